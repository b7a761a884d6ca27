"""The GPT-2 and NanoGPT style: LayerNorm, learned positions, fused qkv, GELU."""

from __future__ import annotations

from oazoo.configs import NanoGPTConfig, TransformerConfig
from oazoo.models.cache import KVCache
from oazoo.models.sequences import Context, Sequences
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.dropout import Dropout
from oazoo.nn.layers import Embedding, LayerNorm, Linear, activated_linear, project
from oazoo.nn.module import Module, ModuleList
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.attention import rotary_attention
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.sequences import attend


class Attention(Module):
    """Causal self-attention; positions are in the embedding, so nothing is rotated."""

    def __init__(self, config: NanoGPTConfig, layer: int) -> None:
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, config.bias)
        self.o = Linear(config.hidden_size, config.hidden_size, config.bias)
        self._heads = config.num_heads
        self._layer = layer

    def __call__(self, x: Tensor, residual: Tensor | None, context: Context) -> Tensor:
        """``residual + o(attention(x))``, f32 [tokens, hidden]."""
        return self.o(mixed(self.qkv(x), self._heads, self._layer, context), residual=residual)


def mixed(qkv: Tensor, heads: int, layer: int, context: Context) -> Tensor:
    """Causal attention without rotation, over the cache of a layer or a batch of whole sequences."""
    if isinstance(context, Sequences):
        return attend(qkv, context.batch, heads)
    assert isinstance(context, KVCache)
    keys, values = context.layers[layer]
    return rotary_attention(qkv, None, context.start, keys, values, heads)


class MLP(Module):
    """Feed-forward with GELU."""

    def __init__(self, config: NanoGPTConfig) -> None:
        self.up = Linear(config.hidden_size, config.intermediate_size, config.bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.bias)
        self._activation = config.activation

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """``residual + down(gelu(up(x)))``, f32 [tokens, hidden]."""
        return self.down(activated_linear(x, self.up, self._activation), residual=residual)


class Block(Layer):
    """One layer."""

    def __init__(self, config: NanoGPTConfig, layer: int) -> None:
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        self.attn = Attention(config, layer)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        self.mlp = MLP(config)
        self.dropout = Dropout(0.0)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        if self.dropout.training and self.dropout.rate:
            x = add(x, self.dropout(self.attn(self.attn_norm(x), None, context)))
            return add(x, self.dropout(self.mlp(self.mlp_norm(x), None)))
        x = self.attn(self.attn_norm(x), x, context)
        return self.mlp(self.mlp_norm(x), x)


class LearnedPositions(CausalModel):
    """What models have in common whose positions are a table that is added to the embedding: all but layers and head."""

    def __init__(self, config: NanoGPTConfig | TransformerConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.positions = Embedding(config.max_positions, config.hidden_size)
        self.dropout = Dropout(0.0)

    def new_cache(self, capacity: int) -> KVCache:
        config = self.config
        return KVCache.create(
            self.device,
            layers=config.num_layers,
            kv_heads=config.num_heads,
            capacity=capacity,
            head_dim=config.head_dim,
        )

    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        return Sequences.create(self.device, batch, tokens)

    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        """Embeddings of tokens and of their positions, added up: f32 [tokens, hidden]."""
        if isinstance(context, Sequences):
            return self.dropout(self.embed(ids, self.positions, period=context.tokens))
        assert isinstance(context, KVCache)
        return self.embed(ids, self.positions, context.start)


class NanoGPT(LearnedPositions):
    """The whole model."""

    def __init__(self, config: NanoGPTConfig, device: Device) -> None:
        super().__init__(config, device)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        self._tied = config.tied_embeddings
        if not self._tied:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def head_logits(self, hidden: Tensor) -> Tensor:
        if not self._tied:
            return project(hidden, [self.head], norm=self.norm)
        return linear(self.norm(hidden), self.embed.weight.shards)
