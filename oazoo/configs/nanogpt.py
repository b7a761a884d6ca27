"""The configuration of GPT-2 and NanoGPT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oazoo.configs.fields import StrictJson, check, check_parameter_count, check_transformer_sizes

GELU_FORMS = ("gelu_tanh", "gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoGPTConfig(StrictJson):
    """A GPT-2 style language model: LayerNorm, learned positions, fused qkv, GELU.

    ``bias``: whether the linear layers have one; ``norm_bias`` the same of the norms, ``None`` for as ``bias`` says.
    ``activation``: ``"gelu_tanh"`` (GPT-2), or ``"gelu"``, the exact form with erf (PyTorch's default).
    """

    family: ClassVar[str] = "nanogpt"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    bias: bool = True
    norm_bias: bool | None = None
    activation: str = "gelu_tanh"

    def __post_init__(self) -> None:
        check_transformer_sizes(self)
        where = type(self).__name__
        check(
            self.hidden_size % self.num_heads == 0,
            where,
            f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}",
        )
        check(
            self.activation in GELU_FORMS,
            where,
            f"activation {self.activation[:64]!r} is not supported; supported: {', '.join(GELU_FORMS)}",
        )
        hidden = self.hidden_size
        a_layer = hidden * (4 * hidden + 3 * self.intermediate_size)
        check_parameter_count(
            self, (2 * self.vocab_size + self.max_positions) * hidden + self.num_layers * a_layer
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def has_norm_bias(self) -> bool:
        """Whether the norms have a bias."""
        return self.bias if self.norm_bias is None else self.norm_bias

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in]; qkv: q, k, v rows."""
        hidden, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "embed.weight": (self.vocab_size, hidden),
            "positions.weight": (self.max_positions, hidden),
        }

        def add(name: str, bias: bool, *shape: int) -> None:
            shapes[f"{name}.weight"] = shape
            if bias:
                shapes[f"{name}.bias"] = shape[:1]

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            add(f"{at}.attn_norm", self.has_norm_bias, hidden)
            add(f"{at}.attn.qkv", self.bias, 3 * hidden, hidden)
            add(f"{at}.attn.o", self.bias, hidden, hidden)
            add(f"{at}.mlp_norm", self.has_norm_bias, hidden)
            add(f"{at}.mlp.up", self.bias, inner, hidden)
            add(f"{at}.mlp.down", self.bias, hidden, inner)
        add("norm", self.has_norm_bias, hidden)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes
