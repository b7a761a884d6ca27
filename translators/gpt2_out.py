"""GPT-2 and NanoGPT on their way out, in both namings."""

from __future__ import annotations

from typing import Any

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.translators.decoders_out import gguf_gelu
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.gpt2 import gguf_rules, hf_rules


def _check(config: NanoGPTConfig) -> None:
    if not (config.bias and config.has_norm_bias):
        raise TranslationError("GPT-2 has a bias in every linear layer and norm, this model has not")


def _hf(config: NanoGPTConfig) -> Outgoing:
    _check(config)
    settings: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_inner": config.intermediate_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_positions,
        "n_ctx": config.max_positions,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tied_embeddings,
    }
    return Outgoing("hf", "GPT2LMHeadModel", settings, hf_rules(config))


def _gguf(config: NanoGPTConfig) -> Outgoing:
    _check(config)
    settings: dict[str, Any] = {
        "general.architecture": "gpt2",
        "gpt2.context_length": config.max_positions,
        "gpt2.embedding_length": config.hidden_size,
        "gpt2.block_count": config.num_layers,
        "gpt2.feed_forward_length": config.intermediate_size,
        "gpt2.attention.head_count": config.num_heads,
        "gpt2.attention.layer_norm_epsilon": config.norm_eps,
        "gpt2.vocab_size": config.vocab_size,
    }
    form, notes = gguf_gelu(config.activation, "gpt2")
    return Outgoing("gguf", "gpt2", settings | form, gguf_rules(config), notes=tuple(notes))


EXPORTERS = (
    Exporter("nanogpt", "hf", "GPT2LMHeadModel", _hf),
    Exporter("nanogpt", "gguf", "gpt2", _gguf),
)
