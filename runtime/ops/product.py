"""The products that go backward through a linear layer: gradients of its input and of its weight.

Two variants compute the same: ``lanes`` for CPU devices with 8 lanes and sizes that are multiples of small numbers, ``tile``
for any device and size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oazoo.errors import DeviceError
from oazoo.runtime.ops.common import MAX_ELEMENTS, eight_lanes, require, require_dense
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.tensor import Tensor

ENCODINGS = ("f32", "f16", "bf16", "q8", "q4")
_TILE, _LANES = 32, 8
#: Rows from which decoding a weight first pays on processors.
_MANY_ROWS = 16


def input_gradient(dy: Tensor, weight: Tensor | Sequence[Tensor], *, variant: str | None = None) -> Tensor:
    """``dy · weight``: the gradient of x where ``y = x · weightᵀ``.

    Args:
        dy: f32 [rows, outputs of all weights].
        weight: [outputs, inputs] in f32, f16, bf16, q8 or q4; or several that x went through, their outputs side by side.
        variant: ``lanes`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [rows, inputs].
    """
    op = "input_gradient"
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    for w in weights:
        require(len(w.shape) == 2, op, f"the weight must have two axes, not {list(w.shape)}")
        require(w.dtype in ENCODINGS, op, f"weights cannot be {w.dtype}")
        require(w.shape[1] == weights[0].shape[1], op, "the weights have different inputs")
    require_dense(dy, op, "dy", "f32", -1, sum(w.shape[0] for w in weights))
    rows, inputs = dy.shape[0], weights[0].shape[1]
    for w in weights:
        _check_size(op, w, rows * inputs)
    y = Tensor.empty(dy.device, (rows, inputs))
    eight = eight_lanes(dy.device)
    if variant is None and rows >= _MANY_ROWS and eight:
        weights = [w if w.dtype == "f32" else dequantize(w) for w in weights]
    fast = eight and inputs % 4 == 0 and dy.address % 8 == 0 and len(weights) <= 3
    fast = fast and all(w.dtype == "f32" and w.shape[0] % 4 == 0 and w.address % 8 == 0 for w in weights)
    if _choose(op, fast, variant) == "lanes":
        three: list[Tensor | None] = [*weights, None, None][:3]
        sizes = [0 if w is None else w.shape[0] for w in three]
        for kernel, groups, first in _tiles(op, "product_inputs_lanes", y):
            dy.device.kernel(kernel).dispatch(
                groups,
                {"a": dy, "w0": three[0], "w1": three[1], "w2": three[2]},
                {"y": y},
                work=rows * inputs * dy.shape[1],
                rows=rows,
                columns=inputs,
                n0=sizes[0],
                n1=sizes[1],
                n2=sizes[2],
                a_width=dy.shape[1],
                first=first,
            )
        return y
    column = 0
    for w in weights:
        # Rows are read at their whole width, from a column on.
        own = Tensor(dy.device, (dy.numel - column,), "f32", dy.memory, dy.offset + 4 * column)
        _run_tiles(op, f"product_inputs_tile_{w.dtype}", own, w, y, w.shape[0], dy.shape[1], column > 0)
        column += w.shape[0]
    return y


def weight_gradient(
    dy: Tensor, x: Tensor, *, out: Tensor | None = None, variant: str | None = None
) -> Tensor:
    """``dyᵀ · x``: the gradient of the weight where ``y = x · weightᵀ``.

    Args:
        dy: f32 [rows, outputs].
        x: f32 [rows, inputs].
        out: f32 [outputs, inputs] to add the gradient to; a new tensor if None.
        variant: ``lanes`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [outputs, inputs].
    """
    return _weight_gradient(dy, x, out, None, variant)


def layer_gradients(dy: Tensor, x: Tensor, *, variant: str | None = None) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias where ``y = x · weightᵀ + bias``: of :func:`weight_gradient`, and sums over rows.

    Returns:
        f32 [outputs, inputs] and f32 [outputs].
    """
    sums = Tensor.empty(dy.device, dy.shape[1:])
    return _weight_gradient(dy, x, None, sums, variant), sums


