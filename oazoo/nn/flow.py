"""What flow models are made of: time embeddings, and bidirectional Transformer blocks that a condition modulates."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from oazoo.nn.attention import MultiHeadAttention
from oazoo.nn.blocks import MLP
from oazoo.nn.initial import zeros
from oazoo.nn.layers import LayerNorm, Linear
from oazoo.nn.module import Module, ModuleList
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.ops.activation import activate
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.norm import layer_norm

#: From nothing to what stands in a block in place of its norm and MLP: f32 [tokens, width] to the same, its own residual and
#: norm in it.
MakeExperts = Callable[[], Module]


class PlainLayerNorm(Module):
    """``(x - mean) / sqrt(variance + eps)``: a layer norm that learns nothing, for what is modulated afterwards."""

    def __init__(self, features: int, eps: float) -> None:
        self.features, self.eps = features, eps
        self._ones: list[Tensor] = []  # tensors are no parameters, so nothing of it is in a file

    def __call__(self, x: Tensor) -> Tensor:
        """f32 [rows, features] to the same."""
        return layer_norm(
            x, constant(x.device, self._ones, np.ones(self.features, np.float32)), None, self.eps
        )


def constant(device: Device, kept: list[Tensor], values: npt.NDArray[np.float32]) -> Tensor:
    """``values`` on the device, uploaded once and kept in ``kept``; also while a program is captured."""
    if not kept or kept[0].device is not device:
        with device.aside():
            kept[:] = [Tensor.from_numpy(device, values)]
    return kept[0]


class FlowTimeEmbedding(Module):
    """Sines, then cosines, of ``time · scale · period^(-i / (width / 2))``; only these frequencies are uploaded, once.

    Args:
        width: of the embedding, even.
        period: the longest wavelength over the shortest.
        scale: on times.
        cosine_first: cosines, then sines, as DiT has them.
    """

    def __init__(
        self, width: int, period: float = 10_000.0, scale: float = 1_000.0, *, cosine_first: bool = False
    ) -> None:
        if width < 2 or width % 2:
            raise ValueError(f"the width of a time embedding must be even, not {width}")
        steps = np.arange(width // 2, dtype=np.float64) / (width // 2)
        self.frequencies = (scale * np.exp(-math.log(period) * steps)).astype(np.float32)
        self.cosine_first = cosine_first
        self._kept: list[Tensor] = []

    def __call__(self, time: Tensor) -> Tensor:
        """f32 [sequences] to [sequences, width]."""
        frequencies = constant(time.device, self._kept, self.frequencies)
        return ops.time_embedding(time, frequencies, cosine_first=self.cosine_first)


class FlowBlock(Module):
    """A bidirectional Transformer block that a vector a sequence modulates (AdaLN-Zero, arXiv:2212.09748).

    With the six chunks of ``modulation(c)``, shift, scale and gate of each sublayer:
    ``x += gate1 · attn(norm1(x) (1 + scale1) + shift1); x += gate2 · ffn(norm2(x) (1 + scale2) + shift2)``. Without a
    condition: ``x += attn(norm1(x)); x += ffn(norm2(x))``.

    Args:
        width: of the residual stream, a multiple of ``heads``.
        inner: width of the feed-forward layer.
        heads: attention heads.
        eps: of the norms.
        adaptive: whether it has a modulation, which is zero at first, so that the block is the identity.
        silu: the condition goes through SiLU first (DiT).
        affine: the norms have a weight and a bias of their own.
        experts: makes what stands in place of ``norm2`` and ``ffn``; it adds its result to its input. Modulated, that is
            ``x += gate2 · experts(x (1 + scale2) + shift2)``.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        *,
        eps: float = 1e-5,
        adaptive: bool = True,
        silu: bool = False,
        affine: bool = True,
        experts: MakeExperts | None = None,
    ) -> None:
        self.norm1 = norm(width, eps, affine)
        self.attn = MultiHeadAttention(width, heads, causal=False)
        self.moe: Module | None = None
        if experts is None:
            self.norm2 = norm(width, eps, affine)
            self.ffn = MLP(width, inner)
        else:
            self.moe = experts()
        if adaptive:
            self.modulation = Linear(width, 6 * width)
            self.modulation.weight.initial = zeros
        self.adaptive, self.silu = adaptive, silu

    def __call__(
        self, x: Tensor, batch: int = 1, condition: Tensor | None = None, *, keep: Tensor | None = None
    ) -> Tensor:
        """f32 [batch · tokens, width] to the same.

        Args:
            x: sequences one after the other.
            batch: how many.
            condition: f32 [batch, width], or None for the plain block.
            keep: f32 [batch, tokens]; keys with 0 are seen by nobody.
        """
        if condition is None or not self.adaptive:
            x = self.attn(self.norm1(x), batch, keep=keep, residual=x)
            return self.ffn(self.norm2(x), residual=x) if self.moe is None else call(self.moe, x)
        m = self.modulation(activate(condition, "silu") if self.silu else condition)
        h = ops.modulate(self.norm1(x), m, shift=0, scale=1)
        x = ops.modulate(self.attn(h, batch, keep=keep), m, scale=2, residual=x)
        if self.moe is None:
            y = self.ffn(ops.modulate(self.norm2(x), m, shift=3, scale=4))
        else:
            y = call(self.moe, ops.modulate(x, m, shift=3, scale=4))
        return ops.modulate(y, m, scale=5, residual=x)


def norm(width: int, eps: float, affine: bool) -> LayerNorm | PlainLayerNorm:
    """A layer norm, with parameters of its own or without."""
    return LayerNorm(width, eps) if affine else PlainLayerNorm(width, eps)


def call(module: Module, x: Tensor) -> Tensor:
    """What a module makes of a tensor."""
    y = module(x)  # type: ignore[operator]
    assert isinstance(y, Tensor)
    return y


class FlowTransformer(Module):
    """Flow blocks one after the other, and a last layer norm, which is not modulated.

    Args:
        width, inner, heads, eps, adaptive, experts: see :class:`FlowBlock`.
        layers: number of blocks.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        layers: int,
        *,
        eps: float = 1e-5,
        adaptive: bool = True,
        experts: MakeExperts | None = None,
    ) -> None:
        self.blocks = ModuleList(
            [
                FlowBlock(width, inner, heads, eps=eps, adaptive=adaptive, experts=experts)
                for _ in range(layers)
            ]
        )
        self.final_norm = LayerNorm(width, eps)

    def __call__(
        self, x: Tensor, batch: int = 1, condition: Tensor | None = None, *, keep: Tensor | None = None
    ) -> Tensor:
        """f32 [batch · tokens, width] to the same; arguments as those of :class:`FlowBlock`."""
        for block in self.blocks:
            x = block(x, batch, condition, keep=keep)
        return self.final_norm(x)


def conditions(*parts: Tensor | None) -> Tensor | None:
    """The sum of the vectors that there are, f32 [sequences, width]; None without any."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else add(total, part)
    return total
