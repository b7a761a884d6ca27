"""First values of parameters, drawn on the host: the same for a seed on every device."""

from __future__ import annotations

from collections.abc import Callable
from math import prod, sqrt

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
#: From a source of random numbers and a shape to first values.
Initial = Callable[[np.random.Generator, tuple[int, ...]], Array]


def zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Zeros: biases."""
    return np.zeros(shape, np.float32)


def ones(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Ones: weights of norms."""
    return np.ones(shape, np.float32)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float) -> Array:
    """Evenly from -bound to bound."""
    return (rng.random(shape, np.float32) * 2 - 1) * np.float32(bound)


def glorot(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Evenly within ±sqrt(6 / (inputs + outputs)), of a weight [outputs, inputs] (Glorot and Bengio, AISTATS 2010)."""
    return uniform(rng, shape, sqrt(6 / (shape[0] + prod(shape[1:]))))


def by_width(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Evenly within ±1 / sqrt(width), of a table [rows, width]."""
    return uniform(rng, shape, shape[-1] ** -0.5)


def normal(deviation: float) -> Initial:
    """Normally distributed around 0."""
    return lambda rng, shape: rng.standard_normal(shape, np.float32) * np.float32(deviation)
