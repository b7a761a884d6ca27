"""OLMo 2: norms only on what a sublayer gives back, and over all queries and all keys of a token at once."""

from __future__ import annotations

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.decoders import (
    GGUF_IGNORED,
    GGUF_NAMES,
    GGUF_NEUTRAL,
    HF_IGNORED,
    HF_NAMES,
    HF_NEUTRAL,
    SILU,
    decoder_rules,
    gguf_sizes,
    gguf_unknown,
    hf_sizes,
    hf_tied,
    one_of,
    refuse_active,
    tied_copy,
)
from oazoo.translators.decoders_out import gguf_outgoing, hf_settings, require, require_plain, require_square
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rope import hf_rope
from oazoo.translators.translator import Checkpoint, Translation, Translator

_HF_NAMES = {
    **HF_NAMES,
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_FORM = {"qk_norm": "full", "pre_norm": False, "post_norm": True}


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings = checkpoint.settings()
    refuse_active(settings, "", HF_NEUTRAL | {"sliding_window": ()}, "OLMo 2")
    one_of(settings, "hidden_act", "silu", SILU, "OLMo 2")
    notes: list[str] = []
    theta, scaling = hf_rope(settings)
    bias = settings.boolean("attention_bias", False)
    config = DecoderConfig(
        **hf_sizes(settings),
        norm_eps=settings.number("rms_norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=hf_tied(settings, checkpoint, notes),
        attention_bias=bias,
        attention_output_bias=bias,
        **_FORM,  # type: ignore[arg-type]
    )
    ignored, equal = tied_copy(config, checkpoint)
    rules = decoder_rules(config, _HF_NAMES, "model.layers.{}")
    return Translation(config, rules, [*HF_IGNORED, *ignored], notes, equal)


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    refuse_active(meta, "olmo2.", GGUF_NEUTRAL, "the architecture 'olmo2'")
    if meta.get("olmo2.attention.sliding_window"):
        raise TranslationError(
            f"{meta.where}: olmo2.attention.sliding_window: OLMo 3's attention windows are not supported"
        )
    notes: list[str] = []
    config = DecoderConfig(
        **gguf_sizes(meta, "olmo2", source, notes),
        norm_eps=meta.number("olmo2.attention.layer_norm_rms_epsilon"),
        **_FORM,  # type: ignore[arg-type]
    )
    gguf_unknown(meta, "olmo2", notes)
    return Translation(config, decoder_rules(config, GGUF_NAMES, "blk.{}"), GGUF_IGNORED, notes)


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (Translator("olmo2", "OLMo 2", ("gguf:olmo2", "hf:Olmo2ForCausalLM"), _translate),)


# Out


def _check(config: DecoderConfig, *stated: str) -> None:
    form = {name: getattr(config, name) for name in _FORM}
    require(
        form == _FORM, "it has norms after each sublayer alone, and over all of a token's queries and keys"
    )
    require_plain(config, *_FORM, *stated)


def _hf(config: DecoderConfig) -> Outgoing:
    biases = ("attention_bias", "attention_output_bias")
    require(config.attention_bias == config.attention_output_bias, "it has biases on q, k, v and o together")
    _check(config, *biases)
    settings = hf_settings(config, "Olmo2ForCausalLM", "olmo2", attention_bias=config.attention_bias)
    return Outgoing("hf", "Olmo2ForCausalLM", settings, decoder_rules(config, _HF_NAMES, "model.layers.{}"))


def _gguf(config: DecoderConfig) -> Outgoing:
    _check(config)
    require(not config.tied_embeddings, "llama.cpp wants a head of its own, this model shares the embedding")
    require_square(config)
    return gguf_outgoing(config, "olmo2", decoder_rules(config, GGUF_NAMES, "blk.{}"), {})


EXPORTERS = (
    Exporter("decoder", "hf", "Olmo2ForCausalLM", _hf),
    Exporter("decoder", "gguf", "olmo2", _gguf),
)
