"""Convolutions and transposed convolutions over images and sequences, with gradients.

Both, and the ways back through them, are three computations over the same windows: results from inputs, inputs from
results, and weights from both. Two variants compute the same:

- ``products``: what windows see becomes rows, a bounded number at a time, and the rest is the products of linear layers;
- ``direct``: as it is defined, for groups of few channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oazoo.runtime.ops.arithmetic import fill, reshaped, swap_axes
from oazoo.runtime.ops.common import (
    MAX_ELEMENTS,
    MAX_GROUPS,
    eight_lanes,
    grid,
    lanes,
    require,
    require_dense,
)
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.ops.linear import ENCODINGS, linear
from oazoo.runtime.ops.product import input_gradient, weight_gradient
from oazoo.runtime.ops.windows import (
    Pair,
    Windows,
    check_images,
    fold,
    multiply_tiles,
    pair,
    rounded,
    stretches,
    unfold,
)
from oazoo.runtime.tape import no_grad, taped
from oazoo.runtime.tensor import Tensor

VARIANTS = ("products", "direct")
#: Weights of a group at a place of the kernel up to which computing directly is faster.
_FEW = 16


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    variant: str | None = None,
) -> Tensor:
    """Cross-correlation of images with kernels: what deep learning calls a convolution.

    Args:
        x: f32 [batch, channels, height, width].
        weight: [outputs, channels / groups, kernel height, kernel width] in f32, f16, bf16, q8 or q4.
        bias: f32 [outputs], or None.
        stride: steps from one window to the next; a number, or one for rows and one for columns, like those below.
        padding: zeros on either side.
        dilation: steps from one pixel of a window to the next.
        groups: parts that channels and outputs are divided into, which see nothing of each other.
        variant: ``products`` or ``direct``; the faster one if None.

    Returns:
        f32 [batch, outputs, result height, result width], where a result size is
        ``(size + 2 padding - dilation (kernel - 1) - 1) // stride + 1``.

    Raises:
        DeviceError: shapes, types or numbers that do not fit.
    """
    op = "conv2d"
    require_dense(x, op, "x", "f32", -1, -1, -1, -1)
    kernel = _kernel(op, weight)
    windows = Windows(
        (x.shape[2], x.shape[3]),
        kernel,
        pair(op, "stride", stride, 1),
        pair(op, "padding", padding, 0),
        pair(op, "dilation", dilation, 1),
    )
    batch, channels = x.shape[:2]
    plan = _Plan(op, windows, batch, channels, weight.shape[0], groups)
    plan.check(weight, bias, plan.outputs)
    direct = plan.choose(variant)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        return [
            plan.inputs(dy, weight, None, direct) if want[0] else None,
            plan.weights(x, dy, direct).view(*weight.shape) if want[1] else None,
            channel_sums(dy) if want[2] else None,
        ]

    return taped(plan.results(x, weight, bias, direct), (x, weight, bias), back)


def conv_transpose2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
    variant: str | None = None,
) -> Tensor:
    """The transpose of :func:`conv2d`: what its way back computes, as a layer that makes images larger.

    Args:
        x: f32 [batch, channels, height, width].
        weight: [channels, outputs / groups, kernel height, kernel width] in f32, f16, bf16, q8 or q4.
        bias: f32 [outputs], or None.
        stride: of the convolution that this transposes, like all below.
        padding: likewise.
        output_padding: rows and columns of the result below and on the right that the size alone does not tell; less than
            the stride or the dilation.
        dilation: likewise.
        groups: likewise.
        variant: ``products`` or ``direct``; the faster one if None.

    Returns:
        f32 [batch, outputs, result height, result width], where a result size is
        ``(size - 1) stride - 2 padding + dilation (kernel - 1) + 1 + output_padding``.

    Raises:
        DeviceError: shapes, types or numbers that do not fit.
    """
    op = "conv_transpose2d"
    require_dense(x, op, "x", "f32", -1, -1, -1, -1)
    kernel = _kernel(op, weight)
    strides, paddings = pair(op, "stride", stride, 1), pair(op, "padding", padding, 0)
    steps, more = pair(op, "dilation", dilation, 1), pair(op, "output_padding", output_padding, 0)
    sizes = []
    for n, k, s, p, d, extra in zip(x.shape[2:], kernel, strides, paddings, steps, more, strict=True):
        require(
            extra < max(s, d), op, f"an output_padding of {extra} must be less than the stride or dilation"
        )
        sizes.append((n - 1) * s - 2 * p + d * (k - 1) + 1 + extra)
        require(sizes[-1] > 0, op, f"nothing is left of a result of {sizes[-1] + 2 * p} with padding {p}")
    batch, channels = x.shape[:2]
    windows = Windows((sizes[0], sizes[1]), kernel, strides, paddings, steps, (x.shape[2], x.shape[3]))
    plan = _Plan(op, windows, batch, weight.shape[1] * max(1, groups), channels, groups)
    plan.check(weight, bias, plan.channels)
    direct = plan.choose(variant)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        return [
            plan.results(dy, weight, None, direct) if want[0] else None,
            plan.weights(dy, x, direct).view(*weight.shape) if want[1] else None,
            channel_sums(dy) if want[2] else None,
        ]

    return taped(plan.inputs(x, weight, bias, direct), (x, weight, bias), back)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    variant: str | None = None,
) -> Tensor:
    """:func:`conv2d` of sequences: f32 [batch, channels, length] with weight [outputs, channels / groups, kernel]."""
    return _of_lines(
        lambda x, w: conv2d(
            x,
            w,
            bias,
            stride=(1, stride),
            padding=(0, padding),
            dilation=(1, dilation),
            groups=groups,
            variant=variant,
        ),
        "conv1d",
        x,
        weight,
    )


def conv_transpose1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    variant: str | None = None,
) -> Tensor:
    """:func:`conv_transpose2d` of sequences: f32 [batch, channels, length], weight [channels, outputs / groups, kernel]."""
    return _of_lines(
        lambda x, w: conv_transpose2d(
            x,
            w,
            bias,
            stride=(1, stride),
            padding=(0, padding),
            output_padding=(0, output_padding),
            dilation=(1, dilation),
            groups=groups,
            variant=variant,
        ),
        "conv_transpose1d",
        x,
        weight,
    )


def channel_sums(x: Tensor) -> Tensor:
    """Sums over all images of each channel, a bias's gradient: f32 [batch, channels, …] to f32 [channels]."""
    batch, channels = x.shape[:2]
    sums = Tensor.empty(x.device, (channels,))
    x.device.kernel(f"channel_sums_{lanes(x.device)}").dispatch(
        (channels, 1, 1),
        {"x": x},
        {"sums": sums},
        batch=batch,
        channels=channels,
        area=x.numel // (batch * channels),
    )
    return sums


