"""Samplers: integrate a flow model's velocity from noise to data, one captured step replayed at every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.models.flow import FlowDenoiser
from oazoo.runtime import Program, Tensor
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.ops.arithmetic import accumulate
from oazoo.runtime.random import Generator

#: Samplers, and how often each asks the model in a step.
SAMPLERS = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4}
SCHEDULES = ("uniform", "cosine", "shifted")
MAX_STEPS = 10_000
#: Numbers of a step that lie in device memory: its begin, middle and end, its length, the guidance scale.
_BEGIN, _MIDDLE, _END, _LENGTH, _GUIDANCE = range(5)


def noise_levels(steps: int, schedule: str = "uniform", shift: float = 3.0) -> list[float]:
    """The shares of noise between steps, from 1 to 0: ``steps`` + 1 numbers.

    Args:
        steps: of the sampler.
        schedule: ``uniform``; ``cosine``, short steps at both ends; or ``shifted``, short ones where there is most noise,
            ``s u / (1 + (s - 1) u)`` of uniform levels u (arXiv:2403.03206).
        shift: s, for ``shifted``.

    Raises:
        UsageError: no such schedule, or a number out of range.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(f"{steps} steps: there must be 1 to {MAX_STEPS:,}")
    if schedule not in SCHEDULES:
        raise UsageError(f"there is no schedule {schedule[:40]!r}; there are {', '.join(SCHEDULES)}")
    if not 0 < shift <= 1e6:
        raise UsageError(f"the shift {shift} must be positive")
    even = [1 - i / steps for i in range(steps + 1)]
    if schedule == "cosine":
        return [(1 - math.cos(math.pi * u)) / 2 for u in even]
    if schedule == "shifted":
        return [shift * u / (1 + (shift - 1) * u) for u in even]
    return even


