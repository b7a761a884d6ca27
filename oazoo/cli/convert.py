"""Translate a checkpoint into an .oam file."""

from __future__ import annotations

import time
from pathlib import Path

import click

from oazoo.cli.common import (
    emit_json,
    format_bytes,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
    stdout_console,
)


@click.command()
@click.argument("source", metavar="SRC")
@click.option("-o", "--output", metavar="OUT.oam", type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--arch",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="Translator to use. raw: keep every tensor under its own name, without a model.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "f32", "f16", "bf16"]),
    default="keep",
    show_default=True,
    help="What dense tensors become. keep: quantised ones stay packed where that loses nothing, else f16.",
)
@click.option("--no-tokenizer", is_flag=True, help="Weights only.")
@click.option("--dry-run", is_flag=True, help="Print the plan, checked whole; write nothing.")
@click.option("--force", is_flag=True, help="Replace OUT.oam if it exists.")
@json_option
@quiet_option
def command(
    source: str,
    output: Path | None,
    arch: str,
    dtype: str,
    no_tokenizer: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Translate SRC into an .oam file, with its tokenizer, chat template and provenance inside.

    SRC is a GGUF, SafeTensors or ONNX file, a checkpoint of nanoGPT, a Hugging Face folder, a name of the zoo, or a URI that
    'oazoo pull' takes. Needs no Vulkan device.
    """
    from oazoo.formats.atomic import check_output
    from oazoo.zoo.convert import convert, plan_conversion

    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see the plan)")
    if output is not None:
        check_output(output, overwrite=force)
    if dry_run:
        with (
            progress_bar() as progress,
            plan_conversion(
                source, arch=arch, dtype=dtype, with_tokenizer=not no_tokenizer, progress=progress, notify=say
            ) as planned,
        ):
            if as_json:
                emit_json(planned.to_json())
                return
            stdout_console().print(planned.table())
            for note in planned.notes:
                say(note)
            say(
                f"{planned.output_bytes:,} bytes would be written, with at most "
                f"{format_bytes(planned.peak_bytes)} of memory; nothing was"
            )
        return
    assert output is not None
    start = time.perf_counter()
    with progress_bar() as progress:
        report = convert(
            source,
            output,
            arch=arch,
            dtype=dtype,
            overwrite=force,
            with_tokenizer=not no_tokenizer,
            progress=progress,
            notify=say,
        )
    if as_json:
        emit_json(report.to_json())
        return
    if report.rounded:
        stdout_console().print(report.table())
    say(
        f"{output}: {report.translator} → {report.config.family} in {format_duration(time.perf_counter() - start)}"
    )
    for line in report.summary():
        say(f"  {line}")
