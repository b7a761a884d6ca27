"""The GPT-2 and NanoGPT style: LayerNorm, learned positions, fused qkv, GELU."""

from __future__ import annotations

from oazoo.configs import NanoGPTConfig
from oazoo.models.cache import KVCache
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.layers import Embedding, LayerNorm, Linear, activated_linear
from oazoo.nn.module import Module, ModuleList
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.attention import rotary_attention
from oazoo.runtime.ops.linear import linear


class Attention(Module):
    """Causal self-attention over a KV cache; positions are in the embedding, so nothing is rotated."""

    def __init__(self, config: NanoGPTConfig, layer: int) -> None:
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, config.bias)
        self.o = Linear(config.hidden_size, config.hidden_size, config.bias)
        self._heads = config.num_heads
        self._layer = layer

    def __call__(self, x: Tensor, residual: Tensor, cache: KVCache) -> Tensor:
        """``residual + o(attention(x))``, f32 [tokens, hidden]."""
        qkv = self.qkv(x)
        keys, values = cache.layers[self._layer]
        mixed = rotary_attention(qkv, None, cache.start, keys, values, self._heads)
        return self.o(mixed, residual=residual)


class MLP(Module):
    """Feed-forward with GELU."""

    def __init__(self, config: NanoGPTConfig) -> None:
        self.up = Linear(config.hidden_size, config.intermediate_size, config.bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.bias)
        self._activation = config.activation

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual + down(gelu(up(x)))``, f32 [tokens, hidden]."""
        return self.down(activated_linear(x, self.up, self._activation), residual=residual)


class Block(Layer):
    """One layer."""

    def __init__(self, config: NanoGPTConfig, layer: int) -> None:
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        self.attn = Attention(config, layer)
        self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        self.mlp = MLP(config)

    def __call__(self, x: Tensor, cache: KVCache) -> Tensor:
        x = self.attn(self.attn_norm(x), x, cache)
        return self.mlp(self.mlp_norm(x), x)


class NanoGPT(CausalModel):
    """The whole model."""

    def __init__(self, config: NanoGPTConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.positions = Embedding(config.max_positions, config.hidden_size)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, config.has_norm_bias)
        if not config.tied_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, capacity: int) -> KVCache:
        config = self.config
        return KVCache.create(
            self.device,
            layers=config.num_layers,
            kv_heads=config.num_heads,
            capacity=capacity,
            head_dim=config.head_dim,
        )

    def embed_tokens(self, ids: Tensor, cache: KVCache) -> Tensor:
        return self.embed(ids, self.positions, cache.start)

    def head_logits(self, hidden: Tensor) -> Tensor:
        weight = self.embed.weight if self.config.tied_embeddings else self.head.weight
        return linear(self.norm(hidden), weight.shards)
