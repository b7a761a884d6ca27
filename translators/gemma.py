"""Gemma 2 and Gemma 3 (text): norms before and after each sublayer, GeGLU, alternating attention windows.

Hugging Face checkpoints hold norm weights w that mean 1 + w; GGUF files hold the sum. Both are kept as they are, and
``norm_offset`` says which. Scores are scaled by ``query_pre_attn_scalar`` ^ -0.5; GGUF does not state that number, and
llama.cpp derives it: from the head width, but from hidden size and heads in the 27B models, which it tells by their layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from oazoo.configs import DecoderConfig, RopeScaling
from oazoo.errors import TranslationError
from oazoo.translators.decoders import (
    GELU,
    GGUF_IGNORED,
    GGUF_NAMES,
    GGUF_NEUTRAL,
    HF_IGNORED,
    HF_NAMES,
    HF_NEUTRAL,
    decoder_rules,
    gguf_sizes,
    gguf_unknown,
    hf_layer_types,
    hf_sizes,
    hf_tied,
    one_layer_type,
    one_of,
    refuse_active,
    tied_copy,
)
from oazoo.translators.decoders_out import gguf_outgoing, hf_settings, require, require_plain
from oazoo.translators.decoders_out import hf_layer_types as layer_types_out
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rope import hf_rope
from oazoo.translators.rope_out import hf_rope_settings
from oazoo.translators.rules import Identity, Ignored, Offset, Rule, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_HF_NAMES = {
    **HF_NAMES,
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
#: Layers of a 27B model, and every how many layers attention is full.
_LARGE = {"gemma2": 46, "gemma3": 62}
_PERIOD = {"gemma2": 2, "gemma3": 6}
_LOCAL_THETA = 10000.0
#: The name of Gemma 3 with its vision tower, and the tensors of that.
_SEES = "Gemma3ForConditionalGeneration"
_VISION = Ignored(
    r"(model\.)?(vision_tower|multi_modal_projector)\..*", "sees images: only the language model is taken"
)
#: What transformers takes for a setting that a config leaves out; published configs of Gemma 3 leave out most. Null is
#: a value for some: no cap, no window.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "vocab_size": 256000,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
}
_NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
#: Fields beyond Llama's that both generations state, or fix to one value.
_STATED = (
    "norm_offset",
    "post_norm",
    "activation",
    "embedding_scale",
    "attention_scale",
    "sliding_window",
    "layer_types",
)


def _rules(config: DecoderConfig, names: Mapping[str, str], layer: str, offset: float = 0.0) -> list[Rule]:
    def transform(part: str) -> Transform:
        return Offset(offset) if offset and part.endswith("norm") else Identity()

    return decoder_rules(config, names, layer, transform)


def _scale(scalar: float, head_dim: int) -> float | None:
    """The factor on scores, None if it is the one of the head's width."""
    return None if math.isclose(scalar, head_dim, rel_tol=1e-9) else scalar**-0.5


def _text_settings(checkpoint: Checkpoint) -> tuple[Settings, str]:
    """Settings of the language model, with transformers' defaults for those it leaves out; and the generation."""
    settings = checkpoint.settings()
    kind = "gemma3" if str(settings.get("model_type")).startswith("gemma3") else "gemma2"
    text: Mapping[str, Any] = settings.values
    where = settings.where
    if _SEES in checkpoint.declared:
        kind, where = "gemma3", f"{where}: text_config"
        text = Settings(settings.get("text_config"), where).values
        if "tie_word_embeddings" in settings:
            text = {"tie_word_embeddings": settings.boolean("tie_word_embeddings"), **text}
    return Settings(
        _DEFAULTS[kind] | {k: v for k, v in text.items() if v is not None or k in _NULLABLE}, where
    ), kind


