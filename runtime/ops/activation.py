"""Activations of the feed-forward layers, and the soft cap of scores and logits."""

from __future__ import annotations

from oazoo.runtime.ops.arithmetic import join_columns
from oazoo.runtime.ops.common import MAX_ELEMENTS, grid, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import ACTIVATIONS


def activate(x: Tensor, activation: str) -> Tensor:
    """An activation of every value.

    - ``silu``: ``x / (1 + exp(-x))``.
    - ``gelu_tanh``: the tanh form of GELU, ``0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`` (arXiv:1606.08415).
    - ``gelu``: its exact form, ``0.5 x (1 + erf(x / sqrt(2)))``, as PyTorch's ``nn.GELU()`` computes it, within 2e-7 of the
      exact value for every unit of ``|x|``.

    Args:
        x: f32 tensor of any shape.
        activation: ``silu``, ``gelu_tanh`` or ``gelu``.

    Returns:
        f32 of the same shape.
    """
    _check_activation("activate", activation)
    y = _elementwise(x, "activate", f"activate_{activation}")
    return taped(y, (x,), lambda dy, want: (_back(f"activate_{activation}_back", x, dy, 0.0),))


def activate_gated(x: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up`` of rows that hold gate and up side by side (SwiGLU and GeGLU, arXiv:2002.05202).

    Args:
        x: f32 [rows, 2 width].
        activation: as :func:`activate` has them.

    Returns:
        f32 [rows, width].
    """
    op = "activate_gated"
    _check_activation(op, activation)
    require_dense(x, op, "x", "f32", -1, -1)
    rows, both = x.shape
    require(both % 2 == 0, op, f"rows of {both} do not split into gate and up")
    width = both // 2
    y = Tensor.empty(x.device, (rows, width))
    require(x.numel <= MAX_ELEMENTS, op, f"{x.numel:,} elements are more than one run can address")
    groups = grid(-(-y.numel // 256))
    scalars = {"count": y.numel, "width": width, "columns": groups[0]}
    if y.numel:
        x.device.kernel(f"activate_gated_{activation}").dispatch(groups, {"x": x}, {"y": y}, **scalars)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        if y.numel:
            kernel = x.device.kernel(f"activate_gated_{activation}_back")
            kernel.dispatch(groups, {"x": x, "dy": dy}, {"y": dx}, **scalars)
        return (dx,)

    return taped(y, (x,), back)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two f32 [rows, width] tensors (arXiv:2002.05202)."""
    return activate_gated(join_columns([gate, up]))


def softcap(x: Tensor, cap: float) -> Tensor:
    """``cap tanh(x / cap)``: values held within ± cap, small ones hardly changed (arXiv:2408.00118).

    Args:
        x: f32 tensor of any shape.
        cap: positive.

    Returns:
        f32 of the same shape.
    """
    require(cap > 0, "softcap", f"the cap {cap} must be positive")
    y = _elementwise(x, "softcap", "softcap", cap)
    return taped(y, (x,), lambda dy, want: (_back("softcap_back", x, dy, cap),))


def _back(kernel: str, x: Tensor, dy: Tensor, alpha: float) -> Tensor:
    dx, groups = Tensor.empty(x.device, x.shape), grid(-(-x.numel // 256))
    x.device.kernel(kernel).dispatch(
        groups, {"x": x, "dy": dy}, {"y": dx}, count=x.numel, columns=groups[0], alpha=alpha
    )
    return dx


def _check_activation(op: str, activation: str) -> None:
    require(
        activation in ACTIVATIONS,
        op,
        f"there is no activation {activation!r}; there are {', '.join(ACTIVATIONS)}",
    )


def _elementwise(x: Tensor, op: str, kernel: str, cap: float = 0.0) -> Tensor:
    require(x.dtype == "f32", op, f"x must be f32, not {x.dtype}")
    y = Tensor.empty(x.device, x.shape)
    groups = grid(-(-x.numel // 256))
    if x.numel:
        x.device.kernel(kernel).dispatch(
            groups, {"x": x}, {"y": y}, count=x.numel, columns=groups[0], cap=cap
        )
    return y
