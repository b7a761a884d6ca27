"""Loading ONNX files and nanoGPT's checkpoints by path: converted once, and again when any of their files has changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import oazoo
from oazoo.cli import main
from oazoo.zoo.store import Store

DATA = Path(__file__).resolve().parent.parent / "data" / "onnx" / "nanogpt_dynamo"


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", ["model.onnx", "ckpt.pt"])
def test_by_path(name: str) -> None:
    reference = np.load(DATA / "reference.npz")
    for _ in range(2):
        model = oazoo.load(DATA / name)
        assert np.abs(model.logits(reference["ids"]) - reference["logits"]).max() < 1e-3
    assert len(list((Store().root / "converted").glob("*.oam"))) == 1


def test_changed_external_data_is_noticed(tmp_path: Path) -> None:
    golden = onnx.load(DATA / "model.onnx")
    path, data = tmp_path / "m.onnx", tmp_path / "weights"
    onnx.save(golden, path, save_as_external_data=True, location=data.name, size_threshold=100)
    ids = np.arange(8)
    before = oazoo.load(path).logits(ids)
    values = np.frombuffer(data.read_bytes(), np.float32)
    data.write_bytes((values * np.float32(1.5)).tobytes())
    assert np.abs(oazoo.load(path).logits(ids) - before).max() > 0.01


@pytest.mark.parametrize("name", ["model.onnx", "ckpt.pt"])
def test_inspect(name: str) -> None:
    shown = CliRunner().invoke(main, ["inspect", str(DATA / name)])
    assert shown.exit_code == 0 and "transformer.wte.weight" in shown.output and "96" in shown.output


def test_a_folder_with_one_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes((DATA / "model.onnx").read_bytes())
    (tmp_path / "ckpt.pt").write_bytes((DATA / "ckpt.pt").read_bytes())
    run = CliRunner().invoke(main, ["convert", str(tmp_path), "-o", str(tmp_path / "m.oam")])
    assert run.exit_code == 0 and "ckpt.pt beside model.onnx" in run.output


def test_the_exit_status_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08\x3a\x7f")
    for name, status in (("m.onnx", 1), ("missing.onnx", 2)):
        run = CliRunner().invoke(main, ["convert", str(tmp_path / name), "-o", str(tmp_path / "m.oam")])
        assert run.exit_code == status and "Traceback" not in run.output
