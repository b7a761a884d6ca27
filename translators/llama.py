"""The Llama family: Llama, Mistral, Qwen2 and those that share their form (SmolLM2, TinyLlama, …).

From Hugging Face names the weights are taken as they are. From GGUF names too, except that the converter of
llama.cpp reorders the q and k rows of the architecture ``llama`` for interleaved rotary pairs; that is
undone here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators.rope import gguf_rope, hf_rope
from oazoo.translators.rules import Identity, Ignored, RopePermute, Rule, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_INVERSE_FREQUENCIES = "rotary inverse frequencies: computed from the config"

_HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_HF_IGNORED = (Ignored(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", _INVERSE_FREQUENCIES),)

_GGUF_NAMES = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_GGUF_IGNORED = (
    Ignored(r"rope_freqs\.weight", "rotary frequency factors: carried in the config"),
    Ignored(r"blk\.\d+\.attn_rot_embd", _INVERSE_FREQUENCIES),
)

#: Settings of other members of the family, with the value that switches each off. Any other value is
#: refused.
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "partial_rotary_factor": (1, 1.0),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_norm": (False,),
    "no_rope_layers": ([],),
    "clip_qkv": (),
}
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0, 1),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
#: Keys without a meaning for the result.
_GGUF_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout", "attention.recurrent_layers")


def _rules(
    config: DecoderConfig, names: dict[str, str], layer: str, transform: Callable[[str], Transform]
) -> list[Rule]:
    """One rule a parameter: ``layers.N.attn.q.weight`` ← ``<layer N>.<name of attn.q>.weight``."""
    rules = []
    for target in config.parameters():
        stem, _, suffix = target.rpartition(".")
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            source = f"{layer.format(number)}.{names[part]}.{suffix}"
        else:
            part = stem
            source = f"{names[part]}.{suffix}"
        rules.append(Rule(target, (source,), transform(part)))
    return rules


def hf_rules(config: DecoderConfig) -> list[Rule]:
    """The map from Hugging Face names; run backwards for export."""
    return _rules(config, _HF_NAMES, "model.layers.{}", lambda part: Identity())


def gguf_rules(config: DecoderConfig, arch: str) -> list[Rule]:
    """The map from GGUF names of an architecture; run backwards for export."""
    permuted = {"attn.q": config.num_heads, "attn.k": config.num_kv_heads} if arch == "llama" else {}

    def transform(part: str) -> Transform:
        return RopePermute(permuted[part]) if part in permuted else Identity()

    return _rules(config, _GGUF_NAMES, "blk.{}", transform)


def _refuse_active(settings: Settings, prefix: str, neutral: dict[str, tuple[Any, ...]], title: str) -> None:
    for key, values in neutral.items():
        value = settings.get(prefix + key)
        if value is not None and value not in values:
            raise TranslationError(
                f"{settings.where}: {prefix}{key} = {str(value)[:40]} is not supported for {title}"
            )


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings = checkpoint.settings()
    qwen = "Qwen2ForCausalLM" in checkpoint.declared or settings.get("model_type") == "qwen2"
    mistral = "MistralForCausalLM" in checkpoint.declared or settings.get("model_type") == "mistral"
    _refuse_active(settings, "", _HF_NEUTRAL, "the Llama family")
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise TranslationError(
            f"{settings.where}: hidden_act {activation[:64]!r} is not supported for the Llama family; "
            "supported: silu"
        )
    notes: list[str] = []
    heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    if "head_dim" not in settings and (heads <= 0 or hidden % heads):
        raise TranslationError(
            f"{settings.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    layers = settings.integer("num_hidden_layers")
    theta, scaling = hf_rope(settings)
    window, layer_types = _hf_window(settings, layers, qwen, notes)
    # Qwen2 and Mistral fix their biases in code; Llama reads them from the config.
    bias = settings.boolean("attention_bias", False) if not (qwen or mistral) else qwen
    output_bias = bias and not qwen
    config = DecoderConfig(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=settings.integer("head_dim") if "head_dim" in settings else hidden // heads,
        norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=settings.integer("max_position_embeddings", 2048),
        tied_embeddings=_hf_tied(settings, checkpoint, notes),
        attention_bias=bias,
        attention_output_bias=output_bias,
        mlp_bias=settings.boolean("mlp_bias", False) if not (qwen or mistral) else False,
        sliding_window=window,
        layer_types=layer_types,
    )
    rules = hf_rules(config)
    ignored, equal = list(_HF_IGNORED), []
    if config.tied_embeddings and "lm_head.weight" in checkpoint.source:
        ignored.append(Ignored(r"lm_head\.weight", "a copy of the tied embedding"))
        equal.append(("lm_head.weight", "model.embed_tokens.weight"))
    return Translation(config, rules, ignored, notes, equal)


def _hf_tied(settings: Settings, checkpoint: Checkpoint, notes: list[str]) -> bool:
    if "tie_word_embeddings" in settings:
        return settings.boolean("tie_word_embeddings")
    if "lm_head.weight" not in checkpoint.source:
        raise TranslationError(
            f"{checkpoint.source.path}: there is no lm_head.weight, and {settings.where} does not set "
            "tie_word_embeddings, whose default in this family is false; "
            "set it to true if the head shares the embedding"
        )
    notes.append("tie_word_embeddings is not set: the family's default, false, is used")
    return False


def _hf_window(
    settings: Settings, layers: int, qwen: bool, notes: list[str]
) -> tuple[int | None, tuple[str, ...] | None]:
    """The attention window and, where layers differ, the type of each."""
    types = settings.get("layer_types")
    enabled = settings.boolean("use_sliding_window", not qwen)
    if types is not None:
        names = {"full_attention": "full", "sliding_attention": "sliding"}
        if not isinstance(types, (list, tuple)) or len(types) != layers:
            raise TranslationError(f"{settings.where}: layer_types must list the {layers} layers")
        for kind in types:
            if not isinstance(kind, str) or kind not in names:
                raise TranslationError(
                    f"{settings.where}: layer type {str(kind)[:64]!r} is not supported; "
                    f"supported: {', '.join(names)}"
                )
        types = tuple(names[kind] for kind in types)
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
        # Qwen2: the first max_window_layers layers attend fully.
        full = settings.integer("max_window_layers", 28)
        types = tuple("full" if layer < full else "sliding" for layer in range(min(layers, 4096)))
        if "sliding" not in types:
            notes.append(
                f"sliding_window {window} reaches no layer (max_window_layers {full}): attention is full"
            )
            return None, None
    if types is not None and set(types) == {"sliding"}:
        types = None
    return window, types


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    source, meta = checkpoint.source, checkpoint.settings()
    arch = checkpoint.declared[0]
    at = f"{arch}."
    _refuse_active(meta, at, _GGUF_NEUTRAL, f"the architecture {arch!r}")
    notes: list[str] = []
    hidden, heads = meta.integer(at + "embedding_length"), meta.integer(at + "attention.head_count")
    if heads <= 0 or (at + "attention.key_length" not in meta and hidden % heads):
        raise TranslationError(f"{meta.where}: {hidden} values do not divide into {heads} heads")
    head_dim = meta.integer(at + "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(at + key, head_dim) != head_dim:
            raise TranslationError(
                f"{meta.where}: {at}{key} = {meta.get(at + key)} differs from the head size {head_dim}: "
                "not supported"
            )
    context = meta.integer(at + "context_length")
    theta, scaling = gguf_rope(meta, arch, source, context)
    embedding = source["token_embd.weight"].info.shape if "token_embd.weight" in source else ()
    tied = "output.weight" not in source
    if tied:
        notes.append("no output.weight: the head shares the embedding, as GGUF means by its absence")
    window = meta.integer(at + "attention.sliding_window", 0)
    config = DecoderConfig(
        vocab_size=meta.integer(at + "vocab_size", embedding[0] if embedding else 0),
        hidden_size=hidden,
        intermediate_size=meta.integer(at + "feed_forward_length"),
        num_layers=meta.integer(at + "block_count"),
        num_heads=heads,
        num_kv_heads=meta.integer(at + "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=meta.number(at + "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=context,
        tied_embeddings=tied,
        attention_bias="blk.0.attn_q.bias" in source,
        attention_output_bias="blk.0.attn_output.bias" in source,
        mlp_bias="blk.0.ffn_gate.bias" in source,
        sliding_window=window or None,
    )
    known = {at + key for key in (*_GGUF_HARMLESS, "context_length")} | meta.taken
    for key in meta.values:
        if key.startswith(at) and key not in known:
            notes.append(f"setting {key[:80]!r} is not known and was not considered")
    return Translation(config, gguf_rules(config, arch), _GGUF_IGNORED, notes)


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
        "Llama, Mistral, Qwen2, SmolLM2",
        ("gguf:llama", "gguf:qwen2", "hf:LlamaForCausalLM", "hf:MistralForCausalLM", "hf:Qwen2ForCausalLM"),
        _translate,
    ),
)