def _hf_names(checkpoint: Checkpoint) -> tuple[Mapping[str, str], str]:
    """Names of parts, and of a layer: those of the model with a vision tower have a prefix, two forms of which are known."""
    for prefix in ("language_model.model", "model.language_model"):
        if f"{prefix}.embed_tokens.weight" in checkpoint.source:
            head = f"{prefix.removesuffix('.model')}.lm_head"
            own = {
                "embed": f"{prefix}.embed_tokens",
                "norm": f"{prefix}.norm",
                "head": head if f"{head}.weight" in checkpoint.source else "lm_head",
            }
            return {**_HF_NAMES, **own}, f"{prefix}.layers.{{}}"
    return _HF_NAMES, "model.layers.{}"


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings, kind = _text_settings(checkpoint)
    title = "Gemma 2" if kind == "gemma2" else "Gemma 3"
    refuse_active(settings, "", HF_NEUTRAL, title, *_CAPS, "query_pre_attn_scalar")
    if settings.get("use_bidirectional_attention"):
        raise TranslationError(f"{settings.where}: use_bidirectional_attention is not supported for {title}")
    activation = one_of(settings, "hidden_activation", "gelu_pytorch_tanh", GELU, title)
    notes: list[str] = []
    names, layer = _hf_names(checkpoint)
    sizes = hf_sizes(settings)
    layers = sizes["num_layers"]
    types = hf_layer_types(settings, layers) or _default_types(settings, kind, layers)
    if "sliding" in types and "sliding_window" not in settings:
        raise TranslationError(f"{settings.where}: layer_types has sliding layers but sliding_window is null")
    sliding, types_or_none = one_layer_type(types, settings.integer("sliding_window", 1))
    theta, scaling, local = _hf_theta(settings, kind)
    if sliding is None or (local == theta and scaling is None):
        local = None  # not said where it makes no difference; scaling would, as sliding layers take none
    config = DecoderConfig(
        **sizes,
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        norm_offset=1.0,
        rope_theta=theta,
        rope_scaling=scaling,
        sliding_rope_theta=local,
        tied_embeddings=hf_tied(settings, checkpoint, notes, default=True, head=names["head"]),
        attention_bias=settings.boolean("attention_bias", False),
        attention_output_bias=settings.boolean("attention_bias", False),
        post_norm=True,
        activation=activation,
        qk_norm="head" if kind == "gemma3" else None,
        embedding_scale=sizes["hidden_size"] ** 0.5,
        attention_scale=_scale(settings.number("query_pre_attn_scalar"), sizes["head_dim"]),
        attention_softcap=_cap(settings, "attn_logit_softcapping"),
        logit_softcap=_cap(settings, "final_logit_softcapping"),
        sliding_window=sliding,
        layer_types=types_or_none,
    )
    ignored, equal = tied_copy(config, checkpoint, names["head"], names["embed"])
    if _SEES in checkpoint.declared:
        notes.append("the model also sees images; only its language model is taken")
        ignored.append(_VISION)
    return Translation(config, _rules(config, names, layer), [*HF_IGNORED, *ignored], notes, equal)


def _cap(settings: Settings, key: str) -> float | None:
    return settings.number(key) if key in settings else None


def _default_types(settings: Settings, kind: str, layers: int) -> tuple[str, ...]:
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    period = next((settings.integer(key) for key in keys if key in settings), _PERIOD[kind])
    if not 0 < period <= 4096 or not 0 < layers <= 4096:
        raise TranslationError(f"{settings.where}: a sliding_window_pattern of {period} for {layers} layers")
    return tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(layers))


