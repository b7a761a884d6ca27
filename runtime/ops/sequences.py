"""Attention and rotary positions over whole sequences of a batch: what training needs, with gradients."""

from __future__ import annotations

from oazoo.runtime.ops.common import MAX_GROUPS, eight_lanes, require, require_dense
from oazoo.runtime.ops.dropout import words_below
from oazoo.runtime.random import generator
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import TRAIN_HEAD_DIMS

MAX_HEAD_DIM = 256
_CAUSAL, _MASKED, _HIDDEN = 1, 2, 4


def attend(
    qkv: Tensor,
    batch: int,
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    keep: Tensor | None = None,
    dropout: float = 0.0,
    variant: str | None = None,
) -> Tensor:
    """``softmax(q kᵀ · scale + mask) v`` for every head of every sequence (arXiv:1706.03762), without storing the scores.

    Args:
        qkv: f32 [batch · tokens, (heads + 2 kv_heads) · head_dim]: heads of q, then k, then v.
        batch: sequences, all of one length, one after the other.
        heads: query heads, a multiple of ``kv_heads``.
        kv_heads: key/value heads; as many as query heads if None.
        causal: a query sees no later key.
        window: keys that a query sees, its own included; None for all. Causal attention only.
        scale: factor on scores; head_dim^-0.5 if None.
        softcap: scores become ``cap tanh(score / cap)``.
        mask: f32 [batch · heads · tokens, tokens], added to the scaled scores.
        keep: f32 [batch, tokens]; keys with 0 are seen by nobody. A query that sees nothing gives zeros.
        dropout: rate at which weights of keys are dropped after the softmax; those that stay are divided by ``1 - dropout``.
            Drawn from the device's own stream.
        variant: ``lanes`` (8-lane CPU devices, some head widths) or ``group``; the best that fits if None.

    Returns:
        f32 [batch · tokens, heads · head_dim].
    """
    op = "attend"
    kv_heads = heads if kv_heads is None else kv_heads
    require(
        heads > 0 and kv_heads > 0 and heads % kv_heads == 0, op, f"{heads} heads for {kv_heads} of k and v"
    )
    require_dense(qkv, op, "qkv", "f32", -1, -1)
    rows, width = qkv.shape
    require(batch > 0 and rows % batch == 0 and rows > 0, op, f"{rows} rows are not {batch} equal sequences")
    tokens, dims = rows // batch, width // (heads + 2 * kv_heads)
    require(
        dims * (heads + 2 * kv_heads) == width and 0 < dims <= MAX_HEAD_DIM, op, f"rows of {width} do not fit"
    )
    require(window is None or (window > 0 and causal), op, "a window is positive, and for causal attention")
    require(0 <= dropout < 1, op, f"the rate {dropout} must be at least 0 and less than 1")
    if mask is not None:
        require_dense(mask, op, "mask", "f32", batch * heads * tokens, tokens)
    if keep is not None:
        require_dense(keep, op, "keep", "f32", batch, tokens)
    fast = dims in TRAIN_HEAD_DIMS and eight_lanes(qkv.device) and qkv.address % 8 == 0
    variant = variant or ("lanes" if fast else "group")
    require(variant in ("lanes", "group"), op, f"there is no variant {variant!r}; there are lanes, group")
    require(fast or variant == "group", op, "the lanes variant suits neither this device nor these tensors")
    require(max(tokens, heads, batch) <= MAX_GROUPS, op, "too many tokens, heads or sequences for one run")
    device = qkv.device
    flags = causal * _CAUSAL + (mask is not None) * _MASKED + (keep is not None) * _HIDDEN
    draw = generator(device).draw() if dropout else None
    y, lse = Tensor.empty(device, (rows, heads * dims)), Tensor.empty(device, (rows, heads))

    def run(part: str, over: int, reads: dict[str, Tensor | None], writes: dict[str, Tensor]) -> None:
        name = f"attend_{part}_{variant}" + (f"_{dims}" if variant == "lanes" else "")
        everything: dict[str, Tensor | None] = {"qkv": qkv, "mask": mask, "keep": keep, "draw": draw, **reads}
        rest = {"y", "lse", "dy", "delta", "dqkv"} - {*reads, *writes}
        device.kernel(name).dispatch(
            (-(-tokens // 8) if variant == "lanes" else tokens, over, batch),
            {**everything, **dict.fromkeys(rest)},
            writes,
            work=2 * rows * heads * dims * min(tokens, window or tokens),
            batch=batch,
            tokens=tokens,
            heads=heads,
            kv_heads=kv_heads,
            dims=dims,
            window=window or 0,
            flags=flags,
            scale=dims**-0.5 if scale is None else scale,
            softcap=softcap or 0.0,
            below=words_below(dropout),
            kept=1 / (1 - dropout),
        )

    run("forward", heads, {}, {"y": y, "lse": lse})

    def back(dy: Tensor, want: object) -> tuple[Tensor, None, None]:
        dqkv, delta = Tensor.empty(device, qkv.shape), Tensor.empty(device, lse.shape)
        run("queries", heads, {"y": y, "lse": lse, "dy": dy}, {"delta": delta, "dqkv": dqkv})
        run("keys", kv_heads, {"lse": lse, "dy": dy, "delta": delta}, {"dqkv": dqkv})
        return dqkv, None, None

    return taped(y, (qkv, mask, keep), back)


def rotate(
    x: Tensor, table: Tensor, tokens: int, heads: int, head_dim: int, *, rotated: int | None = None
) -> Tensor:
    """Rotary positions (arXiv:2104.09864) of the first ``heads`` heads of each row; half-split pairs.

    Args:
        x: f32 [batch · tokens, width]; what follows the heads in a row is copied.
        table: f32 [positions ≥ tokens, rotated / 2, 2] of cosine and sine.
        tokens: length of a sequence: row r stands at position r mod tokens.
        heads: heads that are turned.
        head_dim: width of a head.
        rotated: how many of a head's first components are turned; all if None.

    Returns:
        f32 of the shape of x.
    """
    op = "rotate"
    rotated = head_dim if rotated is None else rotated
    require_dense(x, op, "x", "f32", -1, -1)
    rows, width = x.shape
    require(heads * head_dim <= width, op, f"{heads} heads of {head_dim} are wider than rows of {width}")
    require(
        0 < rotated <= head_dim and rotated % 2 == 0,
        op,
        f"{rotated} of {head_dim} components cannot be turned",
    )
    require_dense(table, op, "table", "f32", -1, rotated // 2, 2)
    require(0 < tokens <= table.shape[0], op, f"the table ends before position {tokens}")
    require(rows <= MAX_GROUPS, op, f"{rows:,} rows are more than the {MAX_GROUPS:,} of one run")

    def run(values: Tensor, turn: float) -> Tensor:
        y = Tensor.empty(x.device, x.shape)
        x.device.kernel("rotate").dispatch(
            (-(-width // 64), rows, 1),
            {"x": values, "table": table},
            {"y": y},
            rows=rows,
            tokens=tokens,
            heads=heads,
            dims=head_dim,
            rotated=rotated,
            width=width,
            turn=turn,
        )
        return y

    return taped(run(x, 1.0), (x,), lambda dy, want: (run(dy, -1.0),))
