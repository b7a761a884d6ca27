"""Decoders with rotary positions and grouped-query attention: Llama and its relatives, told apart by fields of the config.

Read from the top: attention and feed-forward take the residual stream with the norm that goes before them; a block puts
the two together; the model adds embedding and head. :class:`oazoo.configs.DecoderConfig` says what each field means.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oazoo.configs import DecoderConfig
from oazoo.configs.frequencies import inverse_frequencies
from oazoo.models.cache import KVCache
from oazoo.models.sequences import Context, Sequences
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.layers import (
    Embedding,
    LayerNorm,
    Linear,
    Norm,
    RMSNorm,
    activated_linear,
    gated_linear,
    project,
)
from oazoo.nn.module import Module, ModuleList
from oazoo.nn.moe import ExpertLinear, Mixture
from oazoo.nn.rope import rotary_table
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.activation import softcap
from oazoo.runtime.ops.attention import rotary_attention
from oazoo.runtime.ops.grouped import expert_mlp
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.norm import query_key_norm
from oazoo.runtime.ops.routing import Groups, weighted_rows
from oazoo.runtime.ops.sequences import attend, rotate
from oazoo.runtime.ops.unary import sigmoid


def _norm(config: DecoderConfig) -> Norm:
    """A norm over the residual stream."""
    if config.norm == "layer":
        return LayerNorm(config.hidden_size, config.norm_eps, bias=True)
    return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)


class Attention(Module):
    """Causal self-attention with rotary positions, over a KV cache or a batch of whole sequences."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        hidden = config.hidden_size
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(hidden, q_width, config.attention_bias)
        self.k = Linear(hidden, kv_width, config.attention_bias)
        self.v = Linear(hidden, kv_width, config.attention_bias)
        if config.qk_norm is not None:
            one_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(
                config.head_dim if one_head else q_width, config.norm_eps, config.norm_offset
            )
            self.k_norm = RMSNorm(
                config.head_dim if one_head else kv_width, config.norm_eps, config.norm_offset
            )
        self.o = Linear(q_width, hidden, config.attention_output_bias)
        self._config = config
        self._layer = layer

    def __call__(self, x: Tensor, norm: Norm | None, context: Context, residual: Tensor | None) -> Tensor:
        """``o(attention(norm(x))) + residual``, f32 [tokens, hidden]."""
        config = self._config
        qkv = project(x, [self.q, self.k, self.v], norm=norm)
        if config.qk_norm is not None:
            q_weight, k_weight = self.q_norm.weight.tensor, self.k_norm.weight.tensor
            heads = config.num_heads, config.num_kv_heads
            qkv = query_key_norm(qkv, q_weight, k_weight, *heads, config.norm_eps)
        return self.o(self._mixed(qkv, context), residual=residual)

    def _mixed(self, qkv: Tensor, context: Context) -> Tensor:
        """Rotated and attended: f32 [tokens, heads · head_dim]."""
        config = self._config
        assert isinstance(context, KVCache | Sequences) and context.rotary is not None
        table = context.rotary[self._layer]
        window = config.layer_window(self._layer)
        scale, cap = config.score_scale, config.attention_softcap
        if isinstance(context, Sequences):
            turned = config.num_heads + config.num_kv_heads
            qkv = rotate(qkv, table, context.tokens, turned, config.head_dim, rotated=config.rotated)
            heads = config.num_heads, config.num_kv_heads
            return attend(qkv, context.batch, *heads, window=window, scale=scale, softcap=cap)
        assert isinstance(context, KVCache)
        keys, values = context.layers[self._layer]
        return rotary_attention(
            qkv,
            table,
            context.start,
            keys,
            values,
            config.num_heads,
            window=window,
            scale=scale,
            softcap=cap,
        )


class MLP(Module):
    """Feed-forward, gated (SwiGLU, GeGLU) or plain."""

    def __init__(self, config: DecoderConfig, inner: int) -> None:
        if config.gated_mlp:
            self.gate = Linear(config.hidden_size, inner, config.mlp_bias)
        self.up = Linear(config.hidden_size, inner, config.mlp_bias)
        self.down = Linear(inner, config.hidden_size, config.mlp_bias)
        self._gated = config.gated_mlp
        self._activation = config.activation

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        """``down(activation(gate(h)) * up(h)) + residual`` or, not gated, ``down(activation(up(h))) + residual``.

        h is ``norm(x)``; f32 [tokens, hidden].
        """
        if self._gated:
            inner = gated_linear(x, self.gate, self.up, self._activation, norm)
        else:
            inner = activated_linear(x, self.up, self._activation, norm)
        return self.down(inner, residual=residual)


