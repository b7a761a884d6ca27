"""`oazoo export` on the command line and as `oazoo.export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from exported import gguf_bytes, oam_bytes
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    oazoo.convert(source_path("Q8_0"), tmp_path / "m.oam")
    return tmp_path / "m.oam"


def test_out_and_back(model: Path, tmp_path: Path) -> None:
    done = run(model, "-o", tmp_path / "out.gguf")
    assert (
        done.exit_code == 0
        and "read again and compared" in done.stderr
        and "no value was changed" in done.stderr
    )
    assert gguf_bytes(tmp_path / "out.gguf") == gguf_bytes(source_path("Q8_0"))
    oazoo.convert(tmp_path / "out.gguf", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(model)
    done = run(model, "-o", tmp_path / "hf", "--json")
    shown = json.loads(done.stdout)
    assert done.exit_code == 0 and shown["container"] == "safetensors"
    assert shown["architecture"] == "LlamaForCausalLM" and shown["max_error"] > 0
    assert shown["files"] == {p.name: p.stat().st_size for p in (tmp_path / "hf").iterdir()}
    assert any("the precision that packing took does not come back" in note for note in shown["notes"])


def test_rounding_is_shown(model: Path, tmp_path: Path) -> None:
    done = run(model, "-o", tmp_path / "hf", "--dtype", "bf16")
    assert done.exit_code == 0 and "Rounded" in done.stdout and "largest change" in done.stdout


@pytest.mark.parametrize("arguments", (["-o", "OUT.gguf"], ["--to", "gguf"]))
def test_dry_run_writes_nothing(arguments: list[str], model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    arguments = [str(tmp_path / part) if part.startswith("OUT") else part for part in arguments]
    done = run(model, *arguments, "--dry-run")
    assert done.exit_code == 0 and "RopePermute(4 heads, to interleaved)" in done.stdout
    assert "blk.*.attn_q.weight" in done.stdout and "nothing was" in done.stderr
    shown = json.loads(run(model, *arguments, "--dry-run", "--json").stdout)
    assert shown["architecture"] == "llama" and shown["peak_bytes"] > 0
    assert {t["encoding"] for t in shown["tensors"]} == {"f32", "gguf.q8_0"}
    written = oazoo.export(model, tmp_path / "x.gguf")
    assert shown["weight_bytes"] == sum(t.nbytes for t in written.tensors)
    (tmp_path / "x.gguf").unlink()
    assert sorted(tmp_path.iterdir()) == before


def test_a_graph(model: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    done = run(model, "--to", "onnx", "--dry-run")
    assert done.exit_code == 0 and "decoder → onnx" in done.stdout and "layers.*.attn.q.weight" in done.stdout
    shown = json.loads(run(model, "-o", tmp_path / "x.onnx", "--dry-run", "--json").stdout)
    assert shown["container"] == "onnx" and shown["architecture"] == "decoder"
    assert {t["encoding"] for t in shown["tensors"]} == {"f16", "f32"} and sorted(
        tmp_path.iterdir()
    ) == before
    done = run(model, "-o", tmp_path / "x.onnx", "--external", "--json")
    shown = json.loads(done.stdout)
    assert done.exit_code == 0 and {"x.onnx", "x.onnx.data", "tokenizer.json"} < set(shown["files"])
    assert oazoo.diff(model, tmp_path / "x.onnx", tolerance=1e-3).equal


def test_weights_alone(model: Path, tmp_path: Path) -> None:
    assert run(model, "-o", tmp_path / "hf", "--no-tokenizer").exit_code == 0
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_misuse(model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([model], "say where to write"),
        ([model, "--dry-run"], "say where to write"),
        ([model, "-o", tmp_path / "x.tflite"], "what to export to"),
        ([model, "-o", tmp_path / "x.gguf", "--external"], "--external is for ONNX"),
        ([source_path("F32"), "-o", tmp_path / "x"], "convert it first"),
        ([tmp_path / "none.oam", "-o", tmp_path / "x"], "none.oam"),
        (["smollm2-135m-instruct", "-o", tmp_path / "x"], "is a name of the zoo, and a file is needed"),
        ([model, "-o", model], "what to export to"),
        ([model, "-o", tmp_path / "x", "--dtype", "q4"], "q4"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and words in done.stderr, done.stderr
    (tmp_path / "x.gguf").write_bytes(b"old")
    assert run(model, "-o", tmp_path / "x.gguf").exit_code == 2
    assert run(model, "-o", tmp_path / "x.gguf", "--force").exit_code == 0
    assert run(model, "-o", tmp_path / "no" / "x.gguf").exit_code == 1