def _weight_gradient(
    dy: Tensor, x: Tensor, out: Tensor | None, sums: Tensor | None, variant: str | None
) -> Tensor:
    op = "weight_gradient"
    require_dense(dy, op, "dy", "f32", -1, -1)
    rows, outputs = dy.shape
    require_dense(x, op, "x", "f32", rows, -1)
    inputs = x.shape[1]
    _check_size(op, x, outputs * inputs)
    y = out if out is not None else Tensor.empty(dy.device, (outputs, inputs))
    require_dense(y, op, "out", "f32", outputs, inputs)
    fast = outputs > 0 and inputs % 4 == 0 and eight_lanes(dy.device)
    fast = fast and x.address % 8 == 0 and y.address % 8 == 0
    if _choose(op, fast, variant) == "tile":
        _run_tiles(op, "product_weights_tile", dy, x, y, rows, outputs, out is not None)
        if sums is not None:
            column_sums(dy, out=sums)
        return y
    reads: dict[str, Tensor | None] = {"a": dy, "b": x} | ({"sums": None} if sums is None else {})
    writes = {"y": y} | ({} if sums is None else {"sums": sums})
    for kernel, groups, first in _tiles(op, "product_weights_lanes", y):
        dy.device.kernel(kernel).dispatch(
            groups,
            reads,
            writes,
            work=rows * outputs * inputs,
            rows=outputs,
            columns=inputs,
            inner=rows,
            first=first,
            add=int(out is not None),
            summed=int(sums is not None),
        )
    return y


def _choose(op: str, fast: bool, variant: str | None) -> str:
    variant = variant or ("lanes" if fast else "tile")
    require(variant in ("lanes", "tile"), op, f"there is no variant {variant!r}; there are lanes, tile")
    require(fast or variant == "tile", op, "the lanes variant suits neither this device nor these tensors")
    return variant


def _check_size(op: str, operand: Tensor, results: int) -> None:
    for count in (operand.numel, results):
        require(count <= MAX_ELEMENTS, op, f"{count:,} elements are more than one run can address")


def _tiles(op: str, kernel: str, y: Tensor) -> Iterator[tuple[str, tuple[int, int, int], int]]:
    """The runs of a lanes kernel: its name, its workgroups, the tile of columns that it begins with."""
    rows, columns = y.shape
    share = 8 if columns >= 128 and columns % 8 == 0 else 4
    tiles, row_groups = -(-columns // (_LANES * share)), -(-rows // _LANES)
    # Rows along x run first, so a tile of the second operand stays in the nearest cache.
    row_limit, tile_limit = y.device.info.max_groups[:2]
    _check_rows(op, rows, row_groups, row_limit)
    for first in range(0, tiles, tile_limit):
        yield f"{kernel}{share}", (row_groups, min(tiles - first, tile_limit), 1), first


def _check_rows(op: str, rows: int, groups: int, limit: int) -> None:
    if groups > limit:
        raise DeviceError(f"{op}: {rows:,} rows are too many for one run on this device")


def _run_tiles(
    op: str, name: str, a: Tensor, b: Tensor, y: Tensor, inner: int, a_width: int, add: bool
) -> None:
    rows, columns = y.shape
    tiles, row_groups = -(-columns // _TILE), -(-rows // _TILE)
    tile_limit, row_limit = a.device.info.max_groups[:2]
    _check_rows(op, rows, row_groups, row_limit)
    for first in range(0, tiles, tile_limit):
        some = min(tiles - first, tile_limit)
        a.device.kernel(name).dispatch(
            (some, row_groups, 1),
            {"a": a, "b": b},
            {"y": y},
            work=rows * inner * min(columns, some * _TILE),
            rows=rows,
            columns=columns,
            inner=inner,
            a_width=a_width,
            first=first,
            add=int(add),
        )
