"""GPT-NeoX and Pythia: LayerNorm, biases, part of each head rotated, attention and MLP side by side.

The weight of q, k and v holds them interleaved by head; GGUF has the same weight with all of q first.
"""

from __future__ import annotations

from collections.abc import Mapping

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.decoders import (
    GELU,
    GGUF_IGNORED,
    GGUF_NAMES,
    GGUF_NEUTRAL,
    HF_NEUTRAL,
    INVERSE_FREQUENCIES,
    decoder_rules,
    gguf_gelu,
    gguf_sizes,
    gguf_unknown,
    hf_sizes,
    hf_tied,
    one_of,
    refuse_active,
    tied_copy,
)
from oazoo.translators.decoders_out import gguf_gelu as gguf_gelu_out
from oazoo.translators.decoders_out import gguf_outgoing, hf_settings, require, require_plain, require_square
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rope import hf_rope, hf_rotary_dim
from oazoo.translators.rope_out import rotary_share
from oazoo.translators.rules import Identity, Ignored, Interleaved, Rule, Slice, Transform
from oazoo.translators.translator import Checkpoint, Translation, Translator

_QKV = ("attn.q", "attn.k", "attn.v")
_HF_NAMES = {
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "attn_norm": "input_layernorm",
    **dict.fromkeys(_QKV, "attention.query_key_value"),
    "attn.o": "attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_GGUF_NAMES = {**GGUF_NAMES, **dict.fromkeys(_QKV, "attn_qkv")}
_IGNORED = (
    Ignored(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)", "causal mask: made by the attention itself"
    ),
    Ignored(r"gpt_neox\.(layers\.\d+\.attention\.)?rotary_emb\.inv_freq", INVERSE_FREQUENCIES),
)
_FORM = {"norm": "layer", "gated_mlp": False, "mlp_bias": True}
_STATED = (*_FORM, "activation", "rotary_dim", "parallel_residual", "attention_bias", "attention_output_bias")


def _hf_rules(config: DecoderConfig) -> list[Rule]:
    def transform(part: str) -> Transform:
        return Interleaved(config.num_heads, 3, _QKV.index(part)) if part in _QKV else Identity()

    return decoder_rules(config, _HF_NAMES, "gpt_neox.layers.{}", transform)


def _gguf_rules(config: DecoderConfig) -> list[Rule]:
    rows = config.num_heads * config.head_dim

    def transform(part: str) -> Transform:
        if part not in _QKV:
            return Identity()
        start = _QKV.index(part) * rows
        return Slice(0, start, start + rows, 3 * rows)

    return decoder_rules(config, _GGUF_NAMES, "blk.{}", transform)


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings = checkpoint.settings()
    refuse_active(settings, "", HF_NEUTRAL, "GPT-NeoX", "partial_rotary_factor")
    notes: list[str] = []
    sizes = hf_sizes(settings)
    if sizes["num_kv_heads"] != sizes["num_heads"]:
        raise TranslationError(f"{settings.where}: num_key_value_heads: GPT-NeoX has as many as query heads")
    theta, scaling = hf_rope(settings, settings.number("rotary_emb_base", 10000.0))
    bias = settings.boolean("attention_bias", True)
    config = DecoderConfig(
        **sizes,
        norm_eps=settings.number("layer_norm_eps", 1e-5),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=hf_rotary_dim(settings, sizes["head_dim"], "rotary_pct", 0.25),
        tied_embeddings=hf_tied(settings, checkpoint, notes, head="embed_out"),
        attention_bias=bias,
        attention_output_bias=bias,
        activation=one_of(settings, "hidden_act", "gelu", GELU, "GPT-NeoX"),
        parallel_residual=settings.boolean("use_parallel_residual", True),
        **_FORM,  # type: ignore[arg-type]
    )
    ignored, equal = tied_copy(config, checkpoint, "embed_out", "gpt_neox.embed_in")
    return Translation(config, _hf_rules(config), [*_IGNORED, *ignored], notes, equal)


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    but = ("use_parallel_residual", "attention.layer_norm_epsilon")
    refuse_active(meta, "gptneox.", GGUF_NEUTRAL, "the architecture 'gptneox'", *but)
    notes: list[str] = []
    config = DecoderConfig(
        **gguf_sizes(meta, "gptneox", source, notes),
        norm_eps=meta.number("gptneox.attention.layer_norm_epsilon"),
        attention_bias="blk.0.attn_qkv.bias" in source,
        attention_output_bias="blk.0.attn_output.bias" in source,
        activation=gguf_gelu(meta, "gptneox"),
        parallel_residual=meta.boolean("gptneox.use_parallel_residual", True),
        **_FORM,  # type: ignore[arg-type]
    )
    gguf_unknown(meta, "gptneox", notes)
    return Translation(config, _gguf_rules(config), GGUF_IGNORED, notes)


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (
    Translator("gpt_neox", "GPT-NeoX, Pythia", ("gguf:gptneox", "hf:GPTNeoXForCausalLM"), _translate),
)


# Out


def _check(config: DecoderConfig) -> None:
    form: Mapping[str, object] = {name: getattr(config, name) for name in _FORM}
    require(form == _FORM, "it has LayerNorm and a plain MLP, with biases")
    require(config.num_kv_heads == config.num_heads, "it has as many key/value heads as query heads")
    require(config.attention_bias == config.attention_output_bias, "it has biases on q, k, v and o together")
    require_plain(config, *_STATED)


def _hf(config: DecoderConfig) -> Outgoing:
    _check(config)
    names = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
    require(config.activation in names, f"its activation is GELU, this model's is {config.activation}")
    require_square(config)
    share = rotary_share(config)
    settings = hf_settings(
        config,
        "GPTNeoXForCausalLM",
        "gpt_neox",
        hidden_act=names[config.activation],
        layer_norm_eps=config.norm_eps,
        rotary_pct=share,
        rotary_emb_base=config.rope_theta,
        use_parallel_residual=config.parallel_residual,
        attention_bias=config.attention_bias,
    )
    settings["rope_parameters"] = settings["rope_parameters"] | {"partial_rotary_factor": share}
    for key in ("rms_norm_eps", "num_key_value_heads", "head_dim"):
        del settings[key]
    settings.pop("partial_rotary_factor", None)
    return Outgoing("hf", "GPTNeoXForCausalLM", settings, _hf_rules(config))


def _gguf(config: DecoderConfig) -> Outgoing:
    _check(config)
    require(config.attention_bias, "it has biases")
    require(not config.tied_embeddings, "llama.cpp wants a head of its own, this model shares the embedding")
    require_square(config)
    own = {"use_parallel_residual": config.parallel_residual}
    form, notes = gguf_gelu_out(config.activation, "gptneox")
    rules = _gguf_rules(config)
    return gguf_outgoing(config, "gptneox", rules, own, notes, norm="layer_norm_epsilon", besides=form)


EXPORTERS = (
    Exporter("decoder", "hf", "GPTNeoXForCausalLM", _hf),
    Exporter("decoder", "gguf", "gptneox", _gguf),
)
