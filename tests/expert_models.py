"""Tiny checkpoints of the families with a mixture of experts, under the names that transformers saves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BASE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "sliding_window": None},
    "qwen2": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 5,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 16,
        "norm_topk_prob": False,
    },
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 5,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
}
PARTS = {"gate": ("w1", "gate_proj"), "up": ("w3", "up_proj"), "down": ("w2", "down_proj")}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return BASE | FAMILIES[family] | changes


def tensors(family: str, config: dict[str, Any], dtype: Any = np.float32) -> dict[str, Array]:
    """Random weights under the names that transformers saves."""
    random, hidden = np.random.default_rng(5), config["hidden_size"]
    dense = set(config.get("mlp_only_layers", ()))
    experts = config.get("num_experts") or config["num_local_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], hidden // 4
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}

    def mlp(at: str, width: int) -> None:
        shapes[f"{at}.gate_proj.weight"] = shapes[f"{at}.up_proj.weight"] = (width, hidden)
        shapes[f"{at}.down_proj.weight"] = (hidden, width)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if family == "qwen2":
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
            if family == "qwen3" and name != "v":
                shapes[f"{at}.self_attn.{name}_norm.weight"] = (dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        if layer in dense:
            mlp(f"{at}.mlp", config["intermediate_size"])
        elif family == "mixtral":
            shapes[f"{at}.block_sparse_moe.gate.weight"] = (experts, hidden)
            for n in range(experts):
                e = f"{at}.block_sparse_moe.experts.{n}"
                shapes[f"{e}.w1.weight"] = shapes[f"{e}.w3.weight"] = (inner, hidden)
                shapes[f"{e}.w2.weight"] = (hidden, inner)
        else:
            shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
            for n in range(experts):
                mlp(f"{at}.mlp.experts.{n}", inner)
            if family == "qwen2":
                mlp(f"{at}.mlp.shared_expert", config["shared_expert_intermediate_size"])
                shapes[f"{at}.mlp.shared_expert_gate.weight"] = (1, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
