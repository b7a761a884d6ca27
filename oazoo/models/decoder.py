"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU. The config tells its members apart."""

from __future__ import annotations

from oazoo.configs import DecoderConfig
from oazoo.models.cache import KVCache
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.layers import Embedding, Linear, RMSNorm, gated_linear, project
from oazoo.nn.module import Module, ModuleList
from oazoo.nn.rope import inverse_frequencies, rotary_table
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.attention import rotary_attention
from oazoo.runtime.ops.linear import linear


class Attention(Module):
    """Causal self-attention with rotary positions over a KV cache."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        hidden, width = config.hidden_size, config.head_dim
        self.q = Linear(hidden, config.num_heads * width, config.attention_bias)
        self.k = Linear(hidden, config.num_kv_heads * width, config.attention_bias)
        self.v = Linear(hidden, config.num_kv_heads * width, config.attention_bias)
        self.o = Linear(config.num_heads * width, hidden, config.attention_output_bias)
        self._heads = config.num_heads
        self._window = config.layer_window(layer)
        self._layer = layer

    def __call__(self, x: Tensor, norm: RMSNorm, cache: KVCache) -> Tensor:
        """``x + o(attention(norm(x)))``, f32 [tokens, hidden]."""
        qkv = project(x, [self.q, self.k, self.v], norm=norm)
        keys, values = cache.layers[self._layer]
        mixed = rotary_attention(
            qkv, cache.rotary, cache.start, keys, values, self._heads, window=self._window
        )
        return self.o(mixed, residual=x)


class MLP(Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DecoderConfig) -> None:
        self.gate = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def __call__(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """``x + down(silu(gate(norm(x))) * up(norm(x)))``, f32 [tokens, hidden]."""
        return self.down(gated_linear(x, self.gate, self.up, norm), residual=x)


class Block(Layer):
    """One layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def __call__(self, x: Tensor, cache: KVCache) -> Tensor:
        return self.mlp(self.attn(x, self.attn_norm, cache), self.mlp_norm)


class Decoder(CausalModel):
    """The whole model."""

    def __init__(self, config: DecoderConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, capacity: int) -> KVCache:
        config = self.config
        inverse, magnitude = inverse_frequencies(
            config.head_dim, config.rope_theta, config.rope_scaling, capacity
        )
        return KVCache.create(
            self.device,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            rotary=rotary_table(inverse, magnitude, capacity),
        )

    def embed_tokens(self, ids: Tensor, cache: KVCache) -> Tensor:
        return self.embed(ids)

    def head_logits(self, hidden: Tensor) -> Tensor:
        weight = self.embed.weight if self.config.tied_embeddings else self.head.weight
        return linear(hidden, weight.shards, norm=self.norm.weight.tensor, eps=self.norm.eps)
