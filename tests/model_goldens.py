"""The golden checkpoints of ``tests/data`` and their reference logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

DATA = Path(__file__).resolve().parent / "data"
HF = (
    "gpt2",
    "llama",
    "llama_tied_bf16",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_six",
    "olmo2",
    "phi3",
    "phi3_longrope",
    "gpt_neox",
    "gpt_neox_serial",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
#: What llama.cpp's fixed rules for an architecture cannot express, and the words that say so.
NOT_GGUF = {
    "gemma3": "scales scores by 16\\^-0.5",
    "gpt_neox_serial": "a head of its own",
    "qwen2_moe": "all its layers have experts",
}
#: And what no graph of ours expresses.
NOT_ONNX = dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), "layers with a mixture of experts")
ONNX = tuple(
    f"{name}/{file}"
    for name in ("nanogpt_script", "nanogpt_nobias_script", "nanogpt_dynamo")
    for file in ("model.onnx", "ckpt.pt")
)
GGUF = ("F32", "BF16", "Q4_0", "Q8_0", "Q4_K_M", "Q6_K")


def source_path(name: str) -> Path:
    """Where a golden's checkpoint lies."""
    if name in ONNX:
        return DATA / "onnx" / name
    return DATA / "hf" / name if name in HF else DATA / "gguf" / f"tiny-{name}.gguf"


def reference(name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids and logits of a golden: [2, 24] and [2, 24, 160] for Hugging Face, [1, 16] and [1, 16, 96] for ONNX, [48] and
    [48, 320] for GGUF.
    """
    if name in ONNX:
        file = np.load((DATA / "onnx" / name).parent / "reference.npz")
        return file["ids"], file["logits"]
    if name in HF:
        file = np.load(DATA / "hf" / name / "reference.npz")
        return file["ids"], file["logits"]
    file = np.load(DATA / "gguf" / "reference.npz")
    return file["ids"], file[name]
