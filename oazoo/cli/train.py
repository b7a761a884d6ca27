"""Train a small model from nothing, on text of yours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oazoo.cli._training import carry_out, classes_of, flow_options, settings_of, training_options
from oazoo.cli.common import emit_table


@click.command()
@click.argument("preset", metavar="PRESET", required=False)
@click.option("--list", "list_presets", is_flag=True, help="List the presets.", is_eager=True)
@flow_options
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
    classes: str | None,
    condition_dropout: float | None,
    **options: Any,
) -> None:
    """Train the model of PRESET from random first values on --data, into the folder RUN.

    RUN gets best.oam, the model with the lowest loss on held-out data, which runs, quantizes and exports as any other;
    checkpoints to go on from (--resume), log.csv and curves.png. Ctrl-C saves and ends. --list names the presets.
    Presets flow-… learn images or sequences (.npz, .npy); flow-digits without --data learns scikit-learn's digits.
    """
    from oazoo.zoo.flow_presets import FLOW_PRESETS
    from oazoo.zoo.presets import PRESETS
    from oazoo.zoo.train import train

    if list_presets:
        known = [(name, p.about) for name, p in PRESETS.items()]
        emit_table(["preset", "what it is"], known + [(name, p.about) for name, p in FLOW_PRESETS.items()])
        return
    if preset is None:
        raise click.UsageError(f"name a preset: {', '.join([*PRESETS, *FLOW_PRESETS])}")
    if preset in FLOW_PRESETS:
        own = FLOW_PRESETS[preset].settings
        context = click.get_current_context()
        given = {name: value for name, value in own.items() if _is_default(context, name)}
        flow_settings = settings_of(options | given)
        more: dict[str, Any] = {"classes": classes_of(classes), "validation_data": validation_data}
        if condition_dropout is not None:
            more["condition_dropout"] = condition_dropout
        from oazoo.zoo.train_flow import train_flow

        carry_out(
            lambda **rest: train_flow(
                preset, data, None if dry_run else output, flow_settings, **more, **rest
            ),
            output,
            resume,
            dry_run,
            as_json,
        )
        return
    if classes is not None or condition_dropout is not None:
        raise click.UsageError("--classes and --condition-dropout belong to flow models")
    if not data:
        raise click.UsageError("say what to learn from: --data FILE|DIR")
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


def _is_default(context: click.Context, name: str) -> bool:
    """Whether an option was left out."""
    from click.core import ParameterSource

    return context.get_parameter_source(name) in (None, ParameterSource.DEFAULT)
