"""The Llama family on its way out: which architecture's settings express a decoder, in both namings."""

from __future__ import annotations

from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.translators.decoders_out import (
    gguf_outgoing,
    gguf_window,
    hf_layer_types,
    hf_settings,
    require,
    require_plain,
)
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.llama import gguf_rules, hf_rules

_BIASES = ("attention_bias", "attention_output_bias", "mlp_bias")
_WINDOW = ("sliding_window", "layer_types")
_QWEN2_BIASES = (True, False, False)


def _biases(config: DecoderConfig) -> tuple[bool, bool, bool]:
    return config.attention_bias, config.attention_output_bias, config.mlp_bias


def _hf(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> Outgoing:
    return Outgoing(
        "hf", architecture, hf_settings(config, architecture, model_type, **own), hf_rules(config)
    )


def _hf_llama(config: DecoderConfig) -> Outgoing:
    require(config.sliding_window is None, "it has no sliding window")
    require(
        config.attention_bias == config.attention_output_bias,
        "it has biases on q, k, v and o together or on none of them",
    )
    require_plain(config, *_BIASES)
    biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return _hf(config, "LlamaForCausalLM", "llama", **biases)


def _hf_mistral(config: DecoderConfig) -> Outgoing:
    require(not any(_biases(config)), "it has no biases")
    require(config.layer_types is None, "its layers all have the same attention window")
    require_plain(config, "sliding_window")
    return _hf(config, "MistralForCausalLM", "mistral", sliding_window=config.sliding_window)


def _hf_qwen2(config: DecoderConfig) -> Outgoing:
    require(_biases(config) == _QWEN2_BIASES, "it has biases on q, k and v, and no other")
    require_plain(config, *_BIASES, *_WINDOW)
    return _hf(config, "Qwen2ForCausalLM", "qwen2", **_qwen_window(config))


def _qwen_window(config: DecoderConfig) -> dict[str, Any]:
    if config.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None}
    types = config.layer_types or ("sliding",) * config.num_layers
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": next((n for n, kind in enumerate(types) if kind == "sliding"), len(types)),
        "layer_types": hf_layer_types(config),
    }


def _hf_qwen3(config: DecoderConfig) -> Outgoing:
    require(config.qk_norm == "head", "it has norms over each head's queries and keys")
    require(
        config.attention_bias == config.attention_output_bias and not config.mlp_bias,
        "it has biases on q, k, v and o together or on none of them, and none in the MLP",
    )
    require_plain(config, "attention_bias", "attention_output_bias", *_WINDOW, "qk_norm")
    window = _qwen_window(config)
    return _hf(config, "Qwen3ForCausalLM", "qwen3", attention_bias=config.attention_bias, **window)


def _gguf(config: DecoderConfig, arch: str) -> Outgoing:
    own, notes = gguf_window(config, arch)
    return gguf_outgoing(config, arch, gguf_rules(config, arch), own, notes)


def _gguf_llama(config: DecoderConfig) -> Outgoing:
    require_plain(config, *_BIASES, *_WINDOW)
    return _gguf(config, "llama")


def _gguf_qwen2(config: DecoderConfig) -> Outgoing:
    require(_biases(config) == _QWEN2_BIASES, "it has biases on q, k and v, and no other")
    require_plain(config, *_BIASES, *_WINDOW)
    return _gguf(config, "qwen2")


def _gguf_qwen3(config: DecoderConfig) -> Outgoing:
    require(config.qk_norm == "head", "it has norms over each head's queries and keys")
    require_plain(config, *_WINDOW, "qk_norm")
    return _gguf(config, "qwen3")


EXPORTERS = (
    Exporter("decoder", "hf", "LlamaForCausalLM", _hf_llama),
    Exporter("decoder", "hf", "MistralForCausalLM", _hf_mistral),
    Exporter("decoder", "hf", "Qwen2ForCausalLM", _hf_qwen2),
    Exporter("decoder", "hf", "Qwen3ForCausalLM", _hf_qwen3),
    Exporter("decoder", "gguf", "qwen2", _gguf_qwen2),
    Exporter("decoder", "gguf", "qwen3", _gguf_qwen3),
    Exporter("decoder", "gguf", "llama", _gguf_llama),
)
