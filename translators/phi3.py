"""Phi-3 and Phi-4-mini: Llama's form with q, k and v in one weight, gate and up in another, and LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping

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
from oazoo.translators.decoders_out import (
    gguf_outgoing,
    gguf_window,
    hf_settings,
    require,
    require_plain,
    require_square,
)
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rope import hf_rope, hf_rotary_dim
from oazoo.translators.rules import Identity, Rule, Slice, Transform
from oazoo.translators.translator import Checkpoint, Translation, Translator

_HF_NAMES = {
    **HF_NAMES,
    **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj"),
}
_GGUF_NAMES = {
    **GGUF_NAMES,
    **dict.fromkeys(("attn.q", "attn.k", "attn.v"), "attn_qkv"),
    **dict.fromkeys(("mlp.gate", "mlp.up"), "ffn_up"),
}
_STATED = ("rotary_dim", "sliding_window")


def _rules(config: DecoderConfig, names: Mapping[str, str], layer: str) -> list[Rule]:
    q, kv, inner = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    rows = {
        "attn.q": Slice(0, 0, q, q + 2 * kv),
        "attn.k": Slice(0, q, q + kv, q + 2 * kv),
        "attn.v": Slice(0, q + kv, q + 2 * kv, q + 2 * kv),
        "mlp.gate": Slice(0, 0, inner, 2 * inner),
        "mlp.up": Slice(0, inner, 2 * inner, 2 * inner),
    }

    def transform(part: str) -> Transform:
        return rows.get(part, Identity())

    return decoder_rules(config, names, layer, transform)


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings = checkpoint.settings()
    refuse_active(settings, "", HF_NEUTRAL, "Phi-3", "partial_rotary_factor")
    one_of(settings, "hidden_act", "silu", SILU, "Phi-3")
    notes: list[str] = []
    sizes = hf_sizes(settings)
    theta, scaling = hf_rope(settings)
    if scaling is not None and scaling.kind != "longrope":
        raise TranslationError(
            f"{settings.where}: rotary scaling {scaling.kind!r} is not supported for Phi-3; supported: none, longrope"
        )
    config = DecoderConfig(
        **sizes,
        norm_eps=settings.number("rms_norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=hf_rotary_dim(settings, sizes["head_dim"]),
        tied_embeddings=hf_tied(settings, checkpoint, notes),
        sliding_window=settings.integer("sliding_window") if "sliding_window" in settings else None,
    )
    ignored, equal = tied_copy(config, checkpoint)
    return Translation(
        config, _rules(config, _HF_NAMES, "model.layers.{}"), [*HF_IGNORED, *ignored], notes, equal
    )


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    refuse_active(meta, "phi3.", GGUF_NEUTRAL, "the architecture 'phi3'")
    notes: list[str] = []
    config = DecoderConfig(
        **gguf_sizes(meta, "phi3", source, notes),
        norm_eps=meta.number("phi3.attention.layer_norm_rms_epsilon"),
        sliding_window=meta.integer("phi3.attention.sliding_window", 0) or None,
    )
    gguf_unknown(meta, "phi3", notes)
    fused = "blk.0.attn_qkv.weight" in source
    names = _GGUF_NAMES if fused else {**GGUF_NAMES, "mlp.gate": "ffn_up"}
    rules = _rules(config, names, "blk.{}")
    if not fused:
        # Some files hold q, k and v apart.
        rules = [Rule(r.target, r.sources) if ".attn." in r.target else r for r in rules]
    return Translation(config, rules, GGUF_IGNORED, notes)


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (Translator("phi3", "Phi-3, Phi-4-mini", ("gguf:phi3", "hf:Phi3ForCausalLM"), _translate),)


# Out


def _hf(config: DecoderConfig) -> Outgoing:
    require_plain(config, *_STATED)
    scaling, own = config.rope_scaling, {"sliding_window": config.sliding_window}
    if scaling is not None:
        require(scaling.kind == "longrope", f"its rotary scaling is LongRoPE, this model's is {scaling.kind}")
        own["original_max_position_embeddings"] = scaling.original_max_positions
    settings = hf_settings(config, "Phi3ForCausalLM", "phi3", **own)
    return Outgoing("hf", "Phi3ForCausalLM", settings, _rules(config, _HF_NAMES, "model.layers.{}"))


def _gguf(config: DecoderConfig) -> Outgoing:
    require_plain(config, *_STATED)
    require_square(config)
    own, notes = gguf_window(config, "phi3")
    return gguf_outgoing(config, "phi3", _rules(config, _GGUF_NAMES, "blk.{}"), own, notes)


EXPORTERS = (
    Exporter("decoder", "hf", "Phi3ForCausalLM", _hf),
    Exporter("decoder", "gguf", "phi3", _gguf),
)
