"""Models to train from nothing, by name: their configurations, their tokenizers, and settings that suit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig, TransformerConfig
from oazoo.errors import UsageError
from oazoo.text.vocabulary import VocabularyKind

#: Tokens of a row of OA's models, and of their BPE vocabularies at most: the 256 bytes and as many merges.
OA_CONTEXT = 16
OA_BPE_SIZE = 512


@dataclass(frozen=True)
class Preset:
    """A model to train from nothing.

    Attributes:
        about: a line on it.
        config: its configuration, from the size of the vocabulary and the longest sequence (None: the preset's own).
        vocabulary: the kind of its vocabulary; all but the bytes are learned from the data.
        vocab_size: tokens of a vocabulary of kind ``bpe`` or ``words`` at most; None for the others.
        context: its longest sequence unless one is asked for.
        settings: training settings that differ from the general ones.
    """

    about: str
    config: Callable[[int, int], ModelConfig]
    vocabulary: VocabularyKind
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


def _oa_transformer(vocabulary: int, context: int) -> ModelConfig:
    return replace(TransformerConfig.byte_transformer(), vocab_size=vocabulary, max_positions=context)


def _oa_moe_transformer(vocabulary: int, context: int) -> ModelConfig:
    return replace(TransformerConfig.byte_moe_transformer(), vocab_size=vocabulary, max_positions=context)


#: OA's small language models: its name for the architecture, and the configuration with the sizes that OA's model over
#: bytes has, whatever the vocabulary (OA states none for the others).
_OA_ARCHITECTURES: dict[str, Callable[[int, int], ModelConfig]] = {
    "Transformer": _oa_transformer,
    "MoeTransformer": _oa_moe_transformer,
}
#: Each comes over each kind of vocabulary: OA's prefix, how many tokens at most, and the line on it.
_OA_VOCABULARIES: dict[VocabularyKind, tuple[str, int | None, str]] = {
    "byte": ("Byte", None, "over bytes"),
    "char": ("Char", None, "over the characters of the text"),
    "bpe": ("Bpe", OA_BPE_SIZE, f"over OA's BPE, {OA_BPE_SIZE} tokens at most"),
}


def _oa_presets() -> dict[str, Preset]:
    return {
        f"oa-{prefix}{name}".lower(): Preset(f"OA's {prefix}{name}: {about}", config, kind, size, OA_CONTEXT)
        for name, config in _OA_ARCHITECTURES.items()
        for kind, (prefix, size, about) in _OA_VOCABULARIES.items()
    }


PRESETS: dict[str, Preset] = {
    "bytelm-tiny": Preset(
        "over bytes, 0.2 M parameters: minutes", _decoder(64, 3, 4, 192), "byte", None, 128
    ),
    "bytelm-small": Preset("over bytes, 0.9 M parameters", _decoder(128, 4, 4, 352), "byte", None, 256),
    "bytelm-base": Preset("over bytes, 6 M parameters", _decoder(256, 8, 8, 704), "byte", None, 512),
    "nanogpt-tiny": Preset("GPT-2 style, 1.3 M parameters", _nanogpt(128, 4, 4), "words", 2048, 128),
    "nanogpt-small": Preset("GPT-2 style, 2.4 M parameters", _nanogpt(192, 4, 6), "words", 2048, 256),
    "nanogpt-base": Preset("GPT-2 style, 30 M parameters", _nanogpt(512, 8, 8), "words", 8192, 512),
    **_oa_presets(),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none; the message names those there are.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name[:60]!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
