"""Schedules of the learning rate: objects that give the rate of a step, counted from 0.

A schedule is called with the step that is about to be taken: ``optimizer.set_lr(schedule(step))``. Only
:class:`ReduceOnPlateau` has a memory; all others are functions of the step, so a run continues anywhere. The definitions are
PyTorch's where it has one, with the rate held after the last step. ``compat="oa"`` gives those of OA 0.8.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from oazoo.errors import UsageError

#: From a step, counted from 0, to its learning rate.
Schedule: TypeAlias = "Callable[[int], float]"
Compat = Literal["oa"] | None


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise UsageError(f"schedule: {what}")


def _cosine(start: float, end: float, share: float) -> float:
    """From ``start`` to ``end`` along half a cosine, as ``share`` goes from 0 to 1."""
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, slots=True)
class Constant:
    """``lr`` at every step."""

    lr: float

    def __call__(self, step: int) -> float:
        return self.lr


@dataclass(frozen=True, slots=True)
class Warmup:
    """``lr · (step + 1) / steps`` up to ``lr``, which then stays."""

    lr: float
    steps: int

    def __post_init__(self) -> None:
        _need(self.steps > 0, f"a warm-up takes at least one step, not {self.steps}")

    def __call__(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / self.steps)


@dataclass(frozen=True, slots=True)
class Cosine:
    """From ``lr`` down to ``min_lr`` along half a cosine over ``steps`` steps (arXiv:1608.03983, without restarts)."""

    lr: float
    steps: int
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        _need(self.steps > 0, f"a cosine takes at least one step, not {self.steps}")

    def __call__(self, step: int) -> float:
        return _cosine(self.lr, self.min_lr, min(step, self.steps) / self.steps)


@dataclass(frozen=True, slots=True)
class CosineRestarts:
    """The cosine again and again, each period ``multiplier`` times as long as the one before (arXiv:1608.03983)."""

    lr: float
    period: int
    multiplier: int = 1
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        _need(self.period > 0 and self.multiplier > 0, "a period has at least one step and does not shrink")

    def __call__(self, step: int) -> float:
        period, place = self.period, step
        if self.multiplier == 1:
            place %= period
        while place >= period:
            place -= period
            period *= self.multiplier
        return _cosine(self.lr, self.min_lr, place / period)


@dataclass(frozen=True, slots=True)
class Cyclic:
    """A triangle between ``base_lr`` and ``max_lr`` (arXiv:1506.01186): ``steps_up`` steps up and as many down.

    ``mode``: ``triangular`` keeps its height, ``triangular2`` halves it every cycle, ``exp_range`` multiplies it with
    ``gamma`` to the power of the step.
    """

    base_lr: float
    max_lr: float
    steps_up: int = 2000
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        _need(self.steps_up > 0, f"a cycle goes up for at least one step, not {self.steps_up}")
        known = ("triangular", "triangular2", "exp_range")
        _need(self.mode in known, f"a cycle's mode is {', '.join(known)}, not {self.mode!r}")

    def __call__(self, step: int) -> float:
        cycle = step // (2 * self.steps_up)
        height = 1 - abs(step / self.steps_up - 2 * cycle - 1)
        if self.mode == "triangular2":
            height *= 0.5**cycle
        elif self.mode == "exp_range":
            height *= self.gamma**step
        return self.base_lr + (self.max_lr - self.base_lr) * height


@dataclass(frozen=True, slots=True)
class OneCycle:
    """Up along half a cosine for ``percent_up`` of ``steps``, then down along another (arXiv:1708.07120).

    Starts at ``lr / division`` and ends, at step ``steps - 1``, at ``lr / division / final_division``. OA starts where it
    ends, reaches ``lr`` at step ``int(percent_up · steps)`` and the end at ``steps``.
    """

    lr: float
    steps: int
    percent_up: float = 0.3
    division: float = 25.0
    final_division: float = 1e4
    compat: Compat = None

    def __post_init__(self) -> None:
        _need(self.steps > 0, f"one cycle takes at least one step, not {self.steps}")
        _need(0 <= self.percent_up <= 1, f"percent_up is from 0 to 1, not {self.percent_up}")
        _need(self.division > 0 and self.final_division > 0, "divisions are positive")

    def __call__(self, step: int) -> float:
        low = self.lr / self.division / self.final_division
        if self.compat == "oa":
            start, up, last = low, float(int(self.percent_up * self.steps)), float(self.steps)
        else:
            start, up, last = self.lr / self.division, self.percent_up * self.steps - 1, self.steps - 1.0
        if step < up or (step == up and up > 0):
            return _cosine(start, self.lr, step / up)
        if last <= up:
            return low
        return _cosine(self.lr, low, min(1.0, (step - up) / (last - up)))


@dataclass(frozen=True, slots=True)
class WarmupCosine:
    """``lr · (step + 1) / warmup`` for ``warmup`` steps, then the cosine down to ``min_lr`` at step ``steps``.

    OA is one step late: its steps 0 and 1 have the same rate.
    """

    lr: float
    warmup: int
    steps: int
    min_lr: float = 0.0
    compat: Compat = None

    def __post_init__(self) -> None:
        _need(
            0 <= self.warmup < self.steps,
            f"a warm-up of {self.warmup} steps does not end before {self.steps}",
        )

    def __call__(self, step: int) -> float:
        place = max(step, 1) - 1 if self.compat == "oa" else step
        if place < self.warmup:
            return self.lr * (place + 1) / self.warmup
        share = (place - self.warmup) / (self.steps - self.warmup)
        return _cosine(self.lr, self.min_lr, min(1.0, share))


@dataclass(frozen=True, slots=True)
class Sequential:
    """One schedule after the other: the next begins, at its own step 0, at each of ``milestones``."""

    schedules: Sequence[Schedule]
    milestones: Sequence[int]

    def __post_init__(self) -> None:
        fits = len(self.schedules) == len(self.milestones) + 1 and list(self.milestones) == sorted(
            self.milestones
        )
        _need(fits, f"{len(self.schedules)} schedules need {len(self.schedules) - 1} milestones, in order")

    def __call__(self, step: int) -> float:
        passed = sum(step >= milestone for milestone in self.milestones)
        begin = self.milestones[passed - 1] if passed else 0
        return self.schedules[passed](step - begin)


@dataclass(slots=True)
class ReduceOnPlateau:
    """Multiplies the rate with ``factor`` when a metric has not improved for more than ``patience`` observations.

    An observation counts as improved when it is better than the best one by ``threshold``: a share of it, or with
    ``absolute`` (which is what OA does) the difference itself. An observation that is no number is none.
    """

    lr: float
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    min_lr: float = 0.0
    mode: Literal["min", "max"] = "min"
    absolute: bool = False
    compat: Compat = None
    best: float = field(init=False)
    bad: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        _need(0 < self.factor < 1, f"the factor of a plateau lies between 0 and 1, not at {self.factor}")
        _need(self.mode in ("min", "max"), f"a plateau's mode is min or max, not {self.mode!r}")
        self.best = math.inf if self.mode == "min" else -math.inf

    def __call__(self, step: int) -> float:
        return self.lr

    def observe(self, metric: float) -> float:
        """Take a metric into account; returns the learning rate from now on."""
        sign = 1 if self.mode == "min" else -1
        margin = self.threshold
        if not (self.absolute or self.compat == "oa"):
            margin *= abs(self.best) if math.isfinite(self.best) else 0.0
        if sign * metric < sign * self.best - margin or (math.isinf(self.best) and not math.isnan(metric)):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.bad > self.patience:
            self.lr, self.bad = max(self.lr * self.factor, self.min_lr), 0
        return self.lr

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to continue."""
        return {"lr": self.lr, "best": self.best if math.isfinite(self.best) else None, "bad": self.bad}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self.lr, self.bad = float(state["lr"]), int(state["bad"])
        if state["best"] is not None:
            self.best = float(state["best"])
