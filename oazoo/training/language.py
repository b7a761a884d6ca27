"""Language models: what one step computes, and the loss on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from oazoo.errors import UsageError
from oazoo.models import CausalModel
from oazoo.runtime import Program, Tensor, random
from oazoo.runtime.sizing import measuring
from oazoo.training.batches import Batch
from oazoo.training.optimizer import Optimizer
from oazoo.training.stepper import CapturedStepper


def summed_loss(model: CausalModel, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """``Σ weight · cross-entropy`` of next tokens, f32 [1], in nats times the weights.

    Args:
        model: gives the logits.
        inputs, targets: i32 [rows, tokens].
        weights: f32 [rows, tokens]; 0 where a target does not count.
    """
    count = targets.numel
    return model.loss(inputs, targets.view(count), mask=weights.view(count), count=1.0)


def _inputs(rows: int, tokens: int) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and types of inputs, targets and weights."""
    return [((rows, tokens), dtype) for dtype in ("i32", "i32", "f32")]


class LanguageStepper(CapturedStepper):
    """Trains a language model on :class:`~oazoo.training.batches.Batch` objects of one shape.

    The loss of a step is the mean over all tokens that count in all of its batches, however they are spread over them.

    Args:
        model: its parameters that require gradients learn.
        optimizer: over these.
        clip: largest norm of the gradient, or None.
        accumulate: batches of a step.
        captured: off, steps are run anew each time instead of being replayed; for comparison.
        seed: of dropout.
    """

    def __init__(
        self,
        model: CausalModel,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        captured: bool = True,
        seed: int = 0,
    ) -> None:
        self.model, draws = model, random.seed(model.device, seed)
        super().__init__(
            model,
            optimizer,
            partial(summed_loss, model),
            draws,
            clip=clip,
            accumulate=accumulate,
            captured=captured,
            norms=True,
        )

    def run(self, batches: Sequence[Batch]) -> None:
        """Queue one step over as many batches as were announced."""
        self._begin(batches)
        for batch in batches:
            # A batch of which nothing counts adds nothing, and there is no mean of it.
            weights = batch.mask / np.float32(max(batch.tokens, 1))
            self.step(batch.inputs, batch.targets, weights, weight=max(float(batch.tokens), 1e-6))

    def drain(self) -> list[tuple[float, float | None]]:
        """(loss, norm of its gradient before clipping) of the steps since the last call, nats a token; waits."""
        return [(float(loss), float(norm)) for loss, norm in self.step.figures()]

    def measure(self, rows: int, tokens: int) -> int:
        """Bytes of device memory that steps over batches of [rows, tokens] take; see :meth:`TrainingStep.measure`."""
        self.model.train()
        return self.step.measure(*_inputs(rows, tokens))


class HeldOutLoss:
    """Mean loss of a language model over held-out batches, all of one shape; the first call captures, later ones replay.

    Args:
        model: put to evaluation while it is measured.
        batches: from :func:`oazoo.training.batches.one_pass`; gone through at each call.
    """

    def __init__(self, model: CausalModel, batches: Sequence[Batch]) -> None:
        if not batches:
            raise UsageError("there is nothing to validate on")
        self._model, self._batches = model, batches
        self._inputs: list[Tensor] = []
        self._program: Program | None = None
        self._loss: Tensor | None = None

    def __call__(self) -> tuple[float, int]:
        """(nats a token, tokens); waits for the device."""
        self._model.eval()
        total, tokens = 0.0, 0
        for batch in self._batches:
            total += self._sum(batch)
            tokens += batch.tokens
        if not tokens:
            raise UsageError("no token of the validation data counts in the loss")
        return total / tokens, tokens

    @staticmethod
    def measure(model: CausalModel, rows: int, tokens: int) -> int:
        """Bytes of device memory that it takes for batches of [rows, tokens], without taking any."""
        model.eval()
        with measuring(model.device):
            inputs = [Tensor.empty(model.device, shape, dtype) for shape, dtype in _inputs(rows, tokens)]
        with measuring(model.device) as arena:
            summed_loss(model, *inputs)
        return arena.nbytes + sum(tensor.nbytes for tensor in inputs)

    def _sum(self, batch: Batch) -> float:
        device = self._model.device
        arrays = (batch.inputs, batch.targets, batch.mask)
        if self._program is None:
            self._inputs = [Tensor.from_numpy(device, array) for array in arrays]
            with device.capture() as program:
                self._loss = summed_loss(self._model, *self._inputs)
            self._program = program
        else:
            for tensor, array in zip(self._inputs, arrays, strict=True):
                tensor.write(array)
        self._program.run()
        assert self._loss is not None
        return float(self._loss.numpy()[0])
