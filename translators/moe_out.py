"""Mixture-of-experts decoders on their way out, in both namings."""

from __future__ import annotations

from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.translators.decoders_out import gguf_outgoing, hf_settings, require
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.moe import MIXTRAL, QWEN2, QWEN3, gguf_rules, hf_rules


def _need_experts(config: DecoderConfig) -> None:
    require(config.num_experts > 0, "it has experts")
    require(not config.mlp_bias, "its feed-forward has no biases")


def _hf(config: DecoderConfig, architecture: str, model_type: str, **own: Any) -> Outgoing:
    _need_experts(config)
    own["num_experts_per_tok"] = config.experts_per_token
    settings = hf_settings(config, architecture, model_type, **own)
    return Outgoing("hf", architecture, settings, hf_rules(config, architecture == MIXTRAL))


def _mixtral(config: DecoderConfig) -> Outgoing:
    require(not config.attention_bias, "it has no biases")
    require(config.shared_expert_size == 0, "it has no shared expert")
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
    require(config.shared_expert_size > 0, "it has a shared expert")
    own = {"shared_expert_intermediate_size": config.shared_expert_size, "qkv_bias": config.attention_bias}
    return _qwen(config, QWEN2, "qwen2_moe", **own)


def _qwen3(config: DecoderConfig) -> Outgoing:
    require(config.qk_norm == "head", "it has norms on queries and keys")
    require(config.shared_expert_size == 0, "it has no shared expert")
    return _qwen(config, QWEN3, "qwen3_moe", attention_bias=config.attention_bias)


def _gguf(config: DecoderConfig, arch: str) -> Outgoing:
    _need_experts(config)
    require(config.dense_layers is None, "all its layers have experts")
    own: dict[str, Any] = {
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
    }
    if config.sliding_window is not None:
        own["attention.sliding_window"] = config.sliding_window
    if arch != "llama":
        own["expert_feed_forward_length"] = config.expert_size
        own["expert_weights_norm"] = config.normalize_experts
    if config.shared_expert_size:
        own["expert_shared_feed_forward_length"] = config.shared_expert_size
    return gguf_outgoing(config, arch, gguf_rules(config, arch), own)


def _gguf_llama(config: DecoderConfig) -> Outgoing:
    require(
        config.qk_norm is None and config.shared_expert_size == 0,
        "it has no norms on q and k, and no shared expert",
    )
    return _gguf(config, "llama")


def _gguf_qwen2(config: DecoderConfig) -> Outgoing:
    require(config.shared_expert_size > 0, "it has a shared expert")
    return _gguf(config, "qwen2moe")


def _gguf_qwen3(config: DecoderConfig) -> Outgoing:
    require(
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
