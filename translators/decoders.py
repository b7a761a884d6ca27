"""What the translators of decoder families share: names, rules made from them, and the settings that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.rope import gguf_rope
from oazoo.translators.rules import Identity, Ignored, Rule, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint

INVERSE_FREQUENCIES = "rotary inverse frequencies: computed from the config"

#: Part of a model → its stem in Hugging Face names, as Llama has them. Families override what differs.
HF_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
#: The same in GGUF.
GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}
HF_IGNORED = (Ignored(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", INVERSE_FREQUENCIES),)
GGUF_IGNORED = (
    Ignored(
        r"rope_(freqs|factors_long|factors_short)\.weight", "rotary frequency factors: carried in the config"
    ),
    Ignored(r"blk\.\d+\.attn_rot_embd", INVERSE_FREQUENCIES),
)

#: Settings of other members of the family, with the value that switches each off. Any other value is
#: refused.
HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "partial_rotary_factor": (1, 1.0),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
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
GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
GGUF_HARMLESS = ("rope.scaling.finetuned", "tensor_data_layout", "attention.recurrent_layers")


def decoder_rules(
    config: DecoderConfig,
    names: Mapping[str, str],
    layer: str,
    transform: Callable[[str], Transform] = lambda part: Identity(),
) -> list[Rule]:
    """One rule a parameter: ``layers.N.attn.q.weight`` ← ``<layer N>.<name of attn.q>.weight``.

    Args:
        config: the model.
        names: part → stem of the source's name, within a layer or outside.
        layer: the source's name of a layer, ``{}`` for its number.
        transform: what happens to a part on its way.
    """
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


def refuse_active(
    settings: Settings, prefix: str, neutral: Mapping[str, tuple[Any, ...]], title: str, *but: str
) -> None:
    """Refuse every setting of ``neutral``, except those named in ``but``, that has another value than those listed."""
    for key, values in neutral.items():
        value = None if key in but else settings.get(prefix + key)
        if value is not None and value not in values:
            raise TranslationError(
                f"{settings.where}: {prefix}{key} = {str(value)[:40]} is not supported for {title}"
            )


def one_of(settings: Settings, key: str, default: str, known: Mapping[str, str], title: str) -> str:
    """A setting that names one of a few things, as ours is called.

    Raises:
        TranslationError: another value, by name.
    """
    value = settings.text(key, default)
    if value not in known:
        raise TranslationError(
            f"{settings.where}: {key} {value[:64]!r} is not supported for {title}; supported: {', '.join(known)}"
        )
    return known[value]


#: Names of activations in Hugging Face configs.
SILU = {"silu": "silu", "swish": "silu"}
GELU = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

#: GGUF has no key for the form of GELU, and llama.cpp computes the tanh form. What we write says it in a key of our own.
GGUF_GELU = "oazoo.activation"


def gguf_gelu(meta: Settings, arch: str) -> str:
    """The form of GELU of a GGUF file: llama.cpp's, unless the file says otherwise."""
    forms = {"gelu": "gelu", "gelu_tanh": "gelu_tanh"}
    return one_of(meta, GGUF_GELU, "gelu_tanh", forms, f"the architecture {arch!r}")


def hf_sizes(settings: Settings) -> dict[str, Any]:
    """The sizes that every Hugging Face decoder config has, as fields of a :class:`DecoderConfig`."""
    heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    if "head_dim" not in settings and (heads <= 0 or hidden % heads):
        raise TranslationError(
            f"{settings.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is not given"
        )
    return {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("intermediate_size"),
        "num_layers": settings.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": settings.integer("head_dim") if "head_dim" in settings else hidden // heads,
        "max_positions": settings.integer("max_position_embeddings", 2048),
    }


