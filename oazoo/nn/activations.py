"""Activations as modules: f32 of any shape to the same."""

from __future__ import annotations

from oazoo.nn.module import Module
from oazoo.runtime import Tensor
from oazoo.runtime.ops import softmax as rows
from oazoo.runtime.ops import unary
from oazoo.runtime.ops.activation import activate


class ReLU(Module):
    """``max(x, 0)``."""

    def __call__(self, x: Tensor) -> Tensor:
        return unary.relu(x)


class LeakyReLU(Module):
    """``x`` where positive, else ``alpha · x``."""

    def __init__(self, alpha: float = 0.01) -> None:
        self.alpha = alpha

    def __call__(self, x: Tensor) -> Tensor:
        return unary.leaky_relu(x, self.alpha)


class ELU(Module):
    """``x`` where positive, else ``alpha (exp(x) - 1)`` (arXiv:1511.07289)."""

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def __call__(self, x: Tensor) -> Tensor:
        return unary.elu(x, self.alpha)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def __call__(self, x: Tensor) -> Tensor:
        return unary.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def __call__(self, x: Tensor) -> Tensor:
        return unary.tanh(x)


class Softplus(Module):
    """``log(1 + exp(x))``."""

    def __call__(self, x: Tensor) -> Tensor:
        return unary.softplus(x)


class Mish(Module):
    """``x · tanh(softplus(x))`` (arXiv:1908.08681)."""

    def __call__(self, x: Tensor) -> Tensor:
        return unary.mish(x)


class SiLU(Module):
    """``x / (1 + exp(-x))``."""

    def __call__(self, x: Tensor) -> Tensor:
        return activate(x, "silu")


class GELU(Module):
    """GELU (arXiv:1606.08415): its tanh form, or the exact one with erf."""

    def __init__(self, exact: bool = False) -> None:
        self.form = "gelu" if exact else "gelu_tanh"

    def __call__(self, x: Tensor) -> Tensor:
        return activate(x, self.form)


class Softmax(Module):
    """``exp(x) / Σ exp(x)`` over the last axis."""

    def __call__(self, x: Tensor) -> Tensor:
        return rows.softmax(x)


class LogSoftmax(Module):
    """``x - log Σ exp(x)`` over the last axis."""

    def __call__(self, x: Tensor) -> Tensor:
        return rows.log_softmax(x)
