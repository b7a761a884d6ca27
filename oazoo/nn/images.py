"""Pooling, resizing and batch norm of images [batch, channels, height, width]."""

from __future__ import annotations

from typing import Literal

from oazoo.errors import UsageError
from oazoo.nn.initial import ones
from oazoo.nn.module import Buffer, Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.batch_norm import batch_norm
from oazoo.runtime.ops.pooling import adaptive_average_pool2d, average_pool2d, max_pool2d, resize
from oazoo.runtime.ops.windows import Pair


class MaxPool2d(Module):
    """The largest value of each window."""

    def __init__(self, kernel: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding

    def __call__(self, x: Tensor) -> Tensor:
        return max_pool2d(x, self.kernel, stride=self.stride, padding=self.padding)


class AvgPool2d(Module):
    """The mean of each window, its padding counted or not."""

    def __init__(
        self, kernel: Pair, stride: Pair | None = None, padding: Pair = 0, count_include_pad: bool = True
    ) -> None:
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.count_include_pad = count_include_pad

    def __call__(self, x: Tensor) -> Tensor:
        return average_pool2d(
            x,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            count_include_pad=self.count_include_pad,
        )


class AdaptiveAvgPool2d(Module):
    """Means of as many stretches as ``size`` says, whatever the image's size."""

    def __init__(self, size: Pair) -> None:
        self.size = size

    def __call__(self, x: Tensor) -> Tensor:
        return adaptive_average_pool2d(x, self.size)


class Upsample(Module):
    """Images ``scale`` times as high and wide, by ``nearest`` pixels or ``bilinear``."""

    def __init__(self, scale: int, mode: Literal["nearest", "bilinear"] = "nearest") -> None:
        if scale < 1:
            raise UsageError(f"images are made larger by a whole number from 1 on, not {scale}")
        self.scale = scale
        self.mode = mode

    def __call__(self, x: Tensor) -> Tensor:
        return resize(x, (x.shape[-2] * self.scale, x.shape[-1] * self.scale), self.mode)


class BatchNorm2d(Module):
    """Each channel by its mean and variance: those of the batch while training, else running ones (arXiv:1502.03167).

    The running variance is unbiased, as PyTorch has it; with ``compat="oa"`` it is biased like that of the batch.
    """

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        compat: Literal["oa"] | None = None,
    ) -> None:
        if compat not in (None, "oa"):
            raise UsageError(f"there is no compat {compat!r}; there is 'oa'")
        self.weight = Parameter(features, initial=ones)
        self.bias = Parameter(features)
        self.running_mean = Buffer(features)
        self.running_var = Buffer(features, initial=ones)
        self.eps, self.momentum, self.compat = eps, momentum, compat

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, features, height, width] to the same."""
        return batch_norm(
            x,
            self.weight.tensor,
            self.bias.tensor,
            self.running_mean.tensor,
            self.running_var.tensor,
            self.eps,
            training=self.training,
            momentum=self.momentum,
            unbiased=self.compat != "oa",
        )
