"""The Llama family on its way out: which architecture's settings express a decoder, in both namings."""

from __future__ import annotations

from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.llama import gguf_rules, hf_rules
from oazoo.translators.rope_out import gguf_rope_settings, hf_rope_settings

_QWEN2_BIASES = (True, False, False)


def _biases(config: DecoderConfig) -> tuple[bool, bool, bool]:
    return config.attention_bias, config.attention_output_bias, config.mlp_bias


def _no_experts(config: DecoderConfig) -> None:
    if config.num_experts:
        raise TranslationError("it has no experts")


def _hf(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> Outgoing:
    _no_experts(config)
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
        **own,
    }
    return Outgoing("hf", architecture, settings, hf_rules(config))


def _hf_llama(config: DecoderConfig) -> Outgoing:
    if config.sliding_window is not None:
        raise TranslationError("it has no sliding window")
    if config.attention_bias != config.attention_output_bias:
        raise TranslationError("it has biases on q, k, v and o together or on none of them")
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return _hf(config, "LlamaForCausalLM", "llama", **biases)


def _hf_mistral(config: DecoderConfig) -> Outgoing:
    if any(_biases(config)):
        raise TranslationError("it has no biases")
    if config.layer_types is not None:
        raise TranslationError("its layers all have the same attention window")
    return _hf(config, "MistralForCausalLM", "mistral", sliding_window=config.sliding_window)


def _hf_qwen2(config: DecoderConfig) -> Outgoing:
    if _biases(config) != _QWEN2_BIASES:
        raise TranslationError("it has biases on q, k and v, and no other")
    if config.sliding_window is None:
        return _hf(config, "Qwen2ForCausalLM", "qwen2", use_sliding_window=False, sliding_window=None)
    types = config.layer_types or ("sliding",) * config.num_layers
    window = {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": next((n for n, kind in enumerate(types) if kind == "sliding"), len(types)),
        "layer_types": [f"{kind}_attention" for kind in types],
    }
    return _hf(config, "Qwen2ForCausalLM", "qwen2", **window)


def _gguf(config: DecoderConfig, arch: str) -> Outgoing:
    _no_experts(config)
    at = f"{arch}."
    rope, extra = gguf_rope_settings(config, arch)
    settings: dict[str, Any] = {
        "general.architecture": arch,
        at + "context_length": config.max_positions,
        at + "embedding_length": config.hidden_size,
        at + "block_count": config.num_layers,
        at + "feed_forward_length": config.intermediate_size,
        at + "attention.head_count": config.num_heads,
        at + "attention.head_count_kv": config.num_kv_heads,
        at + "attention.key_length": config.head_dim,
        at + "attention.value_length": config.head_dim,
        at + "attention.layer_norm_rms_epsilon": config.norm_eps,
        at + "vocab_size": config.vocab_size,
        **rope,
    }
    notes: tuple[str, ...] = ()
    if config.sliding_window is not None:
        if config.layer_types is not None:
            raise TranslationError("its layers all have the same attention window")
        settings[at + "attention.sliding_window"] = config.sliding_window
        notes = (
            f"llama.cpp lets {arch!r} models attend to everything: beyond {config.sliding_window} tokens its answers "
            "differ from this model's",
        )
    return Outgoing("gguf", arch, settings, gguf_rules(config, arch), extra, notes)


def _gguf_llama(config: DecoderConfig) -> Outgoing:
    return _gguf(config, "llama")


def _gguf_qwen2(config: DecoderConfig) -> Outgoing:
    if _biases(config) != _QWEN2_BIASES:
        raise TranslationError("it has biases on q, k and v, and no other")
    return _gguf(config, "qwen2")


EXPORTERS = (
    Exporter("decoder", "hf", "LlamaForCausalLM", _hf_llama),
    Exporter("decoder", "hf", "MistralForCausalLM", _hf_mistral),
    Exporter("decoder", "hf", "Qwen2ForCausalLM", _hf_qwen2),
    Exporter("decoder", "gguf", "qwen2", _gguf_qwen2),
    Exporter("decoder", "gguf", "llama", _gguf_llama),
)
