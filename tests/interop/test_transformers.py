"""Exported folders in transformers: the same logits, ids and chat prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import GGUF, HF, reference, source_path
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.formats.oam import OamSource
from oazoo.translators.assets import PROBE, load_tokenizer

pytestmark = pytest.mark.interop
_WHY = "needs the packages of tests/interop/requirements.txt"
torch = pytest.importorskip("torch", reason=_WHY)
transformers = pytest.importorskip("transformers", reason=_WHY)

REFERENCE = np.load(Path(__file__).resolve().parent.parent / "data" / "smollm2" / "reference.npz")
TOLERANCE = 1e-4


def logits(folder: Path, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Logits of a folder, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        result: npt.NDArray[np.float32] = model(torch.tensor(np.atleast_2d(ids))).logits.numpy()
    return result


@pytest.mark.parametrize("name", HF)
def test_hugging_face_goldens(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out", max_shard_bytes=100_000)
    ids, wanted = reference(name)
    found = logits(tmp_path / "out", ids)
    original = logits(source_path(name), ids)
    print(f"{name}: {np.abs(found - original).max():.3g} from the original in transformers")
    print(f"{name}: {np.abs(found - wanted).max():.3g} from the reference")
    assert np.abs(found - original).max() <= TOLERANCE
    assert np.abs(found - wanted).max() <= (2e-2 if name == "llama_tied_bf16" else TOLERANCE)


#: Golden, and settings changed in its config; ``...`` takes one away. Older spellings, and what is switched off or on.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "another scale, one cap": (
        "gemma2",
        {"query_pre_attn_scalar": 40, "attn_logit_softcapping": None, "layer_types": ...},
    ),
    "default caps": ("gemma2", {"attn_logit_softcapping": ..., "final_logit_softcapping": ...}),
    "gemma 3 of transformers 4": (
        "gemma3",
        {
            "rope_parameters": ...,
            "layer_types": ...,
            "rope_theta": 50000.0,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "one section": (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
    ),
    "final cap": ("gemma3", {"final_logit_softcapping": 2.0}),
    "qwen3 windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "layer_types": ...},
    ),
    "qwen3 windows off": ("qwen3", {"use_sliding_window": False, "sliding_window": 6, "layer_types": ...}),
    "no window": ("phi3", {"sliding_window": None}),
    "longrope of transformers 4": (
        "phi3_longrope",
        {
            "rope_parameters": ...,
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.5,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.0, 3.0, 9.0],
            },
        },
    ),
    "longrope, short factors": (
        "phi3_longrope",
        {"max_position_embeddings": 256, "original_max_position_embeddings": 64},
    ),
    "gpt-neox of transformers 4": (
        "gpt_neox",
        {"rope_parameters": ..., "rotary_pct": 0.67, "rotary_emb_base": 500, "hidden_act": "gelu_fast"},
    ),
    "gpt-neox defaults": ("gpt_neox", {"rope_parameters": ..., "rotary_pct": 0.34, "rotary_emb_base": ...}),
    "one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "olmo2 scaled": (
        "olmo2",
        {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "exact GELU": ("gpt2", {"activation_function": "gelu"}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_mean_what_transformers_takes_them_for(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    shutil.copytree(source_path(name), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    ids, _ = reference(name)
    wanted = logits(tmp_path / "in", ids)
    oazoo.convert(tmp_path / "in", tmp_path / "m.oam")
    params, typed = load_oam(tmp_path / "m.oam")
    for row, expected in zip(ids, wanted, strict=True):
        found = numpy_logits(params, typed, row)
        print(f"{variant}: {np.abs(found - expected).max():.3g} from transformers")
        assert np.abs(found - expected).max() <= TOLERANCE
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")
    assert np.abs(logits(tmp_path / "out", ids) - wanted).max() <= TOLERANCE


@pytest.mark.parametrize("name", GGUF)
def test_gguf_goldens_become_folders(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam", dtype="f32")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")
    ids, wanted = reference(name)
    found = logits(tmp_path / "out", ids)[0]
    print(f"{name}: {np.abs(found - wanted).max():.3g} from the reference")
    assert np.abs(found - wanted).max() <= TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with OamSource(tmp_path / "m.oam") as source:
        ours = load_tokenizer(source.asset("asset/tokenizer.json") or b"", "m.oam")
        named = source.metadata["tokenizer"]
    assert tokenizer(PROBE)["input_ids"] == ours.encode(PROBE).ids
    assert tokenizer.decode(ours.encode(PROBE).ids) == ours.decode(
        ours.encode(PROBE).ids, skip_special_tokens=False
    )
    assert tokenizer.eos_token == named["eos_token"] and tokenizer.bos_token == named["bos_token"]


@pytest.mark.heavy
@pytest.mark.network
def test_smollm2(tmp_path: Path) -> None:
    oazoo.convert("smollm2-135m-instruct", tmp_path / "m.oam", dtype="f32")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out", max_shard_bytes=200_000_000)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    worst = 0.0
    for number, entry in enumerate(json.loads(str(REFERENCE["meta"]))):
        ids = REFERENCE[f"ids_{number}"]
        assert tokenizer(entry["prompt"])["input_ids"] == ids.tolist()
        with torch.no_grad():
            last = model(torch.tensor(ids.astype(np.int64))[None]).logits[0, -1].numpy()
        worst = max(worst, float(np.abs(last - REFERENCE[f"last_logits_{number}"]).max()))
    print(f"SmolLM2: {worst:.3g} from the reference")
    assert worst <= TOLERANCE
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" in text
