"""Axes in another order, and images as rows of square patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oazoo.runtime.ops.arithmetic import reshaped
from oazoo.runtime.ops.common import grid, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor

_MAX_AXES = 6


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """The axes of a tensor in another order, as NumPy's ``transpose`` has it.

    Args:
        x: f32 of at most six axes.
        order: which axis of x each axis of the result is.

    Returns:
        f32, its axis i that of x at ``order[i]``.
    """
    op = "permute"
    require_dense(x, op, "x", "f32", *x.shape)
    axes = len(x.shape)
    require(axes <= _MAX_AXES, op, f"{axes} axes are more than the {_MAX_AXES} there may be")
    require(
        sorted(order) == list(range(axes)), op, f"{list(order)} is no order of the axes of {list(x.shape)}"
    )
    back = [list(order).index(axis) for axis in range(axes)]
    return taped(_run(x, order), (x,), lambda dy, want: (_run(dy, back),))


def _run(x: Tensor, order: Sequence[int]) -> Tensor:
    steps = [1] * len(x.shape)
    for axis in range(len(steps) - 2, -1, -1):
        steps[axis] = steps[axis + 1] * x.shape[axis + 1]
    y = Tensor.empty(x.device, [x.shape[axis] for axis in order])
    missing = _MAX_AXES - len(order)
    sizes, apart = [1] * missing + list(y.shape), [0] * missing + [steps[axis] for axis in order]
    groups = grid(-(-x.numel // 256))
    if x.numel:
        scalars: dict[str, Any] = {f"n{i}": sizes[i] for i in range(1, _MAX_AXES)} | {
            f"s{i}": apart[i] for i in range(_MAX_AXES)
        }
        x.device.kernel("permute").dispatch(
            groups, {"x": x}, {"y": y}, count=x.numel, columns=groups[0], **scalars
        )
    return y


def patchify(x: Tensor, patch: int, *, channels_last: bool = False) -> Tensor:
    """Images as sequences of square patches, row by row.

    Args:
        x: f32 [batch, channels, height, width].
        patch: side of a patch, which divides height and width.
        channels_last: within a patch, values go by row, column, channel; else by channel, row, column, which is the order
            of a convolution's weight (DiT's first layer, arXiv:2212.09748).

    Returns:
        f32 [batch, patches, channels · patch²].
    """
    op = "patchify"
    require_dense(x, op, "x", "f32", -1, -1, -1, -1)
    batch, channels, height, width = x.shape
    fits = patch > 0 and height % patch == 0 and width % patch == 0
    require(fits, op, f"images of {height} x {width} do not divide into patches of {patch} x {patch}")
    parts = reshaped(x, batch, channels, height // patch, patch, width // patch, patch)
    turned = permute(parts, (0, 2, 4, 3, 5, 1) if channels_last else (0, 2, 4, 1, 3, 5))
    return reshaped(turned, batch, height // patch * (width // patch), channels * patch * patch)


def unpatchify(x: Tensor, height: int, width: int, patch: int, *, channels_last: bool = True) -> Tensor:
    """Images of sequences of square patches: what :func:`patchify` undoes.

    Args:
        x: f32 [batch, patches, channels · patch²].
        height: of an image, a multiple of ``patch``.
        width: likewise.
        patch: side of a patch.
        channels_last: within a patch, values go by row, column, channel (DiT's last layer); else by channel, row, column.

    Returns:
        f32 [batch, channels, height, width].
    """
    op = "unpatchify"
    require_dense(x, op, "x", "f32", -1, -1, -1)
    batch, count, values = x.shape
    fits = patch > 0 and height > 0 and width > 0 and height % patch == 0 and width % patch == 0
    require(fits, op, f"images of {height} x {width} do not divide into patches of {patch} x {patch}")
    rows, columns = height // patch, width // patch
    require(count == rows * columns, op, f"{count} patches are not the {rows} x {columns} of an image")
    require(values % (patch * patch) == 0, op, f"{values} values are no whole channels of {patch} x {patch}")
    channels = values // (patch * patch)
    inner = (patch, patch, channels) if channels_last else (channels, patch, patch)
    parts = reshaped(x, batch, rows, columns, *inner)
    turned = permute(parts, (0, 5, 1, 3, 2, 4) if channels_last else (0, 3, 1, 4, 2, 5))
    return reshaped(turned, batch, channels, height, width)
