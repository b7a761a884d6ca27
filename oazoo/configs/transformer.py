"""The configuration of OA's Transformer language models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from oazoo.configs.fields import (
    MAX_EXPERTS,
    StrictJson,
    check,
    check_parameter_count,
    check_transformer_sizes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(StrictJson):
    """OA's Transformer: learned positions, LayerNorm before each sublayer, separate q, k and v, GELU in its tanh form, an
    untied head; every linear layer has a bias.

    With ``num_experts``, the feed-forward layers are mixtures of as many SwiGLU layers of width ``intermediate_size``, and
    each token goes to ``experts_per_token`` of them. ``routing_bias``: whether a bias for the choice of experts is part of
    the model, which keeps them evenly busy in training (OA's files have none).
    """

    family: ClassVar[str] = "transformer"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_eps: float = 1e-5
    num_experts: int | None = None
    experts_per_token: int | None = None
    routing_bias: bool | None = None

    def __post_init__(self) -> None:
        check_transformer_sizes(self)
        check(
            self.hidden_size % self.num_heads == 0,
            type(self).__name__,
            f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}",
        )
        hidden = self.hidden_size
        experts, top = self.num_experts, self.experts_per_token
        where = type(self).__name__
        if experts is None:
            check(top is None and self.routing_bias is None, where, "expert fields need num_experts")
        else:
            check(0 < experts <= MAX_EXPERTS, where, f"num_experts = {experts} is out of range")
            check(
                top is not None and 0 < top <= experts,
                where,
                f"experts_per_token = {top} is out of range (1 to {experts})",
            )
        a_layer = hidden * (4 * hidden + 3 * (experts or 1) * self.intermediate_size)
        check_parameter_count(
            self, (2 * self.vocab_size + self.max_positions) * hidden + self.num_layers * a_layer
        )

    @classmethod
    def byte_transformer(cls) -> Self:
        """OA's ByteTransformer: one layer, one head and 16 positions over the 256 bytes; 25,760 parameters."""
        return cls(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_layers=1,
            num_heads=1,
            max_positions=16,
        )

    @classmethod
    def byte_moe_transformer(cls) -> Self:
        """OA's ByteMoeTransformer: the same with 4 experts of width 16, of which each token goes to 2."""
        return replace(cls.byte_transformer(), intermediate_size=16, num_experts=4, experts_per_token=2)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order in which OA's files have them; linear weights are [out, in],
        those of experts [experts, out, in].
        """
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab_size, hidden),
            "positions.weight": (self.max_positions, hidden),
        }

        def add(name: str, *shape: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

        def stack(name: str, *shape: int) -> None:
            assert self.num_experts is not None
            shapes[f"{name}.weight"] = (self.num_experts, *shape)
            shapes[f"{name}.bias"] = (self.num_experts, shape[0])

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            add(f"{at}.attn_norm", hidden)
            for name in "qkvo":
                add(f"{at}.attn.{name}", hidden, hidden)
            if self.num_experts is None:
                add(f"{at}.mlp_norm", hidden)
                add(f"{at}.mlp.up", inner, hidden)
                add(f"{at}.mlp.down", hidden, inner)
                continue
            stack(f"{at}.moe.gate_up", 2 * inner, hidden)
            stack(f"{at}.moe.down", hidden, inner)
            shapes[f"{at}.moe.norm.weight"] = (hidden,)
            add(f"{at}.moe.router", self.num_experts, hidden)
            if self.routing_bias:
                shapes[f"{at}.moe.routing_bias"] = (self.num_experts,)
        add("norm", hidden)
        add("head", self.vocab_size, hidden)
        return shapes
