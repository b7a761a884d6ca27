"""Token embedding, with learned positions where a model has them."""

from __future__ import annotations

from oazoo.runtime.ops.common import MAX_ELEMENTS, require, require_dense
from oazoo.runtime.tensor import Tensor


def embedding(
    ids: Tensor, table: Tensor, positions: Tensor | None = None, start: Tensor | None = None
) -> Tensor:
    """Rows of ``table`` by id, plus rows of ``positions`` from ``start`` on.

    An id or position outside its table gives NaN and reads nothing.

    Args:
        ids: i32 [tokens].
        table: [vocabulary, width], any encoding.
        positions: [positions, width] in the table's encoding, or None.
        start: i32 [1], position of the first token; needed with ``positions``.

    Returns:
        f32 [tokens, width].
    """
    op = "embedding"
    require_dense(ids, op, "ids", "i32", -1)
    require(len(table.shape) == 2, op, f"table must have 2 dimensions, not {len(table.shape)}")
    require(table.numel <= MAX_ELEMENTS, op, "table has more elements than one run can address")
    require((positions is None) == (start is None), op, "positions and start go together")
    vocabulary, width = table.shape
    if positions is not None:
        same = positions.dtype == table.dtype and len(positions.shape) == 2 and positions.shape[1] == width
        require(same, op, f"positions must be {table.dtype}[any, {width}], not {positions!r}")
    tokens = ids.shape[0]
    y = Tensor.empty(ids.device, (tokens, width))
    ids.device.kernel(f"embedding_{table.dtype}").dispatch(
        (-(-width // 256), tokens, 1),
        {"ids": ids, "table": table, "positions": positions, "start": start},
        {"y": y},
        tokens=tokens,
        width=width,
        vocabulary=vocabulary,
        position_rows=0 if positions is None else positions.shape[0],
    )
    return y
