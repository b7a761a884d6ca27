"""Linear layers, embeddings and norms, for use and for training.

Activations are f32, best flattened to [tokens, features]; layers that take one tensor take any shape [..., features].
Weights are [out_features, in_features].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from oazoo.nn.initial import by_width, glorot, ones
from oazoo.nn.module import Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.activation import activate, activate_gated
from oazoo.runtime.ops.arithmetic import fill, join_columns, reshaped, swap_axes
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.low_rank import LowRank, corrected_linear
from oazoo.runtime.ops.norm import layer_norm, rms_norm
from oazoo.runtime.ops.scales import learned
from oazoo.runtime.tape import taping

#: Rows from which correcting the weights costs less than going through corrections with every row.
_MANY_ROWS = 64


def by_rows(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer of [rows, features] on x of any shape [..., features]."""
    if len(x.shape) == 2:
        return layer(x)
    y = layer(reshaped(x, x.numel // max(1, x.shape[-1]), x.shape[-1]))
    return reshaped(y, *x.shape[:-1], y.shape[-1])


class Adapter(Module):
    """What is added to a linear layer's output, computed from its input: f32 [tokens, in] to [tokens, out]."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """What is added, f32 [tokens, out], for x, f32 [tokens, in]."""

    def low_rank(self) -> LowRank | None:
        """The same as a correction of the layer's weight, if it is one and x goes into it as it is."""
        return None


class Linear(Module):
    """``y = x Wᵀ + b``, its weight in any encoding; plus what ``adapter`` makes of x, where there is one."""

    adapter: Adapter | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        self.weight = Parameter(out_features, in_features, initial=glorot)
        if bias:
            self.bias = Parameter(out_features)
        self.has_bias = bias

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def bias_parts(self) -> list[Tensor | None]:
        """The bias of each shard of the weight."""
        shards = self.weight.shards
        if not self.has_bias:
            return [None] * len(shards)
        if len(shards) == 1:
            return [self.bias.tensor]
        stops = np.cumsum([shard.shape[0] for shard in shards]).tolist()
        return [self.bias.tensor.rows(stop - s.shape[0], stop) for s, stop in zip(shards, stops, strict=True)]

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, gelu: bool = False) -> Tensor:
        """f32 [..., in_features] to [..., out_features]; GELU, then ``residual`` (of 2 axes), are applied to the result."""
        if len(x.shape) == 2:
            return project(x, [self], residual=residual, gelu=gelu)
        return by_rows(lambda x: project(x, [self], residual=residual, gelu=gelu), x)


def project(
    x: Tensor,
    layers: Sequence[Linear],
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gelu: bool = False,
) -> Tensor:
    """Several linear layers of the same input, their outputs side by side: f32 [tokens, sum of out_features].

    ``norm`` is applied to ``x`` first; an RMSNorm is folded into the product where that is faster. The tanh form of GELU,
    then ``residual``, are applied to the result.
    """
    if isinstance(norm, LayerNorm):
        x, norm = norm(x), None
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for layer in layers:
        weights += layer.weight.shards
        biases += layer.bias_parts()
    if any(layer.adapter is not None for layer in layers):
        return _adapted(x, layers, weights, biases, norm, residual, gelu)
    return linear(
        x,
        weights,
        biases,
        norm=None if norm is None else norm.weight.tensor,
        eps=0.0 if norm is None else norm.eps,
        residual=residual,
        gelu=gelu,
    )


def _adapted(
    x: Tensor,
    layers: Sequence[Linear],
    weights: list[Tensor],
    biases: list[Tensor | None],
    norm: RMSNorm | None,
    residual: Tensor | None,
    gelu: bool,
) -> Tensor:
    x = x if norm is None else norm(x)
    corrections = _corrections(layers)
    learning = [t for c in corrections or [] if c is not None for t in (c.a, c.b)]
    if corrections is not None and (x.shape[0] >= _MANY_ROWS or taping(x, *learning)):
        y = corrected_linear(x, weights, biases, corrections)
        y = activate(y, "gelu_tanh") if gelu else y
        return y if residual is None else add(y, residual)
    parts = []
    for layer in layers:
        if layer.adapter is not None:
            parts.append(layer.adapter(x))
        else:
            parts.append(fill(Tensor.empty(x.device, (x.shape[0], layer.out_features)), 0.0))
    more = parts[0] if len(parts) == 1 else join_columns(parts)
    y = linear(x, weights, biases, residual=more)
    y = activate(y, "gelu_tanh") if gelu else y
    return y if residual is None else add(y, residual)


def _corrections(layers: Sequence[Linear]) -> list[LowRank | None] | None:
    """What stands beside each layer, as corrections of frozen weights that are whole; None if that is not what it is."""
    found: list[LowRank | None] = []
    for layer in layers:
        own = layer.adapter if layer.adapter is None else layer.adapter.low_rank()
        whole = len(layer.weight.shards) == 1 and not any(
            learned(p).requires_grad for p in layer.weight.shards
        )
        if not whole or (layer.adapter is not None and own is None):
            return None
        if layer.has_bias and layer.bias.tensor.requires_grad:
            return None
        found.append(own)
    return found


def activated_linear(x: Tensor, up: Linear, activation: str, norm: Norm | None = None) -> Tensor:
    """``activation(up(norm(x)))``: f32 [tokens, out_features]. The tanh form of GELU is part of the product."""
    if activation == "gelu_tanh":
        return project(x, [up], norm=norm, gelu=True)
    return activate(project(x, [up], norm=norm), activation)


def gated_linear(
    x: Tensor, gate: Linear, up: Linear, activation: str = "silu", norm: Norm | None = None
) -> Tensor:
    """``activation(gate(norm(x))) * up(norm(x))``: f32 [tokens, out_features] (SwiGLU, GeGLU; arXiv:2002.05202)."""
    if isinstance(norm, LayerNorm):
        x, norm = norm(x), None
    whole = gate.adapter is None and up.adapter is None
    whole = whole and len(gate.weight.shards) == len(up.weight.shards) == 1
    if whole and gate.weight.tensor.dtype == up.weight.tensor.dtype and activation != "gelu":
        return gated(
            x,
            gate.weight.tensor,
            up.weight.tensor,
            gate.bias.tensor if gate.has_bias else None,
            up.bias.tensor if up.has_bias else None,
            norm=None if norm is None else norm.weight.tensor,
            eps=0.0 if norm is None else norm.eps,
            gelu=activation == "gelu_tanh",
        )
    # Two encodings, weights in several parts, adapters, or exact GELU: the two products side by side, then the gate.
    return activate_gated(project(x, [gate, up], norm=norm), activation)


class Embedding(Module):
    """Rows of a table by token id, its weight in any encoding."""

    def __init__(self, rows: int, features: int, scale: float = 1.0) -> None:
        self.weight = Parameter(rows, features, initial=by_width)
        self.scale = scale

    def __call__(
        self,
        ids: Tensor,
        positions: Embedding | None = None,
        start: Tensor | None = None,
        period: int | None = None,
    ) -> Tensor:
        """Ids (i32, u32 or u8 [...]) to f32 [..., features], scaled.

        Rows of ``positions`` are added: those from ``start`` (i32 [1], or 0) on, which start over after ``period`` ids.
        """
        if len(ids.shape) != 1:
            flat = self(ids.view(ids.numel), positions, start, period)
            return reshaped(flat, *ids.shape, flat.shape[1])
        places = None if positions is None else positions.weight.tensor
        return embedding(ids, self.weight.shards, places, start, period=period, scale=self.scale)


class ByteEmbedding(Embedding):
    """A row for each of the 256 bytes."""

    def __init__(self, features: int) -> None:
        super().__init__(256, features)


class ByteOutputHead(Linear):
    """Logits of the 256 bytes: f32 [..., features] to [..., 256]."""

    def __init__(self, features: int, bias: bool = True) -> None:
        super().__init__(features, 256, bias)


class RMSNorm(Module):
    """``x / sqrt(mean(x²) + eps) * weight`` (arXiv:1910.07467); ``offset`` is added to the weight when it is loaded."""

    def __init__(self, features: int, eps: float = 1e-5, offset: float = 0.0) -> None:
        self.weight = Parameter(features, offset=offset, initial=lambda rng, shape: ones(rng, shape) - offset)
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """f32 [..., features] to the same; ``residual`` (of 2 axes) is added to the result."""
        return by_rows(lambda x: rms_norm(x, self.weight.tensor, self.eps, residual=residual), x)


class LayerNorm(Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` (arXiv:1607.06450)."""

    def __init__(self, features: int, eps: float = 1e-5, bias: bool = True) -> None:
        self.weight = Parameter(features, initial=ones)
        if bias:
            self.bias = Parameter(features)
        self.has_bias = bias
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """f32 [..., features] to the same; ``residual`` (of 2 axes) is added to the result."""
        bias = self.bias.tensor if self.has_bias else None
        return by_rows(lambda x: layer_norm(x, self.weight.tensor, bias, self.eps, residual=residual), x)

    def over_channels(self, x: Tensor) -> Tensor:
        """The norm over the middle axis of f32 [batch, features, length]; the same shape."""
        return swap_axes(self(swap_axes(x)))


Norm = RMSNorm | LayerNorm