class FlowSteps:
    """Sampling of batches of one size by one sampler.

    Args:
        model: a flow model that predicts velocities; its weights are loaded.
        batch: sequences of a batch.
        sampler: one of ``SAMPLERS``.
        guided: whether steps are taken with classifier-free guidance, which asks the model for two batches at once.
        masked: whether tokens are hidden.
        captured: off, every step is run anew instead of being replayed; for comparison.
    """

    def __init__(
        self,
        model: FlowDenoiser,
        batch: int,
        sampler: str = "euler",
        *,
        guided: bool = False,
        masked: bool = False,
        captured: bool = True,
    ) -> None:
        config = model.config
        if sampler not in SAMPLERS:
            raise UsageError(f"there is no sampler {sampler[:40]!r}; there are {', '.join(SAMPLERS)}")
        if config.prediction not in ("velocity", "sit_velocity"):
            raise UsageError(
                f"a model that predicts {config.prediction} (DiT) runs forward, but is not integrated here; models with a "
                "velocity (SiT, flow matching) are"
            )
        conditioned = bool(config.num_classes or config.condition_features)
        if guided and not conditioned:
            raise UsageError("the model takes no condition, so there is nothing to guide by")
        self.model, self.batch, self._sampler, self._guided = model, batch, sampler, guided
        device = self._device = model.device
        both = batch * (2 if guided else 1)
        self.x = Tensor.empty(device, (batch, config.tokens, config.token_size))
        self._clock = Tensor.empty(device, (5,))
        self._condition: Tensor | None = None
        if config.num_classes:
            self._condition = Tensor.empty(device, (both,), "i32")
        elif config.condition_features:
            self._condition = Tensor.empty(device, (both, config.condition_features))
        self._keep = Tensor.empty(device, (both, config.tokens)) if masked else None
        self._captured = captured
        self._program: Program | None = None

    def __call__(
        self,
        seed: int,
        first: int,
        levels: Sequence[float],
        *,
        condition: npt.NDArray[np.float32] | npt.NDArray[np.int32] | None = None,
        keep: npt.NDArray[np.float32] | None = None,
        guidance: float = 1.0,
    ) -> npt.NDArray[np.float32]:
        """Sequences from noise, f32 [batch, tokens, token_size]; waits for the device.

        Args:
            seed: of the noise; sequence i has the noise of draw ``first + i``, whatever the batch.
            first: number of the first sequence.
            levels: of noise, between steps; see :func:`noise_levels`.
            condition: class numbers int32 [batch], or f32 [batch, condition_features].
            keep: f32 [batch, tokens], 0 for tokens that are not there; for ``masked``.
            guidance: scale, for ``guided``.
        """
        self._tell(condition, keep)
        noise = Generator(self._device)
        noise.seed(seed, first)
        for row in range(self.batch):
            accumulate(self.x.rows(row, row + 1), ops.random_normal(noise, (1, *self.x.shape[1:])), 1.0, 0.0)
        backward = self.model.config.prediction == "sit_velocity"
        times = [1 - level for level in levels] if backward else list(levels)
        self.model.eval()
        for begin, end in pairwise(times):
            self._clock.write(np.array([begin, (begin + end) / 2, end, end - begin, guidance], np.float32))
            self._run()
        return self.x.numpy().astype(np.float32, copy=False)

    def _tell(self, condition: npt.NDArray[np.float32] | npt.NDArray[np.int32] | None, keep: object) -> None:
        config = self.model.config
        if self._condition is not None:
            if condition is None:
                raise UsageError("the model takes a condition")
            parts = [condition]
            if self._guided:
                none = np.full_like(condition, config.num_classes) if config.num_classes else 0 * condition
                parts.append(none)
            self._condition.write(np.concatenate(parts))
        if self._keep is not None:
            self._keep.write(np.concatenate([np.asarray(keep, np.float32)] * (2 if self._guided else 1)))

    def _run(self) -> None:
        if not self._captured:
            self._step()
            self._device.flush()
            return
        if self._program is None:
            with self._device.capture() as program:
                self._step()
            self._program = program
        self._program.run()

    def _velocity(self, x: Tensor, time: int) -> Tensor:
        if not self._guided:
            at = ops.read_clock(self._clock, time, self.batch)
            return self.model.velocity(x, at, self._condition, keep=self._keep)
        both = Tensor.empty(self._device, (2 * self.batch, *x.shape[1:]))
        for half in range(2):
            accumulate(both.rows(half * self.batch, (half + 1) * self.batch), x, 1.0, 0.0)
        at = ops.read_clock(self._clock, time, 2 * self.batch)
        v = self.model.velocity(both, at, self._condition, keep=self._keep)
        return ops.guide(v, self._clock, _GUIDANCE)

    def _ahead(self, v: Tensor, factor: float) -> Tensor:
        """Where a velocity leads from the state, a share of the step on."""
        return ops.advance(self.x, v, self._clock, _LENGTH, factor)

    def _move(self, v: Tensor, factor: float) -> None:
        ops.advance(self.x, v, self._clock, _LENGTH, factor, out=self.x)

    def _step(self) -> None:
        k1 = self._velocity(self.x, _BEGIN)
        if self._sampler == "euler":
            self._move(k1, 1.0)
        elif self._sampler == "midpoint":
            self._move(self._velocity(self._ahead(k1, 0.5), _MIDDLE), 1.0)
        elif self._sampler == "heun":
            k2 = self._velocity(self._ahead(k1, 1.0), _END)
            self._move(k1, 0.5)
            self._move(k2, 0.5)
        else:
            k2 = self._velocity(self._ahead(k1, 0.5), _MIDDLE)
            k3 = self._velocity(self._ahead(k2, 0.5), _MIDDLE)
            k4 = self._velocity(self._ahead(k3, 1.0), _END)
            for k, share in ((k1, 1 / 6), (k2, 1 / 3), (k3, 1 / 3), (k4, 1 / 6)):
                self._move(k, share)
