"""Mamba's weights, from transformers (``MambaForCausalLM``), from the original state-spaces files, and from GGUF.

``conv1d.weight`` is [channels, 1, taps] in one place and [channels, taps] in another; ours is the latter. GGUF stores A,
the others its logarithm; each is kept as it is, so that nothing is rounded on the way.
"""

from __future__ import annotations

from typing import Any

from oazoo.configs import MambaConfig
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.rules import Identity, Ignored, Reshape, Rule, Transform
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint, Translation, Translator

_HF = {
    "embed": "backbone.embeddings",
    "norm": "backbone.norm_f",
    "head": "lm_head",
    "layer.norm": "norm",
    "layer.mixer.in": "mixer.in_proj",
    "layer.mixer.conv": "mixer.conv1d",
    "layer.mixer.x": "mixer.x_proj",
    "layer.mixer.dt": "mixer.dt_proj",
    "layer.mixer.a_log": "mixer.A_log",
    "layer.mixer.d": "mixer.D",
    "layer.mixer.out": "mixer.out_proj",
}
_GGUF = {
    "embed": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "layer.norm": "attn_norm",
    "layer.mixer.in": "ssm_in",
    "layer.mixer.conv": "ssm_conv1d",
    "layer.mixer.x": "ssm_x",
    "layer.mixer.dt": "ssm_dt",
    "layer.mixer.a": "ssm_a",
    "layer.mixer.d": "ssm_d",
    "layer.mixer.out": "ssm_out",
}
_NOTE = "the weights are kept; running Mamba is not there yet"


def _rules(
    config: MambaConfig, names: dict[str, str], layer: str, embedding: str, source: WeightSource | None
) -> list[Rule]:
    """One rule a parameter. The convolution has an axis of one in the middle, unless ``source`` has it without."""
    result = []
    for target, shape in config.parameters().items():
        at, rest = "", target
        if target.startswith("layers."):
            _, number, rest = target.split(".", 2)
            at, rest = layer.format(number), f"layer.{rest}"
        stem, dot, suffix = rest.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = rest, "", ""
        name = embedding if stem == "embed" else names[stem]
        name = f"{at}{name}{dot}{suffix}"
        transform: Transform = Identity()
        if target.endswith(".conv.weight") and (
            source is None or (name in source and len(source[name].info.shape) == 3)
        ):
            transform = Reshape((shape[0], 1, shape[1]), shape)
        result.append(Rule(target, (name,), transform))
    return result


def _translate_hf(checkpoint: Checkpoint) -> Translation:
    settings, source = checkpoint.settings(), checkpoint.source
    original = "ssm_cfg" in settings.values or "d_model" in settings
    config = _original(settings, source) if original else _transformers(settings)
    embedding = "backbone.embedding" if "backbone.embedding.weight" in source else _HF["embed"]
    ignored, equal = [], []
    if config.tied_embeddings and "lm_head.weight" in source:
        ignored.append(Ignored(r"lm_head\.weight", "a copy of the tied embedding"))
        equal.append(("lm_head.weight", f"{embedding}.weight"))
    return Translation(
        config, _rules(config, _HF, "backbone.layers.{}.", embedding, source), ignored, [_NOTE], equal
    )


