"""What ``train`` and ``finetune`` share: options, the run itself, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_bytes,
    format_count,
    format_duration,
    json_option,
    progress_bar,
    quiet_option,
    say,
)

if TYPE_CHECKING:
    from oazoo.training.records import Summary
    from oazoo.zoo.train import Run
    from oazoo.zoo.train_flow import FlowRun

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option(
        "--data",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE|DIR",
        help="Text (UTF-8), or .jsonl with an example a line; .npz or .npy for flow models. More than one may be given.",
    ),
    click.option("-o", "--output", type=click.Path(path_type=Path), metavar="RUN", help="The run's folder."),
    click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in RUN."),
    click.option("--steps", type=int, help="Steps of the optimizer.  [default: what --epochs take]"),
    click.option("--epochs", type=float, default=1.0, show_default=True, help="Passes over the data."),
    click.option(
        "--minutes",
        type=float,
        help="End after so many minutes, if steps or epochs are not done by then; the schedule follows the time.",
    ),
    click.option("--batch-size", type=int, default=16, show_default=True, help="Rows of a batch."),
    click.option(
        "--accumulate", type=int, default=1, show_default=True, help="Batches whose gradients make a step."
    ),
    click.option(
        "--auto-batch",
        is_flag=True,
        help="Divide the rows of a step (--batch-size times --accumulate) into batches that fit into free memory.",
    ),
    click.option(
        "--checkpointing",
        is_flag=True,
        help="Compute layers again on the way back instead of keeping what is in them: less memory, more time.",
    ),
    click.option("--context", type=int, help="Tokens of a row.  [default: the model's, 512 at most]"),
    click.option(
        "--optimizer",
        type=click.Choice(["adamw", "adam", "muon", "sgd"]),
        default="adamw",
        show_default=True,
    ),
    click.option(
        "--compat",
        type=click.Choice(["oa"]),
        help="OA's definition of the optimizer, and its state in MODEL.",
    ),
    click.option("--lr", type=float, help="Highest learning rate.  [default: by optimizer and kind of run]"),
    click.option(
        "--schedule",
        type=click.Choice(["cosine", "constant", "one-cycle", "plateau"]),
        default="cosine",
        show_default=True,
    ),
    click.option(
        "--warmup", type=float, default=0.05, show_default=True, help="Share of steps on the way up."
    ),
    click.option("--weight-decay", type=float, default=0.1, show_default=True, help="Of matrices."),
    click.option(
        "--clip", type=float, default=1.0, show_default=True, help="Largest gradient norm; 0: none."
    ),
    click.option("--dropout", type=float, default=0.0, show_default=True),
    click.option(
        "--dtype",
        type=click.Choice(["f32", "bf16", "f16"]),
        default="f32",
        show_default=True,
        help="How matrices that learn are stored. Gradients, moments and updates are f32 all the same.",
    ),
    click.option(
        "--validation", type=float, default=0.05, show_default=True, help="Share of the data held back."
    ),
    click.option(
        "--validation-data",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FILE|DIR",
        help="Validate on these, and hold nothing of --data back.",
    ),
    click.option(
        "--special",
        type=click.Choice(["refuse", "plain", "tokens"]),
        default="refuse",
        show_default=True,
        help="What names of control tokens (<|im_end|>) in the data are: an error, plain text, or those tokens.",
    ),
    click.option("--validate-every", type=int, help="Steps between validations.  [default: a tenth of all]"),
    click.option(
        "--checkpoint-every", type=int, help="Steps between checkpoints.  [default: a tenth of all]"
    ),
    click.option(
        "--patience", type=int, help="End after so many validations without improvement.  [default: never]"
    ),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--dry-run", is_flag=True, help="Say what the run would do and take; train nothing."),
    json_option,
    quiet_option,
]


def training_options(function: F) -> F:
    """The options of a run."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def flow_options(function: F) -> F:
    """Options that only runs of flow models have."""
    for option in (
        click.option(
            "--condition-dropout",
            type=float,
            help="Flow models: share of classes or conditions that are not told.  [default: 0.1]",
        ),
        click.option("--classes", metavar="K,…", help="Flow models: learn only these classes."),
    ):
        function = option(function)
    return function


