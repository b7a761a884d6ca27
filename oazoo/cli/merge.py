"""Add a LoRA adapter to a model's weights for good."""

from __future__ import annotations

from pathlib import Path

import click

from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
    warn,
)


@click.command()
@click.argument("model", metavar="MODEL.oam", type=click.Path(path_type=Path))
@click.argument("adapter", metavar="ADAPTER", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT.oam", type=click.Path(path_type=Path), help="The file to write.")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "f32", "f16", "bf16"]),
    default="keep",
    show_default=True,
    help="What weights with an adapter become. keep: as they are; q4 and q8 are packed anew.",
)
@click.option(
    "--dry-run", is_flag=True, help="Check that the adapter fits, and list what it changes; write nothing."
)
@click.option("--force", is_flag=True, help="Replace OUT.oam if it exists.")
@json_option
@quiet_option
def command(
    model: Path, adapter: Path, output: Path | None, dtype: str, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Write MODEL.oam with ADAPTER added to its weights: W + scale · B · A, computed in float32.

    ADAPTER is a folder as PEFT saves it (adapter_config.json and adapter_model.safetensors), or one SafeTensors file that
    holds its config too. Every tensor of it must find its layer. Needs no Vulkan device.
    """
    from oazoo.zoo.adapters import merge

    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see what would be done)")
    with progress_bar() as progress:
        report = merge(
            model, adapter, output, dtype=dtype, overwrite=force, dry_run=dry_run, progress=progress
        )
    for line in report.warnings:
        warn(line)
    if as_json:
        emit_json(report.to_json())
        return
    if dry_run:
        planned = [(t.name, t.rank, t.source, t.target) for t in report.tensors]
        emit_table(["weight", "rank", "now", "then"], planned, right=["rank"])
        say(f"{len(planned)} weights would change; nothing was written")
        return
    rows = [
        (t.name, t.rank, t.source, t.target, f"{t.change:.2%}", f"{t.rounding:.2%}") for t in report.tensors
    ]
    columns = ["weight", "rank", "was", "is", "change", "lost in rounding"]
    emit_table(columns, rows, right=["rank", "change", "lost in rounding"])
    say(f"{output}: {len(rows)} weights changed, in {format_duration(report.seconds)}")
