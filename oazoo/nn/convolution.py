"""Convolutions and transposed convolutions of images [batch, channels, height, width] and sequences [batch, channels, length]."""

from __future__ import annotations

from math import prod

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


def _both(kernel: Pair) -> tuple[int, int]:
    return (kernel, kernel) if isinstance(kernel, int) else kernel


class _Convolution(Module):
    """A weight, a bias, and where to look."""

    def __init__(self, weight: Parameter, biases: int, bias: bool) -> None:
        self.weight = weight
        if bias:
            self.bias = Parameter(biases)
        self.has_bias = bias

    def _bias(self) -> Tensor | None:
        return self.bias.tensor if self.has_bias else None


class Conv2d(_Convolution):
    """Cross-correlation with a weight [out_channels, in_channels / groups, kernel, kernel], in any encoding, plus a bias.

    Kernel, stride, padding and dilation are numbers, or pairs for rows and columns.
    """

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
        shape = out_channels, in_channels // max(1, groups), *_both(kernel)
        super().__init__(Parameter(*shape, initial=by_inputs(groups)), out_channels, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, height, width] to [batch, out_channels, …]; see :func:`~oazoo.runtime.ops.convolution.conv2d`."""
        return conv2d(
            x,
            self.weight.tensor,
            self._bias(),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


class Conv1d(_Convolution):
    """Cross-correlation along sequences with a weight [out_channels, in_channels / groups, kernel], plus a bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        shape = out_channels, in_channels // max(1, groups), kernel
        super().__init__(Parameter(*shape, initial=by_inputs(groups)), out_channels, bias)
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, length] to [batch, out_channels, …]."""
        return conv1d(
            x,
            self.weight.tensor,
            self._bias(),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )


class ConvTranspose2d(_Convolution):
    """The transpose of a :class:`Conv2d`, which makes images larger: a weight [in_channels, out_channels / groups, kernel, kernel],
    in any encoding, plus a bias.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Pair,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        output_padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        shape = in_channels, out_channels // max(1, groups), *_both(kernel)
        super().__init__(Parameter(*shape, initial=by_inputs(groups, True)), out_channels, bias)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, height, width] to [batch, out_channels, …]; see
        :func:`~oazoo.runtime.ops.convolution.conv_transpose2d`.
        """
        return conv_transpose2d(
            x,
            self.weight.tensor,
            self._bias(),
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
        )


class ConvTranspose1d(_Convolution):
    """The transpose of a :class:`Conv1d`: a weight [in_channels, out_channels / groups, kernel], plus a bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        shape = in_channels, out_channels // max(1, groups), kernel
        super().__init__(Parameter(*shape, initial=by_inputs(groups, True)), out_channels, bias)
        self.stride, self.padding, self.output_padding = stride, padding, output_padding
        self.dilation, self.groups = dilation, groups

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, in_channels, length] to [batch, out_channels, …]."""
        return conv_transpose1d(
            x,
            self.weight.tensor,
            self._bias(),
            stride=self.stride,
            padding=self.padding,
            output_padding=self.output_padding,
            dilation=self.dilation,
            groups=self.groups,
        )
