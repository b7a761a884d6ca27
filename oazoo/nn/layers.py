"""Layers of the ready models. Activations are flattened [tokens, features] f32; weights are [out_features, in_features]."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.nn.module import Module, Parameter
from oazoo.runtime import Tensor
from oazoo.runtime.ops.activation import activate, activate_gated
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.norm import layer_norm, rms_norm


class Linear(Module):
    """``y = x Wᵀ + b``, its weight in any encoding."""

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        self.weight = Parameter(out_features, in_features)
        if bias:
            self.bias = Parameter(out_features)
        self.has_bias = bias

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, gelu: bool = False) -> Tensor:
        """f32 [tokens, in_features] to [tokens, out_features]; GELU, then ``residual``, are applied to the result."""
        return project(x, [self], residual=residual, gelu=gelu)


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
        first = 0
        for shard in layer.weight.shards:
            weights.append(shard)
            stop = first + shard.shape[0]
            biases.append(layer.bias.tensor.rows(first, stop) if layer.has_bias else None)
            first = stop
    return linear(
        x,
        weights,
        biases,
        norm=None if norm is None else norm.weight.tensor,
        eps=0.0 if norm is None else norm.eps,
        residual=residual,
        gelu=gelu,
    )


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
    whole = len(gate.weight.shards) == len(up.weight.shards) == 1
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
    # Two encodings, weights in several parts, or exact GELU: the two products side by side, then the gate.
    return activate_gated(project(x, [gate, up], norm=norm), activation)


class Embedding(Module):
    """Rows of a table by token id, its weight in any encoding."""

    def __init__(self, rows: int, features: int, scale: float = 1.0) -> None:
        self.weight = Parameter(rows, features)
        self.scale = scale

    def __call__(
        self, ids: Tensor, positions: Embedding | None = None, start: Tensor | None = None
    ) -> Tensor:
        """i32 [tokens] to f32 [tokens, features], scaled, plus the rows of ``positions`` from ``start`` (i32 [1]) on."""
        places = None if positions is None else positions.weight.tensor
        return embedding(ids, self.weight.shards, places, start, scale=self.scale)


class RMSNorm(Module):
    """``x / sqrt(mean(x²) + eps) * weight`` (arXiv:1910.07467); ``offset`` is added to the weight when it is loaded."""

    def __init__(self, features: int, eps: float, offset: float = 0.0) -> None:
        self.weight = Parameter(features, offset=offset)
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """f32 [tokens, features] to the same; ``residual`` is added to the result."""
        return rms_norm(x, self.weight.tensor, self.eps, residual=residual)


class LayerNorm(Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` (arXiv:1607.06450)."""

    def __init__(self, features: int, eps: float, bias: bool) -> None:
        self.weight = Parameter(features)
        if bias:
            self.bias = Parameter(features)
        self.has_bias = bias
        self.eps = eps

    def __call__(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """f32 [tokens, features] to the same; ``residual`` is added to the result."""
        bias = self.bias.tensor if self.has_bias else None
        return layer_norm(x, self.weight.tensor, bias, self.eps, residual=residual)


Norm = RMSNorm | LayerNorm
