"""Checkpoints under Hugging Face names, described from their config.json as transformers reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from oazoo.translators.reference.description import Decoder, Experts, Frequencies, NoReferenceError
from oazoo.translators.reference.frequencies import of_config

Config = Mapping[str, Any]

_LLAMA = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_GEMMA = _LLAMA | {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def describe(config: Config, architecture: str) -> Decoder:
    """The decoder of a config.json.

    Raises:
        NoReferenceError: an architecture, or a setting, that is not known here.
        KeyError, TypeError, ValueError: a setting that is missing or of another type.
    """
    if architecture not in _FAMILIES:
        raise NoReferenceError(
            f"the check does not know the architecture {architecture[:64]!r}; it knows {', '.join(_FAMILIES)}"
        )
    return _FAMILIES[architecture](config)


def _value(config: Config, key: str, default: Any) -> Any:
    """A setting; null counts as absent."""
    value = config.get(key)
    return default if value is None else value


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise NoReferenceError(f"the check does not know the activation {name[:64]!r}")
    return _ACTIVATIONS[name]


def _rope_section(config: Config, kind: str | None = None) -> Config:
    """``rope_parameters`` (of one kind of layer, where they are given for each) or ``rope_scaling``."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = section.get(kind) if kind else None
    return nested if isinstance(nested, Mapping) else section


def _rotary(config: Config, head_dim: int, theta: float = 10000.0) -> Callable[[int, int], Frequencies]:
    section = _rope_section(config)
    partial = _value(section, "partial_rotary_factor", _value(config, "partial_rotary_factor", 1.0))
    base = float(_value(section, "rope_theta", _value(config, "rope_theta", theta)))
    width = int(head_dim * float(partial))
    return lambda layer, tokens: of_config(section, config, base, width, tokens)


def _windows(config: Config, sliding: Callable[[int], bool]) -> Callable[[int], int | None]:
    """The window of each layer: by ``layer_types`` where they are listed, else by ``sliding``."""
    window, types = config.get("sliding_window"), config.get("layer_types")

    def of(layer: int) -> int | None:
        slides = types[layer] == "sliding_attention" if types else sliding(layer)
        return window if slides else None

    return of


