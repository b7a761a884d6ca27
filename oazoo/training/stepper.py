"""What steppers of every kind of model share: a captured step, its settings, and its stream of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oazoo.errors import UsageError
from oazoo.nn.module import Module
from oazoo.runtime import Tensor
from oazoo.runtime.random import Generator
from oazoo.training.optimizer import Optimizer
from oazoo.training.step import TrainingStep


class CapturedStepper:
    """A captured step over batches of one shape, and all of :class:`oazoo.training.loop.Stepper` but what is in a batch.

    Args:
        model: its parameters that require gradients learn.
        optimizer: over these.
        loss: of the arrays of a batch.
        draws: the stream that the step draws from.
        clip: largest norm of the gradient, or None.
        accumulate: batches of a step.
        captured: off, steps are run anew each time instead of being replayed; for comparison.
        norms: keep the norms of gradients.
    """

    #: Losses kept until they are read.
    capacity = 256

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loss: Callable[..., Tensor],
        draws: Generator,
        *,
        clip: float | None,
        accumulate: int,
        captured: bool,
        norms: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self._module, self._draws, self._accumulate = model, draws, accumulate
        self.step = TrainingStep(
            loss,
            optimizer,
            clip=clip,
            accumulation=accumulate,
            captured=captured,
            kept=2 * self.capacity,
            norms=norms,
        )

    def _begin(self, batches: Sequence[object]) -> None:
        """Before a step: as many batches as were announced, and a model that learns."""
        if len(batches) != self._accumulate:
            raise UsageError(f"a step of {self._accumulate} batches was given {len(batches)}")
        if not self._module.training:
            self._module.train()

    def set_lr(self, lr: float) -> None:
        """Of the steps from now on."""
        self.optimizer.set_lr(lr)

    def set_weight_decay(self, value: float) -> None:
        """Of the steps from now on; parameters without any keep none."""
        for index, group in enumerate(self.optimizer.groups):
            if group.options["weight_decay"]:
                self.optimizer.set_options(index, weight_decay=value)

    def device_seconds(self) -> float | None:
        """Device time of the last step, asked for after ``drain``; None if the device does not tell."""
        return self.step.seconds()

    def state(self) -> Mapping[str, Any]:
        """Where the stream of random numbers is; waits for the device."""
        return {"draws": list(self._draws.position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._draws.seed(*(int(number) for number in state["draws"]))
