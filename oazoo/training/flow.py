"""Flow models: what one step computes, and the loss on held-out items."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.errors import UsageError
from oazoo.models.flow import FlowDenoiser
from oazoo.runtime import Program, Tensor, random
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.random import Generator
from oazoo.runtime.sizing import measuring
from oazoo.training.flow_data import FlowBatch
from oazoo.training.optimizer import Optimizer
from oazoo.training.stepper import CapturedStepper


def flow_loss(
    model: FlowDenoiser, source: Generator, clean: Tensor, *told: Tensor, drop: bool = True
) -> Tensor:
    """The mean squared error of the velocity at random times of straight paths to random noise; f32 [1].

    While training, losses of routers of experts are added.

    Times are spread evenly over a batch, noise and what is dropped of the condition are drawn on the device.

    Args:
        model: predicts velocities.
        source: of random numbers.
        clean: f32 [items, tokens, token_size].
        told: a condition, if the model takes one; then the mask f32 [items, tokens], if there is one. Tokens with 0 are seen
            by nobody and count nothing.
        drop: whether a share of the conditions is dropped.
    """
    config, parts = model.config, list(told)
    condition = parts.pop(0) if config.num_classes or config.condition_features else None
    keep = parts.pop(0) if parts else None
    time = ops.random_uniform(source, (clean.shape[0],), strata=True)
    noise = ops.random_normal(source, clean.shape)
    if config.prediction == "sit_velocity":
        state, velocity = ops.linear_match(noise, clean, time)
    else:
        state, velocity = ops.linear_match(clean, noise, time)
    if drop:
        condition = model.drop(condition)
    found = model.velocity(state, time, condition, keep=keep)
    loss = mse(found, velocity) if keep is None else ops.masked_mse(found, velocity, keep)
    for mixture in model.mixtures():
        if mixture.loss is not None:
            loss = add(loss, mixture.loss)
    return loss


class FlowStepper(CapturedStepper):
    """Trains a flow model on :class:`~oazoo.training.flow_data.FlowBatch` objects of one shape.

    Args:
        model: its parameters that require gradients learn.
        optimizer: over these.
        clip: largest norm of the gradient, or None.
        accumulate: batches of a step.
        captured: off, steps are run anew each time instead of being replayed; for comparison.
        seed: of times, noise and dropped conditions.
    """

    def __init__(
        self,
        model: FlowDenoiser,
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
            lambda *arrays: flow_loss(model, draws, *arrays),
            draws,
            clip=clip,
            accumulate=accumulate,
            captured=captured,
        )

    def run(self, batches: Sequence[FlowBatch]) -> None:
        """Queue one step over as many batches as were announced."""
        self._begin(batches)
        for batch in batches:
            self.step(*batch.arrays, weight=float(batch.tokens))

    def drain(self) -> list[tuple[float, float | None]]:
        """The losses of the steps since the last call; waits for the device."""
        return [(float(loss), None) for loss in self.step.losses()]

    def measure(self, batch: FlowBatch) -> int:
        """Bytes of device memory that steps over such batches take."""
        self.model.train()
        return self.step.measure(*((a.shape, {"f": "f32", "i": "i32"}[a.dtype.kind]) for a in batch.arrays))


class HeldOutFlowLoss:
    """Loss of a flow model over held-out batches of one shape, always at the same times and with the same noise.

    Args:
        model: put to evaluation while it is measured.
        batches: gone through at each call.
        rounds: times that each is gone through, with other times and noise.
        seed: of those.
    """

    def __init__(
        self, model: FlowDenoiser, batches: Sequence[FlowBatch], *, rounds: int = 1, seed: int = 0
    ) -> None:
        if not batches:
            raise UsageError("there is nothing to validate on")
        self._model, self._batches, self._rounds, self._seed = model, list(batches), rounds, seed
        self._source = Generator(model.device, seed)
        self._inputs: list[Tensor] = []
        self._program: Program | None = None
        self._loss: Tensor | None = None

    def __call__(self) -> tuple[float, int]:
        """(mean loss, tokens); waits for the device."""
        self._model.eval()
        self._source.seed(self._seed)
        total, tokens = 0.0, 0
        for _ in range(self._rounds):
            for batch in self._batches:
                total += batch.tokens * self._of(batch)
                tokens += batch.tokens
        return total / tokens, tokens

    @staticmethod
    def measure(model: FlowDenoiser, batch: FlowBatch) -> int:
        """Bytes of device memory that it takes for such batches, without taking any."""
        model.eval()
        source = Generator(model.device)
        with measuring(model.device):
            inputs = [
                Tensor.empty(model.device, a.shape, {"f": "f32", "i": "i32"}[a.dtype.kind])
                for a in batch.arrays
            ]
        with measuring(model.device) as arena:
            flow_loss(model, source, *inputs, drop=False)
        return arena.nbytes + sum(tensor.nbytes for tensor in inputs)

    def _of(self, batch: FlowBatch) -> float:
        device = self._model.device
        if self._program is None:
            self._inputs = [Tensor.from_numpy(device, array) for array in batch.arrays]
            with device.capture() as program:
                self._loss = flow_loss(self._model, self._source, *self._inputs, drop=False)
            self._program = program
        else:
            for tensor, array in zip(self._inputs, batch.arrays, strict=True):
                tensor.write(array)
        self._program.run()
        assert self._loss is not None
        return float(self._loss.numpy()[0])
