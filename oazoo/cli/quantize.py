"""Pack a model's weights to 4 or 8 bits on the Vulkan device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oazoo.cli._quality import Quality, quality_options
from oazoo.cli._text import read_text
from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_bytes,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
)
from oazoo.zoo.quantize import METHODS, TARGETS, QuantizeReport, quantize


@click.command()
@click.argument("source", metavar="IN.oam", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT.oam", type=click.Path(path_type=Path), help="File to write.")
@click.option("--to", required=True, type=click.Choice(TARGETS), help="q4: 5.0 bits a weight; q8: 9.0.")
@click.option(
    "--keep", multiple=True, metavar="PATTERN", help="Leave tensors dense whose names match (shell style)."
)
@click.option(
    "--q8",
    multiple=True,
    metavar="PATTERN",
    help="Pack tensors to q8 whose names match, the others as --to says.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="absmax",
    show_default=True,
    help="search finds each block's best scale and codes; weighted also minds what a column is multiplied with.",
)
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For weighted: what oazoo calibrate made.  [default: the model is run]",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="For weighted without --stats: UTF-8 text to run the model on.  [default: a general text of ours]",
)
@click.option(
    "--allow-nonfinite", is_flag=True, help="Pack NaN and infinities as 0 instead of refusing them."
)
@click.option(
    "--dry-run", is_flag=True, help="Show what would be done and how large the result is; write nothing."
)
@click.option("--force", is_flag=True, help="Replace OUT.oam if it exists.")
@quality_options
@json_option
@quiet_option
def command(
    source: Path,
    output: Path | None,
    to: str,
    keep: tuple[str, ...],
    q8: tuple[str, ...],
    method: str,
    stats: Path | None,
    text_file: Path | None,
    allow_nonfinite: bool,
    dry_run: bool,
    force: bool,
    quality: Quality,
    as_json: bool,
) -> None:
    """Pack the dense weights of IN.oam (f32, f16, bf16; 2 or more dimensions) into blocks of 4 or 8 bits.

    The packing kernels run on the Vulkan device (OAZOO_DEVICE). By absmax the bits are the same on every device and are
    those of the format's own encoder; every method's result is an ordinary file of the format. Everything else in
    the file is carried over; the optimizer's state is dropped.
    """
    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see the plan)")
    text = None if text_file is None else read_text(text_file, "the text to calibrate on")
    more: dict[str, Any] = {}
    with progress_bar() as progress:

        def pack(path: Path | None) -> QuantizeReport:
            return quantize(
                source,
                path,
                to,
                keep=keep,
                q8=q8,
                method=method,
                statistics=stats,
                text=text,
                allow_nonfinite=allow_nonfinite,
                overwrite=force,
                dry_run=dry_run,
                progress=progress,
            )

        if output is None or dry_run:
            report = pack(output)
        else:
            report, more = quality.run(source, output, pack, overwrite=force, progress=progress)
    if as_json:
        emit_json({**report.to_json(), **more})
    elif dry_run:
        _show_plan(report)
    already = [t for t in report.tensors if t.reason.startswith("already")]
    if already:
        say(
            f"quantised already, carried over as they are: {len(already)} tensors ({already[0].name}, …)"
            if len(already) > 1
            else f"quantised already, carried over as it is: {already[0].name} ({already[0].source})"
        )
    for what in report.dropped:
        say(f"not carried over: {what}")
    if not dry_run:
        say(
            f"{output}: {format_bytes(report.source_bytes)} → {format_bytes(report.output_bytes)} in "
            f"{format_duration(report.seconds)} on {report.device} "
            f"({report.packed_bytes / max(report.seconds, 1e-9) / 1e9:.2f} GB/s of dense weights)"
        )


def _show_plan(report: QuantizeReport) -> None:
    """The plan, the same tensor of all layers on one line."""
    from oazoo.translators.plan import any_layer

    groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for t in report.tensors:
        shape = "×".join(map(str, t.shape)) or "scalar"
        key = (any_layer(t.name), shape, t.source, t.target, t.reason)
        groups.setdefault(key, []).append((t.bytes_before, t.bytes_after))
    rows = [
        (
            name,
            shape,
            source,
            target,
            len(sizes),
            *(format_bytes(sum(s)) for s in zip(*sizes, strict=True)),
            reason,
        )
        for (name, shape, source, target, reason), sizes in groups.items()
    ]
    emit_table(
        ["tensor", "shape", "from", "to", "tensors", "before", "after", "kept because"],
        rows,
        right=["tensors", "before", "after"],
    )
    say(f"{report.source_bytes:,} bytes would become {report.output_bytes:,}; nothing was written")
