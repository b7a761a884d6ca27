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

#: Nats a token that are worth a warning: about what packing a whole model to q8 costs, several times.
_NOTICEABLE = 0.02


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
    "--method",
    type=click.Choice(["search", "absmax"]),
    default="search",
    show_default=True,
    help="How q4 and q8 weights are packed anew. search needs a device; absmax is the coarser rule.",
)
@click.option("--no-check", is_flag=True, help="Do not run the merged model beside the one with its adapter.")
@click.option(
    "--tolerance", type=float, metavar="X", help="Fail (exit 1) if a logit of theirs differs by more than X."
)
@click.option(
    "--dry-run", is_flag=True, help="Check that the adapter fits, and list what it changes; write nothing."
)
@click.option("--force", is_flag=True, help="Replace OUT.oam if it exists.")
@json_option
@quiet_option
def command(
    model: Path,
    adapter: Path,
    output: Path | None,
    dtype: str,
    method: str,
    no_check: bool,
    tolerance: float | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write MODEL.oam with ADAPTER added to its weights: W + scale · B · A, computed in float32.

    ADAPTER is a folder as PEFT saves it (adapter_config.json and adapter_model.safetensors), or one SafeTensors file that
    holds its config too. Every tensor of it must find its layer. The merged model is then held against the one that runs
    with the adapter beside its weights: how far their logits differ on a few prompts shows what storing the sums has cost.
    """
    from oazoo.zoo.adapters import merge
    from oazoo.zoo.merge_check import compare

    if no_check and tolerance is not None:
        raise click.UsageError("--tolerance is for the check that --no-check leaves out")

    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see what would be done)")
    with progress_bar() as progress:
        report = merge(
            model,
            adapter,
            output,
            dtype=dtype,
            method=method,
            overwrite=force,
            dry_run=dry_run,
            progress=progress,
        )
        checked = None
        if output is not None and not dry_run and not no_check:
            checked = compare(model, adapter, output, progress=progress)
    for line in report.warnings:
        warn(line)
    if checked is not None and checked.kl > _NOTICEABLE:
        warn(
            f"the merged model is not quite the one with the adapter: {checked.kl:.2g} nats a token apart; weights stored "
            "in more bits keep more of it (--dtype f16)"
        )
    if as_json:
        emit_json(report.to_json() | {"check": None if checked is None else checked.to_json()})
        if checked is not None:
            checked.check(tolerance)
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
    if checked is not None:
        say(
            f"on {checked.tokens} tokens of prompts logits differ by {checked.largest:.3g} at most from those with the "
            f"adapter beside the weights, {checked.kl:.2g} nats a token on average; the most probable token is the same "
            f"at {checked.same_top:.1%}"
        )
        checked.check(tolerance)
