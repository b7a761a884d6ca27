"""Exported folders in transformers: the same logits, ids and chat prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import GGUF, HF, reference, source_path

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
