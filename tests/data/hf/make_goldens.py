"""Make the golden checkpoints of the decoder families, with transformers 5.24 and torch 2.13:

    python tests/data/hf/make_goldens.py [NAME ...]

Each folder gets a random model of one family, a few hundred KB, whose every setting matters: norms are random, windows
are shorter than the sequences, soft caps are small enough to bend. ``reference.npz`` holds token ids [2, 24] and the logits
[2, 24, 160] that transformers computes in float32. Running this again gives the same files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
COMMON: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": 2}
GEMMA = GROUPED | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}
#: Name → (model, its config, type that weights are stored in).
GOLDENS: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 24, "tie_word_embeddings": True}, torch.float32),
    "phi3": ("Phi3", GROUPED | {"sliding_window": 8}, torch.float32),
    "phi3_longrope": (
        "Phi3",
        GROUPED
        | {
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.25, 1.5, 1.75, 2.0],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
            },
        },
        torch.float32,
    ),
    "gemma2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        torch.float32,
    ),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        torch.bfloat16,
    ),
    "olmo2": ("Olmo2", GROUPED | {"rope_theta": 500000.0}, torch.float32),
    "gpt_neox": (
        "GPTNeoX",
        COMMON | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}},
        torch.float32,
    ),
}


def make(name: str) -> None:
    """Write one golden."""
    family, values, dtype = GOLDENS[name]
    kind = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**values)
    generator = torch.Generator().manual_seed(sorted(GOLDENS).index(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            norm = "norm" in key and key.endswith("weight")
            centre = 1.0 if norm and not family.startswith("Gemma") else 0.0
            scale = 0.3 if norm else 0.1 if value.ndim == 1 else 1.5 / value.shape[-1] ** 0.5
            value.copy_((centre + scale * noise).to(dtype).float())
        ids = torch.randint(3, config.vocab_size, (2, 24), generator=generator)
        logits = model(ids).logits.numpy()
    model.to(dtype).save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)
    np.savez(HERE / name / "reference.npz", ids=ids.numpy(), logits=logits.astype(np.float32))
    print(f"{name}: logits from {logits.min():.2f} to {logits.max():.2f}, deviation {logits.std():.2f}")


if __name__ == "__main__":
    for wanted in sys.argv[1:] or GOLDENS:
        make(wanted)
