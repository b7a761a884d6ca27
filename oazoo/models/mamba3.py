"""Mamba-3: RMSNorm and a mixer with a running state, optionally a gated MLP, around a residual stream in float32.

A sequence's memory is one state a layer, of the same size however long the sequence is: prompts run through the parallel
form in pieces, each from the state that the one before left, and decoding is one turn of the recurrence.
"""

from __future__ import annotations

from math import sqrt

from oazoo.configs import Mamba3Config
from oazoo.configs.fields import MAX_POSITIONS
from oazoo.models.cache import StateCache
from oazoo.models.sequences import Context, Sequences
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.initial import Initial, by_width, normal
from oazoo.nn.layers import Embedding, Linear, RMSNorm, gated_linear, project
from oazoo.nn.mamba3 import Mamba3Block
from oazoo.nn.module import Module, ModuleList
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.mamba3 import Mamba3States


class MLP(Module):
    """``down(up(h) * silu(gate(h)))`` without biases."""

    def __init__(self, config: Mamba3Config) -> None:
        self.gate = Linear(config.hidden_size, config.mlp_width, bias=False)
        self.up = Linear(config.hidden_size, config.mlp_width, bias=False)
        self.down = Linear(config.mlp_width, config.hidden_size, bias=False)
        self.gate.weight.initial = self.up.weight.initial = by_width
        self.down.weight.initial = shrunk(by_width, config.num_layers)

    def __call__(self, x: Tensor, norm: RMSNorm, residual: Tensor) -> Tensor:
        """``residual`` and what the MLP makes of ``h = norm(x)``, f32 [tokens, hidden]."""
        return self.down(gated_linear(x, self.gate, self.up, "silu", norm), residual=residual)


def shrunk(initial: Initial, layers: int) -> Initial:
    """First values divided by the square root of the number of layers: those of what is added to the residual stream."""
    return lambda rng, shape: initial(rng, shape) / sqrt(layers)


def mixed(mixer: Mamba3Block, h: Tensor, x: Tensor, context: Context, layer: int) -> Tensor:
    """``x + mixer(h)``, f32 [tokens, hidden], over a batch of whole sequences or on from the state of a layer."""
    if isinstance(context, Sequences):
        return mixer(h, context.batch, residual=x)
    assert isinstance(context, StateCache)
    states = Mamba3States(**context.layers[layer])
    if h.shape[0] == 1:
        return mixer.step(h, states, residual=x)
    return mixer(h, 1, states=states, into=states, residual=x)


def state_shapes(config: Mamba3Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's state, for one sequence."""
    heads, dim, states = config.num_heads, config.head_dim, config.state_size
    return {
        "angle": (1, heads, config.num_angles),
        "ssm": (1, heads, dim, states),
        "k": (1, config.rank, heads, states),
        "v": (1, heads, dim),
    }


class Block(Layer):
    """One layer."""

    def __init__(self, config: Mamba3Config, layer: int) -> None:
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = Mamba3Block.from_config(config)
        out = self.mixer.out_proj.weight
        out.initial = shrunk(out.initial, config.num_layers)
        self._has_mlp = config.mlp_width > 0
        if self._has_mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = MLP(config)
        self._layer = layer

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        x = mixed(self.mixer, self.norm(x), x, context, self._layer)
        return self.mlp(x, self.mlp_norm, x) if self._has_mlp else x


class Mamba3(CausalModel):
    """The whole model."""

    def __init__(self, config: Mamba3Config, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = MAX_POSITIONS
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.embed.weight.initial = normal(0.02)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
            self.head.weight.initial = by_width

    @property
    def used_vocab_size(self) -> int:
        return self.config.used_vocab_size

    @property
    def constant_state(self) -> bool:
        return True

    def new_cache(self, capacity: int) -> StateCache:
        return StateCache(self.device, [state_shapes(self.config)] * self.config.num_layers, MAX_POSITIONS)

    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        return Sequences.create(self.device, batch, tokens)

    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        return self.embed(ids)

    def head_logits(self, hidden: Tensor) -> Tensor:
        if not self.config.tied_embeddings:
            return project(hidden, [self.head], norm=self.norm)
        return linear(hidden, self.embed.weight.shards, norm=self.norm.weight.tensor, eps=self.norm.eps)