@dataclass(frozen=True)
class _Plan:
    """A convolution's sizes, and the three computations of it. ``channels`` are those of what windows look at."""

    op: str
    windows: Windows
    batch: int
    channels: int
    outputs: int
    groups: int

    @property
    def depth(self) -> int:
        return self.channels // self.groups

    @property
    def share(self) -> int:
        return self.outputs // self.groups

    def check(self, weight: Tensor, bias: Tensor | None, biases: int) -> None:
        op, groups = self.op, self.groups
        require(type(groups) is int and groups > 0, op, f"groups must be at least 1, not {groups!r}")
        fits = self.channels % groups == 0 and self.outputs % groups == 0
        require(fits, op, f"{self.channels} and {self.outputs} channels do not divide into {groups} groups")
        of = (self.outputs, self.depth, *self.windows.kernel)
        require(
            weight.shape == of, op, f"the weight must be of shape {list(of)} for x, not {list(weight.shape)}"
        )
        self.windows.check(op)
        check_images(op, (self.batch, self.channels, *self.windows.size))
        check_images(op, (self.batch, self.outputs, *self.windows.results))
        if bias is not None:
            require_dense(bias, op, "bias", "f32", biases)

    def choose(self, variant: str | None) -> bool:
        """Whether to compute directly."""
        require(
            variant in (None, *VARIANTS), self.op, f"there is no variant {variant!r}; there are {VARIANTS}"
        )
        if variant is not None:
            return variant == "direct"
        return self.groups > 1 and self.depth * self.share <= _FEW

    def results(self, x: Tensor, weight: Tensor, bias: Tensor | None, direct: bool) -> Tensor:
        """What windows over x give."""
        y = Tensor.empty(x.device, (self.batch, self.outputs, *self.windows.results))
        if direct:
            self._run("conv_outputs", {"x": x, "w": _dense(weight), "bias": bias}, {"y": y}, y)
            return y
        pitch = rounded(x, self.depth * self.windows.taps, 4)
        tiled = eight_lanes(x.device)
        with no_grad():
            for group, w in enumerate(self._matrices(weight, self.share, pitch, decoded=tiled)):
                of_x, of_y = (group * self.depth, self.depth), (group * self.share, self.share)
                for positions in stretches(x, _area(y), pitch):
                    seen = unfold(x, self.windows, of_x, positions, pitch, tiled=tiled)
                    if tiled:
                        multiply_tiles(w, seen, positions, y, of_y[0], _of_group(bias, of_y))
                    else:
                        fold(linear(seen, w), y, self.windows.points, of_y, positions, _of_group(bias, of_y))
        return y

    def inputs(self, y: Tensor, weight: Tensor, bias: Tensor | None, direct: bool) -> Tensor:
        """What adds up at each place that windows look at, from their results' gradients."""
        x = Tensor.empty(y.device, (self.batch, self.channels, *self.windows.size))
        if direct:
            self._run("conv_inputs", {"y": y, "w": _dense(weight), "bias": bias}, {"x": x}, x)
            return x
        inner, width = self.depth * self.windows.taps, rounded(y, self.share, 4)
        tiled = eight_lanes(y.device)
        with no_grad():
            for group, w in enumerate(self._matrices(weight, width, inner, decoded=tiled)):
                of_x, of_y = (group * self.depth, self.depth), (group * self.share, self.share)
                turned = swap_axes(w.view(1, width, inner)).view(inner, width) if tiled else w
                for positions in stretches(y, _area(y), inner):
                    own = unfold(y, self.windows.points, of_y, positions, width, tiled=tiled)
                    found = multiply_tiles(turned, own, positions) if tiled else input_gradient(own, w)
                    fold(found, x, self.windows, of_x, positions, _of_group(bias, of_x))
        return x

    def weights(self, x: Tensor, y: Tensor, direct: bool) -> Tensor:
        """The weight's gradient, [outputs, depth · taps]."""
        inner = self.depth * self.windows.taps
        w = Tensor.empty(x.device, (self.outputs, inner))
        if direct:
            self._run(f"conv_weights_{lanes(x.device)}", {"x": x, "y": y, "bias": None}, {"w": w}, None)
            return w
        pitch, width = rounded(x, inner, 4), rounded(x, self.share, 8)
        for group in range(self.groups):
            of_x, of_y = (group * self.depth, self.depth), (group * self.share, self.share)
            total: Tensor | None = None
            for positions in stretches(x, _area(y), pitch):
                dy = unfold(y, self.windows.points, of_y, positions, width)
                total = weight_gradient(dy, unfold(x, self.windows, of_x, positions, pitch), out=total)
            assert total is not None
            if self.groups == 1 and total.shape == w.shape:
                return total
            _copy(total, w.rows(of_y[0], of_y[0] + self.share), self.share, inner)
        return w

    def _matrices(self, weight: Tensor, rows: int, pitch: int, *, decoded: bool) -> list[Tensor]:
        """The weight of each group as a matrix of so many rows and columns, 0 where there is nothing."""
        inner = self.depth * self.windows.taps
        exact = (rows, pitch) == (self.share, inner)
        if self.groups == 1 and exact and not decoded:
            return [weight.view(self.outputs, inner)]
        dense = _dense(weight).view(self.outputs, inner)
        parts = [dense.rows(g * self.share, (g + 1) * self.share) for g in range(self.groups)]
        # What is decoded may be loaded by 8 bytes at a time.
        if exact and (not decoded or all(part.address % 8 == 0 for part in parts)):
            return parts
        padded = [fill(Tensor.empty(weight.device, (rows, pitch)), 0.0) for _ in parts]
        for part, room in zip(parts, padded, strict=True):
            _copy(part, room, self.share, inner)
        return padded

    def _run(
        self, name: str, reads: dict[str, Tensor | None], writes: dict[str, Tensor], out: Tensor | None
    ) -> None:
        """A kernel that computes directly: a lane for 4 values of ``out``, or a workgroup for each of the weight's."""
        tensors = {**reads, **writes}
        device = next(iter(writes.values())).device
        if out is None:
            columns, more, layers = grid(writes["w"].numel)
        else:
            fours = self.batch * out.shape[2] * -(-out.shape[3] // 4)
            columns, more, _ = grid(-(-fours // 64))
            layers = out.shape[1]
        fields: dict[str, Any] = {
            "batch": self.batch,
            "channels": self.channels,
            "outputs": self.outputs,
            "depth": self.depth,
            "share": self.share,
            "columns": columns,
            "biased": int(tensors["bias"] is not None),
        }
        down, across = self.windows.results
        work = self.batch * down * across * self.outputs * self.depth * self.windows.taps
        device.kernel(name).dispatch(
            (columns, more, layers), reads, writes, work=work, **fields, **self.windows.fields
        )


def _area(images: Tensor) -> int:
    return images.shape[2] * images.shape[3]


def _of_group(bias: Tensor | None, channels: tuple[int, int]) -> Tensor | None:
    return None if bias is None else bias.rows(channels[0], channels[0] + channels[1])


def _dense(weight: Tensor) -> Tensor:
    with no_grad():
        return weight if weight.dtype == "f32" else dequantize(weight)


def _copy(x: Tensor, y: Tensor, rows: int, count: int) -> None:
    """The first rows and columns of one matrix into another."""
    x.device.kernel("columns").dispatch(
        (-(-count // 256), rows, 1),
        {"x": x},
        {"y": y},
        rows=rows,
        x_width=x.shape[1],
        y_width=y.shape[1],
        x_column=0,
        y_column=0,
        count=count,
    )


def _kernel(op: str, weight: Tensor) -> tuple[int, int]:
    require(len(weight.shape) == 4, op, f"the weight must have four axes, not {list(weight.shape)}")
    require(
        weight.dtype in ENCODINGS,
        op,
        f"the weight cannot be {weight.dtype}; it can be {', '.join(ENCODINGS)}",
    )
    require(all(n > 0 for n in weight.shape), op, f"a weight of shape {list(weight.shape)} has no values")
    require(
        weight.numel <= MAX_ELEMENTS, op, f"a weight of {weight.numel:,} elements is too large for one run"
    )
    require(
        max(weight.shape[:2]) <= MAX_GROUPS, op, f"a weight of {list(weight.shape)} has too many channels"
    )
    return weight.shape[2], weight.shape[3]


def _of_lines(form: Callable[[Tensor, Tensor], Tensor], op: str, x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of images on sequences: images of one row."""
    require_dense(x, op, "x", "f32", -1, -1, -1)
    require(len(weight.shape) == 3, op, f"the weight must have three axes, not {list(weight.shape)}")
    batch, channels, length = x.shape
    first, second, kernel = weight.shape
    y = form(reshaped(x, batch, channels, 1, length), reshaped(weight, first, second, 1, kernel))
    return reshaped(y, y.shape[0], y.shape[1], y.shape[3])
