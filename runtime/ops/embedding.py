"""Token embedding, with learned positions where a model has them."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.common import MAX_ELEMENTS, class_numbers, grid, require
from oazoo.runtime.tape import taped, taping
from oazoo.runtime.tensor import Tensor


def embedding(
    ids: Tensor,
    table: Tensor | Sequence[Tensor],
    positions: Tensor | None = None,
    start: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Rows of ``table`` by id times ``scale``, plus rows of ``positions`` from ``start`` on.

    An id or position outside its table gives NaN and reads nothing.

    Args:
        ids: i32, u32 or u8 [tokens].
        table: [vocabulary, width], any encoding; or several tensors of one encoding that hold its rows in order.
        positions: [positions, width] in the table's encoding, or None.
        start: i32 [1], position of the first token; needed with ``positions``.
        scale: factor on the rows of ``table``.

    Returns:
        f32 [tokens, width].
    """
    op = "embedding"
    is_bytes = class_numbers(op, "ids", ids, -1)
    require((positions is None) == (start is None), op, "positions and start go together")
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
            scale=scale,
            bytes=is_bytes,
        )
        first += part.shape[0]
    if not taping(*parts, positions):
        return y
    require(len(parts) == 1, op, "a table in several parts has no gradient")

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        of_table = table_gradient(ids, dy, parts[0].shape[0], scale) if want[0] else None
        return of_table, None

    require(
        positions is None or not taping(positions),
        op,
        "positions that learn are looked up by ids of their own",
    )
    return taped(y, (parts[0], positions), back)


def table_gradient(ids: Tensor, dy: Tensor, rows: int, scale: float = 1.0) -> Tensor:
    """The gradient of a table of ``rows`` rows, f32 [rows, width]: rows of ``dy`` added up by id, in their order, scaled."""
    is_bytes = class_numbers("embedding", "ids", ids, dy.shape[0])
    tokens, width = dy.shape
    y = Tensor.empty(dy.device, (rows, width))
    lanes = dy.device.info.is_software
    groups = (-(-width // 8), 1, 1) if lanes else grid(rows)
    dy.device.kernel("embedding_back_lanes" if lanes else "embedding_back").dispatch(
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
