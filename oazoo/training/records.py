"""What a training run tells of itself: records of steps and validations, a summary, or the error it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from oazoo.errors import OazooError


class TrainingError(OazooError):
    """A run cannot go on: its loss is not finite, or a checkpoint does not belong to it."""


@dataclass(frozen=True)
class StepRecord:
    """One step of the optimizer.

    Attributes:
        step: its number, from 1.
        epoch: the pass over the data that its batch is of, from 0.
        loss: mean loss of its target tokens before the update, nats a token.
        lr: the learning rate it used.
        grad_norm: length of the whole gradient of that loss before clipping; None if that was not computed.
        samples, tokens: rows of the batch, and tokens that count in its loss.
        seconds: wall time; losses are read several steps at a time, which then share it evenly.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float | None
    samples: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class ValidationRecord:
    """One validation: after which step, mean loss in nats a token, over how many tokens, and the seconds it took."""

    step: int
    loss: float
    tokens: int
    seconds: float
    best: bool = False


@dataclass(frozen=True)
class Summary:
    """How a run went; losses in nats a token, times in seconds.

    Attributes:
        steps, tokens, samples: of this run, without what came before a resumption.
        seconds: spent in steps; validation and checkpoints are not counted.
        ended: why: "finished", "stopped", "early stop", "out of time".
        step_p50, step_p95: wall time of a step.
        device_p50, device_p95: time of a step by the device's own clock, one step for every reading of losses; None where
            the device has no such clock.
        best_loss, best_step: of the validations; None without any.
    """

    steps: int
    tokens: int
    samples: int
    seconds: float
    ended: str
    loss_first: float | None
    loss_last: float | None
    loss_mean: float | None
    step_p50: float | None
    step_p95: float | None
    device_p50: float | None
    device_p95: float | None
    best_loss: float | None
    best_step: int | None

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the steps."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


@dataclass
class Tally:
    """Sums up the steps of a run for its :class:`Summary`: a few floats a step are kept."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    samples: int = 0

    def add(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.losses.append(record.loss)
            self.seconds.append(record.seconds)
            self.tokens += record.tokens
            self.samples += record.samples

    def add_device(self, seconds: float | None) -> None:
        """Device time of one step."""
        if seconds is not None:
            self.device_seconds.append(seconds)

    def summary(self, ended: str, best_loss: float | None, best_step: int | None) -> Summary:
        some = bool(self.losses)
        p50, p95 = _percentiles(self.seconds)
        device_p50, device_p95 = _percentiles(self.device_seconds)
        return Summary(
            steps=len(self.losses),
            tokens=self.tokens,
            samples=self.samples,
            seconds=float(sum(self.seconds)),
            ended=ended,
            loss_first=self.losses[0] if some else None,
            loss_last=self.losses[-1] if some else None,
            loss_mean=float(np.mean(self.losses)) if some else None,
            step_p50=p50,
            step_p95=p95,
            device_p50=device_p50,
            device_p95=device_p95,
            best_loss=best_loss,
            best_step=best_step,
        )


def _percentiles(seconds: list[float]) -> tuple[float | None, float | None]:
    """The 50th and the 95th."""
    if not seconds:
        return None, None
    p50, p95 = np.percentile(seconds, [50, 95])
    return float(p50), float(p95)