class Experts(Mixture):
    """Feed-forward as a mixture of gated experts, and one for all tokens besides if there is a shared one.

    The shared one's output is multiplied with a sigmoid of its own (Qwen2-MoE).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.num_experts, config.experts_per_token, normalize=config.normalize_experts)
        hidden, inner, experts = config.hidden_size, config.expert_size, config.num_experts
        self.router = Linear(hidden, experts, bias=False)
        self.gate = ExpertLinear(experts, hidden, inner, bias=False)
        self.up = ExpertLinear(experts, hidden, inner, bias=False)
        self.down = ExpertLinear(experts, inner, hidden, bias=False)
        if config.shared_expert_size:
            self.shared = MLP(config, config.shared_expert_size)
            self.shared_gate = Linear(hidden, 1, bias=False)
        self._has_shared = bool(config.shared_expert_size)
        self._activation = config.activation

    def run_experts(self, h: Tensor, groups: Groups) -> Tensor:
        gate_up = [self.gate.weight.shards, self.up.weight.shards]
        return expert_mlp(h, groups, gate_up, self.down.weight.shards, activation=self._activation)

    def __call__(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        """``Σ weight · expert(norm(x)) + residual``, and the shared expert; f32 [tokens, hidden]."""
        h = x if norm is None else norm(x)
        y = self.mixed(h, residual)
        if not self._has_shared:
            return y
        return weighted_rows(self.shared(h, None, None), sigmoid(self.shared_gate(h)), residual=y)


class Block(Layer):
    """One layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        if config.pre_norm:
            self.attn_norm = _norm(config)
        self.attn = Attention(config, layer)
        if config.post_norm:
            self.attn_post_norm = _norm(config)
        if config.pre_norm:
            self.mlp_norm = _norm(config)
        if config.is_moe(layer):
            self.moe = Experts(config)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        if config.post_norm:
            self.mlp_post_norm = _norm(config)
        self._pre, self._post = config.pre_norm, config.post_norm
        self._parallel = config.parallel_residual
        self._sparse = config.is_moe(layer)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        feed_forward = self.moe if self._sparse else self.mlp
        attn_norm = self.attn_norm if self._pre else None
        mlp_norm = self.mlp_norm if self._pre else None
        if self._post:
            x = self.attn_post_norm(self.attn(x, attn_norm, context, None), residual=x)
            return self.mlp_post_norm(feed_forward(x, mlp_norm, None), residual=x)
        after = self.attn(x, attn_norm, context, x)
        return feed_forward(x if self._parallel else after, mlp_norm, after)


class Decoder(CausalModel):
    """The whole model."""

    def __init__(self, config: DecoderConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        scale = 1.0 if config.embedding_scale is None else config.embedding_scale
        self.embed = Embedding(config.vocab_size, config.hidden_size, scale)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = _norm(config)
        if not config.tied_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, capacity: int) -> KVCache:
        config = self.config
        return KVCache.create(
            self.device,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            capacity=capacity,
            head_dim=config.head_dim,
            rotary=self._rotary(capacity),
        )

    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        return Sequences.create(self.device, batch, tokens, self._rotary(tokens))

    def _rotary(self, length: int) -> list[npt.NDArray[np.float32]]:
        """A table of positions a layer."""
        config = self.config
        ropes = [config.layer_rope(layer) for layer in range(config.num_layers)]
        tables = {}
        for theta, scaling in set(ropes):
            inverse, magnitude = inverse_frequencies(config.rotated, theta, scaling, length)
            tables[theta, scaling] = rotary_table(inverse, magnitude, length)
        return [tables[rope] for rope in ropes]

    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        return self.embed(ids)

    def head_logits(self, hidden: Tensor) -> Tensor:
        if not self.config.tied_embeddings:
            logits = project(hidden, [self.head], norm=self.norm)
        elif isinstance(self.norm, LayerNorm):
            logits = linear(self.norm(hidden), self.embed.weight.shards)
        else:
            weight, eps = self.norm.weight.tensor, self.norm.eps
            logits = linear(hidden, self.embed.weight.shards, norm=weight, eps=eps)
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)
