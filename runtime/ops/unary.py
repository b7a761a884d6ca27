"""Functions of one number, elementwise, with their gradients. Those of feed-forward layers are in :mod:`.activation`."""

from __future__ import annotations

from oazoo.runtime.ops.common import MAX_ELEMENTS, grid, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``; the gradient at 0 is 0."""
    return _unary("relu", x)


def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    """``x`` where positive, else ``alpha · x``."""
    return _unary("leaky_relu", x, alpha)


def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """``x`` where positive, else ``alpha (exp(x) - 1)`` (arXiv:1511.07289)."""
    return _unary("elu", x, alpha)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return _unary("sigmoid", x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return _unary("tanh", x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""
    return _unary("softplus", x)


def mish(x: Tensor) -> Tensor:
    """``x · tanh(softplus(x))`` (arXiv:1908.08681)."""
    return _unary("mish", x)


def _unary(name: str, x: Tensor, alpha: float = 0.0) -> Tensor:
    require_dense(x, name, "x", "f32", *x.shape)
    require(x.numel <= MAX_ELEMENTS, name, f"{x.numel:,} elements are more than one run can address")

    def run(kernel: str, dy: Tensor | None) -> Tensor:
        y = Tensor.empty(x.device, x.shape)
        groups = grid(-(-x.numel // 256))
        if x.numel:
            x.device.kernel(kernel).dispatch(
                groups, {"x": x, "dy": dy}, {"y": y}, count=x.numel, columns=groups[0], alpha=alpha
            )
        return y

    return taped(run(f"unary_{name}", None), (x,), lambda dy, want: (run(f"unary_{name}_back", dy),))
