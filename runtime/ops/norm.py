"""RMSNorm and LayerNorm."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, lanes, require, require_dense
from oazoo.runtime.tensor import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, variant: str | None = None
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight + residual`` over the last axis (arXiv:1910.07467).

    Args:
        x: f32 [rows, width].
        weight: f32 [width].
        eps: added to the mean square.
        residual: f32 [rows, width], or None.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows, width].
    """
    require_dense(x, "rms_norm", "x", "f32", -1, -1)
    return _norm("rms_norm", x, weight, None, eps, residual, variant)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias + residual`` over the last axis, with the biased variance
    (arXiv:1607.06450).

    Args:
        x: f32 [rows, width].
        weight: f32 [width].
        bias: f32 [width], or None.
        eps: added to the variance.
        residual: f32 [rows, width], or None.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows, width].
    """
    require_dense(x, "layer_norm", "x", "f32", -1, -1)
    return _norm("layer_norm", x, weight, bias, eps, residual, variant)


def query_key_norm(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    *,
    variant: str | None = None,
) -> None:
    """RMSNorm of queries and keys in place: over each head, or over all heads of a token at once, as the weights are wide.

    Args:
        qkv: f32 [tokens, (heads + 2 kv_heads) head_dim], rows of q, k, v heads; values are left alone.
        q_weight: f32 [head_dim], one weight for every head, or [heads · head_dim].
        k_weight: f32 [head_dim], or [kv_heads · head_dim].
        heads: query heads.
        kv_heads: key/value heads.
        eps: added to the mean square.
        variant: ``wave8`` or ``group32``; the device's own if None.
    """
    op = "query_key_norm"
    require_dense(qkv, op, "qkv", "f32", -1, -1)
    tokens, stride = qkv.shape
    all_heads = heads + 2 * kv_heads
    require(stride % all_heads == 0, op, f"rows of {stride} do not split into {all_heads} heads")
    head_dim = stride // all_heads
    whole = heads > 1 and q_weight.numel == heads * head_dim
    require_dense(q_weight, op, "q_weight", "f32", heads * head_dim if whole else head_dim)
    require_dense(k_weight, op, "k_weight", "f32", kv_heads * head_dim if whole else head_dim)
    q_parts, k_parts = (1, 1) if whole else (heads, kv_heads)
    groups = grid(tokens * (q_parts + k_parts))
    qkv.device.kernel(f"{op}_{variant or lanes(qkv.device)}").dispatch(
        groups,
        {"q_weight": q_weight, "k_weight": k_weight},
        {"x": qkv},
        stride=stride,
        tokens=tokens,
        q_parts=q_parts,
        k_parts=k_parts,
        q_width=q_weight.numel,
        k_width=k_weight.numel,
        columns=groups[0],
        eps=eps,
    )


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    variant: str | None,
) -> Tensor:
    rows, width = x.shape
    require_dense(weight, op, "weight", "f32", width)
    if bias is not None:
        require_dense(bias, op, "bias", "f32", width)
    if residual is not None:
        require_dense(residual, op, "residual", "f32", rows, width)
    y = Tensor.empty(x.device, x.shape)
    groups = grid(rows)
    x.device.kernel(f"{op}_{variant or lanes(x.device)}").dispatch(
        groups,
        {"x": x, "weight": weight, "bias": bias, "residual": residual},
        {"y": y},
        width=width,
        rows=rows,
        columns=groups[0],
        eps=eps,
        has_bias=int(bias is not None),
        has_residual=int(residual is not None),
    )
    return y
