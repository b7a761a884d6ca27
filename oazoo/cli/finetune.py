"""Train a model further on text of yours, all of its weights or a LoRA adapter beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oazoo.cli._training import carry_out, classes_of, flow_options, settings_of, training_options
from oazoo.cli.common import say


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--lora", "rank", type=int, metavar="RANK", help="Train corrections of this rank beside the weights."
)
@click.option("--full", is_flag=True, help="Train all weights.")
@click.option(
    "--alpha", type=float, help="Strength of LoRA: corrections are times alpha / rank.  [default: 2 · RANK]"
)
@click.option("--lora-dropout", type=float, default=0.0, show_default=True)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="LAYER",
    help="Layers with corrections: names, ends (attn.q, q_proj) or patterns.  [default: all linear ones but the head]",
)
@click.option("--raw", is_flag=True, help="Leave the model's chat template aside.")
@flow_options
@training_options
def command(
    model: str,
    rank: int | None,
    full: bool,
    alpha: float | None,
    lora_dropout: float,
    targets: tuple[str, ...],
    raw: bool,
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
    """Train MODEL (a name of the zoo, a file or folder, an address) further on --data, into the folder RUN.

    With --lora RANK its weights stay as they are, Q4 and Q8 too, and RUN/adapter is what was learned, in PEFT's layout:
    oazoo generate MODEL --adapter RUN/adapter, oazoo merge. With --full RUN/best.oam is the trained model. Of examples in
    .jsonl files ({"messages": […]}, {"prompt": …, "completion": …}, {"text": …}) only the answers are learned.
    A flow model learns images or sequences (.npz, .npy) with --full; flow-digits without --data scikit-learn's digits.
    """
    from oazoo.training.lora import LoraSettings
    from oazoo.zoo.load import is_flow
    from oazoo.zoo.train import finetune

    if full == (rank is not None):
        raise click.UsageError("say what learns: --lora RANK, or --full")
    if full and (targets or alpha is not None):
        raise click.UsageError("--target and --alpha belong to --lora")
    if is_flow(model, notify=say):
        if not full:
            raise click.UsageError(
                f"{model} is a flow model: all of its weights learn (--full), no corrections"
            )
        from oazoo.zoo.train_flow import finetune_flow

        flow_settings = settings_of(options)
        own: dict[str, Any] = {"classes": classes_of(classes), "validation_data": validation_data}
        if condition_dropout is not None:
            own["condition_dropout"] = condition_dropout
        carry_out(
            lambda **more: finetune_flow(
                model, data, None if dry_run else output, flow_settings, **own, **more
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
    lora = None
    if rank is not None:
        lora = LoraSettings(rank=rank, alpha=2.0 * rank if alpha is None else alpha, dropout=lora_dropout)
    settings = settings_of(options)
    carry_out(
        lambda **more: finetune(
            model,
            data,
            None if dry_run else output,
            settings,
            lora=lora,
            targets=targets,
            raw=raw,
            validation_data=validation_data,
            **more,
        ),
        output,
        resume,
        dry_run,
        as_json,
    )
