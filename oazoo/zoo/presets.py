"""Models to train from nothing, by name: their configurations, their tokenizers, and settings that suit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig, TransformerConfig
from oazoo.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """A model to train from nothing.

    Attributes:
        about: a line on it.
        config: its configuration, from the size of the vocabulary and the longest sequence (None: the preset's own).
        vocab_size: tokens of the vocabulary that is learned from the data; None for the 256 bytes.
        context: its longest sequence unless one is asked for.
        settings: training settings that differ from the general ones.
    """

    about: str
    config: Callable[[int, int], ModelConfig]
    vocab_size: int | None
    context: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def _decoder(hidden: int, layers: int, heads: int, inner: int) -> Callable[[int, int], ModelConfig]:
    """Rotary positions, RMSNorm, SwiGLU, tied embeddings: what Llama has, small."""

    def make(vocabulary: int, context: int) -> ModelConfig:
        return DecoderConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            max_positions=context,
            tied_embeddings=True,
        )

    return make


def _nanogpt(hidden: int, layers: int, heads: int) -> Callable[[int, int], ModelConfig]:
    """LayerNorm, learned positions, GELU, tied embeddings: what GPT-2 has, small."""

    def make(vocabulary: int, context: int) -> ModelConfig:
        return NanoGPTConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_layers=layers,
            num_heads=heads,
            norm_eps=1e-5,
            max_positions=context,
            tied_embeddings=True,
        )

    return make


def _oa_byte(vocabulary: int, context: int) -> ModelConfig:
    return TransformerConfig.byte_transformer()


PRESETS: dict[str, Preset] = {
    "bytelm-tiny": Preset("over bytes, 0.2 M parameters: minutes", _decoder(64, 3, 4, 192), None, 128),
    "bytelm-small": Preset("over bytes, 0.9 M parameters", _decoder(128, 4, 4, 352), None, 256),
    "bytelm-base": Preset("over bytes, 6 M parameters", _decoder(256, 8, 8, 704), None, 512),
    "nanogpt-tiny": Preset("GPT-2 style, 1.3 M parameters", _nanogpt(128, 4, 4), 2048, 128),
    "nanogpt-small": Preset("GPT-2 style, 2.4 M parameters", _nanogpt(192, 4, 6), 2048, 256),
    "nanogpt-base": Preset("GPT-2 style, 30 M parameters", _nanogpt(512, 8, 8), 8192, 512),
    "oa-bytetransformer": Preset("OA's ByteTransformer, 25,760 parameters", _oa_byte, None, 16),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none; the message names those there are.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name[:60]!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
