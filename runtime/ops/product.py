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
from oazoo.shaders.kernels import MANY_EIGHTS

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
    if variant is None and rows >= _MANY_ROWS and eight_lanes(dy.device):
        weights = [w if w.dtype == "f32" else dequantize(w) for w in weights]
    _multiply(op, dy, (0, dy.shape[1]), weights, y, False, variant)
    return y


def product(
    a: Tensor,
    b: Tensor,
    *,
    columns: tuple[int, int] | None = None,
    out: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """``a · b``, without a gradient.

    Args:
        a: f32 [rows, width].
        b: f32 [inner, columns].
        columns: those of a, from and to, that are multiplied; all if None.
        out: f32 [rows, columns] to add the product to; a new tensor if None.
        variant: ``lanes`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [rows, columns].
    """
    op = "product"
    require_dense(a, op, "a", "f32", -1, -1)
    start, stop = columns or (0, a.shape[1])
    require(0 <= start <= stop <= a.shape[1], op, f"columns {start} to {stop} of {list(a.shape)}")
    require_dense(b, op, "b", "f32", stop - start, -1)
    rows, width = a.shape[0], b.shape[1]
    _check_size(op, b, rows * width)
    y = out if out is not None else Tensor.empty(a.device, (rows, width))
    require_dense(y, op, "out", "f32", rows, width)
    _multiply(op, a, (start, stop), [b], y, out is not None, variant)
    return y


def _multiply(
    op: str, a: Tensor, own: tuple[int, int], weights: list[Tensor], y: Tensor, add: bool, variant: str | None
) -> None:
    """Columns of ``a``, split among ``weights`` ([outputs, inputs]), times each of them, added up in ``y``."""
    rows, inputs = y.shape
    width = a.shape[1]
    a = _from_column(a, own[0])
    fast = eight_lanes(a.device) and inputs % 4 == 0 and width % 2 == 0 and len(weights) <= 3
    fast = fast and a.address % 8 == 0 and y.address % 8 == 0
    fast = fast and all(w.dtype == "f32" and w.shape[0] % 4 == 0 and w.address % 8 == 0 for w in weights)
    if _choose(op, fast, variant) == "lanes":
        three: list[Tensor | None] = [*weights, None, None][:3]
        sizes = [0 if w is None else w.shape[0] for w in three]
        for kernel, groups, first in _tiles(op, "product_inputs", y):
            a.device.kernel(kernel).dispatch(
                groups,
                {"a": a, "w0": three[0], "w1": three[1], "w2": three[2]},
                {"y": y},
                work=rows * inputs * (own[1] - own[0]),
                rows=rows,
                columns=inputs,
                n0=sizes[0],
                n1=sizes[1],
                n2=sizes[2],
                a_width=width,
                first=first,
                add=int(add),
            )
        return
    column = 0
    for w in weights:
        part = _from_column(a, column)
        _run_tiles(op, f"product_inputs_tile_{w.dtype}", part, w, y, w.shape[0], width, inputs, add)
        column += w.shape[0]
        add = True


def _from_column(x: Tensor, column: int) -> Tensor:
    """The elements of x, dense f32, from a column of its first row on; kernels read rows at their whole width."""
    return Tensor(x.device, (x.numel - column,), "f32", x.memory, x.offset + 4 * column)


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    *,
    out: Tensor | None = None,
    columns: tuple[int, int] | None = None,
    variant: str | None = None,
) -> Tensor:
    """``dyᵀ · x``: the gradient of the weight where ``y = x · weightᵀ``.

    Args:
        dy: f32 [rows, outputs].
        x: f32 [rows, inputs].
        out: f32 [outputs, inputs] to add the gradient to; a new tensor if None.
        columns: those of x, from and to, that stand for all of x; None for all.
        variant: ``lanes`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [outputs, inputs].
    """
    return _weight_gradient(dy, x, out, None, variant, columns)


def layer_gradients(dy: Tensor, x: Tensor, *, variant: str | None = None) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias where ``y = x · weightᵀ + bias``: of :func:`weight_gradient`, and sums over rows.

    Returns:
        f32 [outputs, inputs] and f32 [outputs].
    """
    sums = Tensor.empty(dy.device, dy.shape[1:])
    return _weight_gradient(dy, x, None, sums, variant), sums


def _weight_gradient(
    dy: Tensor,
    x: Tensor,
    out: Tensor | None,
    sums: Tensor | None,
    variant: str | None,
    columns: tuple[int, int] | None = None,
) -> Tensor:
    op = "weight_gradient"
    require_dense(dy, op, "dy", "f32", -1, -1)
    rows, outputs = dy.shape
    require_dense(x, op, "x", "f32", rows, -1)
    start, stop = columns or (0, x.shape[1])
    require(0 <= start <= stop <= x.shape[1], op, f"columns {start} to {stop} of {list(x.shape)}")
    inputs, width = stop - start, x.shape[1]
    _check_size(op, x, outputs * inputs)
    y = out if out is not None else Tensor.empty(dy.device, (outputs, inputs))
    require_dense(y, op, "out", "f32", outputs, inputs)
    own = _from_column(x, start)
    fast = outputs > 0 and inputs % 4 == 0 and width % 2 == 0 and eight_lanes(dy.device)
    fast = fast and own.address % 8 == 0 and y.address % 8 == 0
    if _choose(op, fast, variant) == "tile":
        _run_tiles(op, "product_weights_tile", dy, own, y, rows, outputs, width, out is not None)
        if sums is not None:
            column_sums(dy, out=sums)
        return y
    reads: dict[str, Tensor | None] = {"a": dy, "b": own} | ({"sums": None} if sums is None else {})
    writes = {"y": y} | ({} if sums is None else {"sums": sums})
    for kernel, groups, first in _tiles(op, "product_weights", y):
        dy.device.kernel(kernel).dispatch(
            groups,
            reads,
            writes,
            work=rows * outputs * inputs,
            rows=outputs,
            columns=inputs,
            inner=rows,
            b_width=width,
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
    many = rows >= _LANES * MANY_EIGHTS
    tiles, row_groups = -(-columns // (_LANES * share)), -(-rows // (_LANES * (MANY_EIGHTS if many else 1)))
    # Rows along x run first, so a tile of the second operand stays in the nearest cache.
    row_limit, tile_limit = y.device.info.max_groups[:2]
    _check_rows(op, rows, row_groups, row_limit)
    for first in range(0, tiles, tile_limit):
        form = "many" if many else "lanes"
        yield f"{kernel}_{form}{share}", (row_groups, min(tiles - first, tile_limit), 1), first


def _check_rows(op: str, rows: int, groups: int, limit: int) -> None:
    if groups > limit:
        raise DeviceError(f"{op}: {rows:,} rows are too many for one run on this device")


def _run_tiles(
    op: str, name: str, a: Tensor, b: Tensor, y: Tensor, inner: int, a_width: int, b_width: int, add: bool
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
            b_width=b_width,
            first=first,
            add=int(add),
        )
