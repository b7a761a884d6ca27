"""What the exporters of decoder families share: settings that all of them state, and refusing what one cannot state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.decoders import GGUF_GELU
from oazoo.translators.exporter import Outgoing
from oazoo.translators.rope_out import gguf_rope_settings, hf_rope_settings
from oazoo.translators.rules import Rule

#: What every exporter states.
_ALWAYS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "norm_eps",
    "rope_theta",
    "max_positions",
    "tied_embeddings",
    "rope_scaling",
}


def require(condition: bool, what: str) -> None:
    """Refuse a model that an architecture cannot express."""
    if not condition:
        raise TranslationError(what)


def require_plain(config: DecoderConfig, *stated: str) -> None:
    """Refuse fields beyond the common ones and ``stated`` that are not at their default."""
    for field in dataclasses.fields(config):
        if field.name in _ALWAYS or field.name in stated:
            continue
        value = getattr(config, field.name)
        require(value == field.default, f"it has no way to say {field.name} = {str(value)[:40]}")


def require_square(config: DecoderConfig) -> None:
    """Refuse heads that are together wider or narrower than the model."""
    require(
        config.num_heads * config.head_dim == config.hidden_size,
        "its heads are together as wide as the model",
    )


def hf_settings(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> dict[str, Any]:
    """``config.json`` as far as Llama's relatives agree; ``own`` replaces and adds, None takes away."""
    settings = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        **hf_rope_settings(config),
    }
    return settings | own


def hf_layer_types(config: DecoderConfig) -> list[str]:
    """The type of every layer, as Hugging Face configs name it."""
    return [
        "sliding_attention" if config.is_sliding(layer) else "full_attention"
        for layer in range(config.num_layers)
    ]


def gguf_window(config: DecoderConfig, arch: str) -> tuple[dict[str, Any], list[str]]:
    """The setting of one attention window for all layers, and a note where llama.cpp does not heed it."""
    if config.sliding_window is None:
        return {}, []
    require(config.layer_types is None, "its layers all have the same attention window")
    note = (
        f"llama.cpp lets {arch!r} models attend to everything: beyond {config.sliding_window} tokens its answers differ "
        "from this model's"
    )
    return {"attention.sliding_window": config.sliding_window}, [note]


def gguf_gelu(activation: str, arch: str) -> tuple[dict[str, Any], list[str]]:
    """The setting that states the form of GELU in GGUF, and a note where llama.cpp computes another."""
    require(activation in ("gelu", "gelu_tanh"), f"its activation is GELU, this model's is {activation}")
    if activation == "gelu_tanh":
        return {}, []
    note = f"llama.cpp computes GELU in its tanh form for {arch!r}, this model in the exact one: its logits differ a little"
    return {GGUF_GELU: activation}, [note]


def gguf_outgoing(
    config: DecoderConfig,
    arch: str,
    rules: Sequence[Rule],
    own: dict[str, Any],
    notes: Sequence[str] = (),
    *,
    norm: str = "layer_norm_rms_epsilon",
    besides: Mapping[str, Any] | None = None,
    reads_as: DecoderConfig | None = None,
) -> Outgoing:
    """GGUF metadata as far as decoders agree; ``own`` has keys without the architecture's prefix, ``besides`` whole ones."""
    at = f"{arch}."
    rope, extra = gguf_rope_settings(config, arch)
    common: dict[str, Any] = {
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{norm}": config.norm_eps,
        "vocab_size": config.vocab_size,
    }
    settings: dict[str, Any] = {"general.architecture": arch}
    settings |= {at + key: value for key, value in (common | own).items()} | dict(besides or {})
    return Outgoing("gguf", arch, settings | rope, rules, extra, tuple(notes), reads_as)
