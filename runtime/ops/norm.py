"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.arithmetic import join_columns, reshaped, split_columns
from oazoo.runtime.ops.common import grid, lanes, require, require_dense
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.tape import taped, taping
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
) -> Tensor:
    """RMSNorm of queries and keys: over each head, or over all heads of a token at once, as the weights are wide.

    Args:
        qkv: f32 [tokens, (heads + 2 kv_heads) head_dim], rows of q, k, v heads; values are left alone.
        q_weight: f32 [head_dim], one weight for every head, or [heads · head_dim].
        k_weight: f32 [head_dim], or [kv_heads · head_dim].
        heads: query heads.
        kv_heads: key/value heads.
        eps: added to the mean square.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        ``qkv`` itself, changed in place; under a tape that needs its gradient, a new tensor of its shape.
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
    if taping(qkv, q_weight, k_weight):
        widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
        q, k, v = split_columns(qkv, widths)
        q, k = (
            reshaped(rms_norm(reshaped(x, x.numel // w.numel, w.numel), w, eps), *x.shape)
            for x, w in ((q, q_weight), (k, k_weight))
        )
        return join_columns([q, k, v])
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
    return qkv


def _norm(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    variant: str | None,
) -> Tensor:
    if residual is not None and taping(x, weight, bias, residual):
        return add(_norm(op, x, weight, bias, eps, None, variant), residual)
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

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, stats = Tensor.empty(x.device, x.shape), Tensor.empty(x.device, (rows, 2))
        x.device.kernel(f"norm_back_{variant or lanes(x.device)}").dispatch(
            groups,
            {"x": x, "weight": weight, "dy": dy},
            {"dx": dx, "stats": stats},
            width=width,
            rows=rows,
            columns=groups[0],
            eps=eps,
            centred=int(op == "layer_norm"),
        )
        of_bias, of_weight = column_sums(dy, x, stats, bias=want[2], weight=want[1])
        return dx, of_weight, of_bias

    return taped(y, (x, weight, bias), back)


def column_sums(
    dy: Tensor,
    x: Tensor | None = None,
    stats: Tensor | None = None,
    *,
    bias: bool = True,
    weight: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Sums over rows: of ``dy``, which is a bias's gradient, and of ``dy`` times the normalised ``x``, a norm weight's.

    Args:
        dy: f32 [rows, width].
        x: f32 [rows, width]; needed for the second.
        stats: f32 [rows, 2], mean and reciprocal deviation of each row of x; needed for the second.
        bias: whether the first is wanted.
        weight: whether the second is wanted.
        out: f32 [width] for the first; a new tensor if None.

    Returns:
        f32 [width] each, or None.
    """
    rows, width = dy.shape
    plain = (Tensor.empty(dy.device, (width,)) if out is None else out) if bias else None
    scaled = Tensor.empty(dy.device, (width,)) if weight else None
    if plain is None and scaled is None:
        return None, None
    writes = {name: t for name, t in (("sum", plain), ("scaled", scaled)) if t is not None}
    reads: dict[str, Tensor | None] = {"dy": dy, "x": x, "stats": stats}
    reads |= {name: None for name in ("sum", "scaled") if name not in writes}
    dy.device.kernel("column_sums").dispatch(
        (-(-width // 8), 1, 1),
        reads,
        writes,
        rows=rows,
        width=width,
        want_sum=int(bias),
        want_scaled=int(weight),
    )
    return plain, scaled
