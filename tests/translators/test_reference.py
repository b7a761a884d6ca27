"""The source semantics of ``convert --check`` against logits of the programs that the checkpoints come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    gguf_names,
    llama_folder,
    llama_metadata,
    llama_tensors,
    write_gguf,
    write_hf,
)
from model_goldens import DATA, GGUF, HF, ONNX, reference, source_path

from oazoo.formats.detect import open_source
from oazoo.translators.reference import NoReferenceError, Reference, reference_for
from oazoo.translators.translator import open_checkpoint

#: Every Hugging Face golden, also those that other tests brought.
FOLDERS = sorted({*HF, *(path.parent.name for path in (DATA / "hf").glob("*/reference.npz"))})


def opened(source: Any) -> Reference:
    checkpoint = open_checkpoint(source)
    return reference_for(source, checkpoint.naming, checkpoint.config, checkpoint.declared)


def logits(path: Path, ids: Any, rounded: dict[str, str] | None = None) -> Any:
    with open_source(path) as source:
        return np.array(
            opened(source).logits([np.asarray(row, np.int64) for row in np.atleast_2d(ids)], rounded)
        )


@pytest.mark.parametrize("name", [*GGUF, *ONNX])
def test_goldens(name: str) -> None:
    ids, wanted = reference(name)
    found = logits(source_path(name), ids)
    assert np.abs(found - wanted.reshape(found.shape)).max() < 3e-5


@pytest.mark.parametrize("name", FOLDERS)
def test_hugging_face_goldens(name: str) -> None:
    file = np.load(DATA / "hf" / name / "reference.npz")
    found = logits(DATA / "hf" / name, file["ids"])
    assert np.abs(found - file["logits"].reshape(found.shape)).max() < 3e-5


def test_sequences_do_not_see_each_other() -> None:
    ids, wanted = reference("qwen2")
    lengths = (24, 5, 1)
    sequences = [ids[0][: lengths[0]], ids[1][: lengths[1]], ids[0][: lengths[2]]]
    with open_source(source_path("qwen2")) as source:
        found = opened(source).logits(sequences)
    for row, (part, length) in enumerate(zip(found, lengths, strict=True)):
        assert part.shape[0] == length
        assert np.abs(part - wanted[row % 2][:length]).max() < 3e-5


def test_memory_does_not_grow_with_the_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time give what whole matrices give."""
    from oazoo.translators.reference import weights

    for name in ("gpt2", "Q6_K"):
        ids, _ = reference(name)
        whole = logits(source_path(name), ids)
        monkeypatch.setattr(weights, "_STEP", 300)
        assert np.abs(logits(source_path(name), ids) - whole).max() < 2e-5
        monkeypatch.undo()


def test_rounding_is_that_of_the_encoding(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    names = llama_tensors(LLAMA)
    ids = np.arange(20)
    exact, rounded = logits(folder, ids), logits(folder, ids, dict.fromkeys(names, "bf16"))
    cut = {n: v.astype(ml_dtypes.bfloat16).astype(np.float32) for n, v in names.items()}
    again = logits(write_hf(tmp_path / "cut", LLAMA, cut), ids)
    assert np.array_equal(rounded, again)
    assert 1e-4 < np.abs(rounded - exact).max() < 0.1


def test_gguf_and_hugging_face_mean_the_same(tmp_path: Path) -> None:
    """Permuted rows with interleaved pairs, against rows as they are with half-split ones."""
    ids = np.arange(30) % 40
    tensors = {name: value * 4 for name, value in llama_tensors(LLAMA).items()}  # scores that say something
    hf = logits(write_hf(tmp_path / "hf", LLAMA, tensors), ids)
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(tensors))
    assert np.abs(logits(path, ids) - hf).max() < 1e-5
    wrong = write_gguf(tmp_path / "w.gguf", llama_metadata(), gguf_names(tensors, permute=False))
    assert np.abs(logits(wrong, ids) - hf).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["SomethingForCausalLM"]},
            "does not know the architecture 'SomethingForCausalLM'",
        ),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_act": "relu6"}, "does not know the activation 'relu6'"),
        ({"rope_scaling": {"rope_type": "odd", "factor": 2.0}}, "rotary scaling 'odd'"),
        ({"num_attention_heads": "four"}, "of a wrong type"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
    ],
)
def test_what_is_not_known(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    config = {k: v for k, v in (LLAMA | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with open_source(folder) as source, pytest.raises(NoReferenceError, match=message):
        opened(source)


def test_other_gguf_architectures(tmp_path: Path) -> None:
    meta = llama_metadata(arch="starcoder2")
    path = write_gguf(tmp_path / "m.gguf", meta, gguf_names(llama_tensors(LLAMA)))
    with open_source(path) as source, pytest.raises(NoReferenceError, match="architecture 'starcoder2'"):
        opened(source)


def test_frequencies_follow_the_length_of_each_sequence(tmp_path: Path) -> None:
    """LongRoPE and dynamic scaling: a short sequence is not changed by a long one beside it."""
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}
    tensors = {name: value * 4 for name, value in llama_tensors(LLAMA).items()}
    folders = [DATA / "hf" / "phi3_longrope", write_hf(tmp_path / "hf", LLAMA | dynamic, tensors)]
    for folder in folders:
        with open_source(folder) as source:
            run = opened(source)
            ids = np.arange(30, dtype=np.int64)
            together = run.logits([ids[:12], ids])
            assert np.abs(together[0] - run.logits([ids[:12]])[0]).max() < 1e-5
            assert np.abs(together[0] - together[1][:12]).max() > 1e-3