def classes_of(text: str | None) -> list[int]:
    """The numbers of ``--classes``."""
    if text is None:
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--classes takes numbers with commas between, not {text[:60]!r}") from error


def settings_of(options: dict[str, Any]) -> Any:
    """The settings among a command's options, taken out of them."""
    from oazoo.zoo.train_settings import TrainSettings

    names = TrainSettings.__dataclass_fields__
    return TrainSettings(**{name: options.pop(name) for name in list(options) if name in names})


def carry_out(
    make: Callable[..., Run | FlowRun], output: Path | None, resume: bool, dry_run: bool, as_json: bool
) -> None:
    """Make a run and fit it, with a bar, a log, curves, and a summary; or only say what it would do."""
    from oazoo.training.callbacks import ProgressReport
    from oazoo.training.control import TrainingControl, stop_on_signals

    if output is None and not dry_run:
        raise click.UsageError("say where the run is kept: -o RUN (or --dry-run to see what it would take)")
    control = TrainingControl()
    with progress_bar() as progress:
        run = make(
            callbacks=[ProgressReport(progress)],
            control=control,
            resume=resume,
            progress=progress,
            notify=say,
        )
        if dry_run:
            _show_plan(run, as_json)
            return
        _tell_plan(run)
        with stop_on_signals(control, say):
            summary = run.fit()
    _show_summary(run, summary, as_json)


def _tell_plan(run: Run | FlowRun) -> None:
    plan = run.plan
    say(
        f"{plan.model}: {format_count(plan.trained)} of {format_count(plan.parameters)} parameters learn, "
        f"{plan.steps} steps, rows of {plan.context} tokens, {format_count(plan.tokens_per_epoch)} tokens a pass, "
        f"on {plan.device}"
    )


def _show_plan(run: Run | FlowRun, as_json: bool) -> None:
    plan = run.plan
    if as_json:
        emit_json(plan.to_json())
        return
    emit_table(
        ["what", "how much"],
        [
            ("parameters", format_count(plan.parameters)),
            ("that learn", format_count(plan.trained)),
            ("rows", f"{plan.rows:,} of {plan.context} tokens"),
            ("tokens a pass", f"{plan.tokens_per_epoch:,}"),
            ("tokens held back", f"{plan.validation_tokens:,}"),
            ("steps", f"{plan.steps:,}"),
            ("highest learning rate", f"{plan.lr:g}"),
            ("batches of a step", f"{plan.accumulate:,} of {plan.batch_size:,} rows"),
            ("device memory", format_bytes(plan.memory_bytes)),
            ("  of a step", format_bytes(plan.memory.step)),
            ("  free for it", format_bytes(plan.memory.free) + ("" if plan.memory.fits else ", not enough")),
            ("device", plan.device),
        ],
        right=["how much"],
    )


def _show_summary(run: Run | FlowRun, summary: Summary, as_json: bool) -> None:
    if as_json:
        emit_json({"plan": run.plan.to_json(), "summary": summary.to_json(), "folder": str(run.output)})
        return
    best = ""
    if summary.best_loss is not None:
        best = f", best validation loss {summary.best_loss:.4f} nats a token after step {summary.best_step}"
    say(
        f"{run.output}: {summary.ended} after {summary.steps} steps in {format_duration(summary.seconds)} "
        f"({summary.tokens_per_second:,.0f} tokens/s){best}"
    )
    if summary.loss_first is not None and summary.loss_last is not None:
        device = ""
        if summary.device_p50 is not None and summary.device_p95 is not None:
            device = (
                f", of the device {1000 * summary.device_p50:,.1f} and {1000 * summary.device_p95:,.1f} ms"
            )
        assert summary.step_p50 is not None and summary.step_p95 is not None and summary.loss_mean is not None
        say(
            f"  loss {summary.loss_first:.4f} → {summary.loss_last:.4f}, mean {summary.loss_mean:.4f}; a step took "
            f"{1000 * summary.step_p50:,.1f} ms (p50), {1000 * summary.step_p95:,.1f} ms (p95){device}"
        )
