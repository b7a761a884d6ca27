"""Convolutions and transposed ones, of images [batch, channels, height, width] and sequences [batch, channels, length]."""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import numpy as np

from oazoo.nn.initial import Array, Initial, uniform
from oazoo.nn.module import Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.convolution import conv1d, conv2d, conv_transpose1d, conv_transpose2d
from oazoo.runtime.ops.windows import Pair


def by_inputs(groups: int, transposed: bool = False) -> Initial:
    """Evenly within ±1 / sqrt(inputs of an output), of a convolution's weight [outputs, channels / groups, …].

    Of a transposed one, [channels, outputs / groups, …], what counts is its outputs.
    """

    def initial(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return uniform(rng, shape, (shape[1] * (groups if transposed else 1) * prod(shape[2:])) ** -0.5)

    return initial


class _Convolution(Module):
    """A weight in any encoding, a bias, and where to look.

    Numbers are those of the op (:mod:`oazoo.runtime.ops.convolution`), which refuses what does not fit. For images each
    may be a pair, for rows and columns.
    """

    #: Axes of what it looks at, and whether it is transposed.
    axes: ClassVar[int]
    transposed: ClassVar[bool]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Pair,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        sides = (kernel,) * self.axes if isinstance(kernel, int) else kernel
        outer, inner = (in_channels, out_channels) if self.transposed else (out_channels, in_channels)
        self.weight = Parameter(
            outer, inner // max(1, groups), *sides, initial=by_inputs(groups, self.transposed)
        )
        if bias:
            self.bias = Parameter(out_channels)
        self.has_bias = bias
        self.options: dict[str, Any] = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
        }

    def _bias(self) -> Tensor | None:
        return self.bias.tensor if self.has_bias else None


class Conv2d(_Convolution):
    """Cross-correlation of images with a weight [out_channels, in_channels / groups, kernel, kernel], plus a bias."""

    axes, transposed = 2, False

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, height, width] to [batch, out_channels, …]."""
        return conv2d(x, self.weight.tensor, self._bias(), **self.options)


class Conv1d(_Convolution):
    """Cross-correlation along sequences with a weight [out_channels, in_channels / groups, kernel], plus a bias."""

    axes, transposed = 1, False

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, length] to [batch, out_channels, …]."""
        return conv1d(x, self.weight.tensor, self._bias(), **self.options)


class _Transposed(_Convolution):
    transposed = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Pair, *, output_padding: Pair = 0, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, **options)
        self.options["output_padding"] = output_padding


class ConvTranspose2d(_Transposed):
    """The transpose of a :class:`Conv2d`, which makes images larger, with a weight
    [in_channels, out_channels / groups, kernel, kernel], plus a bias.
    """

    axes = 2

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, height, width] to [batch, out_channels, …]."""
        return conv_transpose2d(x, self.weight.tensor, self._bias(), **self.options)


class ConvTranspose1d(_Transposed):
    """The transpose of a :class:`Conv1d`, with a weight [in_channels, out_channels / groups, kernel], plus a bias."""

    axes = 1

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, length] to [batch, out_channels, …]."""
        return conv_transpose1d(x, self.weight.tensor, self._bias(), **self.options)
