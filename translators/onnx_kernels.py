"""Element-by-element operations of ONNX in NumPy, in float64: enough for masks, scales, positions and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.formats.onnx_graph import Node

Array = npt.NDArray[Any]

_erf = np.frompyfunc(math.erf, 1, 1)


def numbers(value: Array) -> Array:
    """Values in float64, int64 or bool, whatever they are stored as."""
    if value.dtype.kind == "b":
        return value
    with np.errstate(all="ignore"):  # signalling NaNs, and what no 64-bit integer holds
        return value.astype(np.int64 if value.dtype.kind in "iu" else np.float64)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape; ValueError if there is none."""
    return np.broadcast_shapes(*shapes)


def erf(x: Array) -> Array:
    """The error function."""
    return np.asarray(_erf(x), np.float64)


def gelu_erf(x: Array) -> Array:
    """0.5 x (1 + erf(x / sqrt(2)))."""
    result: Array = 0.5 * x * (1 + erf(x / math.sqrt(2)))
    return result


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))."""
    result: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return result


def _divide(_: Node, a: Array, b: Array) -> Array:
    # Whole numbers are sizes here, so that rounding down is the same as rounding towards zero.
    return a // b if a.dtype.kind == b.dtype.kind == "i" else a / b


def _gelu(node: Node, x: Array) -> Array:
    return gelu_tanh(x) if node.attributes.get("approximate", "none") == "tanh" else gelu_erf(x)


ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "Add": lambda _, a, b: a + b,
    "Sub": lambda _, a, b: a - b,
    "Mul": lambda _, a, b: a * b,
    "Div": _divide,
    "Pow": lambda _, a, b: np.power(a, b),
    "Sqrt": lambda _, a: np.sqrt(a),
    "Reciprocal": lambda _, a: 1 / a,
    "Neg": lambda _, a: -a,
    "Abs": lambda _, a: np.abs(a),
    "Exp": lambda _, a: np.exp(a),
    "Erf": lambda _, a: erf(a),
    "Tanh": lambda _, a: np.tanh(a),
    "Sigmoid": lambda _, a: 1 / (1 + np.exp(-a)),
    "Relu": lambda _, a: np.maximum(a, 0),
    "Gelu": _gelu,
    "Equal": lambda _, a, b: a == b,
    "Less": lambda _, a, b: a < b,
    "LessOrEqual": lambda _, a, b: a <= b,
    "Greater": lambda _, a, b: a > b,
    "GreaterOrEqual": lambda _, a, b: a >= b,
    "Not": lambda _, a: ~a,
    "And": lambda _, a, b: a & b,
    "Or": lambda _, a, b: a | b,
    "Where": lambda _, c, a, b: np.where(c, a, b),
}
