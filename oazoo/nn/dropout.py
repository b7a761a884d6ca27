"""Dropout."""

from __future__ import annotations

from oazoo.nn.module import Module
from oazoo.runtime import Tensor
from oazoo.runtime.ops.dropout import dropout
from oazoo.runtime.random import Generator


class Dropout(Module):
    """While training, each value is 0 with probability ``rate`` and else divided by ``1 - rate`` (arXiv:1207.0580).

    What is dropped follows from the seed of ``source`` (the device's own stream if None, see
    :mod:`oazoo.runtime.random`) and from how often was drawn before; a captured program draws anew at each replay.
    """

    def __init__(self, rate: float, source: Generator | None = None) -> None:
        self.rate = rate
        self.source = source

    @property
    def now(self) -> float:
        """The rate where it trains, else 0."""
        return self.rate if self.training else 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """f32 of any shape to the same."""
        return dropout(x, self.now, self.source)
