"""The first layer of an image Transformer."""

from __future__ import annotations

from oazoo.nn.initial import glorot
from oazoo.nn.module import Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.arithmetic import reshaped
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.patches import patchify


class PatchEmbed(Module):
    """Square patches of an image, each projected to a token: a convolution whose stride is its kernel's side.

    ``weight`` is [features, channels, patch, patch] in any encoding, as checkpoints have it.
    """

    def __init__(self, channels: int, features: int, patch: int, bias: bool = True) -> None:
        self.weight = Parameter(features, channels, patch, patch, initial=glorot)
        if bias:
            self.bias = Parameter(features)
        self.has_bias = bias
        self.patch = patch

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [batch, channels, height, width] to [batch, height / patch · width / patch, features], row by row."""
        rows = patchify(x, self.patch)
        batch, count, values = rows.shape
        features = self.weight.shape[0]
        weight = reshaped(self.weight.tensor, features, values)
        bias = self.bias.tensor if self.has_bias else None
        return reshaped(linear(reshaped(rows, batch * count, values), weight, bias), batch, count, features)
