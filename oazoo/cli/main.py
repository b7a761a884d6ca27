"""The ``oazoo`` command: a group that loads a command's file only when that command is asked for.

A command ``NAME`` is a file ``oazoo/cli/NAME.py`` that exposes a click command called ``command``. Its module
docstring's first line is what ``oazoo --help`` prints next to the name; it is read from the source text, so
the overview imports no command and stays fast. Errors are turned into messages and exit codes in
:mod:`oazoo.cli.common`.
"""

from __future__ import annotations

import ast
import atexit
import difflib
import gc
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from oazoo import __version__
from oazoo.cli.common import delayed_interrupt, quiet_option, run_and_exit

#: Files of this folder that are not commands.
_NOT_COMMANDS = frozenset({"main", "common"})
_PACKAGE = "oazoo.cli"
#: New objects between two searches for garbage. Python's own 700 make it search all the time while modules are loaded, a
#: quarter of what a start takes.
_GARBAGE = 20_000
#: Seconds that a thread which reads, hashes or writes waits at most for the interpreter.
_SWITCH = 0.001


class LazyGroup(click.Group):
    """A click group whose commands are the modules of :mod:`oazoo.cli`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all command files, sorted."""
        package = importlib.import_module(_PACKAGE)
        names = (module.name for module in pkgutil.iter_modules(package.__path__))
        return sorted(name for name in names if name not in _NOT_COMMANDS and not name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the file of one command; None for a name that has no file."""
        if cmd_name not in self.list_commands(ctx):
            return None
        with delayed_interrupt():
            command = importlib.import_module(f"{_PACKAGE}.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"{_PACKAGE}.{cmd_name}.command is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown command's message names the closest ones."""
        name = args[0]
        known = self.list_commands(ctx)
        if name not in known and not name.startswith("-"):
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            hint = (
                f"did you mean {' or '.join(repr(item) for item in close)}?"
                if close
                else "see 'oazoo --help'."
            )
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the first line of each file's docstring."""
        rows = [(name, _first_line(name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; every way out ends in a message and an exit code, never in a traceback."""
        gc.set_threshold(_GARBAGE)
        sys.setswitchinterval(_SWITCH)
        atexit.unregister(gc.freeze)
        atexit.register(
            gc.freeze
        )  # the searches for garbage at the very end would free what the process's end frees

        def call() -> Any:
            return super(LazyGroup, self).main(
                args=args,
                prog_name=prog_name,
                complete_var=complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )

        return run_and_exit(call) if standalone_mode else call()


def _first_line(name: str) -> str:
    """First line of the docstring of a command's file, read without importing it."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name) if spec is not None else None
    docstring = ast.get_docstring(ast.parse(source)) if source else None
    return (docstring or "").partition("\n")[0].rstrip(".")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="'oazoo COMMAND --help' tells more about one command.",
)
@click.version_option(__version__, prog_name="oazoo", message="%(prog)s %(version)s")
@quiet_option
def main() -> None:
    """Fetch, translate, quantize and run language models on Vulkan."""
