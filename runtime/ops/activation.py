"""Activations of the feed-forward layers."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, require, require_dense
from oazoo.runtime.tensor import Tensor


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of rows that hold gate and up side by side (SwiGLU, arXiv:2002.05202).

    Args:
        x: f32 [rows, 2 width].

    Returns:
        f32 [rows, width].
    """
    require_dense(x, "silu_mul", "x", "f32", -1, -1)
    rows, both = x.shape
    require(both % 2 == 0, "silu_mul", f"rows of {both} do not split into gate and up")
    width = both // 2
    y = Tensor.empty(x.device, (rows, width))
    x.device.kernel("silu_mul").dispatch(
        (-(-width // 256), rows, 1), {"x": x}, {"y": y}, rows=rows, width=width
    )
    return y


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU: ``0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`` (arXiv:1606.08415).

    Args:
        x: f32 tensor of any shape.

    Returns:
        f32 of the same shape.
    """
    return _elementwise(x, "gelu_tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """GELU in its exact form, ``0.5 x (1 + erf(x / sqrt(2)))`` (arXiv:1606.08415), as PyTorch's ``nn.GELU()`` computes it.

    Args:
        x: f32 tensor of any shape.

    Returns:
        f32 of the same shape, within 2e-7 of the exact value for every unit of ``|x|``.
    """
    return _elementwise(x, "gelu_erf")


def _elementwise(x: Tensor, kernel: str) -> Tensor:
    require(x.dtype == "f32", kernel, f"x must be f32, not {x.dtype}")
    y = Tensor.empty(x.device, x.shape)
    groups = grid(-(-x.numel // 256))
    if x.numel:
        x.device.kernel(kernel).dispatch(groups, {"x": x}, {"y": y}, count=x.numel, columns=groups[0])
    return y
