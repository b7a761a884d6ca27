"""Measure what a model's weights are multiplied with, for quantising it well."""

from __future__ import annotations

from pathlib import Path

import click

from oazoo.cli._text import device_option, load_model, read_text
from oazoo.cli.common import emit_json, format_bytes, json_option, progress_bar, quiet_option, say


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="STATS.safetensors",
    help="File to write.",
)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="UTF-8 text like what the model is for; '-' is standard input.  [default: a general text of ours]",
)
@click.option("--max-tokens", type=int, metavar="N", help="Use only the first N tokens of the text.")
@click.option("--covariance", is_flag=True, help="Also the means of products of inputs; a much larger file.")
@click.option("--force", is_flag=True, help="Replace STATS.safetensors if it exists.")
@device_option
@json_option
@quiet_option
def command(
    model: str,
    output: Path,
    text_file: Path | None,
    max_tokens: int | None,
    covariance: bool,
    force: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Run MODEL over a text and keep the second moments of the inputs of each of its weights.

    Quantising then weighs errors with them; with --covariance, it also lets columns make up for each other's errors, which
    loses least:

    oazoo quantize MODEL.oam --recipe q4-mixed --stats STATS.safetensors -o OUT.oam
    """
    from oazoo.formats.atomic import check_output
    from oazoo.zoo.calibrate import calibrate
    from oazoo.zoo.evaluate import check_request
    from oazoo.zoo.statistics import save_statistics

    text = None if text_file is None else read_text(text_file, "the text to calibrate on")
    if text is not None:
        check_request(text, 4)
    check_output(output, overwrite=force)
    loaded = load_model(model, device)
    with progress_bar() as progress:
        found = calibrate(
            loaded,
            text,
            name="" if text_file is None else text_file.name,
            covariance=covariance,
            max_tokens=max_tokens,
            progress=progress,
        )
    save_statistics(found, output, overwrite=force)
    size = output.stat().st_size
    if as_json:
        emit_json(
            {
                "output": str(output),
                "bytes": size,
                "model": found.model,
                "text": found.text,
                "text_sha256": found.text_sha256,
                "tokens": found.tokens,
                "weights": len(found.shares),
                "inputs": len(found.moments),
            }
        )
    say(
        f"{output}: inputs of {len(found.shares)} weights over {found.tokens:,} tokens of {found.text} "
        f"({format_bytes(size)})"
    )
