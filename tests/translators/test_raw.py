"""``--arch raw``: every tensor of any container, under its own name, bit for bit; no model to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper
from safetensors.numpy import save_file
from torch_files import save_tensors

import oazoo
from oazoo.cli import main
from oazoo.errors import FormatError, TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan

DATA = Path(__file__).resolve().parent.parent / "data"
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "f32": np.array([[1.5, np.nan, -np.inf]], np.float32),
    "f16": np.arange(6, dtype=np.float16).reshape(2, 3),
    "bf16": np.arange(5).astype(ml_dtypes.bfloat16),
    "f8": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
    "f64": np.arange(3, dtype=np.float64),
    "i64": np.array([-(2**63), 5]),
    "u8": np.arange(3, dtype=np.uint8),
    "bool": np.array([True, False]),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 3), np.float32),
    "hollow": np.zeros((3, 0), np.int8),
    "rank 8": np.ones((1, 2, 1, 1, 3, 1, 1, 1), np.float32),
}


@pytest.fixture
def onnx_file(tmp_path: Path) -> Path:
    stored = [numpy_helper.from_array(value, name) for name, value in TENSORS.items()]
    graph = helper.make_graph([helper.make_node("NoSuchOperation", ["f32"], ["y"])], "g", [], [], stored)
    (tmp_path / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    return tmp_path / "model.onnx"


def test_every_type_of_an_onnx_model(onnx_file: Path, tmp_path: Path) -> None:
    report = convert(onnx_file, tmp_path / "m.oam", arch="raw")
    assert not report.rounded and report.tensors[0].nan == 1 and report.tensors[0].infinite == 1
    with open_source(tmp_path / "m.oam") as source:
        source.verify()  # type: ignore[attr-defined]
        assert list(source) == list(TENSORS)
        for name, value in TENSORS.items():
            found = source[name].numpy()
            assert found.dtype == value.dtype and found.shape == value.shape
            assert found.tobytes() == value.tobytes(), name


@pytest.mark.parametrize(
    ("dtype", "cast"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
def test_dtype_is_for_floats_only(dtype: str, cast: Any, onnx_file: Path, tmp_path: Path) -> None:
    convert(onnx_file, tmp_path / "m.oam", arch="raw", dtype=dtype)
    with open_source(tmp_path / "m.oam") as source:
        for name, value in TENSORS.items():
            floats = value.dtype.kind == "f" or value.dtype.name in ("bfloat16", "float8_e4m3fn")
            expected = value.astype(cast) if floats else value
            assert source[name].numpy().tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(
    "path",
    [
        "onnx/nanogpt_script/model.onnx",
        "onnx/nanogpt_script/ckpt.pt",
        "hf/qwen2",
        "hf/gpt2",
        "gguf/tiny-Q4_0.gguf",
        "gguf/tiny-Q6_K.gguf",
    ],
)
def test_from_every_container(path: str, tmp_path: Path) -> None:
    report = convert(DATA / path, tmp_path / "m.oam", arch="raw")
    assert not report.rounded or "Q6_K" in path
    with open_source(DATA / path) as original, open_source(tmp_path / "m.oam") as source:
        assert source.keys() == original.keys()
        for name, tensor in original.items():
            found, wanted = source[name].numpy(), tensor.numpy()
            if "Q6_K" in path:
                wanted = wanted.astype(found.dtype)
            assert np.array_equal(found, wanted), name
        assert source.metadata["family"] == "raw" and source.metadata["source"]["format"] == original.format


def test_a_checkpoint_of_no_known_model(tmp_path: Path) -> None:
    value = {"net": {"0.weight": np.ones((2, 2), "f4"), "steps": np.array([1, 2])}, "epoch": 3}
    with pytest.raises(TranslationError, match="--arch raw"):
        plan(save_tensors(tmp_path / "c.pt", value))
    convert(tmp_path / "c.pt", tmp_path / "m.oam", arch="raw")
    with open_source(tmp_path / "m.oam") as source:
        assert list(source) == ["net.0.weight", "net.steps"]


def test_it_is_inspected_but_not_run(onnx_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.oam"
    run = CliRunner().invoke(main, ["convert", str(onnx_file), "-o", str(out), "--arch", "raw"])
    assert run.exit_code == 0, run.output
    shown = json.loads(CliRunner().invoke(main, ["inspect", str(out), "--json"]).stdout)
    assert [tensor["name"] for tensor in shown["tensors"]] == list(TENSORS)
    assert shown["family"] == "raw" and shown["config"]["tensors"] == len(TENSORS)
    assert CliRunner().invoke(main, ["verify", str(out)]).exit_code == 0
    with pytest.raises(FormatError, match=r"without a model.*--arch raw"):
        oazoo.load(out)
    generated = CliRunner().invoke(main, ["generate", str(out), "-p", "x"])
    assert generated.exit_code == 1 and "--arch raw" in generated.output


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    save_file({"t": np.zeros((1,) * 9, "f4")}, tmp_path / "a.safetensors")
    with pytest.raises(TranslationError, match="9 dimensions"):
        plan(tmp_path / "a.safetensors", "raw")
    with pytest.raises(TranslationError, match="already"):
        plan(DATA / "oa" / "oam_linear_adamw.oam", "raw")
    (tmp_path / "empty.onnx").write_bytes(
        helper.make_model(helper.make_graph([], "g", [], [])).SerializeToString()
    )
    with pytest.raises(TranslationError, match="no tensors"):
        plan(tmp_path / "empty.onnx", "raw")


def test_dry_run_predicts_the_size(tmp_path: Path) -> None:
    source = DATA / "onnx" / "nanogpt_dynamo" / "model.onnx"
    run = CliRunner().invoke(main, ["convert", str(source), "--arch", "raw", "--dry-run", "--json"])
    assert run.exit_code == 0, run.output
    report = convert(source, tmp_path / "m.oam", arch="raw")
    assert (
        json.loads(run.stdout)["output_bytes"] == report.output_bytes == (tmp_path / "m.oam").stat().st_size
    )
    assert len(report.tensors) == len(onnx.load(source).graph.initializer)
