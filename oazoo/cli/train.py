"""Train a small model from nothing, on text of yours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oazoo.cli._training import carry_out, settings_of, training_options
from oazoo.cli.common import emit_table


@click.command()
@click.argument("preset", metavar="PRESET", required=False)
@click.option("--list", "list_presets", is_flag=True, help="List the presets.", is_eager=True)
@training_options
def command(
    preset: str | None,
    list_presets: bool,
    validation_data: tuple[Path, ...],
    data: tuple[Path, ...],
    output: Path | None,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the model of PRESET from random first values on --data, into the folder RUN.

    RUN gets best.oam, the model with the lowest loss on held-out text, which runs, quantizes and exports as any other;
    checkpoints to go on from (--resume), log.csv and curves.png. Ctrl-C saves and ends. --list names the presets.
    """
    from oazoo.zoo.presets import PRESETS
    from oazoo.zoo.train import train

    if list_presets:
        emit_table(["preset", "what it is"], [(name, p.about) for name, p in PRESETS.items()])
        return
    if preset is None:
        raise click.UsageError(f"name a preset: {', '.join(PRESETS)}")
    settings = settings_of(options)
    carry_out(
        lambda **more: train(
            preset, data, None if dry_run else output, settings, validation_data=validation_data, **more
        ),
        output,
        resume,
        dry_run,
        as_json,
    )
