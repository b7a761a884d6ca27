"""Functions of one number, elementwise, with their gradients; and gates made of them."""

from __future__ import annotations

from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, grid, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor

#: Gates whose activation may stand in a gated unit.
GATES = ("silu", "gelu_tanh", "gelu_erf")


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


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)`` (arXiv:1702.03118)."""
    return _unary("silu", x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""
    return _unary("softplus", x)


def mish(x: Tensor) -> Tensor:
    """``x · tanh(softplus(x))`` (arXiv:1908.08681)."""
    return _unary("mish", x)


def gelu(x: Tensor, *, exact: bool = False) -> Tensor:
    """GELU (arXiv:1606.08415): the tanh form ``0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))``, or with erf if ``exact``."""
    return _unary("gelu_erf" if exact else "gelu_tanh", x)


def gate(x: Tensor, activation: str = "silu") -> Tensor:
    """``activation(left) · right`` of rows that hold both side by side (arXiv:2002.05202).

    Args:
        x: f32 [rows, 2 width].
        activation: ``silu``, ``gelu_tanh`` or ``gelu_erf``.

    Returns:
        f32 [rows, width].
    """
    op = "gate"
    require(activation in GATES, op, f"there is no gate {activation!r}; there are {', '.join(GATES)}")
    require_dense(x, op, "x", "f32", -1, -1)
    rows, both = x.shape
    require(both % 2 == 0, op, f"rows of {both} do not split in two")
    require(rows <= MAX_GROUPS, op, f"{rows:,} rows are more than the {MAX_GROUPS:,} of one run")
    width = both // 2
    groups = (-(-width // 256), rows, 1)
    y = Tensor.empty(x.device, (rows, width))
    kernel = x.device.kernel(f"gated_{activation}")
    kernel.dispatch(groups, {"x": x, "dy": None}, {"y": y}, rows=rows, width=width)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        kernel = x.device.kernel(f"gated_{activation}_back")
        kernel.dispatch(groups, {"x": x, "dy": dy}, {"y": dx}, rows=rows, width=width)
        return (dx,)

    return taped(y, (x,), back)


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
