"""Measure how well a model predicts a text: perplexity, and how far it is from another model."""

from __future__ import annotations

from pathlib import Path

import click

from oazoo.cli._text import adapter_option, device_option, load_model, read_text
from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
)
from oazoo.errors import UsageError


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--text",
    "text_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="UTF-8 text to predict; '-' is standard input.",
)
@click.option("--context", type=int, default=512, show_default=True, metavar="N", help="Tokens of a window.")
@click.option("--windows", type=int, metavar="N", help="Score only the first N windows.  [default: all]")
@click.option(
    "--against", metavar="OTHER", help="A model to hold MODEL against, such as its unquantised original."
)
@click.option("--receipt", is_flag=True, help="Store the result in MODEL (an .oam file); needs --against.")
@click.option(
    "--max-kl", type=float, metavar="X", help="Fail (exit 1) above this mean divergence, nats a token."
)
@click.option(
    "--max-ppl-ratio", type=float, metavar="Y", help="Fail (exit 1) above this ratio of perplexities."
)
@adapter_option
@device_option
@json_option
@quiet_option
def command(
    model: str,
    text_file: Path,
    context: int,
    windows: int | None,
    against: str | None,
    receipt: bool,
    max_kl: float | None,
    max_ppl_ratio: float | None,
    adapter: Path | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Perplexity of MODEL on a text, in windows of N tokens whose second halves are scored, as llama.cpp does it.

    With --against also the divergence of MODEL from OTHER (mean and 99.9th percentile of KL(OTHER, MODEL), nats a token),
    how often both find the same token most probable, and the ratio of their perplexities. Exit status 1 when a limit is
    exceeded.
    """
    from oazoo.zoo.evaluate import check_request, evaluate
    from oazoo.zoo.receipt import Limits, add_receipt, check_receipt_target

    limits = Limits(max_kl, max_ppl_ratio)
    if against is None and (receipt or limits.given):
        raise UsageError(
            "--receipt, --max-kl and --max-ppl-ratio compare with an original: name it with --against"
        )
    text = read_text(text_file, "the text to evaluate on")
    check_request(text, context, windows)
    if receipt:
        check_receipt_target(model)
    original = None if against is None else load_model(against, device)
    loaded = load_model(model, device, adapter)
    with progress_bar() as progress:
        result = evaluate(loaded, text, against=original, context=context, windows=windows, progress=progress)
    if as_json:
        emit_json(result.to_json())
    else:
        rows = [
            ("perplexity", f"{result.perplexity:.4f} ± {result.perplexity_error:.4f}"),
            ("bits a byte", f"{result.bits_per_byte:.4f}"),
            ("tokens", f"{result.tokens:,} scored, in {result.windows} windows of {result.context}"),
        ]
        other = result.comparison
        if other is not None:
            rows += [
                ("held against", other.against),
                ("its perplexity", f"{other.perplexity:.4f}"),
                ("perplexity ratio", f"{other.perplexity_ratio:.5f} ± {other.perplexity_ratio_error:.5f}"),
                ("mean KL", f"{other.kl_mean:.3g} ± {other.kl_mean_error:.1g} nats a token"),
                ("99.9 % of KL below", f"{other.kl_999:.3g}"),
                ("same most probable token", f"{other.same_top:.2%}"),
            ]
        emit_table([result.model, ""], rows)
    speed = result.windows * result.context * (1 if original is None else 2) / max(result.seconds, 1e-9)
    say(
        f"evaluated in {format_duration(result.seconds)} on {result.device} ({speed:.0f} tokens/s)",
        style="dim",
    )
    limits.check(result)
    if receipt:
        assert original is not None
        add_receipt(Path(loaded.info["path"]), Path(original.info["path"]), result)
        say(f"{model}: the receipt is in the file")
