"""What every command file uses: output, progress, errors and formatting.

Data goes to stdout, talk goes to stderr; ``--quiet`` silences talk, ``NO_COLOR`` colours, and nothing that
moves is drawn when stderr is not a terminal. All text from files or the network passes through
:func:`printable`, so that a tensor name cannot send escape codes to the terminal. A command file looks like
this::

    '''Do the thing with a file.'''            # the line that 'oazoo --help' shows
    @click.command()
    @click.argument("file", type=click.Path(path_type=Path))
    @json_option                               # adds --json as parameter as_json: bool
    @quiet_option                              # adds -q/--quiet, and no parameter
    def command(file: Path, as_json: bool) -> None | int:
        '''Longer help.'''
        with progress_bar() as progress:       # a callable (label, done, total or None, unit="bytes")
            result = work(file, progress=progress)
        say("converted in 3 s")                # talk: stderr, silent with --quiet
        emit("text")                           # data: stdout, verbatim
        emit_json({...}) / emit_table([...])   # data

Return None for success or an int as the exit status. Raise :class:`~oazoo.errors.OazooError` for failures;
the message is printed once on stderr as ``error: …`` and its ``exit_code`` is the exit status. An ``OSError``
gives its path and reason, Ctrl-C exits 130, SIGTERM and SIGHUP unwind and exit 143 and 129, a closed pipe ends quietly,
click's usage errors exit 2, and anything else is one line and exit 70 (a bug of ours). ``OAZOO_DEBUG=1`` adds the
traceback to each.

Output: :func:`say`, :func:`warn`, :func:`emit`, :func:`emit_json`, :func:`emit_table`,
:func:`stdout_console`, :func:`stderr_console`. Options: :data:`json_option`, :data:`quiet_option`. Progress:
:func:`progress_bar`. Formatting: :func:`format_bytes`, :func:`format_count`, :func:`format_duration`,
:func:`printable`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import click

from oazoo.errors import OazooError

if TYPE_CHECKING:
    from rich.console import Console

_QUIET = "oazoo.quiet"
#: Exit status of an unexpected exception (EX_SOFTWARE of sysexits.h), apart from 1 (failure) and 2 (misuse).
INTERNAL_ERROR = 70
INTERRUPTED = 130


# ---------------------------------------------------------------------------------------------------- options


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_QUIET] = True


#: ``-q/--quiet``: silences :func:`say`, :func:`warn` and progress. Adds no parameter to the function.
quiet_option = click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=_set_quiet,
    help="Print nothing but data and errors.",
)

#: ``--json``: adds the parameter ``as_json: bool``.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")


def is_quiet() -> bool:
    """Whether ``--quiet`` was given to the group or to the running command."""
    ctx = click.get_current_context(silent=True)
    return bool(ctx is not None and ctx.meta.get(_QUIET, False))


# ----------------------------------------------------------------------------------------------------- output


def stdout_console() -> Console:
    """A rich console for data. Off a terminal it is wide enough that no table cell is ever cut."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 1000
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)


