"""RMSNorm and LayerNorm."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, lanes, require_dense
from oazoo.runtime.tensor import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, variant: str | None = None) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis (arXiv:1910.07467).

    Args:
        x: f32 [rows, width].
        weight: f32 [width].
        eps: added to the mean square.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows, width].
    """
    require_dense(x, "rms_norm", "x", "f32", -1, -1)
    return _norm("rms_norm", x, weight, None, eps, variant)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, variant: str | None = None
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last axis, with the biased variance
    (arXiv:1607.06450).

    Args:
        x: f32 [rows, width].
        weight: f32 [width].
        bias: f32 [width], or None.
        eps: added to the variance.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows, width].
    """
    require_dense(x, "layer_norm", "x", "f32", -1, -1)
    return _norm("layer_norm", x, weight, bias, eps, variant)


def _norm(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, variant: str | None) -> Tensor:
    rows, width = x.shape
    require_dense(weight, op, "weight", "f32", width)
    if bias is not None:
        require_dense(bias, op, "bias", "f32", width)
    y = Tensor.empty(x.device, x.shape)
    groups = grid(rows)
    x.device.kernel(f"{op}_{variant or lanes(x.device)}").dispatch(
        groups,
        {"x": x, "weight": weight, "bias": bias},
        {"y": y},
        width=width,
        rows=rows,
        columns=groups[0],
        eps=eps,
        has_bias=int(bias is not None),
    )
    return y
