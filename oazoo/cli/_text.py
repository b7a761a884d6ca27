"""What the commands that make text share: their options, their input files, and how an answer is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oazoo.cli.common import emit, format_duration, printable, progress_bar, say
from oazoo.errors import UsageError

if TYPE_CHECKING:
    from oazoo.generation import GenerationResult, SamplingSettings, TextModel, TextStream

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MAX_INPUT_BYTES = 1 << 26

_OPTIONS = (
    click.option("--max-tokens", type=int, metavar="N", help="End after N tokens.  [default: 512, or what fits]"),
    click.option("--temperature", type=float, metavar="T", help="0 takes the most probable token each time."),
    click.option("--top-k", type=int, metavar="K", help="Draw among the K most probable tokens; 0 is off."),
    click.option("--top-p", type=float, metavar="P", help="Draw among the fewest tokens that make up P; 1 is off."),
    click.option("--min-p", type=float, metavar="P", help="Leave out tokens below P times the most probable; 0 is off."),
    click.option("--repeat-penalty", type=float, metavar="R", help="Make recent tokens less probable; 1 is off."),
    click.option("--repeat-window", type=int, metavar="N", help="How many tokens count as recent; -1 is all."),
    click.option("--seed", type=int, metavar="SEED", help="Same seed, same text; -1 draws one, and it is printed."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."),
)  # fmt: skip


def sampling_options(command: _Command) -> _Command:
    """Adds the options of :class:`SamplingSettings`; they arrive as keyword arguments of the same names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


device_option = click.option(
    "--device",
    metavar="DEVICE",
    help="Vulkan device: its index, part of its name, its UUID, or cpu.  [default: OAZOO_DEVICE, or the best]",
)


adapter_option = click.option(
    "--adapter",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Run the model with this LoRA adapter (PEFT's layout) beside its weights.",
)


special_option = click.option(
    "--special/--no-special",
    default=True,
    help="Whether names of control tokens such as <|im_end|> in what you say become those tokens (then unknown ones are "
    "errors), or are plain text.  [default: special]",
)


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings that were given; :class:`UsageError` for nonsense before anything is loaded."""
    from oazoo.generation import SamplingSettings

    given = {name: value for name, value in settings.items() if value is not None and value != ()}
    SamplingSettings.make(None, **given)
    return given


def load_model(name: str, device: str | None, adapter: Path | None = None) -> TextModel:
    """Load a model by name, path or URI onto a device, with a LoRA adapter beside it if there is one."""
    import oazoo

    if device is not None:
        os.environ["OAZOO_DEVICE"] = device
    with progress_bar() as progress:
        model = oazoo.load(name, adapter=adapter, progress=progress, notify=say)
    if model.info.get("software_device"):
        say(f"{model.info.get('device')} is a software device: everything works, slowly")
    return model


def read_text(path: Path, what: str) -> str:
    """The text of a file, or of standard input for ``-``. It must be UTF-8."""
    if str(path) == "-":
        data = sys.stdin.buffer.read(_MAX_INPUT_BYTES + 1)
    else:
        if not path.exists():
            raise UsageError(f"{path}: no such file; {what} should be in it")
        with path.open("rb") as file:
            data = file.read(_MAX_INPUT_BYTES + 1)
    where = "standard input" if str(path) == "-" else str(path)
    if len(data) > _MAX_INPUT_BYTES:
        raise UsageError(f"{where}: {what} is larger than {_MAX_INPUT_BYTES >> 20} MiB")
    return decode_utf8(data, f"{where}: {what}")


def decode_utf8(data: bytes, what: str) -> str:
    """Bytes as text; :class:`UsageError` names the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None


def check_text(text: str, what: str) -> str:
    """``text`` from the command line; :class:`UsageError` when its bytes were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{what} is not UTF-8 text: character {error.start} cannot be read") from None
    return text


def print_stream(stream: TextStream) -> bool:
    """Print the pieces as they come, and a line end; False when Ctrl-C ended it.

    On a terminal control characters are shown and not obeyed: a model may have been told to send some.
    """
    shown = printable if sys.stdout.isatty() else str
    with stream:
        try:
            for piece in stream:
                emit(shown(piece), end="")
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
    if not stream.result.text.endswith("\n"):
        emit("")
    return not interrupted


def summary(result: GenerationResult, sampled: bool) -> str:
    """One line about a generation: times, speeds, why it ended and, if tokens were drawn, the seed."""
    t = result.timings
    parts = []
    if t.load_s:
        parts.append(f"loaded in {format_duration(t.load_s)}")
    reused = f", {result.reused_tokens} reused" if result.reused_tokens else ""
    if t.prefill_tokens:
        parts.append(
            f"prompt {_tokens(t.prefill_tokens)} in {format_duration(t.prefill_s)} "
            f"({t.prefill_tokens_per_s:.1f} tokens/s{reused})"
        )
    # The prompt's last logits give the first token: what takes time afterwards are the others.
    speed = (
        f" in {format_duration(t.decode_s)} ({t.decode_tokens_per_s:.1f} tokens/s)" if t.decode_tokens else ""
    )
    parts.append(f"answer {_tokens(len(result.token_ids))}{speed}")
    parts.append(f"ended by {result.finish_reason}")
    if sampled:
        parts.append(f"seed {result.seed}")
    return "; ".join(parts)


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def say_summary(result: GenerationResult, settings: SamplingSettings) -> None:
    """Print :func:`summary` on stderr."""
    say(summary(result, settings.temperature > 0), style="dim")
