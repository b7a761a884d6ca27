"""GPT-2 and models of its form (NanoGPT), from Hugging Face names with or without the prefix
``transformer.``.

GPT-2's linear layers are Conv1D, which stores [in, out]; they are transposed. The fused qkv projection is
kept: its rows are the queries, then the keys, then the values.
"""

from __future__ import annotations

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
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
_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def _translate(checkpoint: Checkpoint) -> Translation:
    settings, source = checkpoint.settings(), checkpoint.source
    for key, allowed in _REQUIRED.items():
        value = settings.get(key)
        if value is not None and value not in allowed:
            raise TranslationError(f"{settings.where}: {key} = {str(value)[:40]} is not supported for GPT-2")
    activation = settings.text("activation_function", "gelu_new")
    if activation not in _GELU_TANH:
        raise TranslationError(
            f"{settings.where}: activation_function {activation[:64]!r} is not supported for GPT-2; "
            f"supported: {', '.join(_GELU_TANH)}"
        )
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
    )
    ignored, equal = list(_IGNORED), []
    if config.tied_embeddings and "lm_head.weight" in source:
        ignored.append(Ignored(r"lm_head\.weight", "a copy of the tied embedding"))
        equal.append(("lm_head.weight", f"{prefix}wte.weight"))
    return Translation(config, _rules(config, prefix), ignored, notes, equal)


def _tied(settings: Settings, notes: list[str]) -> bool:
    if "tie_word_embeddings" in settings:
        return settings.boolean("tie_word_embeddings")
    notes.append("tie_word_embeddings is not set: the family's default, true, is used")
    return True


def _rules(config: NanoGPTConfig, prefix: str) -> list[Rule]:
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


TRANSLATORS = (Translator("gpt2", "GPT-2, NanoGPT", ("hf:GPT2LMHeadModel",), _translate),)