def _hf_theta(settings: Settings, kind: str) -> tuple[float, RopeScaling | None, float | None]:
    """Theta and scaling of full attention, and theta of sliding layers where it differs."""
    if kind == "gemma2":
        return (*hf_rope(settings), None)
    # transformers 5 has a section for each type of layer, 4 states the sliding layers' theta alone.
    sections = settings.get("rope_parameters")
    nested = isinstance(sections, Mapping) and bool({"full_attention", "sliding_attention"} & set(sections))
    full = {**settings.values, "rope_parameters": sections.get("full_attention") if nested else sections}
    theta, scaling = hf_rope(Settings(full, settings.where), 1e6)
    local = Settings(
        {
            "max_position_embeddings": settings.get("max_position_embeddings"),
            "rope_theta": settings.get("rope_local_base_freq"),
            "rope_parameters": sections.get("sliding_attention") if nested else None,
        },
        f"{settings.where}: sliding layers",
    )
    local_theta, local_scaling = hf_rope(local, _LOCAL_THETA)
    if local_scaling is not None:
        raise TranslationError(f"{local.where}: rotary scaling of sliding layers is not supported")
    return theta, scaling, local_theta


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    kind = checkpoint.declared[0]
    at = f"{kind}."
    refuse_active(meta, at, GGUF_NEUTRAL, f"the architecture {kind!r}", *_CAPS)
    notes: list[str] = []
    sizes = gguf_sizes(meta, kind, source, notes)
    layers, hidden = sizes["num_layers"], sizes["hidden_size"]
    if not 0 < layers <= 4096:
        raise TranslationError(f"{meta.where}: {at}block_count = {layers} is out of range")
    if kind == "gemma3" and f"{at}rope.freq_base" not in meta:
        sizes["rope_theta"] = 1e6
    window, types = one_layer_type(
        _gguf_types(meta, kind, layers),
        meta.integer(at + "attention.sliding_window", 4096 if kind == "gemma2" else 0) or None,
    )
    local = meta.number(at + "rope.freq_base_swa", _LOCAL_THETA if kind == "gemma3" else sizes["rope_theta"])
    same = local == sizes["rope_theta"] and (kind == "gemma2" or sizes["rope_scaling"] is None)
    scalar = hidden / sizes["num_heads"] if layers == _LARGE[kind] else sizes["head_dim"]
    config = DecoderConfig(
        **sizes,
        norm_eps=meta.number(at + "attention.layer_norm_rms_epsilon"),
        sliding_rope_theta=None if window is None or same else local,
        post_norm=True,
        activation="gelu_tanh",
        qk_norm="head" if kind == "gemma3" else None,
        embedding_scale=hidden**0.5,
        attention_scale=_scale(scalar, sizes["head_dim"]),
        attention_softcap=meta.number(at + _CAPS[0], 50.0 if kind == "gemma2" else 0.0) or None,
        logit_softcap=meta.number(at + _CAPS[1], 30.0 if kind == "gemma2" else 0.0) or None,
        sliding_window=window,
        layer_types=types,
    )
    gguf_unknown(meta, kind, notes)
    return Translation(config, _rules(config, GGUF_NAMES, "blk.{}"), GGUF_IGNORED, notes)


def _gguf_types(meta: Settings, kind: str, layers: int) -> tuple[str, ...]:
    """The type of each layer: every n-th full, or as ``sliding_window_pattern`` lists them."""
    key = f"{kind}.attention.sliding_window_pattern"
    pattern = meta.get(key)
    if isinstance(pattern, (list, tuple)):
        if len(pattern) != layers or not all(isinstance(one, bool) for one in pattern):
            raise TranslationError(
                f"{meta.where}: {key} must say true or false for each of the {layers} layers"
            )
        return tuple("sliding" if one else "full" for one in pattern)
    period = meta.integer(key, _PERIOD[kind])
    if not 0 < period <= 4096:
        raise TranslationError(f"{meta.where}: {key} = {period} is out of range")
    return tuple("full" if (layer + 1) % period == 0 else "sliding" for layer in range(layers))


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (
    Translator(
        "gemma",
        "Gemma 2, Gemma 3 (text)",
        ("gguf:gemma2", "gguf:gemma3", "hf:Gemma2ForCausalLM", "hf:Gemma3ForCausalLM", f"hf:{_SEES}"),
        _translate,
    ),
)


# Out