def _transformers(settings: Settings) -> MambaConfig:
    activation = settings.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise TranslationError(
            f"{settings.where}: hidden_act {activation[:64]!r} is not supported; supported: silu"
        )
    hidden = settings.integer("hidden_size")
    rank = settings.get("time_step_rank")
    return MambaConfig(
        vocab_size=settings.integer("vocab_size"),
        hidden_size=hidden,
        inner_size=settings.integer("intermediate_size", settings.integer("expand", 2) * hidden),
        num_layers=settings.integer("num_hidden_layers"),
        state_size=settings.integer("state_size", 16),
        conv_kernel=settings.integer("conv_kernel", 4),
        dt_rank=-(-hidden // 16) if rank in (None, "auto") else settings.integer("time_step_rank"),
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=settings.boolean("tie_word_embeddings", True),
        bias=settings.boolean("use_bias", False),
        conv_bias=settings.boolean("use_conv_bias", True),
    )


def _original(settings: Settings, source: WeightSource) -> MambaConfig:
    """Files of the state-spaces repository before Mamba-2: few settings, all others are the code's defaults."""
    block = Settings(settings.get("ssm_cfg") or {}, f"{settings.where}: ssm_cfg")
    for key in ("attn_layer_idx", "d_intermediate"):
        if settings.get(key):
            raise TranslationError(f"{settings.where}: {key} is not supported for Mamba")
    if not settings.boolean("rms_norm", True):
        raise TranslationError(f"{settings.where}: rms_norm = false (LayerNorm) is not supported")
    hidden, multiple = settings.integer("d_model"), settings.integer("pad_vocab_size_multiple", 8)
    if multiple <= 0:
        raise TranslationError(f"{settings.where}: pad_vocab_size_multiple = {multiple} must be positive")
    rank = block.get("dt_rank")
    return MambaConfig(
        vocab_size=-(-settings.integer("vocab_size") // multiple) * multiple,
        hidden_size=hidden,
        inner_size=block.integer("expand", 2) * hidden,
        num_layers=settings.integer("n_layer"),
        state_size=block.integer("d_state", 16),
        conv_kernel=block.integer("d_conv", 4),
        dt_rank=-(-hidden // 16) if rank in (None, "auto") else block.integer("dt_rank"),
        norm_eps=1e-5,
        tied_embeddings=settings.boolean("tie_embeddings", True),
        bias=block.boolean("bias", False),
        conv_bias=block.boolean("conv_bias", True),
    )


def _translate_gguf(checkpoint: Checkpoint) -> Translation:
    meta, source = checkpoint.settings(), checkpoint.source
    at = f"{checkpoint.declared[0]}."
    embedding = source["token_embd.weight"].info.shape if "token_embd.weight" in source else ()
    if meta.get(at + "ssm.dt_b_c_rms"):
        raise TranslationError(f"{meta.where}: {at}ssm.dt_b_c_rms (FalconMamba) is not supported")
    config = MambaConfig(
        vocab_size=meta.integer(at + "vocab_size", embedding[0] if embedding else 0),
        hidden_size=meta.integer(at + "embedding_length"),
        inner_size=meta.integer(at + "ssm.inner_size"),
        num_layers=meta.integer(at + "block_count"),
        state_size=meta.integer(at + "ssm.state_size"),
        conv_kernel=meta.integer(at + "ssm.conv_kernel"),
        dt_rank=meta.integer(at + "ssm.time_step_rank"),
        norm_eps=meta.number(at + "attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in source,
        bias="blk.0.ssm_in.bias" in source,
        conv_bias="blk.0.ssm_conv1d.bias" in source,
        decay="direct",
    )
    return Translation(config, _rules(config, _GGUF, "blk.{}.", _GGUF["embed"], source), (), [_NOTE])


def _translate(checkpoint: Checkpoint) -> Translation:
    return _translate_gguf(checkpoint) if checkpoint.naming == "gguf" else _translate_hf(checkpoint)


def _to_hf(config: MambaConfig) -> Outgoing:
    if config.decay != "log":
        raise TranslationError(
            "it stores the logarithm of the decay, and this model its value; export it to GGUF"
        )
    settings: dict[str, Any] = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_hidden_layers": config.num_layers,
        "state_size": config.state_size,
        "conv_kernel": config.conv_kernel,
        "time_step_rank": config.dt_rank,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "use_bias": config.bias,
        "use_conv_bias": config.conv_bias,
        "hidden_act": "silu",
    }
    if config.inner_size % config.hidden_size == 0:
        settings["expand"] = (
            config.inner_size // config.hidden_size
        )  # transformers computes the width from it
    return Outgoing(
        "hf", "MambaForCausalLM", settings, _rules(config, _HF, "backbone.layers.{}.", _HF["embed"], None)
    )


def _to_gguf(config: MambaConfig) -> Outgoing:
    if config.decay != "direct":
        raise TranslationError(
            "it stores the decay itself, and this model its logarithm; export it to SafeTensors"
        )
    settings = {
        "general.architecture": "mamba",
        "mamba.context_length": 1 << 20,  # llama.cpp wants one; the model has no limit
        "mamba.embedding_length": config.hidden_size,
        "mamba.feed_forward_length": 0,
        "mamba.block_count": config.num_layers,
        "mamba.attention.head_count": 0,
        "mamba.ssm.conv_kernel": config.conv_kernel,
        "mamba.ssm.inner_size": config.inner_size,
        "mamba.ssm.state_size": config.state_size,
        "mamba.ssm.time_step_rank": config.dt_rank,
        "mamba.attention.layer_norm_rms_epsilon": config.norm_eps,
        "mamba.vocab_size": config.vocab_size,
    }
    flat = [
        Rule(rule.target, rule.sources) for rule in _rules(config, _GGUF, "blk.{}.", _GGUF["embed"], None)
    ]
    return Outgoing("gguf", "mamba", settings, flat)


TRANSLATORS = (
    Translator("mamba", "Mamba (weights)", ("gguf:mamba", "hf:MambaForCausalLM", "hf:Mamba1"), _translate),
)
EXPORTERS = (
    Exporter("mamba", "hf", "MambaForCausalLM", _to_hf),
    Exporter("mamba", "gguf", "mamba", _to_gguf),
)
