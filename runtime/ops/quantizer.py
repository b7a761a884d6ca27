"""Vector quantizers: rows by the nearest of some codes, and codes that follow the rows they stand for (arXiv:1711.00937)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oazoo.runtime.ops.arithmetic import fill
from oazoo.runtime.ops.common import (
    MAX_ELEMENTS,
    MAX_GROUPS,
    class_numbers,
    grid,
    lanes,
    require,
    require_dense,
)
from oazoo.runtime.ops.embedding import table_gradient
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.random import Generator, generator
from oazoo.runtime.tape import no_grad
from oazoo.runtime.tensor import Tensor

#: Bytes of scores that there are at a time.
_BYTES = 4 << 20
#: Weights that fall short of the threshold by rounding alone do not count as less.
_ROUNDING = 1e-5


def nearest_codes(x: Tensor, codes: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The nearest code of each row by squared distance; the first among equals. It has no gradient.

    Args:
        x: f32 [rows, width].
        codes: f32 [count, width].
        out: u32 [rows] for the result; a new tensor if None.

    Returns:
        u32 [rows]; a row that is not finite has 0xFFFFFFFF.
    """
    op = "nearest_codes"
    count, width = _check(op, codes)
    require_dense(x, op, "x", "f32", -1, width)
    rows, device, name = x.shape[0], x.device, lanes(x.device)
    ids = Tensor.empty(device, (rows,), "u32") if out is None else out
    require_dense(ids, op, "out", "u32", rows)
    halves = Tensor.empty(device, (count,))
    _run(f"codes_half_norms_{name}", {"codes": codes}, {"halves": halves}, count=count, width=width)
    step = max(32, _BYTES // (4 * count))
    kernel = device.kernel(f"codes_choose_{name}")
    for start in range(0, rows, step):
        some = min(step, rows - start)
        with no_grad():
            scores = linear(x.rows(start, start + some), codes, halves)
        groups = grid(some)
        kernel.dispatch(
            groups,
            {"scores": scores},
            {"ids": ids.rows(start, start + some)},
            rows=some,
            count=count,
            columns=groups[0],
        )
    return ids


def codes_of(ids: Tensor, codes: Tensor) -> Tensor:
    """Codes by their numbers; one outside gives NaN. It has no gradient: codes are not learned by one.

    Args:
        ids: u32 or i32 [rows].
        codes: f32 [count, width].

    Returns:
        f32 [rows, width].
    """
    op = "codes_of"
    count, width = _check(op, codes)
    require(class_numbers(op, "ids", ids, -1) == 0, op, "ids must be i32 or u32, not u8")
    rows = ids.shape[0]
    require(rows * width <= MAX_ELEMENTS, op, f"{rows:,} rows are more than one run can address")
    y, groups = Tensor.empty(ids.device, (rows, width)), grid(-(-rows * width // 256))
    if rows:
        ids.device.kernel("codes_gather").dispatch(
            groups,
            {"codes": codes, "ids": ids},
            {"y": y},
            rows=rows,
            width=width,
            count=count,
            columns=groups[0],
        )
    return y


def follow_rows(
    x: Tensor,
    ids: Tensor,
    codes: Tensor,
    sums: Tensor,
    weights: Tensor,
    *,
    decay: float,
    threshold: float = 0.0,
    normalised: bool = False,
    eps: float = 1e-5,
    source: Generator | None = None,
) -> None:
    """Move codes towards the mean of their rows: ``weight ← d weight + (1 - d) count``, ``sum ← d sum + (1 - d) Σ rows``,
    ``code = sum / weight``; all in place, and the same for the same draws on every run.

    A code whose weight falls below ``threshold`` becomes one of the rows, drawn at random, with weight 1; no two of them the
    same, as long as there are rows enough.

    Args:
        x: f32 [rows, width], at least one row.
        ids: u32 or i32 [rows]: the code that each row has.
        codes: f32 [count, width].
        sums: f32 [count, width].
        weights: f32 [count].
        decay: from 0 to 1.
        threshold: 0 replaces nothing, and draws nothing.
        normalised: scale codes to the norm ``sqrt(width)``; not those that were just replaced.
        eps: least weight that a sum is divided by.
        source: where draws come from; the device's own stream if None.
    """
    op = "follow_rows"
    count, width = _check(op, codes)
    require_dense(x, op, "x", "f32", -1, width)
    require_dense(sums, op, "sums", "f32", count, width)
    require_dense(weights, op, "weights", "f32", count)
    require(0 <= decay <= 1, op, f"the decay {decay} must be from 0 to 1")
    rows, device, name = x.shape[0], x.device, lanes(x.device)
    require(rows > 0, op, "there are no rows to follow")
    class_numbers(op, "ids", ids, rows)
    counts = table_gradient(ids, fill(Tensor.empty(device, (rows, 1)), 1.0), count).view(count)
    of_rows = table_gradient(ids, x, count)
    dead = Tensor.empty(device, (count,), "u32")
    _run(
        f"codes_follow_{name}",
        {"of_rows": of_rows, "counts": counts},
        {"codes": codes, "sums": sums, "weights": weights, "dead": dead},
        count=count,
        width=width,
        decay=decay,
        rest=1 - decay,
        eps=eps,
        threshold=threshold * (1 - _ROUNDING),
        scaled=int(normalised),
    )
    if threshold > 0:
        draw = (source or generator(device)).draw()
        _run(
            f"codes_revive_{name}",
            {"rows": x, "dead": dead, "draw": draw},
            {"codes": codes, "sums": sums, "weights": weights},
            count=count,
            width=width,
            total=rows,
        )


def _check(op: str, codes: Tensor) -> tuple[int, int]:
    require_dense(codes, op, "codes", "f32", -1, -1)
    count, width = codes.shape
    require(count > 0 and width > 0, op, f"codes of shape {list(codes.shape)} have no values")
    require(count <= MAX_GROUPS, op, f"{count:,} codes are more than {MAX_GROUPS:,}")
    return count, width


def _run(
    kernel: str, reads: Mapping[str, Tensor], writes: Mapping[str, Tensor], *, count: int, **scalars: Any
) -> None:
    """A workgroup for each code; what a kernel does not use is null or 0."""
    pointers = ("codes", "halves", "sums", "weights", "rows", "of_rows", "counts", "dead", "draw")
    given = {name: reads.get(name) for name in pointers if name not in writes}
    numbers = {"total": 0, "decay": 0.0, "rest": 0.0, "eps": 0.0, "threshold": 0.0, "scaled": 0} | scalars
    device = next(iter(writes.values())).device
    device.kernel(kernel).dispatch((count, 1, 1), given, writes, count=count, **numbers)
