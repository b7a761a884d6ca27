"""Rotary positions, the KV cache, and causal attention over it."""

from __future__ import annotations

from math import sqrt

from oazoo.runtime.ops.common import lanes, require, require_dense
from oazoo.runtime.tensor import Tensor

#: Components of a head that the narrow and the wide kernels can hold, by variant.
_LIMITS = {"wave8": (64, 256), "group32": (256, 1024)}


def rope_and_cache(
    qkv: Tensor, table: Tensor | None, start: Tensor, keys: Tensor, values: Tensor, heads: int
) -> None:
    """Rotate q and k, and put k and v into the cache.

    Pairs are half-split: component j with j + head_dim / 2 (as Hugging Face's Llama orders the rows).

    Args:
        qkv: f32 [tokens, (heads + 2 kv_heads) head_dim], rows of q, k, v heads; q is rotated in place.
        table: f32 [capacity, head_dim / 2, 2] of cosine and sine by position, or None to leave q and k as they are.
        start: i32 [1], position of the first token.
        keys: f32 [kv_heads, capacity, head_dim]; rows start … start + tokens - 1 are written.
        values: the same.
        heads: query heads.
    """
    op = "rope_and_cache"
    require_dense(keys, op, "keys", "f32", -1, -1, -1)
    kv_heads, capacity, head_dim = keys.shape
    require_dense(values, op, "values", "f32", kv_heads, capacity, head_dim)
    all_heads = heads + 2 * kv_heads
    require_dense(qkv, op, "qkv", "f32", -1, all_heads * head_dim)
    require_dense(start, op, "start", "i32", 1)
    if table is not None:
        require_dense(table, op, "table", "f32", capacity, head_dim // 2, 2)
    require(head_dim % 2 == 0, op, f"head_dim {head_dim} is odd")
    tokens = qkv.shape[0]
    qkv.device.kernel("rope_and_cache").dispatch(
        (-(-all_heads * (head_dim // 2) // 64), tokens, 1),
        {"table": table, "start": start},
        {"qkv": qkv, "keys": keys, "values": values},
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        rotate=int(table is not None),
    )


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
    *,
    window: int | None = None,
    variant: str | None = None,
) -> Tensor:
    """Causal attention of queries at ``start`` … over all cached positions up to their own.

    Softmax is taken online in float32 (arXiv:1805.02867); scores are scaled by 1 / sqrt(head_dim). Query head h reads
    key/value head h // (heads / kv_heads).

    Args:
        q: f32 [tokens, stride]; the heads' components are the first heads · head_dim of each row.
        keys: f32 [kv_heads, capacity, head_dim].
        values: the same.
        start: i32 [1], position of the first query.
        heads: query heads, a multiple of kv_heads.
        window: positions that a query sees, its own included; None for all.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [tokens, heads · head_dim].
    """
    op = "attention"
    require_dense(q, op, "q", "f32", -1, -1)
    require_dense(keys, op, "keys", "f32", -1, -1, -1)
    kv_heads, capacity, head_dim = keys.shape
    require_dense(values, op, "values", "f32", kv_heads, capacity, head_dim)
    require_dense(start, op, "start", "i32", 1)
    tokens, stride = q.shape
    require(heads % kv_heads == 0, op, f"{heads} heads are not a multiple of {kv_heads} key/value heads")
    require(stride >= heads * head_dim, op, f"rows of {stride} are shorter than {heads} heads of {head_dim}")
    # Rows are read four components at a time where a head's width allows.
    require(head_dim % 4 != 0 or stride % 4 == 0, op, f"rows of {stride} are not a multiple of 4")
    require(window is None or window > 0, op, f"window {window} must be positive")
    variant = variant or lanes(q.device)
    narrow, wide = _LIMITS[variant]
    require(
        head_dim <= wide, op, f"head_dim {head_dim} is more than the {wide} that the {variant} kernels hold"
    )
    rows = 1 if tokens == 1 else 4 if head_dim <= narrow else 2
    name = (
        f"attention_{'decode' if tokens == 1 else 'prompt'}{'_wide' if head_dim > narrow else ''}_{variant}"
    )
    y = Tensor.empty(q.device, (tokens, heads * head_dim))
    q.device.kernel(name).dispatch(
        (heads, -(-tokens // rows), 1),
        {"q": q, "keys": keys, "values": values, "start": start},
        {"y": y},
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        q_stride=stride,
        window=window or 0,
        scale=1 / sqrt(head_dim),
    )
    return y
