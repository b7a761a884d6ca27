"""The products that go backward through a linear layer: gradients of its input and of its weight.

Two variants compute the same: ``lanes`` for CPU devices with 8 lanes and sizes that are multiples of small numbers, ``tile``
for any device and size.
"""

from __future__ import annotations

from oazoo.errors import DeviceError
from oazoo.runtime.ops.common import MAX_ELEMENTS, eight_lanes, require, require_dense
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.tensor import Tensor

ENCODINGS = ("f32", "f16", "bf16", "q8", "q4")
_TILE, _LANES = 32, 8
#: Rows from which decoding a weight first pays on processors.
_MANY_ROWS = 16


def input_gradient(dy: Tensor, weight: Tensor, *, variant: str | None = None) -> Tensor:
    """``dy · weight``: the gradient of x where ``y = x · weightᵀ``.

    Args:
        dy: f32 [rows, outputs].
        weight: [outputs, inputs] in f32, f16, bf16, q8 or q4.
        variant: ``lanes`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [rows, inputs].
    """
    op = "input_gradient"
    require(len(weight.shape) == 2, op, f"the weight must have two axes, not {list(weight.shape)}")
    require(weight.dtype in ENCODINGS, op, f"weights cannot be {weight.dtype}")
    require_dense(dy, op, "dy", "f32", -1, weight.shape[0])
    rows, outputs = dy.shape
    inputs = weight.shape[1]
    _check_size(op, weight, rows * inputs)
    y = Tensor.empty(dy.device, (rows, inputs))
    if variant is None and weight.dtype != "f32" and rows >= _MANY_ROWS and eight_lanes(dy.device):
        weight = dequantize(weight)
    fast = weight.dtype == "f32" and inputs % 4 == 0 and eight_lanes(dy.device) and weight.address % 8 == 0
    fast = fast and outputs % 16 == 0 and dy.address % 8 == 0
    if _choose(op, fast, variant) == "tile":
        _run(op, f"product_inputs_tile_{weight.dtype}", dy, weight, y, outputs, False)
    else:
        across = Tensor.empty(dy.device, (outputs, -(-rows // _LANES) * _LANES))
        turn(dy, across, 0, rows, 0, False)
        _run(op, "product_lanes", across, weight, y, outputs, False)
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
    op = "weight_gradient"
    require_dense(dy, op, "dy", "f32", -1, -1)
    rows, outputs = dy.shape
    require_dense(x, op, "x", "f32", rows, -1)
    inputs = x.shape[1]
    _check_size(op, x, outputs * inputs)
    y = out if out is not None else Tensor.empty(dy.device, (outputs, inputs))
    require_dense(y, op, "out", "f32", outputs, inputs)
    fast = outputs % 8 == 0 and inputs % 4 == 0 and eight_lanes(dy.device) and x.address % 8 == 0
    name = {"lanes": "product_lanes", "tile": "product_weights_tile"}[_choose(op, fast, variant)]
    _run(op, name, dy, x, y, rows, out is not None)
    return y


def _choose(op: str, fast: bool, variant: str | None) -> str:
    variant = variant or ("lanes" if fast else "tile")
    require(variant in ("lanes", "tile"), op, f"there is no variant {variant!r}; there are lanes, tile")
    require(fast or variant == "tile", op, "the lanes variant suits neither this device nor these tensors")
    return variant


def _check_size(op: str, operand: Tensor, results: int) -> None:
    for count in (operand.numel, results):
        require(count <= MAX_ELEMENTS, op, f"{count:,} elements are more than one run can address")


def _run(op: str, name: str, a: Tensor, b: Tensor, y: Tensor, inner: int, add: bool) -> None:
    rows, columns = y.shape
    lanes = name == "product_lanes"
    share = 8 if columns >= 128 and columns % 8 == 0 else 4
    width, tall = (_LANES * share, _LANES) if lanes else (_TILE, _TILE)
    tiles, row_groups = -(-columns // width), -(-rows // tall)
    # lanes: rows along x run first, so a tile of the second operand stays in the nearest cache.
    limits = a.device.info.max_groups[:2]
    tile_limit, row_limit = limits[::-1] if lanes else limits
    if row_groups > row_limit:
        raise DeviceError(f"{op}: {rows:,} rows are too many for one run on this device")
    for first in range(0, tiles, tile_limit):
        some = min(tiles - first, tile_limit)
        a.device.kernel(f"{name}{share}" if lanes else name).dispatch(
            (row_groups, some, 1) if lanes else (some, row_groups, 1),
            {"a": a, "b": b},
            {"y": y},
            work=rows * inner * min(columns, some * width),
            rows=rows,
            columns=columns,
            inner=inner,
            a_width=a.shape[1],
            first=first,
            add=int(add),
        )


def turn(w: Tensor, out: Tensor, first: int, rows: int, column: int, gap: bool) -> None:
    """Rows of ``w`` from ``first`` on as columns of ``out``, from ``column`` on; for 8-lane CPU devices.

    ``w`` is [any, inputs] in any encoding, inputs a multiple of 16. With ``gap``, rows go in fours with four left free after
    each.
    """
    inputs = w.shape[1]
    w.device.kernel(f"turn_{w.dtype}").dispatch(
        (-(-rows // _LANES), -(-inputs // 64), 1),
        {"w": w},
        {"y": out},
        n=w.shape[0],
        k=inputs,
        row0=first,
        rows=rows,
        stride=out.shape[1],
        column=column,
        gap=int(gap),
    )
