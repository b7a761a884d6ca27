"""Rotary positions, the KV cache, and causal attention over it."""

from __future__ import annotations

from dataclasses import dataclass

from oazoo.runtime.ops.common import eight_lanes, grid, require, require_dense
from oazoo.runtime.tape import no_gradient
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import LANES_HEAD_DIMS, STEP_HEAD_DIMS

#: The widest head that the kernels for every device hold.
MAX_HEAD_DIM = 256
#: split: cache rows that are worth a workgroup, the most parts of a query's cache, and workgroups that fill any GPU.
_PART_ROWS, _MAX_PARTS, _ENOUGH_GROUPS = 128, 32, 1024
#: group: multiply-adds of one run over many rows and a long cache, which must not look hung to a driver's watchdog.
_RUN_WORK = 1 << 35


def rope_and_cache(
    qkv: Tensor, table: Tensor | None, start: Tensor, keys: Tensor, values: Tensor, heads: int
) -> None:
    """Rotate q and k, and put k and v into the cache.

    Pairs are half-split: component j with j + rotated / 2 (as Hugging Face's Llama orders the rows). Only the first
    ``rotated`` components of a head turn, which is all of them unless the table is narrower.

    Args:
        qkv: f32 [tokens, (heads + 2 kv_heads) head_dim], rows of q, k, v heads; q is rotated in place.
        table: f32 [capacity, rotated / 2, 2] of cosine and sine by position, or None to leave q and k as they are.
        start: i32 [1], position of the first token.
        keys: f32 [kv_heads, capacity, head_dim]; rows start … start + tokens - 1 are written.
        values: the same.
        heads: query heads.
    """
    op = "rope_and_cache"
    no_gradient(op, qkv)
    require_dense(keys, op, "keys", "f32", -1, -1, -1)
    kv_heads, capacity, head_dim = keys.shape
    require_dense(values, op, "values", "f32", kv_heads, capacity, head_dim)
    all_heads = heads + 2 * kv_heads
    require_dense(qkv, op, "qkv", "f32", -1, all_heads * head_dim)
    require_dense(start, op, "start", "i32", 1)
    rotated = _rotated(op, table, capacity, head_dim)
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
        rotated=rotated,
    )


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    heads: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    variant: str | None = None,
) -> Tensor:
    """Causal attention of queries at ``start`` … over all cached positions up to their own.

    Softmax is taken online in float32 (arXiv:1805.02867). Query head h reads key/value head h // (heads / kv_heads).

    Args:
        q: f32 [tokens, stride]; the heads' components are the first heads · head_dim of each row.
        keys: f32 [kv_heads, capacity, head_dim].
        values: the same.
        start: i32 [1], position of the first query.
        heads: query heads, a multiple of kv_heads.
        window: positions that a query sees, its own included; None for all.
        scale: factor on scores; 1 / sqrt(head_dim) if None.
        softcap: scaled scores become ``softcap tanh(score / softcap)`` (arXiv:2408.00118); None leaves them.
        variant: ``lanes`` (8-lane CPU devices, some head widths), ``group``, or ``split`` (the cache of a query shared out
            among workgroups); the best that fits if None.

    Returns:
        f32 [tokens, heads · head_dim].
    """
    op = "attention"
    no_gradient(op, q, keys, values)
    require_dense(q, op, "q", "f32", -1, -1)
    require_dense(keys, op, "keys", "f32", -1, -1, -1)
    kv_heads, capacity, head_dim = keys.shape
    require_dense(values, op, "values", "f32", kv_heads, capacity, head_dim)
    require_dense(start, op, "start", "i32", 1)
    tokens, stride = q.shape
    require(heads % kv_heads == 0, op, f"{heads} heads are not a multiple of {kv_heads} key/value heads")
    require(stride >= heads * head_dim, op, f"rows of {stride} are shorter than {heads} heads of {head_dim}")
    scores = _Scores.checked(op, head_dim, window, scale, softcap)
    require(
        head_dim <= MAX_HEAD_DIM, op, f"head_dim {head_dim} is more than the {MAX_HEAD_DIM} that kernels hold"
    )
    # The lanes kernel reads rows of q in 64-bit words.
    fast = head_dim in LANES_HEAD_DIMS and stride % 2 == 0 and q.address % 8 == 0 and eight_lanes(q.device)
    parts = _parts(tokens * heads, min(capacity, window or capacity))
    variant = variant or ("lanes" if fast else "split" if parts > 1 else "group")
    known = ("lanes", "group", "split")
    require(variant in known, op, f"there is no variant {variant!r}; there are {', '.join(known)}")
    require(fast or variant != "lanes", op, "the lanes variant suits neither this device nor these tensors")
    require(keys.address % 16 == 0, op, "keys must start at a multiple of 16 bytes")
    y = Tensor.empty(q.device, (tokens, heads * head_dim))
    if variant == "lanes":
        groups = (kv_heads, -(-tokens * (heads // kv_heads) // 8), 1)
        _run(f"attention_lanes_{head_dim}", groups, q, None, start, keys, values, y, heads, scores)
    elif variant == "group":
        row_work = 2 * heads * head_dim * min(capacity, window or capacity)
        rows = max(1, _RUN_WORK // row_work)
        for first in range(0, tokens, rows):
            stop = min(first + rows, tokens)
            some, out = q.rows(first, stop), y.rows(first, stop)
            groups = (heads, stop - first, 1)
            _run("attention_group", groups, some, None, start, keys, values, out, heads, scores, first)
    else:
        found = Tensor.empty(q.device, (tokens * heads, parts, head_dim + 2))
        _run("attention_part", (heads, tokens, parts), q, None, start, keys, values, found, heads, scores)
        rows = tokens * heads
        groups = grid(rows)
        q.device.kernel("attention_join").dispatch(
            groups, {"x": found}, {"y": y}, head_dim=head_dim, parts=parts, columns=groups[0], rows=rows
        )
    return y


def _parts(queries: int, visible: int) -> int:
    """Workgroups that share the cache of a query: as many as the cache is worth and the device needs."""
    return max(1, min(-(-visible // _PART_ROWS), _MAX_PARTS, _ENOUGH_GROUPS // max(1, queries)))


def rotary_attention(
    qkv: Tensor,
    table: Tensor | None,
    start: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    variant: str | None = None,
) -> Tensor:
    """:func:`rope_and_cache`, then :func:`attention`; for one token in a single run where the device has a kernel for it.

    Args:
        qkv: f32 [tokens, (heads + 2 kv_heads) head_dim]; q may or may not be rotated in place.
        table: f32 [capacity, rotated / 2, 2] of cosine and sine by position, or None to leave q and k as they are.
        start: i32 [1], position of the first token.
        keys: f32 [kv_heads, capacity, head_dim]; rows start … start + tokens - 1 are written.
        values: the same.
        heads: query heads, a multiple of kv_heads.
        window: positions that a query sees, its own included; None for all.
        scale: factor on scores; 1 / sqrt(head_dim) if None.
        softcap: scaled scores become ``softcap tanh(score / softcap)`` (arXiv:2408.00118); None leaves them.
        variant: ``step`` (the single run), or one of :func:`attention` after a run for rotation and cache; the best
            that fits if None.

    Returns:
        f32 [tokens, heads · head_dim].
    """
    op = "rotary_attention"
    no_gradient(op, qkv)
    require_dense(keys, op, "keys", "f32", -1, -1, -1)
    kv_heads, capacity, head_dim = keys.shape
    rotated = _rotated(op, table, capacity, head_dim)
    fits = head_dim in STEP_HEAD_DIMS and qkv.shape[0] == 1 and qkv.address % 8 == 0
    fits = fits and (table is None or table.address % 8 == 0) and eight_lanes(qkv.device)
    fits = fits and rotated in (0, head_dim)
    if variant != "step" and (variant is not None or not fits):
        rope_and_cache(qkv, table, start, keys, values, heads)
        return attention(
            qkv, keys, values, start, heads, window=window, scale=scale, softcap=softcap, variant=variant
        )
    require(
        fits,
        op,
        "one token, a head width that has a kernel, whole heads rotated, and a CPU device of 8 lanes are needed",
    )
    require_dense(values, op, "values", "f32", kv_heads, capacity, head_dim)
    require_dense(qkv, op, "qkv", "f32", 1, (heads + 2 * kv_heads) * head_dim)
    require_dense(start, op, "start", "i32", 1)
    require(heads % kv_heads == 0, op, f"{heads} heads are not a multiple of {kv_heads} key/value heads")
    scores = _Scores.checked(op, head_dim, window, scale, softcap)
    y = Tensor.empty(qkv.device, (1, heads * head_dim))
    groups = (kv_heads, -(-(heads // kv_heads) // 8), 1)
    _run(f"attention_step_{head_dim}", groups, qkv, table, start, keys, values, y, heads, scores)
    return y


@dataclass(frozen=True, slots=True)
class _Scores:
    """What becomes of scores, as the kernels take it: 0 stands for no window and no cap."""

    window: int
    scale: float
    softcap: float

    @classmethod
    def checked(
        cls, op: str, head_dim: int, window: int | None, scale: float | None, softcap: float | None
    ) -> _Scores:
        require(window is None or window > 0, op, f"window {window} must be positive")
        require(softcap is None or softcap > 0, op, f"softcap {softcap} must be positive")
        return cls(window or 0, head_dim**-0.5 if scale is None else scale, softcap or 0.0)


def _rotated(op: str, table: Tensor | None, capacity: int, head_dim: int) -> int:
    """Components of a head that a checked table of cosines and sines turns."""
    if table is None:
        return 0
    require_dense(table, op, "table", "f32", capacity, -1, 2)
    rotated = 2 * table.shape[1]
    require(0 < rotated <= head_dim, op, f"a table for {rotated} components of heads of {head_dim}")
    return rotated


def _run(
    name: str,
    groups: tuple[int, int, int],
    q: Tensor,
    table: Tensor | None,
    start: Tensor,
    keys: Tensor,
    values: Tensor,
    y: Tensor,
    heads: int,
    scores: _Scores,
    first: int = 0,
) -> None:
    kv_heads, capacity, head_dim = keys.shape
    cache = {"keys": keys, "values": values}
    written = name.startswith("attention_step")
    q.device.kernel(name).dispatch(
        groups,
        {"q": q, "table": table, "start": start, **({} if written else cache)},
        {"y": y, **(cache if written else {})},
        # How much of the cache is filled is only known on the device: count all that may be seen.
        work=2 * q.shape[0] * heads * head_dim * min(capacity, scores.window or capacity),
        tokens=q.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=capacity,
        q_stride=q.shape[1],
        window=scores.window,
        scale=scores.scale,
        softcap=scores.softcap,
        rotate=int(table is not None),
        parts=groups[2],
        first=first,
    )
