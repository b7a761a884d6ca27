"""The windows of an image that a convolution looks through: their geometry, and images as rows of them and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, eight_lanes, grid, require
from oazoo.runtime.tensor import Tensor

#: A number for both axes, or one for rows and one for columns.
Pair = int | tuple[int, int]
#: Bytes of unfolded rows that there are at a time: on processors what stays in a cache.
_BYTES, _CPU_BYTES = 64 << 20, 3 << 20
#: Channels of a lane, and positions of a workgroup.
_CHANNELS, _LANES = 8, 64
#: Positions of a tile, where rows are turned over.
TILE = 64


def pair(op: str, name: str, value: Pair, least: int) -> tuple[int, int]:
    """Both numbers of an argument, which must be at least ``least``."""
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    fits = len(both) == 2 and all(type(n) is int and least <= n <= MAX_ELEMENTS for n in both)
    require(fits, op, f"the {name} must be at least {least}, or two such numbers, not {value!r}")
    return both[0], both[1]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution over images of one size, by the names of the kernels' arguments.

    Axes are (rows, columns). Window (y, x) begins at ``stride · (y, x) - padding`` and takes pixels ``dilation`` apart.
    """

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    #: How many windows there are; as many as fit if None.
    count: tuple[int, int] | None = None

    @property
    def taps(self) -> int:
        """Pixels of a window."""
        return self.kernel[0] * self.kernel[1]

    @property
    def results(self) -> tuple[int, int]:
        """How many windows there are, down and across."""
        if self.count is not None:
            return self.count
        rows, columns = (
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, p, d, k, s in zip(
                self.size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )
        return rows, columns

    def check(self, op: str) -> None:
        """Refuse windows that are larger than an image with its padding, or images that no kernel could address."""
        for n, p, d, k in zip(self.size, self.padding, self.dilation, self.kernel, strict=True):
            require(n > 0, op, f"images of {self.size[0]} x {self.size[1]} have no pixels")
            require(n + 2 * p <= MAX_ELEMENTS, op, f"a padding of {p:,} is more than one run can address")
            span = d * (k - 1) + 1
            what = f"a kernel of {k}" + (f" with dilation {d}, which spans {span}," if d > 1 else "")
            require(span <= n + 2 * p, op, f"{what} is larger than the image's {n} with padding {p}")

    @property
    def fields(self) -> dict[str, Any]:
        """The kernels' arguments."""
        results = self.results
        return {
            "height": self.size[0],
            "width": self.size[1],
            "out_height": results[0],
            "out_width": results[1],
            "kernel_height": self.kernel[0],
            "kernel_width": self.kernel[1],
            "stride_y": self.stride[0],
            "stride_x": self.stride[1],
            "pad_y": self.padding[0],
            "pad_x": self.padding[1],
            "step_y": self.dilation[0],
            "step_x": self.dilation[1],
        }

    @property
    def points(self) -> Windows:
        """The results themselves as images, looked at a pixel at a time."""
        return Windows(self.results, (1, 1))


def stretches(x: Tensor, area: int, width: int) -> Iterator[tuple[int, int]]:
    """The positions of all images by first and count, so that rows of ``width`` floats take bounded memory.

    Whole images, or pieces of one image.
    """
    batch = x.shape[0]
    software = x.device.info.is_software
    room = max(8, (_CPU_BYTES if software else _BYTES) // (4 * max(1, width)))
    if area <= room:
        step = room // area * area
        for first in range(0, batch * area, step):
            yield first, min(step, batch * area - first)
        return
    # Pieces of about one size.
    step = -(-area // -(-area // room) // 8) * 8
    for image in range(batch):
        for first in range(0, area, step):
            yield image * area + first, min(step, area - first)


def rounded(x: Tensor, width: int, step: int) -> int:
    """``width`` as the products on this device are fast with: on processors up to a multiple of ``step``."""
    return -(-width // step) * step if eight_lanes(x.device) else width


def unfold(
    x: Tensor,
    windows: Windows,
    channels: tuple[int, int],
    positions: tuple[int, int],
    pitch: int,
    *,
    tiled: bool = False,
) -> Tensor:
    """What windows see, a row each.

    Args:
        x: f32 [batch, all channels, height, width].
        windows: over x.
        channels: the first, and how many.
        positions: the first window, counted over all images, and how many.
        pitch: floats of a row; what is left over is 0.
        tiled: turn rows over, in tiles of 64; those beyond the last position are undefined.

    Returns:
        f32 [positions, pitch], or [tiles, pitch, 64]: in a row by channel, then by row and column of the window.
    """
    first, depth = channels
    shape = (-(-positions[1] // TILE), pitch, TILE) if tiled else (positions[1], pitch)
    rows = Tensor.empty(x.device, shape)
    columns, more, _ = grid(-(-positions[1] // _LANES))
    x.device.kernel("unfold").dispatch(
        (columns, more, -(-depth // _CHANNELS)),
        {"image": x, "bias": None},
        {"rows": rows},
        channels=x.shape[1],
        channel0=first,
        depth=depth,
        row0=positions[0],
        count=positions[1],
        pitch=pitch,
        columns=columns,
        pixel0=0,
        pixels=0,
        flags=4 if tiled else 0,
        **windows.fields,
    )
    return rows


def fold(
    rows: Tensor,
    out: Tensor,
    windows: Windows,
    channels: tuple[int, int],
    positions: tuple[int, int],
    bias: Tensor | None = None,
) -> None:
    """Write into images the sum of all that :func:`unfold` would take from each pixel, and a bias.

    Args:
        rows: f32 [positions, at least channels · taps], or that turned over, [tiles, …, 64].
        out: f32 [batch, all channels, height, width]; the images that the positions are of are written, or added to by later
            pieces of an image.
        windows: over ``out``.
        channels: the first, and how many.
        positions: the first window and how many: whole images, or a piece of one.
        bias: f32 [channels], or None.
    """
    first, depth = channels
    area = windows.results[0] * windows.results[1]
    image, begun = divmod(positions[0], area)
    height, width = windows.size
    top, lines = 0, -(-(begun + positions[1]) // area) * height
    if begun:
        # A later piece of an image adds to the rows of pixels that its windows reach.
        top = max(0, begun // windows.results[1] * windows.stride[0] - windows.padding[0])
        last = (begun + positions[1] - 1) // windows.results[1] * windows.stride[0] - windows.padding[0]
        lines = max(0, min(height, last + windows.dilation[0] * (windows.kernel[0] - 1) + 1) - top)
    pixel0, pixels = (image * height + top) * width, lines * width
    columns, more, _ = grid(-(-pixels // _LANES))
    out.device.kernel("fold").dispatch(
        (columns, more, -(-depth // _CHANNELS)),
        {"rows": rows, "bias": None if begun else bias},
        {"image": out},
        channels=out.shape[1],
        channel0=first,
        depth=depth,
        row0=positions[0],
        count=positions[1],
        pitch=rows.shape[1],
        columns=columns,
        pixel0=pixel0,
        pixels=pixels,
        flags=int(bias is not None and not begun) | (2 if begun else 0) | (4 if len(rows.shape) == 3 else 0),
        **windows.fields,
    )


def multiply_tiles(
    w: Tensor,
    seen: Tensor,
    positions: tuple[int, int],
    out: Tensor | None = None,
    channel0: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """A matrix times what windows see, on devices with 8 lanes.

    Args:
        w: f32 [rows, inner], inner a multiple of 4.
        seen: f32 [tiles, inner, 64], as :func:`unfold` makes them.
        positions: the first, counted over all images, and how many.
        out: f32 [batch, channels, height, width] for the results at these positions, the rows being channels from
            ``channel0`` on; None for tiles.
        channel0: see there.
        bias: f32 [rows] that is added, or None.

    Returns:
        ``out``, or f32 [tiles, rows, 64].
    """
    rows, inner = w.shape
    y = Tensor.empty(w.device, (seen.shape[0], rows, TILE)) if out is None else out
    area = 1 if out is None else out.shape[2] * out.shape[3]
    w.device.kernel("conv_wide").dispatch(
        (-(-rows // 8), seen.shape[0], 1),
        {"w": w, "seen": seen, "bias": bias},
        {"y": y},
        work=rows * inner * positions[1],
        rows=rows,
        inner=inner,
        count=positions[1],
        position0=positions[0],
        area=area,
        channels=0 if out is None else out.shape[1],
        channel0=channel0,
        biased=int(bias is not None),
        tiled=int(out is None),
    )
    return y


def check_images(op: str, shape: Sequence[int]) -> None:
    """Sizes that the kernels can take."""
    require(all(n > 0 for n in shape), op, f"images of shape {list(shape)} have no values")
    require(shape[1] <= MAX_GROUPS, op, f"{shape[1]:,} channels are more than {MAX_GROUPS:,}")
    count = shape[0] * shape[1] * shape[2] * shape[3]
    require(count <= MAX_ELEMENTS, op, f"{count:,} values are more than one run can address")
