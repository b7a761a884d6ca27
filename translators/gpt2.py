"""GPT-2 and models of its form (NanoGPT), from Hugging Face names with or without the prefix
``transformer.``, and from GGUF names.

GPT-2's linear layers are Conv1D, which stores [in, out]; they are transposed. GGUF holds them as [out, in]. The
fused qkv projection is kept: its rows are the queries, then the keys, then the values.
"""

from __future__ import annotations

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.translators.decoders import GELU, gguf_gelu, one_of
from oazoo.translators.rules import Identity, Ignored, Rule, Transpose2D
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_NAMES = {
    "embed": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_GGUF_NAMES = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "attn.qkv": "attn_qkv",
    "attn.o": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
_CONV1D = ("attn.qkv", "attn.o", "mlp.up", "mlp.down")
_IGNORED = (
    Ignored(r"(transformer\.)?h\.\d+\.attn\.bias", "causal mask: made by the attention itself"),
    Ignored(
        r"(transformer\.)?h\.\d+\.attn\.masked_bias",
        "the value of masked scores: made by the attention itself",
    ),
)

#: Settings that change the computation, with the values that we support.
_REQUIRED: dict[str, tuple[object, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings, source = checkpoint.settings(), checkpoint.source
    for key, allowed in _REQUIRED.items():
        value = settings.get(key)
        if value is not None and value not in allowed:
            raise TranslationError(f"{settings.where}: {key} = {str(value)[:40]} is not supported for GPT-2")
    activation = one_of(settings, "activation_function", "gelu_new", GELU, "GPT-2")
    notes: list[str] = []
    hidden = settings.integer("n_embd")
    prefix = "transformer." if "transformer.wte.weight" in source else ""
    config = NanoGPTConfig(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.integer("n_inner", 4 * hidden),
        num_layers=settings.integer("n_layer"),
        num_heads=settings.integer("n_head"),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        max_positions=settings.integer("n_positions"),
        tied_embeddings=_tied(settings, notes),
        activation=activation,
    )
    ignored, equal = list(_IGNORED), []
    if config.tied_embeddings and "lm_head.weight" in source:
        ignored.append(Ignored(r"lm_head\.weight", "a copy of the tied embedding"))
        equal.append(("lm_head.weight", f"{prefix}wte.weight"))
    return Translation(config, hf_rules(config, prefix), ignored, notes, equal)


def _tied(settings: Settings, notes: list[str]) -> bool:
    if "tie_word_embeddings" in settings:
        return settings.boolean("tie_word_embeddings")
    notes.append("tie_word_embeddings is not set: the family's default, true, is used")
    return True


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    meta, source = checkpoint.settings(), checkpoint.source
    at = f"{checkpoint.declared[0]}."
    embedding = source["token_embd.weight"].info.shape if "token_embd.weight" in source else ()
    notes: list[str] = []
    tied = "output.weight" not in source
    if tied:
        notes.append("no output.weight: the head shares the embedding, as GGUF means by its absence")
    config = NanoGPTConfig(
        vocab_size=meta.integer(at + "vocab_size", embedding[0] if embedding else 0),
        hidden_size=meta.integer(at + "embedding_length"),
        intermediate_size=meta.integer(at + "feed_forward_length"),
        num_layers=meta.integer(at + "block_count"),
        num_heads=meta.integer(at + "attention.head_count"),
        norm_eps=meta.number(at + "attention.layer_norm_epsilon"),
        max_positions=meta.integer(at + "context_length"),
        tied_embeddings=tied,
        activation=gguf_gelu(meta, "gpt2"),
    )
    for key in meta.values:
        if key.startswith(at) and key not in meta.taken:
            notes.append(f"setting {key[:80]!r} is not known and was not considered")
    return Translation(config, gguf_rules(config), (), notes)


def gguf_rules(config: NanoGPTConfig) -> list[Rule]:
    """The map from GGUF names; run backwards for export."""
    rules = []
    for target in config.parameters():
        stem, _, suffix = target.rpartition(".")
        at, part = "", stem
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            at = f"blk.{number}."
        rules.append(Rule(target, (f"{at}{_GGUF_NAMES[part]}.{suffix}",)))
    return rules


def hf_rules(config: NanoGPTConfig, prefix: str = "transformer.") -> list[Rule]:
    """The map from Hugging Face names; run backwards for export."""
    rules = []
    for target in config.parameters():
        if target == "head.weight":
            rules.append(Rule(target, ("lm_head.weight",)))
            continue
        transposed = target.endswith(tuple(f"{part}.weight" for part in _CONV1D))
        rules.append(
            Rule(target, (source_name(target, prefix),), Transpose2D() if transposed else Identity())
        )
    return rules


def source_name(target: str, prefix: str) -> str:
    """GPT-2's name of a parameter other than the head."""
    stem, _, suffix = target.rpartition(".")
    if stem.startswith("layers."):
        _, number, part = stem.split(".", 2)
        return f"{prefix}h.{number}.{_NAMES[part]}.{suffix}"
    return f"{prefix}{_NAMES[stem]}.{suffix}"


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (Translator("gpt2", "GPT-2, NanoGPT", ("gguf:gpt2", "hf:GPT2LMHeadModel"), _translate),)
