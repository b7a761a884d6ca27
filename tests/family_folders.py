"""Golden checkpoints of the decoder families with settings or tensors changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (lets NumPy name bfloat16)
import numpy as np
import numpy.typing as npt
from checkpoints import write_hf
from model_goldens import source_path
from safetensors.numpy import load_file

Array = npt.NDArray[Any]
#: A golden of each family, and the name of its head.
FAMILIES: dict[str, str] = {
    "qwen3": "lm_head.weight",
    "gemma2": "lm_head.weight",
    "gemma3_six": "lm_head.weight",
    "olmo2": "lm_head.weight",
    "phi3": "lm_head.weight",
    "gpt_neox": "embed_out.weight",
}


def golden(name: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Config and tensors of a golden."""
    folder = source_path(name)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def bent(
    folder: Path,
    name: str,
    changes: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, Array]], object] = lambda tensors: None,
    **files: Any,
) -> Path:
    """A golden's folder with settings changed (``...`` takes one away) and tensors changed in place."""
    config, values = golden(name)
    config |= changes or {}
    tensors(values)
    return write_hf(folder, {k: v for k, v in config.items() if v is not ...}, values, **files)


def embedding(name: str) -> str:
    """The name of a golden's embedding."""
    return "gpt_neox.embed_in.weight" if name.startswith("gpt_neox") else "model.embed_tokens.weight"


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    """Something to put where it does not belong."""
    return np.ones(shape, dtype)