def hf_tied(
    settings: Settings,
    checkpoint: Checkpoint,
    notes: list[str],
    *,
    default: bool = False,
    head: str = "lm_head",
) -> bool:
    """Whether the head shares the embedding; ``default`` is the family's."""
    if "tie_word_embeddings" in settings:
        return settings.boolean("tie_word_embeddings")
    if not default and f"{head}.weight" not in checkpoint.source:
        raise TranslationError(
            f"{checkpoint.source.path}: there is no {head}.weight, and {settings.where} does not set "
            "tie_word_embeddings, whose default in this family is false; "
            "set it to true if the head shares the embedding"
        )
    notes.append(f"tie_word_embeddings is not set: the family's default, {str(default).lower()}, is used")
    return default


def tied_copy(
    config: DecoderConfig, checkpoint: Checkpoint, head: str = "lm_head", embed: str = "model.embed_tokens"
) -> tuple[list[Ignored], list[tuple[str, str]]]:
    """What to ignore, and what to check for being equal, where a tied model brings its head along."""
    if not (config.tied_embeddings and f"{head}.weight" in checkpoint.source):
        return [], []
    pattern = head.replace(".", r"\.") + r"\.weight"
    return [Ignored(pattern, "a copy of the tied embedding")], [(f"{head}.weight", f"{embed}.weight")]


def hf_layer_types(settings: Settings, layers: int) -> tuple[str, ...] | None:
    """``layer_types`` in our words, or None if it is not set."""
    types = settings.get("layer_types")
    if types is None:
        return None
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise TranslationError(f"{settings.where}: layer_types must list the {layers} layers")
    for kind in types:
        if not isinstance(kind, str) or kind not in names:
            raise TranslationError(
                f"{settings.where}: layer type {str(kind)[:64]!r} is not supported; "
                f"supported: {', '.join(names)}"
            )
    return tuple(names[kind] for kind in types)


def one_layer_type(types: tuple[str, ...], window: int | None) -> tuple[int | None, tuple[str, ...] | None]:
    """Window and layer types said as briefly as they can be."""
    if window is None or "sliding" not in types:
        return None, None
    return window, None if set(types) == {"sliding"} else types


def gguf_sizes(meta: Settings, arch: str, source: WeightSource, notes: list[str]) -> dict[str, Any]:
    """The sizes, rotary positions and tie that GGUF metadata of every decoder has, as fields of a config."""
    at = f"{arch}."
    hidden, heads = meta.integer(at + "embedding_length"), meta.integer(at + "attention.head_count")
    if heads <= 0 or (at + "attention.key_length" not in meta and hidden % heads):
        raise TranslationError(f"{meta.where}: {hidden} values do not divide into {heads} heads")
    head_dim = meta.integer(at + "attention.key_length", hidden // heads)
    if meta.integer(at + "attention.value_length", head_dim) != head_dim:
        raise TranslationError(
            f"{meta.where}: {at}attention.value_length = {meta.get(at + 'attention.value_length')} differs from the "
            f"head size {head_dim}: not supported"
        )
    rotated = meta.integer(at + "rope.dimension_count", head_dim)
    context = meta.integer(at + "context_length")
    theta, scaling = gguf_rope(meta, arch, source, context)
    embedding = source["token_embd.weight"].info.shape if "token_embd.weight" in source else ()
    tied = "output.weight" not in source
    if tied:
        notes.append("no output.weight: the head shares the embedding, as GGUF means by its absence")
    return {
        "vocab_size": meta.integer(at + "vocab_size", embedding[0] if embedding else 0),
        "hidden_size": hidden,
        "intermediate_size": meta.integer(at + "feed_forward_length"),
        "num_layers": meta.integer(at + "block_count"),
        "num_heads": heads,
        "num_kv_heads": meta.integer(at + "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rotary_dim": None if rotated == head_dim else rotated,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": context,
        "tied_embeddings": tied,
    }


def gguf_unknown(meta: Settings, arch: str, notes: list[str]) -> None:
    """Note every setting of the architecture that nobody looked at."""
    known = {f"{arch}.{key}" for key in (*GGUF_HARMLESS, "context_length")} | meta.taken
    for key in meta.values:
        if key.startswith(f"{arch}.") and key not in known:
            notes.append(f"setting {key[:80]!r} is not known and was not considered")
