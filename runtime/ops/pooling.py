"""Pooling of images, and images in other sizes, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oazoo.runtime.ops.common import grid, require, require_dense
from oazoo.runtime.ops.windows import Pair, Windows, check_images, pair
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import RESIZES

#: Sizes up to which positions are computed exactly.
_MAX_SIDE = 65535


def max_pool2d(x: Tensor, kernel: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> Tensor:
    """The largest value of each window; NaN counts as the largest, and the gradient goes to the first of equals.

    Args:
        x: f32 [batch, channels, height, width].
        kernel: size of a window; a number, or one for rows and one for columns, like those below.
        stride: from one window to the next; the kernel's if None.
        padding: on either side, less than the kernel, of values smaller than any.

    Returns:
        f32 [batch, channels, height, width] of the result, each ``(size + 2 padding - kernel) // stride + 1``.
    """
    op = "max_pool2d"
    windows = _windows(op, x, kernel, stride, padding)
    y = Tensor.empty(x.device, (*x.shape[:2], *windows.results))
    places = Tensor.empty(x.device, y.shape, "u32")
    fields = _fields(windows)
    _run("max_pool", y.numel, {"x": x}, {"y": y, "places": places}, {**fields, "padded": 0})

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        _run("max_pool_back", x.numel, {"y": dy, "places": places}, {"x": dx}, {**fields, "padded": 0})
        return (dx,)

    return taped(y, (x,), back)


def average_pool2d(
    x: Tensor,
    kernel: Pair,
    *,
    stride: Pair | None = None,
    padding: Pair = 0,
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of each window.

    Args:
        x: f32 [batch, channels, height, width].
        kernel: size of a window; a number, or one for rows and one for columns, like those below.
        stride: from one window to the next; the kernel's if None.
        padding: zeros on either side, less than the kernel.
        count_include_pad: whether these zeros count; else the mean is that of the pixels in the window.

    Returns:
        f32 [batch, channels, height, width] of the result, each ``(size + 2 padding - kernel) // stride + 1``.
    """
    op = "average_pool2d"
    windows = _windows(op, x, kernel, stride, padding)
    y = Tensor.empty(x.device, (*x.shape[:2], *windows.results))
    fields = {**_fields(windows), "padded": int(count_include_pad)}
    _run("average_pool", y.numel, {"x": x, "places": None}, {"y": y}, fields)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        _run("average_pool_back", x.numel, {"y": dy, "places": None}, {"x": dx}, fields)
        return (dx,)

    return taped(y, (x,), back)


def adaptive_average_pool2d(x: Tensor, size: Pair) -> Tensor:
    """Means of as many stretches as ``size`` says, which cover an image evenly.

    Args:
        x: f32 [batch, channels, height, width].
        size: of the result; a number, or one for rows and one for columns. Result i of n along an axis of length m is the
            mean of ``floor(i m / n)`` up to, without it, ``ceil((i + 1) m / n)``.

    Returns:
        f32 [batch, channels, *size].
    """
    return _resize("adaptive_average_pool2d", "adaptive", x, size)


def resize(x: Tensor, size: Pair, mode: str = "nearest") -> Tensor:
    """Images in another size.

    Args:
        x: f32 [batch, channels, height, width].
        size: of the result; a number, or one for rows and one for columns.
        mode: ``nearest``: result i of n is pixel ``floor(i m / n)`` of m; or ``bilinear``: between the centres of pixels,
            which lie at halves, the outermost pixels going on beyond theirs.

    Returns:
        f32 [batch, channels, *size].
    """
    op = "resize"
    require(mode in RESIZES[1:], op, f"there is no mode {mode!r}; there are {', '.join(RESIZES[1:])}")
    return _resize(op, mode, x, size)


def _resize(op: str, kernel: str, x: Tensor, size: Pair) -> Tensor:
    require_dense(x, op, "x", "f32", -1, -1, -1, -1)
    rows, columns = pair(op, "size", size, 1)
    for shape in (x.shape, (*x.shape[:2], rows, columns)):
        check_images(op, shape)
        require(max(shape[2:]) <= _MAX_SIDE, op, f"a side of {max(shape[2:]):,} is more than {_MAX_SIDE:,}")
    y = Tensor.empty(x.device, (*x.shape[:2], rows, columns))
    fields = {"height": x.shape[2], "width": x.shape[3], "out_height": rows, "out_width": columns}
    _run(f"resize_{kernel}", y.numel, {"x": x}, {"y": y}, fields)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(x.device, x.shape)
        _run(f"resize_{kernel}_back", x.numel, {"y": dy}, {"x": dx}, fields)
        return (dx,)

    return taped(y, (x,), back)


def _windows(op: str, x: Tensor, kernel: Pair, stride: Pair | None, padding: Pair) -> Windows:
    require_dense(x, op, "x", "f32", -1, -1, -1, -1)
    sides = pair(op, "kernel", kernel, 1)
    steps = sides if stride is None else pair(op, "stride", stride, 1)
    windows = Windows((x.shape[2], x.shape[3]), sides, steps, pair(op, "padding", padding, 0))
    for side, pad in zip(sides, windows.padding, strict=True):
        require(pad < side, op, f"a padding of {pad} must be less than the kernel's {side}")
    windows.check(op)
    check_images(op, x.shape)
    check_images(op, (*x.shape[:2], *windows.results))
    return windows


def _fields(windows: Windows) -> dict[str, Any]:
    return {name: value for name, value in windows.fields.items() if not name.startswith("step")}


def _run(
    kernel: str,
    count: int,
    reads: Mapping[str, Tensor | None],
    writes: Mapping[str, Tensor],
    fields: Mapping[str, Any],
) -> None:
    """A lane for each of ``count`` values."""
    groups = grid(-(-count // 64))
    device = next(iter(writes.values())).device
    device.kernel(kernel).dispatch(groups, reads, writes, count=count, columns=groups[0], **fields)
