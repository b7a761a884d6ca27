"""Fills, weighted sums and means: what gradients are put together with."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, grid, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor


def fill(x: Tensor, value: float) -> Tensor:
    """Set every element of an f32 tensor; returns it."""
    _check("fill", x)
    groups = grid(-(-x.numel // 256))
    if x.numel:
        x.device.kernel("fill").dispatch(groups, {}, {"y": x}, count=x.numel, columns=groups[0], value=value)
    return x


def accumulate(y: Tensor, x: Tensor, factor: float = 1.0, keep: float = 1.0) -> Tensor:
    """``y = factor · x + keep · y`` in place, f32 of one number of elements; returns ``y``."""
    _check("accumulate", x)
    _check("accumulate", y)
    require(x.numel == y.numel, "accumulate", f"{x.shape} and {y.shape} have different sizes")
    groups = grid(-(-x.numel // 256))
    if x.numel:
        kernel = x.device.kernel("axpy")
        kernel.dispatch(groups, {"x": x}, {"y": y}, count=x.numel, columns=groups[0], a=factor, b=keep)
    return y


def copied(x: Tensor) -> Tensor:
    """An f32 tensor of its own with the values of ``x``."""
    return accumulate(Tensor.empty(x.device, x.shape), x, 1.0, 0.0)


def summed(a: Tensor, b: Tensor) -> Tensor:
    """``a + b`` of f32 tensors of one shape, as a tensor of its own."""
    _check("add", a)
    require_dense(b, "add", "b", "f32", *a.shape)
    groups = -(-a.numel // 256)
    if groups > MAX_GROUPS:
        return accumulate(copied(a), b)
    y = Tensor.empty(a.device, a.shape)
    a.device.kernel("add_f32").dispatch((groups, 1, 1), {"a": a, "b": b}, {"y": y}, count=a.numel)
    return y


def scaled(x: Tensor, factor: float) -> Tensor:
    """``factor · x``, f32 of any shape."""
    y = accumulate(Tensor.empty(x.device, x.shape), x, factor, 0.0)
    return taped(y, (x,), lambda dy, want: (accumulate(Tensor.empty(x.device, x.shape), dy, factor, 0.0),))


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a · b`` element by element, f32 of one shape."""
    _check("multiply", a)
    require_dense(b, "multiply", "b", "f32", *a.shape)

    def run(x: Tensor, y: Tensor) -> Tensor:
        out, groups = Tensor.empty(a.device, a.shape), grid(-(-a.numel // 256))
        if a.numel:
            kernel = a.device.kernel("multiply")
            kernel.dispatch(groups, {"a": x, "b": y}, {"y": out}, count=a.numel, columns=groups[0])
        return out

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        return (run(dy, b) if want[0] else None), (run(dy, a) if want[1] else None)

    return taped(run(a, b), (a, b), back)


def swap_axes(x: Tensor) -> Tensor:
    """The last two axes of f32 [batch, rows, width] in the other order: [batch, width, rows]."""
    require_dense(x, "swap_axes", "x", "f32", -1, -1, -1)

    def run(values: Tensor) -> Tensor:
        batch, rows, width = values.shape
        y, groups = Tensor.empty(x.device, (batch, width, rows)), grid(-(-x.numel // 64))
        if x.numel:
            x.device.kernel("swap").dispatch(
                groups, {"x": values}, {"y": y}, count=x.numel, columns=groups[0], rows=rows, width=width
            )
        return y

    return taped(run(x), (x,), lambda dy, want: (run(dy),))


def total(x: Tensor) -> Tensor:
    """The sum of all elements of an f32 tensor, f32 [1], added in a fixed order."""
    return _sum(x, 1.0)


def mean(x: Tensor) -> Tensor:
    """The mean of all elements of an f32 tensor, f32 [1]."""
    require(x.numel > 0, "mean", "there is nothing to take the mean of")
    return _sum(x, 1 / x.numel)


def _sum(x: Tensor, factor: float) -> Tensor:
    _check("sum", x)
    y = Tensor.empty(x.device, (1,))
    x.device.kernel("sum").dispatch((1, 1, 1), {"x": x}, {"y": y}, count=x.numel, a=factor)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        groups = grid(-(-x.numel // 256))
        kernel = x.device.kernel("scale")
        kernel.dispatch(
            groups,
            {"x": None, "factor": dy},
            {"y": dx},
            count=x.numel,
            columns=groups[0],
            a=factor,
            spread=1,
        )
        return (dx,)

    return taped(y, (x,), back)


def reshaped(x: Tensor, *shape: int) -> Tensor:
    """The same elements in another shape, sharing memory, with the gradient of a view."""
    return taped(x.view(*shape), (x,), lambda dy, want: (dy.view(*x.shape),))


def split_columns(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Columns of f32 [rows, sum of widths] as tensors of their own, [rows, width] each."""
    require_dense(x, "split_columns", "x", "f32", -1, sum(widths))
    parts, column = [], 0
    for width in widths:
        part = Tensor.empty(x.device, (x.shape[0], width))
        _copy_columns(x, part, column, 0, width)

        def back(dy: Tensor, want: object, column: int = column, width: int = width) -> tuple[Tensor]:
            dx = fill(Tensor.empty(x.device, x.shape), 0.0)
            _copy_columns(dy, dx, 0, column, width)
            return (dx,)

        parts.append(taped(part, (x,), back))
        column += width
    return parts


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """f32 [rows, …] tensors side by side: [rows, sum of widths]."""
    rows, widths = parts[0].shape[0], [part.shape[1] for part in parts]
    y, column = Tensor.empty(parts[0].device, (rows, sum(widths))), 0
    for part in parts:
        require_dense(part, "join_columns", "part", "f32", rows, -1)
        _copy_columns(part, y, 0, column, part.shape[1])
        column += part.shape[1]

    def back(dy: Tensor, want: object) -> list[Tensor]:
        return split_columns(dy, widths)

    return taped(y, parts, back)


def _copy_columns(x: Tensor, y: Tensor, x_column: int, y_column: int, count: int) -> None:
    rows = x.shape[0]
    require(rows <= MAX_GROUPS, "columns", f"{rows:,} rows are more than the {MAX_GROUPS:,} of one run")
    x.device.kernel("columns").dispatch(
        (-(-count // 256), rows, 1),
        {"x": x},
        {"y": y},
        rows=rows,
        x_width=x.shape[1],
        y_width=y.shape[1],
        x_column=x_column,
        y_column=y_column,
        count=count,
    )


def _check(op: str, x: Tensor) -> None:
    require_dense(x, op, "x", "f32", *x.shape)
    require(x.numel <= MAX_ELEMENTS, op, f"{x.numel:,} elements are more than one run can address")
