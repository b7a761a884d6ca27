"""How the checkpoints of this folder that have no other source were made: tiny random models and their logits.

Needs PyTorch and transformers, which the suite does not: ``python make_goldens.py OUTPUT_FOLDER [NAME …]``. Weights are random, norms
too (at their defaults a wrong norm would not show), and windows are shorter than the sequence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt_neox import GPTNeoXConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.olmo2 import Olmo2Config
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCABULARY, LENGTH = 160, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
CONFIGS = {
    "qwen3": Qwen3Config(
        **GROUPED, num_hidden_layers=2, head_dim=16, rope_theta=1e6, tie_word_embeddings=True
    ),
    "gemma2": Gemma2Config(
        **GROUPED,
        num_hidden_layers=2,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **GROUPED,
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=20,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma3_six": Gemma3TextConfig(
        **{**GROUPED, "hidden_size": 32, "intermediate_size": 48},
        num_hidden_layers=6,
        head_dim=8,
        sliding_window=8,
        query_pre_attn_scalar=8,
    ),
    "olmo2": Olmo2Config(**GROUPED, num_hidden_layers=2, rope_theta=5e5),
    "phi3": Phi3Config(**GROUPED, num_hidden_layers=2, sliding_window=9),
    "phi3_longrope": Phi3Config(
        **{**GROUPED, "max_position_embeddings": 64},
        num_hidden_layers=2,
        original_max_position_embeddings=16,
        partial_rotary_factor=0.5,
        tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2],
            "long_factor": [1.5, 2.5, 4.0],
        },
    ),
    "gpt_neox": GPTNeoXConfig(**COMMON, num_hidden_layers=2, rotary_pct=0.5, hidden_act="gelu"),
    "gpt_neox_serial": GPTNeoXConfig(
        **COMMON,
        num_hidden_layers=1,
        rotary_pct=0.34,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        tie_word_embeddings=True,
    ),
    "mixtral": MixtralConfig(
        **{**GROUPED, "intermediate_size": 48},
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=9,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **GROUPED,
        num_hidden_layers=2,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=32,
        norm_topk_prob=False,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **GROUPED,
        num_hidden_layers=2,
        head_dim=16,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
}


def main(folder: Path, names: list[str]) -> None:
    for index, (name, config) in enumerate(CONFIGS.items()):
        if names and name not in names:
            continue
        torch.manual_seed(index)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    centre = 0.0 if "bias" in parameter_name or name.startswith("gemma") else 1.0
                    parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(6.0)
            ids = torch.randint(3, VOCABULARY, (2, LENGTH))
            logits = model(ids, use_cache=False).logits.float().numpy()
        target = folder / name
        model.save_pretrained(target)
        np.savez(target / "reference.npz", ids=ids.numpy(), logits=logits.astype(np.float32))
        print(name, sum(p.numel() for p in model.parameters()), float(np.abs(logits).max()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