def _check(config: DecoderConfig, kind: str) -> None:
    require(config.post_norm and config.pre_norm, "it has norms before and after each sublayer")
    require(config.activation == "gelu_tanh", "its activation is the tanh form of GELU")
    require(
        config.embedding_scale is not None
        and math.isclose(config.embedding_scale, config.hidden_size**0.5, rel_tol=1e-6),
        "it scales embeddings by the square root of the hidden size",
    )
    require(config.norm_offset in (0.0, 1.0), f"its norm weights mean 1 + w, not {config.norm_offset} + w")
    if kind == "gemma2":
        require_plain(config, *_STATED, "attention_softcap", "logit_softcap")
    else:
        require(config.qk_norm == "head", "it has norms over each head's queries and keys")
        require_plain(config, *_STATED, "qk_norm", "sliding_rope_theta", "logit_softcap")


def _hf(config: DecoderConfig, kind: str) -> Outgoing:
    _check(config, kind)
    name = "Gemma2ForCausalLM" if kind == "gemma2" else "Gemma3ForCausalLM"
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _plain_number(config.score_scale**-2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.sliding_window or config.max_positions,
        "layer_types": layer_types_out(config),
        "attention_bias": False,
    }
    if kind == "gemma3":
        full = hf_rope_settings(config)["rope_parameters"]
        local = config.sliding_rope_theta or (config.rope_theta if config.sliding_window else _LOCAL_THETA)
        own["rope_parameters"] = {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
        own["rope_local_base_freq"] = local
    settings = hf_settings(config, name, "gemma2" if kind == "gemma2" else "gemma3_text", **own)
    reads_as = dataclasses.replace(config, norm_offset=1.0)
    rules = _rules(config, _HF_NAMES, "model.layers.{}", 1.0 - config.norm_offset)
    return Outgoing("hf", name, settings, rules, reads_as=reads_as)


def _plain_number(value: float) -> float | int:
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-9) else value


def _gguf(config: DecoderConfig, kind: str) -> Outgoing:
    _check(config, kind)
    large = config.num_layers == _LARGE[kind]
    scalar = config.hidden_size / config.num_heads if large else config.head_dim
    require(
        math.isclose(config.score_scale, scalar**-0.5, rel_tol=1e-6),
        f"llama.cpp scales scores by {scalar:g}^-0.5, this model by {config.score_scale:g}",
    )
    period = _PERIOD[kind]
    wanted = ["full" if (n + 1) % period == 0 else "sliding" for n in range(config.num_layers)]
    require(
        config.sliding_window is not None
        and [("sliding" if config.is_sliding(n) else "full") for n in range(config.num_layers)] == wanted,
        f"its attention is full in every {period}th layer and slides in the others",
    )
    own: dict[str, Any] = {"attention.sliding_window": config.sliding_window}
    if kind == "gemma2":
        require(
            config.attention_softcap is not None and config.logit_softcap is not None,
            "it caps scores and logits",
        )
        require(config.tied_embeddings, "its head shares the embedding")
    else:
        require(
            math.isclose(config.sliding_rope_theta or config.rope_theta, _LOCAL_THETA),
            f"the rotary theta of its sliding layers is {_LOCAL_THETA:g}",
        )
    if config.attention_softcap is not None:
        own[_CAPS[0]] = config.attention_softcap
    if config.logit_softcap is not None:
        own[_CAPS[1]] = config.logit_softcap
    reads_as = dataclasses.replace(config, norm_offset=0.0)
    rules = _rules(config, GGUF_NAMES, "blk.{}", -config.norm_offset)
    return gguf_outgoing(config, kind, rules, own, reads_as=reads_as)


EXPORTERS = (
    Exporter("decoder", "hf", "Gemma2ForCausalLM", lambda config: _hf(config, "gemma2")),
    Exporter("decoder", "hf", "Gemma3ForCausalLM", lambda config: _hf(config, "gemma3")),
    Exporter("decoder", "gguf", "gemma2", lambda config: _gguf(config, "gemma2")),
    Exporter("decoder", "gguf", "gemma3", lambda config: _gguf(config, "gemma3")),
)
