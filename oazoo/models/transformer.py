"""OA's Transformer: as GPT-2, with separate q, k and v and a head of its own, and with mixtures of experts if it has any."""

from __future__ import annotations

from oazoo.configs import TransformerConfig
from oazoo.models.nanogpt import LearnedPositions, mixed
from oazoo.models.sequences import Context
from oazoo.models.session import Layer
from oazoo.nn.blocks import MLP
from oazoo.nn.dropout import Dropout
from oazoo.nn.layers import LayerNorm, Linear, project
from oazoo.nn.module import Module, ModuleList
from oazoo.nn.moe import MoE
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.elementwise import add


class Attention(Module):
    """Causal self-attention; positions are in the embedding, so nothing is rotated."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        hidden = config.hidden_size
        self.q = Linear(hidden, hidden)
        self.k = Linear(hidden, hidden)
        self.v = Linear(hidden, hidden)
        self.o = Linear(hidden, hidden)
        self._heads = config.num_heads
        self._layer = layer

    def __call__(self, x: Tensor, norm: LayerNorm, residual: Tensor | None, context: Context) -> Tensor:
        """``residual + o(attention(norm(x)))``, f32 [tokens, hidden]."""
        qkv = project(x, [self.q, self.k, self.v], norm=norm)
        return self.o(mixed(qkv, self._heads, self._layer, context), residual=residual)


class Block(Layer):
    """One layer."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        self.attn_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config, layer)
        if config.num_experts is None:
            self.mlp_norm = LayerNorm(config.hidden_size, config.norm_eps)
            self.mlp = MLP(config.hidden_size, config.intermediate_size)
        else:
            assert config.experts_per_token is not None
            self.moe = MoE(
                config.hidden_size,
                config.intermediate_size,
                config.num_experts,
                config.experts_per_token,
                eps=config.norm_eps,
                routing_bias=bool(config.routing_bias),
            )
        self._sparse = config.num_experts is not None
        self.dropout = Dropout(0.0)

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        if self.dropout.training and self.dropout.rate:
            x = add(x, self.dropout(self.attn(x, self.attn_norm, None, context)))
            if self._sparse:
                return add(x, self.dropout(self.moe.rows(x, None)))
            return add(x, self.dropout(self.mlp(self.mlp_norm(x))))
        x = self.attn(x, self.attn_norm, x, context)
        if self._sparse:
            return self.moe(x)
        return self.mlp(self.mlp_norm(x), residual=x)


class Transformer(LearnedPositions):
    """The whole model."""

    def __init__(self, config: TransformerConfig, device: Device) -> None:
        super().__init__(config, device)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size)

    def head_logits(self, hidden: Tensor) -> Tensor:
        return project(hidden, [self.head], norm=self.norm)
