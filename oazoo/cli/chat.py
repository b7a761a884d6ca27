"""Talk with a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from oazoo.cli._text import (
    adapter_option,
    check_settings,
    check_text,
    decode_utf8,
    device_option,
    load_model,
    print_stream,
    read_text,
    sampling_options,
    say_summary,
    special_option,
)
from oazoo.cli.common import INTERRUPTED, quiet_option, say, warn
from oazoo.errors import OazooError, UsageError
from oazoo.formats.atomic import atomic_file
from oazoo.generation import ChatSession, TextModel

HELP = """/reset          start again, with the same system message
/system [TEXT]  start again, with another system message or none
/save FILE      write the conversation to a new JSON file
/exit           leave (as does the end of input, Ctrl-D)
//…             say something that begins with a slash
Ctrl-C          end the answer"""


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--system", metavar="TEXT", help="A system message to begin with.")
@click.option(
    "--template",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use this chat template (jinja2) in place of the model's own.",
)
@special_option
@sampling_options
@adapter_option
@device_option
@quiet_option
def command(
    model: str,
    system: str | None,
    template: Path | None,
    special: bool,
    adapter: Path | None,
    device: str | None,
    **settings: Any,
) -> int:
    """Talk with MODEL (a name of the zoo, a file, a folder or a URI), a line at a time.

    Lines are read from standard input, so questions can also be piped in; only the answers go to stdout. The
    model keeps the conversation in its cache and reads only what is new. Type /help for the commands.
    """
    given = check_settings(settings)
    check_text(system or "", "the system message")
    source = read_text(template, "the chat template") if template is not None else None
    return run(load_model(model, device, adapter), given, system=system, template=source, special=special)


def run(
    model: TextModel,
    settings: dict[str, Any],
    *,
    system: str | None = None,
    template: str | None = None,
    special: bool = True,
) -> int:
    """The command with a model at hand; returns the exit status."""
    made = model.make_template(template) if template is not None else None
    interactive = sys.stdin.isatty()
    with ChatSession(model, system=system, template=made, allow_special=special, **settings) as chat:
        if interactive:
            say("Type a message, or /help.", style="dim")
        while (line := _read_line(interactive)) is not None:
            try:
                finished = _turn(chat, line, interactive)
            except OazooError as error:
                if not interactive:
                    raise
                say(f"error: {error}", style="red")
                continue
            if finished is None:
                return 0
            if not finished and not interactive:
                return INTERRUPTED
    return 0


def _turn(chat: ChatSession, line: str, interactive: bool) -> bool | None:
    """Do what a line asks for. None: leave; False: Ctrl-C ended the answer."""
    if not line.strip():
        return True
    if line.startswith("/") and not line.startswith("//"):
        return _command(chat, line)
    stream = chat.send(line[1:] if line.startswith("//") else line)
    finished = print_stream(stream)
    if interactive or not finished:
        say_summary(stream.result, chat.settings)
    return finished


def _command(chat: ChatSession, line: str) -> bool | None:
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/exit", "/quit"):
        return None
    if name == "/help":
        say(HELP)
    elif name == "/reset":
        first = chat.messages[0] if chat.messages else {}
        chat.reset(first.get("content") if first.get("role") == "system" else None)
        say("The conversation starts again.")
    elif name == "/system":
        chat.reset(argument or None)
        say(
            "The conversation starts again, "
            + ("with this system message." if argument else "without a system message.")
        )
    elif name == "/save":
        _save(chat, argument)
    else:
        raise UsageError(
            f"there is no command {name}; type /help, or // to say something that begins with a slash"
        )
    return True


def _save(chat: ChatSession, argument: str) -> None:
    if not argument:
        raise UsageError("/save needs the name of a file to write")
    path = Path(argument).expanduser()
    document = {"model": chat.model.name, "messages": chat.messages}
    with atomic_file(path) as file:
        file.write((json.dumps(document, ensure_ascii=False, indent=2) + "\n").encode("utf-8"))
    say(f"{len(chat.messages)} messages written to {path}")


def _read_line(interactive: bool) -> str | None:
    """The next line without its end, or None at the end of input."""
    if not interactive:
        data = sys.stdin.buffer.readline()
        return (
            decode_utf8(data.removesuffix(b"\n").removesuffix(b"\r"), "a line of standard input")
            if data
            else None
        )
    while True:
        try:
            return _ask()
        except EOFError:
            say("")
            return None
        except UnicodeDecodeError:
            warn("that line is not UTF-8 text; it is left out")


def _ask() -> str:
    if sys.stdout.isatty():
        try:
            import readline  # noqa: F401  # line editing and history for input()
        except ImportError:  # a Python without it still reads lines
            pass
        return input("> ")
    # The answers go elsewhere: keep the prompt out of them.
    sys.stderr.write("> ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
