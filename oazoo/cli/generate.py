"""Answer a prompt, or continue a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oazoo.cli._text import (
    adapter_option,
    check_settings,
    check_text,
    device_option,
    load_model,
    print_stream,
    read_text,
    sampling_options,
    say_summary,
    special_option,
)
from oazoo.cli.common import INTERRUPTED, emit, emit_json, json_option, quiet_option, say
from oazoo.errors import UsageError
from oazoo.generation import GenerationResult, SamplingSettings, TextModel
from oazoo.generation.sampling import NonFiniteLogitsError


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "-f",
    "--file",
    "prompt_file",
    metavar="FILE",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    help="Read the prompt from a file, or from standard input with '-'.",
)
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option(
    "--template",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Use this chat template (jinja2) in place of the model's own.",
)
@special_option
@sampling_options
@click.option("--stream/--no-stream", default=True, help="Print pieces as they come, or all at the end.")
@click.option(
    "--debug-nan", is_flag=True, help="If the logits go bad, run again and name the layer where it began."
)
@click.option("--show-tokens", is_flag=True, help="List the prompt's tokens on stderr (with --json: in it).")
@adapter_option
@device_option
@json_option
@quiet_option
def command(
    model: str,
    prompt: str | None,
    prompt_file: Path | None,
    system: str | None,
    raw: bool,
    template: Path | None,
    special: bool,
    stream: bool,
    debug_nan: bool,
    show_tokens: bool,
    adapter: Path | None,
    device: str | None,
    as_json: bool,
    **settings: Any,
) -> int:
    """Print what MODEL (a name of the zoo, a file, a folder or a URI) says to a prompt.

    A model with a chat template is asked through it; with --raw, or without a template, the prompt is
    continued. The text goes to stdout, times and the seed to stderr. Settings that are not given are the
    model's own, or else temperature 0.7 and top-p 0.95. Ctrl-C ends the text where it is and exits 130.
    """
    given = check_settings(settings)
    text = _prompt(prompt, prompt_file, raw)
    check_text(system or "", "the system message")
    if raw and template is not None:
        raise UsageError("--raw and --template exclude each other: a raw prompt goes through no template")
    source = read_text(template, "the chat template") if template is not None else None
    return run(
        load_model(model, device, adapter),
        text,
        given,
        system=system,
        raw=raw,
        template=source,
        special=special,
        stream=stream,
        debug_nan=debug_nan,
        show_tokens=show_tokens,
        as_json=as_json,
    )


def _prompt(prompt: str | None, prompt_file: Path | None, raw: bool) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("give a prompt: either -p TEXT, or -f FILE ('-f -' reads standard input)")
    if prompt_file is None:
        return check_text(_not_empty(prompt or ""), "the prompt")
    text = _not_empty(read_text(prompt_file, "the prompt"))
    # Editors and echo end a file with a line end, which belongs to no message; a raw prompt is taken to the
    # byte.
    return text if raw else text.removesuffix("\n").removesuffix("\r")


def _not_empty(prompt: str) -> str:
    if not prompt:
        raise UsageError("the prompt is empty; give some text")
    return prompt


def run(
    model: TextModel,
    prompt: str,
    settings: dict[str, Any],
    *,
    system: str | None = None,
    raw: bool = False,
    template: str | None = None,
    special: bool = True,
    stream: bool = True,
    debug_nan: bool = False,
    show_tokens: bool = False,
    as_json: bool = False,
) -> int:
    """The command with a model at hand; returns the exit status."""
    answer = model.stream(
        prompt,
        system=system,
        raw=raw,
        template=model.make_template(template) if template is not None else None,
        allow_special=special,
        **settings,
    )
    result = answer.result
    if show_tokens and not as_json:
        for token_id in result.prompt_ids:
            say(f"{token_id:>8}  {_shown(model, token_id)}")
    try:
        if stream and not as_json:
            finished = print_stream(answer)
        else:
            with answer:
                try:
                    for _ in answer:
                        pass
                    finished = True
                except KeyboardInterrupt:
                    finished = False
            if as_json:
                emit_json(_document(model, result, show_tokens))
            else:
                emit(result.text, end="" if result.text.endswith("\n") else "\n")
    except NonFiniteLogitsError as error:
        where = getattr(model.model, "first_nonfinite", None)
        if not debug_nan or where is None:
            raise
        fed = [*result.prompt_ids, *result.token_ids]
        raise NonFiniteLogitsError(f"{error}\nIt begins in {where(fed)}") from error
    say_summary(result, SamplingSettings.make(model.generation, **settings))
    return 0 if finished else INTERRUPTED


def _shown(model: TextModel, token_id: int) -> str:
    token = model.tokenizer.token(token_id)
    return "(no token)" if token is None else repr(token)


def _document(model: TextModel, result: GenerationResult, show_tokens: bool) -> dict[str, Any]:
    t = result.timings
    document: dict[str, Any] = {
        "model": model.info.get("name"),
        "text": result.text,
        "finish_reason": result.finish_reason,
        "stop": result.stop,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "answer_tokens": len(result.token_ids),
        "token_ids": result.token_ids,
        "timings": {
            "load_s": t.load_s,
            "prefill_s": t.prefill_s,
            "first_token_s": t.first_token_s,
            "decode_s": t.decode_s,
            "prefill_tokens_per_s": t.prefill_tokens_per_s,
            "decode_tokens_per_s": t.decode_tokens_per_s,
        },
    }
    if show_tokens:
        document["prompt"] = [{"id": i, "token": model.tokenizer.token(i)} for i in result.prompt_ids]
    return document
