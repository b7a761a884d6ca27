"""Write an .oam as a Hugging Face folder, SafeTensors, GGUF or ONNX."""

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
@click.argument("source", metavar="IN.oam", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT", help="A folder, OUT.safetensors, OUT.gguf, or OUT.onnx.")
@click.option(
    "--to",
    type=click.Choice(["safetensors", "gguf", "onnx"]),
    help="The container, where OUT does not say it.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "f32", "f16", "bf16"]),
    default="keep",
    show_default=True,
    help="What weights become. keep: as they are; packed ones stay packed in GGUF where that loses nothing, else f16.",
)
@click.option(
    "--map",
    "map_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A map of your own, .toml or .py, run backwards. A .py file is run: name only what you trust.",
)
@click.option("--no-tokenizer", is_flag=True, help="Weights and settings only.")
@click.option(
    "--external", is_flag=True, help="ONNX: weights into OUT.onnx.data, as for models above 1.5 GB."
)
@click.option("--dry-run", is_flag=True, help="Print the plan, checked whole; write nothing.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
@quiet_option
def command(
    source: Path,
    output: str | None,
    to: str | None,
    dtype: str,
    map_file: Path | None,
    no_tokenizer: bool,
    external: bool,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write IN.oam as other programs read it: for transformers a folder of SafeTensors under Hugging Face names with
    config.json and tokenizer.json, a GGUF file for llama.cpp, or a graph for ONNX runtimes: token ids in, logits out.

    The result is read again and compared before it gets its name. Needs no Vulkan device.
    """
    from oazoo.translators.export import container_for
    from oazoo.zoo.export import export, plan_of

    if output is None and not (dry_run and to):
        raise click.UsageError("say where to write: -o OUT (or --dry-run --to CONTAINER to see the plan)")
    container = container_for(output, to) if output is not None else str(to)
    if external and container != "onnx":
        raise click.UsageError("--external is for ONNX")
    if dry_run:
        model, plan = plan_of(
            source, container, dtype=dtype, with_tokenizer=not no_tokenizer, map_file=map_file
        )
        with model:
            if as_json:
                emit_json(plan.to_json())
                return
            stdout_console().print(plan.table())
            for note in plan.notes:
                say(note)
            say(
                f"{plan.weight_bytes:,} bytes of weights would be written, with at most "
                f"{format_bytes(plan.peak_bytes)} of memory; nothing was"
            )
        return
    assert output is not None
    start = time.perf_counter()
    with progress_bar() as progress:
        report = export(
            source,
            output,
            to=to,
            dtype=dtype,
            overwrite=force,
            with_tokenizer=not no_tokenizer,
            external=external,
            map_file=map_file,
            progress=progress,
        )
    if as_json:
        emit_json(report.to_json())
        return
    if report.rounded:
        stdout_console().print(report.table())
    if report.nonfinite:
        stdout_console().print(report.nonfinite_table())
    say(
        f"{output}: {report.config.family} → {report.container} ({report.translator}) in "
        f"{format_duration(time.perf_counter() - start)}, read again and compared"
    )
    for line in report.summary():
        say(f"  {line}")
