"""Sample images or sequences from a flow model."""

from __future__ import annotations

from pathlib import Path

import click

from oazoo.cli._text import device_option
from oazoo.cli.common import emit_json, format_duration, json_option, progress_bar, quiet_option, say


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="grid.png, or .npy or .npz with the values themselves.",
)
@click.option(
    "--class",
    "classes",
    type=int,
    multiple=True,
    metavar="K",
    help="Of this class; several take turns.  [default: all in turn]",
)
@click.option("-n", "--count", type=int, help="How many.  [default: 1, or one a class, or one a condition]")
@click.option("--steps", type=int, default=20, show_default=True, help="Steps of the sampler.")
@click.option(
    "--sampler",
    type=click.Choice(["euler", "midpoint", "heun", "rk4"]),
    default="euler",
    show_default=True,
    help="They ask the model 1, 2, 2 and 4 times a step.",
)
@click.option(
    "--schedule",
    type=click.Choice(["uniform", "cosine", "shifted"]),
    default="uniform",
    show_default=True,
    help="How the steps divide the way from noise to data.",
)
@click.option("--shift", type=float, default=3.0, show_default=True, help="Of --schedule shifted.")
@click.option(
    "--guidance",
    type=float,
    default=1.0,
    show_default=True,
    help="Scale of classifier-free guidance; 1: none, in half the time.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="One seed gives one picture.")
@click.option(
    "--conditions",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.npy",
    help="[count, features] of what the model is told.",
)
@click.option(
    "--mask",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.npy",
    help="[count, tokens] or [tokens], 0 where a sequence has no token.",
)
@click.option("--columns", type=int, help="Of the grid.  [default: about as many as rows]")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@device_option
@json_option
@quiet_option
def command(
    model: str,
    output: Path,
    classes: tuple[int, ...],
    count: int | None,
    steps: int,
    sampler: str,
    schedule: str,
    shift: float,
    guidance: float,
    seed: int,
    conditions: Path | None,
    mask: Path | None,
    columns: int | None,
    force: bool,
    device: str | None,
    as_json: bool,
) -> None:
    """Make images or sequences with MODEL (a name of the zoo, a file or a URI), from noise.

    Images go into one picture, as a grid, or into an array of [count, height, width, channels]; sequences into an array of
    [count, tokens, values]. The same seed, options and device give the same file.
    """
    from oazoo.zoo.flow_samples import sample_to_file

    with progress_bar() as progress:
        facts = sample_to_file(
            model,
            output,
            classes=classes,
            count=count,
            conditions=conditions,
            mask=mask,
            columns=columns,
            overwrite=force,
            device=device,
            progress=progress,
            notify=say,
            steps=steps,
            sampler=sampler,
            schedule=schedule,
            shift=shift,
            guidance=guidance,
            seed=seed,
        )
    if as_json:
        emit_json(facts)
        return
    say(
        f"{output}: {facts['count']} in {format_duration(facts['seconds'])}, seed {seed}, {steps} steps of {sampler}"
    )
