"""Exported graphs in ONNX Runtime: the logits of the reference, and the tokenizer beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import GGUF, HF, NOT_ONNX, ONNX, reference, source_path

import oazoo
from oazoo.formats.oam import OamSource
from oazoo.translators.assets import PROBE, load_tokenizer

pytestmark = pytest.mark.interop
runtime = pytest.importorskip("onnxruntime", reason="needs the packages of tests/interop/requirements.txt")
REFERENCE = np.load(Path(__file__).resolve().parent.parent / "data" / "smollm2" / "reference.npz")
TOLERANCE = 1e-4


class Loaded:
    """An ONNX file on the CPU."""

    def __init__(self, path: Path) -> None:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 2  # a warning would be seen
        self.session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def logits(self, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """[batch, tokens, vocabulary]."""
        result: npt.NDArray[np.float32] = self.session.run(
            ["logits"], {"input_ids": np.atleast_2d(np.asarray(ids, np.int64))}
        )[0]
        return result


@pytest.mark.parametrize("name", [name for name in (*HF, *GGUF, *ONNX) if name not in NOT_ONNX])
def test_goldens(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.onnx", external=name == "qwen2")
    ids, wanted = reference(name)
    found = Loaded(tmp_path / "out.onnx").logits(ids)
    difference = np.abs(found - wanted.reshape(found.shape)).max()
    print(f"{name}: {difference:.3g} from the reference")
    rounded = name in ("Q4_0", "Q8_0", "Q4_K_M", "Q6_K")  # to f16
    assert difference <= (2e-2 if rounded else TOLERANCE)
    assert rounded or np.array_equal(found.argmax(-1), wanted.reshape(found.shape).argmax(-1))


@pytest.mark.heavy
@pytest.mark.network
@pytest.mark.parametrize("dtype", ("f32", "keep"))
def test_smollm2(dtype: str, tmp_path: Path) -> None:
    """Its weights come as Q8 and f16, which leave as f16: exact only where they were converted to f32."""
    oazoo.convert("smollm2-135m-instruct", tmp_path / "m.oam", dtype=dtype)
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.onnx")
    loaded = Loaded(tmp_path / "out.onnx")
    worst, agreed, decided = 0.0, 0, 0
    for number in range(len(json.loads(str(REFERENCE["meta"])))):
        ids = REFERENCE[f"ids_{number}"].tolist()
        greedy = REFERENCE[f"greedy_{number}"].tolist()
        every = loaded.logits(ids + greedy)[0, len(ids) - 1 : -1]
        worst = max(worst, float(np.abs(every[0] - REFERENCE[f"last_logits_{number}"]).max()))
        best = np.sort(every, axis=1)
        clear = best[:, -1] - best[:, -2] > 0.1  # elsewhere two tokens are as good as equal
        agreed += int((every.argmax(axis=1) == greedy)[clear].sum())
        decided += int(clear.sum())
    print(f"SmolLM2 {dtype}: {worst:.3g} from the reference; {agreed} of {decided} greedy tokens")
    assert worst <= (TOLERANCE if dtype == "f32" else 0.05) and agreed == decided > 0
    same = oazoo.diff(tmp_path / "m.oam", tmp_path / "out.onnx", tolerance=0 if dtype == "f32" else 1e-2)
    assert same.equal and not same.options


def test_the_tokenizer_beside_a_graph_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oazoo.convert(source_path("F32"), tmp_path / "m.oam")
    (tmp_path / "out").mkdir()
    oazoo.export(tmp_path / "m.oam", tmp_path / "out" / "model.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    with OamSource(tmp_path / "m.oam") as source:
        ours = load_tokenizer(source.asset("asset/tokenizer.json") or b"", "m.oam")
    assert tokenizer(PROBE)["input_ids"] == ours.encode(PROBE).ids