def _llama(config: Config, names: Mapping[str, str] = _LLAMA, **own: Any) -> Decoder:
    heads = int(config["num_attention_heads"])
    head_dim = int(_value(config, "head_dim", config["hidden_size"] // heads))
    tied = bool(_value(config, "tie_word_embeddings", own.pop("tied", False)))
    base = Decoder(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(_value(config, "num_key_value_heads", heads)),
        head_dim=head_dim,
        eps=float(_value(config, "rms_norm_eps", 1e-6)),
        layer="model.layers.{}.",
        names=names,
        embedding="model.embed_tokens",
        final_norm="model.norm",
        head="model.embed_tokens" if tied else "lm_head",
        rotary=_rotary(config, head_dim),
        activation=_activation(_value(config, "hidden_act", "silu")),
    )
    return replace(base, **own)


def _mistral(config: Config) -> Decoder:
    return _llama(config, window=_windows(config, lambda layer: True))


def _qwen2(config: Config) -> Decoder:
    return _llama(config, window=_qwen_windows(config))


def _qwen3(config: Config) -> Decoder:
    return _llama({"head_dim": 128, **config}, _LLAMA | _HEAD_NORMS, window=_qwen_windows(config))


def _qwen_windows(config: Config) -> Callable[[int], int | None]:
    """Qwen's first ``max_window_layers`` layers attend to everything, and all do unless windows are switched on."""
    if not config.get("use_sliding_window"):
        return lambda layer: None
    full = int(_value(config, "max_window_layers", 28))
    return _windows(config, lambda layer: layer >= full)


_SHARED = {
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_scale": "mlp.shared_expert_gate",
}


def _mixtral(config: Config) -> Decoder:
    at = "block_sparse_moe"
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = Experts(
        count=int(config["num_local_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        normalized=True,
        names={"router": f"{at}.gate"}
        | {role: f"{at}.experts.{{}}.{name}.weight" for role, name in names.items()},
    )
    settings = {"rms_norm_eps": 1e-5, **config}
    section = _rope_section(settings)
    theta = float(_value(section, "rope_theta", _value(config, "rope_theta", 1e6)))
    head_dim = int(_value(config, "head_dim", config["hidden_size"] // config["num_attention_heads"]))
    rotary = _rotary(settings, head_dim, theta)
    return _llama(settings, window=_windows(config, lambda layer: True), experts=experts, rotary=rotary)


def _qwen_experts(config: Config, names: Mapping[str, str]) -> Experts:
    step, plain = int(_value(config, "decoder_sparse_step", 1)), config.get("mlp_only_layers") or ()
    parts = ("gate", "up", "down")
    return Experts(
        count=int(config["num_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        normalized=bool(_value(config, "norm_topk_prob", False)),
        names={"router": "mlp.gate"}
        | {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in parts}
        | dict(names),
        layers=lambda layer: layer not in plain and (layer + 1) % step == 0,
    )


def _qwen2_moe(config: Config) -> Decoder:
    if config.get("use_sliding_window"):
        raise NoReferenceError("windows of Qwen2-MoE are not known to the check")
    return _llama(config, experts=_qwen_experts(config, _SHARED))


def _qwen3_moe(config: Config) -> Decoder:
    windows = _windows(config, lambda layer: bool(config.get("use_sliding_window")))
    return _llama(config, _LLAMA | _HEAD_NORMS, window=windows, experts=_qwen_experts(config, {}))


def _phi3(config: Config) -> Decoder:
    names = {role: name for role, name in _LLAMA.items() if role not in ("q", "k", "v", "gate", "up")}
    names |= {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
    return _llama(config, names, window=_windows(config, lambda layer: True))


def _olmo2(config: Config) -> Decoder:
    names = _LLAMA | _HEAD_NORMS
    names |= {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    del names["attn_norm"], names["mlp_norm"]
    return _llama(config, names)


def _gemma(config: Config, names: Mapping[str, str] = _LLAMA, **own: Any) -> Decoder:
    settings = {"head_dim": 256, **config}
    settings["hidden_act"] = _value(config, "hidden_activation", "gelu_pytorch_tanh")
    scale = float(config["hidden_size"]) ** 0.5
    return _llama(settings, names, tied=True, norm_offset=1.0, embedding_scale=scale, **own)


def _gemma2(config: Config) -> Decoder:
    return _gemma(
        config,
        _GEMMA,
        window=_windows(config, lambda layer: layer % 2 == 0),
        attention_scale=float(_value(config, "query_pre_attn_scalar", 256)) ** -0.5,
        attention_cap=config.get("attn_logit_softcapping", 50.0),
        logit_cap=config.get("final_logit_softcapping", 30.0),
    )


def _gemma3(config: Config) -> Decoder:
    pattern = int(_value(config, "sliding_window_pattern", 6))
    windows = _windows(config, lambda layer: (layer + 1) % pattern != 0)
    head_dim = int(_value(config, "head_dim", 256))
    wide, near = (_rope_section(config, kind) for kind in ("full_attention", "sliding_attention"))
    theta = float(_value(wide, "rope_theta", _value(config, "rope_theta", 1e6)))
    if near is wide:  # one section: it is that of the layers which attend to everything
        near = {}
    local = float(_value(near, "rope_theta", _value(config, "rope_local_base_freq", 10000.0)))

    def rotary(layer: int, tokens: int) -> Frequencies:
        if windows(layer) is None:
            return of_config(wide, config, theta, head_dim, tokens)
        return of_config(near, config, local, head_dim, tokens)

    return _gemma(
        config,
        _GEMMA | _HEAD_NORMS,
        window=windows,
        rotary=rotary,
        attention_scale=float(_value(config, "query_pre_attn_scalar", 256)) ** -0.5,
        attention_cap=config.get("attn_logit_softcapping"),
        logit_cap=config.get("final_logit_softcapping"),
    )


def _gpt_neox(config: Config) -> Decoder:
    heads = int(config["num_attention_heads"])
    head_dim = int(config["hidden_size"]) // heads
    tied = bool(_value(config, "tie_word_embeddings", False))
    section = _rope_section(config)
    partial = _value(section, "partial_rotary_factor", _value(config, "rotary_pct", 0.25))
    theta = _value(
        section, "rope_theta", _value(config, "rotary_emb_base", _value(config, "rope_theta", 10000.0))
    )
    width = int(head_dim * float(partial))
    return Decoder(
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        eps=float(_value(config, "layer_norm_eps", 1e-5)),
        layer="gpt_neox.layers.{}.",
        names={
            "attn_norm": "input_layernorm",
            "qkv": "attention.query_key_value",
            "o": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="gpt_neox.embed_in" if tied else "embed_out",
        rotary=lambda layer, tokens: of_config(section, config, float(theta), width, tokens),
        qkv="by_head",
        layer_norms=True,
        activation=_activation(_value(config, "hidden_act", "gelu")),
        parallel=bool(_value(config, "use_parallel_residual", True)),
    )


def gpt2(config: Config, prefix: str = "transformer.") -> Decoder:
    """GPT-2, whose Conv1D layers hold [in, out]."""
    heads = int(config["n_head"])
    tied = bool(_value(config, "tie_word_embeddings", True))
    return Decoder(
        layers=int(config["n_layer"]),
        heads=heads,
        kv_heads=heads,
        head_dim=int(config["n_embd"]) // heads,
        eps=float(_value(config, "layer_norm_epsilon", 1e-5)),
        layer=prefix + "h.{}.",
        names={
            "attn_norm": "ln_1",
            "qkv": "attn.c_attn",
            "o": "attn.c_proj",
            "mlp_norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        embedding=f"{prefix}wte",
        positions=f"{prefix}wpe",
        final_norm=f"{prefix}ln_f",
        head=f"{prefix}wte" if tied else "lm_head",
        transposed=True,
        layer_norms=True,
        activation=_activation(_value(config, "activation_function", "gelu_new")),
    )


_FAMILIES: dict[str, Callable[[Config], Decoder]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GPT2LMHeadModel": gpt2,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
