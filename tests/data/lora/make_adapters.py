"""Adapters as PEFT saves them on the golden checkpoints of ``../hf``, with the logits that PEFT's models give.

    python make_adapters.py

Needs torch, transformers and peft (made with torch 2.13, transformers 5.24, peft 0.21). Run in this folder; the committed
files are its output.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = {
    "llama": LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"]),
    "qwen3": LoraConfig(
        r=4,
        lora_alpha=8,
        use_rslora=True,
        target_modules="all-linear",
        rank_pattern={"k_proj": 2, "model.layers.1.mlp.up_proj": 5},
        alpha_pattern={"^model.layers.0.self_attn.o_proj": 3},
    ),
    "phi3": LoraConfig(r=2, lora_alpha=4, target_modules=["qkv_proj", "gate_up_proj", "o_proj"]),
    "gpt_neox": LoraConfig(r=2, lora_alpha=2, target_modules=["query_key_value", "dense_h_to_4h"]),
    "gpt2": LoraConfig(r=2, lora_alpha=6, fan_in_fan_out=True, target_modules=["c_attn", "c_fc", "c_proj"]),
}

for name, config in MODELS.items():
    torch.manual_seed(0)
    config.task_type = "CAUSAL_LM"
    base = AutoModelForCausalLM.from_pretrained(HERE.parent / "hf" / name, dtype=torch.float32)
    model = get_peft_model(base, config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # zero at first
                parameter.normal_(0, 0.3)
        ids = np.load(HERE.parent / "hf" / name / "reference.npz")["ids"][:1]
        logits = model(torch.from_numpy(ids)).logits.numpy()
    out = HERE / name
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    document = json.loads((out / "adapter_config.json").read_text())
    document["base_model_name_or_path"] = f"tiny-{name}"
    (out / "adapter_config.json").write_text(json.dumps(document, indent=1) + "\n")
    np.savez_compressed(out / "reference.npz", logits=logits.astype(np.float32))
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    print(name, sum(f.stat().st_size for f in out.iterdir()))
