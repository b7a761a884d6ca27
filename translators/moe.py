"""Mixture-of-experts decoders (Mixtral, Qwen2-MoE, Qwen3-MoE): their weights, in the form of the decoder.

Hugging Face stores each expert's matrices by themselves, or all in one tensor per layer (gate and up joined); GGUF
stores one tensor a layer for each of gate, up and down. Ours are stacks, [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Callable

from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.decoders import (
    GGUF_NAMES,
    HF_IGNORED,
    HF_NAMES,
    SILU,
    one_of,
    target_parts,
    tied_copy,
)
from oazoo.translators.rope import gguf_rope, hf_rope
from oazoo.translators.rules import Identity, Ignored, Reshape, RopePermute, Rule, Slice, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.stack import Stack
from oazoo.translators.translator import Checkpoint, Translation, Translator

MIXTRAL, QWEN2, QWEN3 = "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"

_HF = {
    **HF_NAMES,
    "moe.router": "mlp.gate",
    "moe.shared.gate": "mlp.shared_expert.gate_proj",
    "moe.shared.up": "mlp.shared_expert.up_proj",
    "moe.shared.down": "mlp.shared_expert.down_proj",
    "moe.shared_gate": "mlp.shared_expert_gate",
}
#: One tensor an expert: before and after its number.
_EXPERTS = {
    "moe.gate": "mlp.experts.{}.gate_proj",
    "moe.up": "mlp.experts.{}.up_proj",
    "moe.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "moe.gate": "block_sparse_moe.experts.{}.w1",
    "moe.up": "block_sparse_moe.experts.{}.w3",
    "moe.down": "block_sparse_moe.experts.{}.w2",
}
_GGUF = {
    **GGUF_NAMES,
    "moe.router": "ffn_gate_inp",
    "moe.gate": "ffn_gate_exps",
    "moe.up": "ffn_up_exps",
    "moe.down": "ffn_down_exps",
    "moe.shared.gate": "ffn_gate_shexp",
    "moe.shared.up": "ffn_up_shexp",
    "moe.shared.down": "ffn_down_shexp",
    "moe.shared_gate": "ffn_gate_inp_shexp",
}
_GGUF_IGNORED = (Ignored(r"rope_freqs\.weight", "rotary frequency factors: carried in the config"),)


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def hf_rules(
    config: DecoderConfig, mixtral: bool, joined: Callable[[str], bool] = lambda number: False
) -> list[Rule]:
    """The map from Hugging Face names; run backwards for export.

    ``joined``: whether a layer's experts are all in one tensor, gate above up.
    """
    names = _HF | {"moe.router": "block_sparse_moe.gate"} if mixtral else _HF
    experts = _MIXTRAL_EXPERTS if mixtral else _EXPERTS
    rules = []
    for target in config.parameters():
        number, role, suffix = target_parts(target)
        at = f"model.layers.{number}." if number else ""
        if role in experts and joined(number):
            rules.append(_joined(config, target, f"{at}mlp.experts.", role))
        elif role in experts:
            sources = tuple(f"{at}{experts[role].format(n)}.{suffix}" for n in range(config.num_experts))
            rules.append(Rule(target, sources, Stack(config.num_experts)))
        else:
            name = _HF[role] if number and joined(number) else names[role]
            rules.append(Rule(target, (f"{at}{name}.{suffix}",)))
    return rules


def _joined(config: DecoderConfig, target: str, at: str, role: str) -> Rule:
    if role == "moe.down":
        return Rule(target, (f"{at}down_proj",))
    size = config.expert_size
    start = 0 if role == "moe.gate" else size
    return Rule(target, (f"{at}gate_up_proj",), Slice(1, start, start + size, 2 * size))


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings, source = checkpoint.settings(), checkpoint.source
    arch = next((name for name in checkpoint.declared if name in (MIXTRAL, QWEN2, QWEN3)), MIXTRAL)
    one_of(settings, "hidden_act", "silu", SILU, "mixtures of experts")
    heads, hidden = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    layers = settings.integer("num_hidden_layers")
    if "head_dim" not in settings and (heads <= 0 or hidden % heads):
        raise TranslationError(f"{settings.where}: hidden_size {hidden} does not divide into {heads} heads")
    theta, scaling = hf_rope(settings, 1e6 if arch == MIXTRAL else 10000.0)
    counts = [settings.integer(key) for key in ("num_experts", "num_local_experts") if key in settings]
    if not counts:
        raise TranslationError(f"{settings.where}: num_experts is missing")
    inner = settings.integer("intermediate_size")
    config = DecoderConfig(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=settings.integer("head_dim") if "head_dim" in settings else hidden // heads,
        norm_eps=settings.number("rms_norm_eps", 1e-5 if arch == MIXTRAL else 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=settings.integer("max_position_embeddings"),
        tied_embeddings=settings.boolean("tie_word_embeddings", False),
        attention_bias=settings.boolean("qkv_bias", True)
        if arch == QWEN2
        else settings.boolean("attention_bias", False),
        attention_output_bias=arch == QWEN3 and settings.boolean("attention_bias", False),
        sliding_window=_hf_window(settings, arch),
        qk_norm="head" if arch == QWEN3 else None,
        num_experts=counts[0],
        experts_per_token=settings.integer("num_experts_per_tok"),
        expert_size=inner if arch == MIXTRAL else settings.integer("moe_intermediate_size"),
        shared_expert_size=settings.integer("shared_expert_intermediate_size") if arch == QWEN2 else 0,
        normalize_experts=arch == MIXTRAL or settings.boolean("norm_topk_prob", False),
        dense_layers=None if arch == MIXTRAL else _dense_layers(settings, layers),
    )
    ignored, equal = tied_copy(config, checkpoint)
    joined = {n for n in range(layers) if f"model.layers.{n}.mlp.experts.gate_up_proj" in source}
    single = config.num_experts * sum(config.is_moe(n) and n not in joined for n in range(layers))
    if 3 * single > len(source):
        raise TranslationError(
            f"{settings.where}: {single} experts in all layers have {3 * single} matrices; the checkpoint has "
            f"{len(source)} tensors"
        )
    rules = hf_rules(config, arch == MIXTRAL, lambda number: int(number) in joined)
    return Translation(config, rules, [*HF_IGNORED, *ignored], [], equal)


def _hf_window(settings: Settings, arch: str) -> int | None:
    """The attention window; these families have one for all layers, or none."""
    types = settings.get("layer_types")
    if types is not None and (not isinstance(types, (list, tuple)) or set(types) != {"full_attention"}):
        raise TranslationError(
            f"{settings.where}: layer_types other than full_attention are not supported here"
        )
    if types is not None or "sliding_window" not in settings or not settings.integer("sliding_window"):
        return None
    if arch != MIXTRAL and not settings.boolean("use_sliding_window", False):
        return None
    if arch == QWEN2:
        raise TranslationError(f"{settings.where}: use_sliding_window is not supported for Qwen2-MoE")
    return settings.integer("sliding_window")


def _dense_layers(settings: Settings, layers: int) -> tuple[int, ...] | None:
    """Layers with a plain feed-forward: those that are listed, and those that the step leaves out."""
    step, listed = settings.integer("decoder_sparse_step", 1), settings.ids("mlp_only_layers")
    if step <= 0:
        raise TranslationError(f"{settings.where}: decoder_sparse_step = {step} must be positive")
    dense = {n for n in range(min(layers, 4096)) if (n + 1) % step} | set(listed)
    return tuple(sorted(dense)) or None


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_rules(config: DecoderConfig, arch: str, source: WeightSource | None = None) -> list[Rule]:
    """The map from GGUF names; run backwards for export. ``source``: the file, in which a size of one may be left out."""
    permuted = {"attn.q": config.num_heads, "attn.k": config.num_kv_heads} if arch == "llama" else {}
    rules = []
    for target, shape in config.parameters().items():
        number, role, suffix = target_parts(target)
        name = f"blk.{number}.{_GGUF[role]}.{suffix}" if number else f"{_GGUF[role]}.{suffix}"
        transform: Transform = Identity()
        if role in permuted:
            transform = RopePermute(permuted[role])
        elif role == "moe.shared_gate" and (
            source is None or (name in source and len(source[name].info.shape) == 1)
        ):
            transform = Reshape(shape[1:], shape)
        rules.append(Rule(target, (name,), transform))
    return rules


def translate_gguf(checkpoint: Checkpoint) -> Translation:
    """A GGUF file of an architecture with experts: qwen2moe, qwen3moe, or llama with ``llama.expert_count``."""
    source, meta = checkpoint.source, checkpoint.settings()
    arch = checkpoint.declared[0]
    at = f"{arch}."
    hidden, heads = meta.integer(at + "embedding_length"), meta.integer(at + "attention.head_count")
    if heads <= 0 or (at + "attention.key_length" not in meta and hidden % heads):
        raise TranslationError(f"{meta.where}: {hidden} values do not divide into {heads} heads")
    for key, neutral in (
        ("expert_gating_func", 1),
        ("expert_group_count", 0),
        ("leading_dense_block_count", 0),
    ):
        if meta.integer(at + key, neutral) != neutral:
            raise TranslationError(f"{meta.where}: {at}{key} = {meta.get(at + key)} is not supported")
    if "blk.0.ffn_gate.0.weight" in source:
        raise TranslationError(
            f"{meta.where}: has a tensor for each expert, the layout of Mixtral files of before April 2024, which is not "
            "read; take a newer GGUF file of the model, or its SafeTensors folder"
        )
    head_dim = meta.integer(at + "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(at + key, head_dim) != head_dim:
            raise TranslationError(
                f"{meta.where}: {at}{key} differs from the head size {head_dim}: not supported"
            )
    layers = meta.integer(at + "block_count")
    theta, scaling = gguf_rope(meta, arch, source, meta.integer(at + "context_length"))
    embedding = source["token_embd.weight"].info.shape if "token_embd.weight" in source else ()
    inner = meta.integer(at + "feed_forward_length")
    dense = tuple(n for n in range(min(layers, 4096)) if f"blk.{n}.ffn_gate_inp.weight" not in source)
    shared = 0
    if "blk.0.ffn_gate_shexp.weight" in source:
        found = source["blk.0.ffn_gate_shexp.weight"].info.shape
        shared = meta.integer(at + "expert_shared_feed_forward_length", found[0] if found else 0)
    config = DecoderConfig(
        vocab_size=meta.integer(at + "vocab_size", embedding[0] if embedding else 0),
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=meta.integer(at + "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=meta.number(at + "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=meta.integer(at + "context_length"),
        tied_embeddings="output.weight" not in source,
        attention_bias="blk.0.attn_q.bias" in source,
        attention_output_bias="blk.0.attn_output.bias" in source,
        sliding_window=meta.integer(at + "attention.sliding_window", 0) or None,
        qk_norm="head" if arch == "qwen3moe" else None,
        num_experts=meta.integer(at + "expert_count"),
        experts_per_token=meta.integer(at + "expert_used_count"),
        expert_size=inner if arch == "llama" else meta.integer(at + "expert_feed_forward_length"),
        shared_expert_size=shared,
        normalize_experts=meta.boolean(at + "expert_weights_norm", arch != "qwen2moe"),
        dense_layers=dense or None,
    )
    return Translation(config, gguf_rules(config, arch, source), _GGUF_IGNORED, [])


def _translate(checkpoint: Checkpoint) -> Translation:
    return translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


TRANSLATORS = (
    Translator(
        "moe",
        "Mixtral, Qwen2-MoE, Qwen3-MoE",
        ("gguf:qwen2moe", "gguf:qwen3moe", f"hf:{MIXTRAL}", f"hf:{QWEN2}", f"hf:{QWEN3}"),
        _translate,
    ),
)