def stderr_console() -> Console:
    """A rich console for talk; prints nothing with ``--quiet``."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=is_quiet())


def say(message: str, *, style: str = "") -> None:
    """Print a line of talk on stderr (``style`` is rich's, e.g. ``"dim"``)."""
    if is_quiet():
        return  # before rich is imported, which takes as long as some commands
    stderr_console().print(printable(message), style=style, soft_wrap=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    say(f"warning: {message}", style="yellow")


def emit(text: str, *, end: str = "\n") -> None:
    """Print data on stdout verbatim and flush, so that a reader of a pipe sees it at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def emit_json(data: Any) -> None:
    """Print ``data`` as indented JSON on stdout. NaN and infinities are refused: they are not JSON."""
    emit(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def emit_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Sequence[str] = (),
    title: str | None = None,
    footer: Sequence[object] | None = None,
) -> None:
    """Print a table on stdout.

    ``columns`` are the headings; those also in ``right`` are right-aligned. Cells are ``str()`` of what they
    hold. On a terminal long cells fold, off it every row is one line.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, box=box.SIMPLE_HEAD, show_footer=footer is not None, pad_edge=False, title_justify="left"
    )
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    for index, name in enumerate(columns):
        # The first column says what the row is about: it is the last to fold.
        widest = max((len(row[0]) for row in cells), default=0) if index == 0 else 0
        bottom = printable(str(footer[index])) if footer is not None else ""
        justify = "right" if name in right else "left"
        table.add_column(
            name,
            footer=bottom,
            justify=justify,  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=0 < widest <= 40,
        )
    for row in cells:
        table.add_row(*row)
    stdout_console().print(table)


def printable(text: str) -> str:
    r"""``text`` with control, bidirectional-override and lone surrogate characters shown as ``\x1b`` and the
    like.

    Newlines and tabs stay. Names out of files and servers are not trusted to leave the terminal alone.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_safe(char) else _escape(char) for char in text)


def _is_safe(char: str) -> bool:
    if char in "\n\t":
        return True
    if "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069":
        return False
    return unicodedata.category(char) not in ("Cc", "Cs")


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# --------------------------------------------------------------------------------------------------- progress


class ProgressCallback(Protocol):
    """How long work reports: ``label`` names the step, ``done`` of ``total`` (None: unknown) in ``unit``."""

    def __call__(self, label: str, done: int, total: int | None, unit: str = "bytes") -> None: ...


@contextlib.contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """A progress display on stderr; yields the callback to hand to the work.

    A new label starts a new bar. Nothing is drawn when stderr is not a terminal or with ``--quiet``: a log
    file stays short (finish with a :func:`say` of what was done).
    """
    if is_quiet() or not sys.stderr.isatty():
        yield lambda label, done, total, unit="bytes": None
        return

    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[detail]}"),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(label: str, done: int, total: int | None, unit: str = "bytes") -> None:
        if label not in tasks:
            tasks[label] = bar.add_task(printable(label), total=total, detail="")
        show = format_bytes if unit == "bytes" else (lambda count: f"{count} {unit}")
        detail = show(done) if total is None else f"{show(done)} of {show(total)}"
        bar.update(tasks[label], completed=done, total=total, detail=detail)

    with bar:
        yield report


# ------------------------------------------------------------------------------------------------- formatting


def format_bytes(count: float) -> str:
    """Bytes in decimal units: ``98.4 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.95 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def format_count(count: float) -> str:
    """A count with a decimal suffix: ``134.5 M``, ``7.2 B``, ``512``."""
    for unit in ("", " k", " M", " B", " T"):
        if abs(count) < 999.95 or unit == " T":
            break
        count /= 1000
    return f"{count:.0f}" if unit == "" else f"{count:.1f}{unit}"


def format_duration(seconds: float) -> str:
    """A time span: ``340 ms``, ``2.3 s``, ``4 min 05 s``, ``1 h 02 min``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


# ----------------------------------------------------------------------------------------------------- errors


def run_and_exit(call: Callable[[], Any]) -> NoReturn:
    """Run a command line, print what went wrong, and leave the process with the right exit status."""
    _fill_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        # A name or a token that the terminal's encoding lacks must not end the program.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with _signals() as came:
        _run(call, came)


def _run(call: Callable[[], Any], came: Sequence[int]) -> NoReturn:
    try:
        status = call()
        sys.stdout.flush()
    except OazooError as error:
        _fail(str(error), error.exit_code)
    except click.ClickException as error:
        error.show(file=sys.stderr)
        _trace_if_asked()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read us has left. Python flushes stdout once more at exit: give it somewhere to go.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        paths = " -> ".join(
            repr(os.fspath(name)) for name in (error.filename, error.filename2) if name is not None
        )
        reason = error.strerror or str(error) or type(error).__name__
        if not paths and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason = f"standard output cannot be written: {reason}"  # files have names
        _fail(f"{reason}: {paths}" if paths else reason, 1)
    except MemoryError:
        _fail("out of memory", 1)
    except Exception as error:
        if came:  # a library has turned the interruption into an error of its own
            _fail("interrupted", 128 + came[-1])
        detail = f"{type(error).__name__}: {error}".strip().rstrip(":")
        _fail(
            f"unexpected {detail}\nThis is a fault in oazoo. Run again with OAZOO_DEBUG=1 for the traceback.",
            INTERNAL_ERROR,
        )
    sys.exit(status if isinstance(status, int) else 0)


def _fill_standard_streams() -> None:
    """Open the null device in place of standard streams that the caller closed.

    Otherwise the next file opened would get the stream's number, and what a library prints would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # for the process's life
            setattr(sys, name, null)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP unwind as Ctrl-C does, so that unfinished files are removed; yields the signals that came.

    A signal that whoever started us wants ignored (``nohup``, a background job) stays ignored.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_IGN)  # the way out is not to be interrupted
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name, usual, handler in (
            ("SIGINT", signal.default_int_handler, interrupt),
            ("SIGTERM", signal.SIG_DFL, end),
            ("SIGHUP", signal.SIG_DFL, end),
        ):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is usual:
                before[number] = signal.signal(number, handler)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block is done: an extension module that is interrupted as it loads prints a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(signal.SIGINT, came[0])


def _fail(message: str, status: int) -> NoReturn:
    """Print ``error: message`` on stderr (also with ``--quiet``) and exit."""
    from rich.console import Console
    from rich.text import Text

    _trace_if_asked()
    text = Text.assemble(("error: ", "bold red"), printable(message))
    with contextlib.suppress(BrokenPipeError):
        Console(stderr=True, highlight=False, emoji=False).print(text, soft_wrap=True)
    sys.exit(status)


def _trace_if_asked() -> None:
    if os.environ.get("OAZOO_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
