"""Metrics that gather on the device: a step updates them without waiting, and only ``result`` reads.

An update only queues work, so it may be part of a captured program.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.elementwise import argmax
from oazoo.runtime.ops.tally import add_weighted, count_hits


class Metric(Protocol):
    """A number over all that was seen since the last reset."""

    def reset(self) -> None:
        """Start anew; not within a capture."""

    def result(self) -> float:
        """The number, NaN if nothing was seen; waits for the device."""


class MeanLoss:
    """The mean of losses, weighted by what each is the mean of."""

    def __init__(self, device: Device) -> None:
        self._state = Tensor.from_numpy(device, np.zeros(3, np.float32))

    def update(self, loss: Tensor, weight: float = 1.0) -> None:
        """Take in a loss, f32 [1], that is the mean over ``weight`` rows."""
        add_weighted(self._state, loss, weight)

    def reset(self) -> None:
        """Start anew; not within a capture."""
        self._state.write(np.zeros(3, np.float32))

    def result(self) -> float:
        """The mean, NaN if nothing was seen; waits for the device."""
        total, lost, weight = (float(v) for v in self._state.numpy())
        return (total - lost) / weight if weight else math.nan


class Accuracy:
    """The share of rows whose largest logit is the target's; the first of several equal ones counts as the largest."""

    def __init__(self, device: Device) -> None:
        self._state = Tensor.from_numpy(device, np.zeros(2, np.uint32))

    def update(self, logits: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """Take in logits, f32 [rows, classes], and class numbers (i32, u32 or u8 [rows]); a mask of 0 leaves a row out."""
        count_hits(self._state, argmax(logits), targets, mask)

    def reset(self) -> None:
        """Start anew; not within a capture."""
        self._state.write(np.zeros(2, np.uint32))

    def result(self) -> float:
        """The share, from 0 to 1, NaN if nothing was seen; waits for the device."""
        right, rows = (int(v) for v in self._state.numpy())
        return right / rows if rows else math.nan
