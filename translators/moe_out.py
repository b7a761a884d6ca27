"""Mixture-of-experts decoders on their way out, in both namings."""

from __future__ import annotations

from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.moe import MIXTRAL, QWEN2, QWEN3, gguf_rules, hf_rules
from oazoo.translators.rope_out import gguf_rope_settings, hf_rope_settings


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise TranslationError(why)


def _need_experts(config: DecoderConfig) -> None:
    _need(config.num_experts > 0, "it has experts")
    _need(not config.mlp_bias, "its feed-forward has no biases")


def _hf(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> Outgoing:
    _need_experts(config)
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
        "num_experts_per_tok": config.experts_per_token,
        **hf_rope_settings(config),
        **own,
    }
    return Outgoing("hf", architecture, settings, hf_rules(config, architecture == MIXTRAL))


def _mixtral(config: DecoderConfig) -> Outgoing:
    _need(not config.attention_bias, "it has no biases")
    _need(config.shared_expert_size == 0, "it has no shared expert")
    return _hf(
        config, MIXTRAL, "mixtral", num_local_experts=config.num_experts, sliding_window=config.sliding_window
    )


def _qwen(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> Outgoing:
    return _hf(
        config,
        architecture,
        model_type,
        num_experts=config.num_experts,
        moe_intermediate_size=config.expert_size,
        norm_topk_prob=config.normalize_experts,
        decoder_sparse_step=1,
        mlp_only_layers=list(config.dense_layers or ()),
        use_sliding_window=config.sliding_window is not None,
        sliding_window=config.sliding_window,
        **own,
    )


def _qwen2(config: DecoderConfig) -> Outgoing:
    _need(config.shared_expert_size > 0, "it has a shared expert")
    own = {"shared_expert_intermediate_size": config.shared_expert_size, "qkv_bias": config.attention_bias}
    return _qwen(config, QWEN2, "qwen2_moe", **own)


def _qwen3(config: DecoderConfig) -> Outgoing:
    _need(config.qk_norm == "head", "it has norms on queries and keys")
    _need(config.shared_expert_size == 0, "it has no shared expert")
    return _qwen(config, QWEN3, "qwen3_moe", attention_bias=config.attention_bias)


def _gguf(config: DecoderConfig, arch: str) -> Outgoing:
    _need_experts(config)
    _need(config.dense_layers is None, "all its layers have experts")
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
        at + "expert_count": config.num_experts,
        at + "expert_used_count": config.experts_per_token,
        **rope,
    }
    if config.sliding_window is not None:
        settings[at + "attention.sliding_window"] = config.sliding_window
    if arch != "llama":
        settings[at + "expert_feed_forward_length"] = config.expert_size
        settings[at + "expert_weights_norm"] = config.normalize_experts
    if config.shared_expert_size:
        settings[at + "expert_shared_feed_forward_length"] = config.shared_expert_size
    return Outgoing("gguf", arch, settings, gguf_rules(config, arch), extra)


def _gguf_llama(config: DecoderConfig) -> Outgoing:
    _need(
        config.qk_norm is None and config.shared_expert_size == 0,
        "it has no norms on q and k, and no shared expert",
    )
    return _gguf(config, "llama")


def _gguf_qwen2(config: DecoderConfig) -> Outgoing:
    _need(config.shared_expert_size > 0, "it has a shared expert")
    return _gguf(config, "qwen2moe")


def _gguf_qwen3(config: DecoderConfig) -> Outgoing:
    _need(
        config.qk_norm == "head" and config.shared_expert_size == 0,
        "it has norms on q and k, and no shared expert",
    )
    return _gguf(config, "qwen3moe")


EXPORTERS = (
    Exporter("decoder", "hf", MIXTRAL, _mixtral),
    Exporter("decoder", "hf", QWEN2, _qwen2),
    Exporter("decoder", "hf", QWEN3, _qwen3),
    Exporter("decoder", "gguf", "llama", _gguf_llama),
    Exporter("decoder", "gguf", "qwen2moe", _gguf_qwen2),
    Exporter("decoder", "gguf", "qwen3moe", _gguf_qwen3),
)
