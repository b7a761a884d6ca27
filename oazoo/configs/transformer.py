"""The configuration of OA's Transformer language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from oazoo.configs.fields import StrictJson, check, check_parameter_count, check_transformer_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(StrictJson):
    """OA's Transformer: learned positions, LayerNorm before each sublayer, separate q, k and v, GELU in its tanh form, an
    untied head; every linear layer has a bias.
    """

    family: ClassVar[str] = "transformer"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_transformer_sizes(self)
        check(
            self.hidden_size % self.num_heads == 0,
            type(self).__name__,
            f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}",
        )
        hidden = self.hidden_size
        a_layer = hidden * (4 * hidden + 2 * self.intermediate_size)
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

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order in which OA's files have them; linear weights are [out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab_size, hidden),
            "positions.weight": (self.max_positions, hidden),
        }

        def add(name: str, *shape: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            add(f"{at}.attn_norm", hidden)
            for name in "qkvo":
                add(f"{at}.attn.{name}", hidden, hidden)
            add(f"{at}.mlp_norm", hidden)
            add(f"{at}.mlp.up", inner, hidden)
            add(f"{at}.mlp.down", hidden, inner)
        add("norm", hidden)
        add("head", self.vocab_size, hidden)
        return shapes
