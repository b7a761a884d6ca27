"""Tiny checkpoints of Mamba in all its namings."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
HF: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "state_size": 4,
    "conv_kernel": 4,
    "time_step_rank": 3,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
ORIGINAL = {"d_model": 32, "n_layer": 2, "vocab_size": 37, "ssm_cfg": {"d_state": 4, "dt_rank": 3}}
GGUF = {
    "general.architecture": "mamba",
    "mamba.context_length": 1024,
    "mamba.embedding_length": 32,
    "mamba.feed_forward_length": 0,
    "mamba.attention.head_count": 0,
    "mamba.block_count": 2,
    "mamba.ssm.conv_kernel": 4,
    "mamba.ssm.inner_size": 64,
    "mamba.ssm.state_size": 4,
    "mamba.ssm.time_step_rank": 3,
    "mamba.attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors(embedding: str = "embeddings", middle: bool = True) -> dict[str, Array]:
    """Random weights under the published names; ``middle``: the convolution has an axis of one in the middle."""
    random = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {f"backbone.{embedding}.weight": (40, 32)}
    for layer in range(2):
        at = f"backbone.layers.{layer}"
        shapes |= {
            f"{at}.norm.weight": (32,),
            f"{at}.mixer.in_proj.weight": (128, 32),
            f"{at}.mixer.conv1d.weight": (64, 1, 4) if middle else (64, 4),
            f"{at}.mixer.conv1d.bias": (64,),
            f"{at}.mixer.x_proj.weight": (11, 64),
            f"{at}.mixer.dt_proj.weight": (64, 3),
            f"{at}.mixer.dt_proj.bias": (64,),
            f"{at}.mixer.A_log": (64, 4),
            f"{at}.mixer.D": (64,),
            f"{at}.mixer.out_proj.weight": (32, 64),
        }
    shapes["backbone.norm_f.weight"] = (32,)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_tensors() -> dict[str, Array]:
    """The same as llama.cpp's converter stores them: other names, A itself, no axis in the middle."""
    words = {
        "backbone.embeddings": "token_embd",
        "backbone.norm_f": "output_norm",
        "backbone.layers": "blk",
        "mixer.in_proj": "ssm_in",
        "mixer.conv1d": "ssm_conv1d",
        "mixer.x_proj": "ssm_x",
        "mixer.dt_proj": "ssm_dt",
        "mixer.A_log": "ssm_a",
        "mixer.D": "ssm_d",
        "mixer.out_proj": "ssm_out",
    }
    result = {}
    for name, value in tensors().items():
        if name.endswith("A_log"):
            value = -np.exp(value)
        for old, new in words.items():
            name = name.replace(old, new)
        name = name if name.startswith(("token", "output")) else name.replace(".norm.", ".attn_norm.")
        result[name] = value.reshape(64, 4) if "conv1d.weight" in name else value
    return result
