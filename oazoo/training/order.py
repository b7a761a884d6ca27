"""Orders drawn from a seed, the same on every machine and with every version of NumPy: a resumed run depends on them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that leaves no pattern."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _stream(seed: int, epoch: int) -> int:
    """The start of the sequence of numbers of a seed and a pass."""
    first = _mix(np.array([seed & _MASK], np.uint64))
    return int(_mix(first ^ np.uint64((epoch * 0x9E3779B97F4A7C15 + 1) & _MASK))[0])


def permutation(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """The numbers 0 to ``count`` - 1 in an order of this seed and this pass."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    keys = _mix(steps + np.uint64(_stream(seed, epoch)))
    return np.argsort(keys, kind="stable").astype(np.int64)


def random_below(limit: int, seed: int, epoch: int) -> int:
    """A number from 0 to ``limit`` - 1 of this seed and this pass."""
    return _stream(seed ^ 0x5851F42D4C957F2D, epoch) % limit
