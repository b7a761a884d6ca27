"""Token embedding, with learned positions where a model has them."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.arithmetic import accumulate, fill
from oazoo.runtime.ops.common import MAX_ELEMENTS, class_numbers, grid, portable_only, require, require_dense
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.ops.scales import learned, learned_gradient
from oazoo.runtime.tape import taped, taping
from oazoo.runtime.tensor import Tensor

#: Tokens for each row of a table from which its gradient is made row by row, and not token by token.
_MANY_TOKENS = 2


def embedding(
    ids: Tensor,
    table: Tensor | Sequence[Tensor],
    positions: Tensor | None = None,
    start: Tensor | None = None,
    *,
    period: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Rows of ``table`` by id times ``scale``, plus rows of ``positions`` from ``start`` on.

    An id or position outside its table gives NaN and reads nothing.

    Args:
        ids: i32, u32 or u8 [tokens].
        table: [vocabulary, width], any encoding; or several tensors of one encoding that hold its rows in order.
        positions: [positions, width] in the table's encoding, or None.
        start: i32 [1], position of the first token; 0 if None.
        period: length of the sequences of a batch, after which positions start over; tokens are one sequence if None.
        scale: factor on the rows of ``table``.

    Returns:
        f32 [tokens, width].
    """
    op = "embedding"
    is_bytes = class_numbers(op, "ids", ids, -1)
    require(positions is not None or start is None, op, "a start needs positions")
    if start is not None:
        require_dense(start, op, "start", "i32", 1)
    parts = [table] if isinstance(table, Tensor) else list(table)
    require(len(parts) > 0, op, "the table has no tensors: it is not loaded, or was given back")
    encoding = parts[0].dtype
    for part in parts:
        fits = len(part.shape) == 2 and part.shape[1] == parts[0].shape[-1] and part.dtype == encoding
        require(fits, op, f"the table's parts must be {encoding}[any, {parts[0].shape[-1]}], not {part!r}")
        require(part.address % 4 == 0, op, "the table must start at a multiple of 4 bytes")
        require(part.numel <= MAX_ELEMENTS, op, "the table has more elements than one run can address")
    width = parts[0].shape[1]
    if positions is not None:
        same = positions.dtype == encoding and len(positions.shape) == 2 and positions.shape[1] == width
        require(same, op, f"positions must be {encoding}[any, {width}], not {positions!r}")
        require(positions.address % 4 == 0, op, "positions must start at a multiple of 4 bytes")
    tokens = ids.shape[0]
    period = max(1, tokens) if period is None else period
    require(period > 0 and tokens % period == 0, op, f"{tokens} tokens are not sequences of {period}")
    y = Tensor.empty(ids.device, (tokens, width))
    kernel = ids.device.kernel(f"embedding_{encoding}")
    first = 0
    for part in parts:
        kernel.dispatch(
            (-(-width // 256), tokens, 1),
            {"ids": ids, "table": part, "positions": positions, "start": start},
            {"y": y},
            tokens=tokens,
            width=width,
            first=first,
            part=part.shape[0],
            vocabulary=sum(p.shape[0] for p in parts),
            position_rows=0 if positions is None else positions.shape[0],
            period=period,
            started=int(start is not None),
            scale=scale,
            bytes=is_bytes,
        )
        first += part.shape[0]
    learned_positions = None if positions is None else learned(positions)
    if not taping(*map(learned, parts), learned_positions):
        return y
    require(len(parts) == 1, op, "a table in several parts has no gradient")
    require(start is None or not taping(learned_positions), op, "positions from a start on have no gradient")

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        of_table = None
        if want[0]:
            of_table = learned_gradient(table_gradient(ids, dy, parts[0].shape[0], scale), parts[0])
        if positions is None or not want[1]:
            return of_table, None
        # What stands at one position adds up over the sequences; nothing stands beyond the longest.
        sums, _ = column_sums(dy.view(tokens // period, period * width))
        assert sums is not None
        if period == positions.shape[0]:
            return of_table, learned_gradient(sums.view(*positions.shape), positions)
        of_positions = fill(Tensor.empty(dy.device, positions.shape), 0.0)
        accumulate(of_positions.rows(0, period), sums)
        return of_table, learned_gradient(of_positions, positions)

    return taped(y, (learned(parts[0]), learned_positions), back)


def table_gradient(
    ids: Tensor, dy: Tensor, rows: int, scale: float = 1.0, *, variant: str | None = None
) -> Tensor:
    """The gradient of a table of ``rows`` rows, f32 [rows, width]: rows of ``dy`` added up by id, in their order, scaled.

    ``variant``: ``strips`` for processors, ``rows`` and ``tokens`` for any device; the fastest that fits if None.
    """
    is_bytes = class_numbers("embedding", "ids", ids, dy.shape[0])
    tokens, width = dy.shape
    y = Tensor.empty(dy.device, (rows, width))
    if variant is None:
        one = "tokens" if tokens < _MANY_TOKENS * rows else "rows"
        variant = "strips" if dy.device.info.is_software and not portable_only() else one
    if variant == "strips":
        kernel, groups = "embedding_back_lanes", (-(-width // 8), 1, 1)
    else:
        if variant == "tokens":
            fill(y, 0.0)
        columns, more, _ = grid(tokens if variant == "tokens" else rows)
        kernel = "embedding_back_few" if variant == "tokens" else "embedding_back"
        groups = columns, more, -(-width // 128)
    dy.device.kernel(kernel).dispatch(
        groups,
        {"ids": ids, "dy": dy},
        {"y": y},
        tokens=tokens,
        width=width,
        rows=rows,
        columns=groups[0],
        bytes=is_bytes,
        scale=scale,
    )
    return y
