"""Pack a model's weights to 4 or 8 bits on the Vulkan device."""

from __future__ import annotations

from collections.abc import Sequence
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
from oazoo.zoo.quantize import METHODS, quantize
from oazoo.zoo.quantize_plan import DENSE, TARGETS, TensorQuantization
from oazoo.zoo.quantize_run import QuantizeReport
from oazoo.zoo.recipes import RECIPES, short_names


@click.command()
@click.argument("source", metavar="IN.oam", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="OUT.oam", type=click.Path(path_type=Path), help="File to write.")
@click.option(
    "--to",
    type=click.Choice(TARGETS),
    help="q4: 5.0 bits a weight; q8: 9.0; f16, bf16, f32: unpack what is quantised.",
)
@click.option(
    "--recipe",
    type=click.Choice(tuple(RECIPES)),
    help="; ".join(f"{r.name}: {r.about}" for r in RECIPES.values()) + ".",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="The best model of this size: 5.5bpw (bits a weight) or 92MB (the file). What costs most at 4 bits gets more.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Leave tensors as they are whose names match (shell style).",
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
    help="absmax: the format's own rule. search: each block's best scale and codes. weighted: the same, minding what a "
    "column is multiplied with, for which the model is run. gptq: later columns make up for the errors of those before, the "
    "model run along.  [default: search for q8; for q4 gptq with --stats that have covariances, else weighted, or absmax if "
    "the model cannot run]",
)
@click.option(
    "--stats",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What oazoo calibrate made; what a budget measures is added to it.  [default: the model is run]",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Without --stats, and for --tune: UTF-8 text to run the model on; '-' is standard input.  [default: a general text "
    "of ours]",
)
@click.option(
    "--equalize",
    "equalized",
    is_flag=True,
    help="For weighted and gptq: scale columns that count more up first, and what feeds them down by as much.",
)
@click.option(
    "--tune",
    "tuned",
    is_flag=True,
    help="Then let scales and norms learn to predict as IN.oam does, from --text or the general one (minutes on a GPU, an "
    "hour on a processor).",
)
@click.option(
    "--passes", type=int, metavar="N", help="With --tune: how often the text is gone through.  [default: 1]"
)
@click.option(
    "--allow-requantize",
    is_flag=True,
    help="Pack to q4 what is q8 already, although it has lost once.",
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
    to: str | None,
    recipe: str | None,
    budget: str | None,
    keep: tuple[str, ...],
    q8: tuple[str, ...],
    method: str | None,
    stats: Path | None,
    text_file: Path | None,
    equalized: bool,
    tuned: bool,
    passes: int | None,
    allow_requantize: bool,
    allow_nonfinite: bool,
    dry_run: bool,
    force: bool,
    quality: Quality,
    as_json: bool,
) -> None:
    """Pack the dense weights of IN.oam (f32, f16, bf16; 2 or more dimensions) into blocks of 4 or 8 bits, or unpack them.

    Say --to, --recipe or --budget. The kernels run on the Vulkan device (OAZOO_DEVICE). By absmax the bits are the same on
    every device and are those of the format's own encoder; every method's result is an ordinary file of the format.
    Everything else in the file is carried over; the optimizer's state and a quality receipt are dropped.

    A model that can run is run on a text to learn what its weights are multiplied with, and with a budget also what each
    tensor costs. On a software device that takes minutes: oazoo calibrate keeps the first, --stats then keeps both. The
    best models come of covariances: oazoo calibrate --covariance, then --stats.
    """
    if output is None and not dry_run:
        raise click.UsageError("say where to write: -o OUT.oam (or --dry-run to see the plan)")
    if passes is not None and not tuned:
        raise click.UsageError("--passes is of --tune")
    if equalized and quality.report is not None:
        raise click.UsageError("--report compares weights with the original's, which --equalize has scaled")
    text = None if text_file is None else read_text(text_file, "the text to calibrate on")
    more: dict[str, Any] = {}
    with progress_bar() as progress:

        def pack(path: Path | None) -> QuantizeReport:
            return quantize(
                source,
                path,
                to,
                recipe=recipe,
                budget=budget,
                keep=keep,
                q8=q8,
                method=method,
                statistics=stats,
                text=text,
                equalized=equalized,
                tuned=tuned,
                passes=passes,
                allow_requantize=allow_requantize,
                allow_nonfinite=allow_nonfinite,
                overwrite=force,
                dry_run=dry_run,
                progress=progress,
                notify=say,
                planned=_show_plan if (recipe or budget) and not (dry_run or as_json) else None,
            )

        if output is None or dry_run:
            report = pack(output)
        else:
            report, more = quality.run(
                source, output, pack, calibration=text, overwrite=force, progress=progress
            )
    if as_json:
        emit_json({**report.to_json(), **more})
    elif dry_run:
        _show_plan(report)
    if report.method and not dry_run:
        say(f"method {report.method}" + (f", recipe {report.recipe}" if report.recipe else ""))
    if report.tuned is not None and report.tuned.passes:
        found = report.tuned
        often = "1 pass" if found.passes == 1 else f"{found.passes} passes"
        say(
            f"tuned on {found.tokens:,} tokens, {often}: on {found.held_out:,} others the divergence from {source} went "
            f"from {found.before:.4g} to {found.after:.4g} nats a token"
        )
    _say_some(
        "quantised already, carried over as they are",
        [t for t in report.tensors if t.reason.startswith("already")],
    )
    _say_some("quantised AGAIN, on top of what they had lost before", report.requantized)
    for what in report.dropped:
        say(f"not carried over: {what}")
    if dry_run:
        say(f"{report.source_bytes:,} bytes would become {report.output_bytes:,}; nothing was written")
        return
    where = f" on {report.device}" if report.device else ""
    speed = report.packed_bytes / max(report.seconds, 1e-9) / 1e9
    say(
        f"{output}: {format_bytes(report.source_bytes)} → {format_bytes(report.output_bytes)} in "
        f"{format_duration(report.seconds)}{where} "
        f"({speed:.2f} GB/s of {'packed' if report.target in DENSE else 'dense'} weights)"
    )


def _say_some(what: str, tensors: Sequence[TensorQuantization]) -> None:
    """A line on some tensors, if there are any."""
    if tensors:
        first = f"{tensors[0].name}, {tensors[0].source}"
        say(f"{what}: {len(tensors)} tensors ({first}, …)" if len(tensors) > 1 else f"{what}: {first}")


def _show_plan(report: QuantizeReport) -> None:
    """The plan, the same tensor of all layers on one line."""
    from oazoo.translators.plan import any_layer

    groups: dict[tuple[str, ...], list[TensorQuantization]] = {}
    for t in report.tensors:
        shape = "×".join(map(str, t.shape)) or "scalar"
        groups.setdefault((any_layer(t.name), shape, t.source, t.target, t.reason), []).append(t)
    mixed = bool(report.budget)
    rows = [
        (
            # With a budget, layers fare differently: say which.
            ", ".join(short_names([t.name for t in some])) if mixed else name,
            shape,
            source,
            target,
            len(some),
            format_bytes(sum(t.bytes_before for t in some)),
            format_bytes(sum(t.bytes_after for t in some)),
            reason,
        )
        for (name, shape, source, target, reason), some in groups.items()
    ]
    emit_table(
        ["tensor", "shape", "from", "to", "tensors", "before", "after", "kept because"],
        rows,
        right=["tensors", "before", "after"],
    )
