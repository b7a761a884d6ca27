"""Sums of tensors, decoding of weights, and the position of the largest value."""

from __future__ import annotations

from oazoo.runtime.ops.arithmetic import summed
from oazoo.runtime.ops.common import MAX_GROUPS, grid, require, require_dense
from oazoo.runtime.tape import no_gradient, taped
from oazoo.runtime.tensor import BLOCK_CODE_BYTES, Tensor

_LANES = 64


def add(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` of f32 tensors of one shape."""
    return taped(summed(a, b), (a, b), lambda dy, want: (dy, dy))


def dequantize(x: Tensor) -> Tensor:
    """The float32 values of a tensor in any weight encoding, in its shape."""
    known = ("f32", "f16", "bf16", *BLOCK_CODE_BYTES)
    no_gradient("dequantize", x)
    require(x.dtype in known, "dequantize", f"x cannot be {x.dtype}; it can be {', '.join(known)}")
    require(x.numel < 2**31, "dequantize", f"{x.numel:,} elements are more than one run can address")
    require(x.address % 4 == 0, "dequantize", "x must start at a multiple of 4 bytes")
    y = Tensor.empty(x.device, x.shape)
    groups = grid(-(-x.numel // (4 * _LANES)))
    if x.numel:
        kernel = x.device.kernel(f"decode_{x.dtype}")
        kernel.dispatch(groups, {"w": x}, {"y": y}, count=x.numel, columns=groups[0])
    return y


def narrow(x: Tensor, dtype: str = "bf16", *, out: Tensor | None = None) -> Tensor:
    """The values of an f32 tensor as ``f16`` or ``bf16``, rounded to nearest, ties to even; too large ones are infinite.

    ``out`` is a tensor of that type and shape to write into; its own type counts then.
    """
    no_gradient("narrow", x)
    dtype = dtype if out is None else out.dtype
    require(dtype in ("f16", "bf16"), "narrow", f"values can become f16 or bf16, not {dtype}")
    require_dense(x, "narrow", "x", "f32", *x.shape)
    y = Tensor.empty(x.device, x.shape, dtype) if out is None else out
    require_dense(y, "narrow", "out", dtype, *x.shape)
    groups = grid(-(-x.numel // 128))
    if x.numel:
        kernel = x.device.kernel(f"narrow_{dtype}")
        kernel.dispatch(groups, {"x": x}, {"y": y}, count=x.numel, columns=groups[0])
    return y


def argmax(x: Tensor) -> Tensor:
    """Index of the largest value of each row; the first among equals; NaN is never the largest.

    Args:
        x: f32 [rows, width], width at least 1.

    Returns:
        i32 [rows].
    """
    require_dense(x, "argmax", "x", "f32", -1, -1)
    rows, width = x.shape
    require(width > 0, "argmax", "rows have no values")
    require(rows <= MAX_GROUPS, "argmax", f"{rows:,} rows are more than the {MAX_GROUPS:,} of one run")
    y = Tensor.empty(x.device, (rows,), "i32")
    x.device.kernel("argmax").dispatch((rows, 1, 1), {"x": x}, {"y": y}, width=width)
    return y
