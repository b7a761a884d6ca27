"""Exported GGUF files in llama.cpp: they load, tokenize and answer as their originals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import GGUF, HF, NOT_GGUF, reference, source_path
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.formats.oam import OamSource
from oazoo.translators.assets import PROBE, load_tokenizer
from oazoo.zoo.adapters import bound_adapter, merge, write_pairs

pytestmark = pytest.mark.interop
llama_cpp: Any = pytest.importorskip(
    "cyllama.llama.llama_cpp", reason="needs the packages of tests/interop/requirements.txt"
)
REFERENCE = np.load(Path(__file__).resolve().parent.parent / "data" / "smollm2" / "reference.npz")
LORA = Path(__file__).resolve().parent.parent / "data" / "lora"
#: llama.cpp keeps keys and values as f16 and looks SiLU up in a table; its own converter's files differ as much.
TOLERANCE = 1e-2
#: llama.cpp lets Phi-3 and Mixtral attend to everything, so answers agree as far as their windows reach.
REACH = {"phi3": 9, "mixtral": 9}


@pytest.fixture(scope="module", autouse=True)
def backend() -> None:
    llama_cpp.disable_logging()
    llama_cpp.llama_backend_init()
    llama_cpp.ggml_backend_load_all()


class Loaded:
    """A GGUF file in llama.cpp, on the CPU."""

    def __init__(self, path: Path) -> None:
        class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
            """With the attribute that the package's own code asks for."""

            n_vocab = property(lambda self: self.get_vocab().n_vocab)

        options = llama_cpp.LlamaModelParams()
        options.n_gpu_layers = 0
        self.model = Model(path_model=str(path), params=options)
        self.vocabulary = self.model.get_vocab()

    def logits(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """[tokens, vocabulary] of one sequence."""
        options = llama_cpp.LlamaContextParams()
        options.n_ctx = options.n_batch = max(256, len(ids))
        options.n_threads = 2
        context = llama_cpp.LlamaContext(model=self.model, params=options)
        batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for position, token in enumerate(ids):
            batch.add(int(token), position, [0], True)
        context.decode(batch)
        return np.array([context.get_logits_ith(n) for n in range(len(ids))], dtype=np.float32)

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The tokens that follow, the whole sequence computed anew for each."""
        sequence = [int(token) for token in ids]
        for _ in range(count):
            sequence.append(int(self.logits(sequence)[-1].argmax()))
        return sequence[len(ids) :]


def same_answers(name: str, found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Logits within the tolerance, and the same best token wherever the reference has a clear one."""
    print(f"{name}: {np.abs(found - expected).max():.3g} from the reference")
    assert np.abs(found - expected).max() <= TOLERANCE
    best = np.sort(expected, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * TOLERANCE
    assert clear.sum() > len(clear) / 2
    assert np.array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize("name", [name for name in HF if name not in NOT_GGUF])
def test_hugging_face_goldens(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    ids, wanted = reference(name)
    loaded = Loaded(tmp_path / "out.gguf")
    assert loaded.vocabulary.n_vocab == wanted.shape[-1]
    reach = REACH.get(name)
    for sequence, expected in zip(ids, wanted, strict=True):
        same_answers(name, loaded.logits(sequence)[:reach], expected[:reach])


def test_adapters_load_and_merged_models_answer_as_pefts_model(tmp_path: Path) -> None:
    """The package cannot apply an adapter, but loading one checks its names and shapes against the model's."""
    model, adapter = tmp_path / "m.oam", LORA / "llama"
    oazoo.convert(source_path("llama"), model)
    oazoo.export(model, tmp_path / "base.gguf")
    with OamSource(model) as source:
        found, pairs = bound_adapter(source, adapter)
        write_pairs(source, pairs, tmp_path / "adapter.gguf")
    base = Loaded(tmp_path / "base.gguf")
    loaded = base.model.lora_adapter_init(str(tmp_path / "adapter.gguf"))
    facts = {loaded.meta_key_by_index(n): loaded.meta_val_str_by_index(n) for n in range(loaded.meta_count())}
    alpha = next(iter(found.pairs.values())).alpha
    assert facts["general.type"] == "adapter" and float(facts["adapter.lora.alpha"]) == alpha
    merge(model, adapter, tmp_path / "merged.oam")
    oazoo.export(tmp_path / "merged.oam", tmp_path / "merged.gguf")
    ids, wanted = (
        np.load(source_path("llama") / "reference.npz")["ids"],
        np.load(LORA / "llama" / "reference.npz"),
    )
    answers = Loaded(tmp_path / "merged.gguf").logits(ids[0])
    same_answers("merged", answers, wanted["logits"][0])
    assert np.abs(answers - base.logits(ids[0])).max() > 10 * TOLERANCE


#: Golden, and settings changed in its config: what the golden itself does not reach.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Contexts here are 256 tokens, so the golden's original length of 16 takes the long factors and 512 the short ones.
    "short factors": (
        "phi3_longrope",
        {"max_position_embeddings": 1024, "original_max_position_embeddings": 512},
    ),
    "llama, long factors": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
            }
        },
    ),
    "one after the other": ("gpt_neox", {"use_parallel_residual": False}),
    "linear in full layers": (
        "gemma3_six",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "final_logit_softcapping": None,
        },
    ),
    "yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e6,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_settings(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    shutil.copytree(source_path(name), tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | changes))
    oazoo.convert(tmp_path / "in", tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    ids, golden = reference(name)
    params, typed = load_oam(tmp_path / "m.oam")
    expected = numpy_logits(params, typed, ids[0])
    assert np.abs(expected - golden[0]).max() > 10 * TOLERANCE  # the change is one that can be seen
    same_answers(variant, Loaded(tmp_path / "out.gguf").logits(ids[0]), expected)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_goldens(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    ids, wanted = reference(name)
    loaded, original = Loaded(tmp_path / "out.gguf"), Loaded(source_path(name))
    found = loaded.logits(ids)
    if name.endswith("_K") or "_K_" in name:  # these became f16
        print(f"{name}: {np.abs(found - wanted).max():.3g} from the reference")
        assert np.abs(found - wanted).max() <= 2e-2
    else:
        assert np.array_equal(found, original.logits(ids))
        assert loaded.greedy(ids[:8], 24) == original.greedy(ids[:8], 24)
    with OamSource(tmp_path / "m.oam") as source:
        ours = load_tokenizer(source.asset("asset/tokenizer.json") or b"", "m.oam")
    for file in (loaded, original):
        assert file.vocabulary.tokenize(PROBE, True, True) == ours.encode(PROBE).ids
        assert file.vocabulary.token_eos() == original.vocabulary.token_eos()


@pytest.mark.heavy
@pytest.mark.network
def test_smollm2(tmp_path: Path) -> None:
    oazoo.convert("smollm2-135m-instruct", tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    loaded = Loaded(tmp_path / "out.gguf")
    agreed = decided = 0
    for number, entry in enumerate(json.loads(str(REFERENCE["meta"]))):
        ids = REFERENCE[f"ids_{number}"].tolist()
        assert loaded.vocabulary.tokenize(entry["prompt"], False, True) == ids
        wanted = REFERENCE[f"greedy_{number}"].tolist()
        every = loaded.logits(ids + wanted)[len(ids) - 1 : -1]
        best = np.sort(every, axis=1)
        clear = best[:, -1] - best[:, -2] > 0.1  # elsewhere two tokens are as good as equal
        agreed += int((every.argmax(axis=1) == wanted)[clear].sum())
        decided += int(clear.sum())
    print(f"SmolLM2: {agreed} of {decided} greedy tokens that are not a tie are the reference's")
    assert agreed == decided > 0
