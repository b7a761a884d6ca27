"""The Llama family: Llama, Mistral, Qwen2 and those that share their form (SmolLM2, TinyLlama, …); and Qwen3.

From Hugging Face names the weights are taken as they are. From GGUF names too, except that the converter of
llama.cpp reorders the q and k rows of the architecture ``llama`` for interleaved rotary pairs; that is
undone here. Qwen3 adds a norm over each head's queries and keys.
"""

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
    hf_layer_types,
    hf_sizes,
    hf_tied,
    one_layer_type,
    one_of,
    refuse_active,
    tied_copy,
)
from oazoo.translators.rope import hf_rope, hf_rotary_dim
from oazoo.translators.rules import Identity, RopePermute, Rule, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_TITLE = "the Llama family"


def hf_rules(config: DecoderConfig) -> list[Rule]:
    """The map from Hugging Face names; run backwards for export."""
    return decoder_rules(config, HF_NAMES, "model.layers.{}")


def gguf_rules(config: DecoderConfig, arch: str) -> list[Rule]:
    """The map from GGUF names of an architecture; run backwards for export."""
    permuted = {"attn.q": config.num_heads, "attn.k": config.num_kv_heads} if arch == "llama" else {}

    def transform(part: str) -> Transform:
        return RopePermute(permuted[part]) if part in permuted else Identity()

    return decoder_rules(config, GGUF_NAMES, "blk.{}", transform)


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings = checkpoint.settings()

    def is_a(name: str, model_type: str) -> bool:
        return f"{name}ForCausalLM" in checkpoint.declared or settings.get("model_type") == model_type

    qwen2, qwen3, mistral = is_a("Qwen2", "qwen2"), is_a("Qwen3", "qwen3"), is_a("Mistral", "mistral")
    refuse_active(settings, "", HF_NEUTRAL, _TITLE)
    one_of(settings, "hidden_act", "silu", SILU, _TITLE)
    notes: list[str] = []
    sizes = hf_sizes(settings)
    if qwen3 and "head_dim" not in settings:
        sizes["head_dim"] = 128
    theta, scaling = hf_rope(settings)
    if hf_rotary_dim(settings, sizes["head_dim"]) is not None:
        raise TranslationError(
            f"{settings.where}: partial_rotary_factor other than 1 is not supported for {_TITLE}"
        )
    window, layer_types = _hf_window(settings, sizes["num_layers"], qwen2 or qwen3, notes)
    # Qwen2 and Mistral fix their biases in code; Llama and Qwen3 read them from the config.
    bias = settings.boolean("attention_bias", False) if not (qwen2 or mistral) else qwen2
    config = DecoderConfig(
        **sizes,
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=hf_tied(settings, checkpoint, notes),
        attention_bias=bias,
        attention_output_bias=bias and not qwen2,
        mlp_bias=settings.boolean("mlp_bias", False) if not (qwen2 or qwen3 or mistral) else False,
        sliding_window=window,
        layer_types=layer_types,
        qk_norm="head" if qwen3 else None,
    )
    ignored, equal = tied_copy(config, checkpoint)
    return Translation(config, hf_rules(config), [*HF_IGNORED, *ignored], notes, equal)


def _hf_window(
    settings: Settings, layers: int, qwen: bool, notes: list[str]
) -> tuple[int | None, tuple[str, ...] | None]:
    """The attention window and, where layers differ, the type of each."""
    enabled = settings.boolean("use_sliding_window", not qwen)
    types = hf_layer_types(settings, layers)
    if "sliding_window" not in settings:
        if types is not None and "sliding" in types and enabled:
            raise TranslationError(
                f"{settings.where}: layer_types has sliding layers but no sliding_window is set"
            )
        return None, None
    window = settings.integer("sliding_window")
    if not enabled or (types is not None and "sliding" not in types):
        notes.append(f"sliding_window {window} is switched off in the config: attention is full")
        return None, None
    if types is None and qwen:
        # Qwen: the first max_window_layers layers attend fully.
        full = settings.integer("max_window_layers", 28)
        types = tuple("full" if layer < full else "sliding" for layer in range(min(layers, 4096)))
        if "sliding" not in types:
            notes.append(
                f"sliding_window {window} reaches no layer (max_window_layers {full}): attention is full"
            )
            return None, None
    return one_layer_type(types or ("sliding",), window)


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    arch = checkpoint.declared[0]
    refuse_active(meta, f"{arch}.", GGUF_NEUTRAL, f"the architecture {arch!r}")
    notes: list[str] = []
    sizes = gguf_sizes(meta, arch, source, notes)
    if sizes["rotary_dim"] is not None:
        raise TranslationError(
            f"{meta.where}: {arch}.rope.dimension_count = {sizes['rotary_dim']} differs from the head size "
            f"{sizes['head_dim']}: not supported"
        )
    config = DecoderConfig(
        **sizes,
        norm_eps=meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        attention_bias="blk.0.attn_q.bias" in source,
        attention_output_bias="blk.0.attn_output.bias" in source,
        mlp_bias="blk.0.ffn_gate.bias" in source,
        sliding_window=meta.integer(f"{arch}.attention.sliding_window", 0) or None,
        qk_norm="head" if arch == "qwen3" else None,
    )
    gguf_unknown(meta, arch, notes)
    return Translation(config, gguf_rules(config, arch), GGUF_IGNORED, notes)


def _translate(checkpoint: Checkpoint) -> Translation:
    if checkpoint.naming != "gguf":
        return _translate_hf(checkpoint)
    if checkpoint.settings().get(f"{checkpoint.declared[0]}.expert_count") not in (None, 0):
        from oazoo.translators.moe import translate_gguf  # GGUF calls Mixtral a llama, too

        return translate_gguf(checkpoint)
    return _translate_gguf(checkpoint)


TRANSLATORS = (
    Translator(
        "llama",
        "Llama, Mistral, Qwen2, Qwen3, SmolLM2",
        (
            "gguf:llama",
            "gguf:qwen2",
            "gguf:qwen3",
            "hf:LlamaForCausalLM",
            "hf:MistralForCausalLM",
            "hf:Qwen2ForCausalLM",
            "hf:Qwen3ForCausalLM",
        ),
        _translate,
    ),
)
