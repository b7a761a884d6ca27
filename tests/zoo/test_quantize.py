"""`oazoo quantize`: files packed on the device, checked against the format's rules and by the independent reader."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import model_goldens
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from oazoo.cli.main import main
from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.zoo import quantize_run as module
from oazoo.zoo.quantize import quantize


def rule(values: npt.NDArray[Any], top: int) -> npt.NDArray[np.float32]:
    """What packing makes of values, from the specification: blocks of 32 of the flattened tensor, scale = max / top, codes
    from -top to top (127 for Q8, 7 for Q4)."""
    flat = values.astype(np.float32).reshape(-1)
    blocks = np.zeros((-(-flat.size // 32), 32), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(top)
    scale[scale == 0] = 1
    return (np.rint(blocks / scale) * scale).reshape(-1)[: flat.size].reshape(values.shape)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A file with every dense type, an odd row length, state, an asset, an optimizer, and our kind of config."""
    rng = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[Any]] = {
        "embed.weight": rng.normal(size=(50, 33)).astype(np.float32),
        "layers.0.attn.q.weight": rng.normal(size=(7, 64)).astype(np.float16),
        "layers.0.attn.k.weight": rng.normal(size=(3, 5, 7)).astype(ml_dtypes.bfloat16),
        "layers.0.norm.weight": rng.normal(size=33).astype(np.float32),
        "table": rng.integers(0, 9, (4, 4)).astype(np.int32),
        "wide": rng.normal(size=(2, 3)),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.float32(3).reshape(()),
    }
    names = {np.dtype("f4"): "f32", np.dtype("f2"): "f16", np.dtype("i4"): "i32", np.dtype("f8"): "f64"}
    path = tmp_path / "dense.oam"
    payload = json.dumps({"oazoo": 1, "family": "none", "source": {"name": "here"}}).encode()
    entries = [OamEntry(n, a.shape, names.get(a.dtype, "bf16")) for n, a in tensors.items()]
    entries.append(OamEntry("step", (2,), "f32", "state"))
    optimizer = OamOptimizer("AdamW", first=np.zeros(4, np.float32), second=np.zeros(4, np.float32))
    with OamWriter(
        path,
        config=OamConfig("test", payload=payload),
        entries=entries,
        assets={"tokenizer.json": b"{}"},
        optimizer=optimizer,
    ) as writer:
        for name, array in tensors.items():
            if array.size:
                writer.write(name, array)
        writer.write("step", np.array([1, 2], np.float32))
    return path


@pytest.mark.parametrize(("to", "top"), [("q8", 127), ("q4", 7)])
def test_values_are_those_of_the_rule(
    dense: Path, tmp_path: Path, to: str, top: int, oamref: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 64)  # several chunks, the last one short
    out = tmp_path / "out.oam"
    report = quantize(dense, out, to, method="absmax")
    with OamSource(dense) as before:
        original = {name: tensor.numpy() for name, tensor in before.items()}
    read = oamref.load(out)  # the independent reader checks every checksum
    values = {t["name"]: oamref.dense(t) for t in read["weights"]}
    codes = {t["name"]: t["enc"] for t in read["weights"]}
    packed = {"embed.weight", "layers.0.attn.q.weight", "layers.0.attn.k.weight"}
    assert {name for name, code in codes.items() if code} == packed
    for name, array in original.items():
        wanted = rule(array, top) if name in packed else array
        assert np.array_equal(values[name], wanted), name
    assert report.output_bytes == out.stat().st_size
    assert report.packed_bytes == sum(original[name].nbytes for name in packed)
    assert "opt" not in read and report.dropped
    with OamSource(out) as after:
        assert after.asset("asset/tokenizer.json") == b"{}"
        assert after.state["step"].numpy().tolist() == [1, 2]
        assert after.metadata["quantization"]["to"] == to
        assert after.metadata["source"] == {"name": "here"}


def test_keep_dry_run_and_the_predicted_size(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    planned = quantize(dense, out, "q4", keep=["embed*"], dry_run=True)
    assert not out.exists()
    assert quantize(dense, None, "q4", keep=["embed*"], dry_run=True).output_bytes == planned.output_bytes
    with pytest.raises(UsageError, match="say where to write"):
        quantize(dense, None, "q4")
    done = quantize(dense, out, "q4", keep=["embed*"])
    assert planned.output_bytes == done.output_bytes == out.stat().st_size
    assert planned.tensors == done.tensors
    with OamSource(out) as after:
        assert after["embed.weight"].info.encoding == "f32"
        assert after["layers.0.attn.q.weight"].info.encoding == "q4"


def test_some_tensors_to_q8(dense: Path, tmp_path: Path, oamref: Any) -> None:
    """Two encodings in one file, by pattern, as the plan said and as the rule of each wants."""
    out = tmp_path / "out.oam"
    planned = quantize(dense, None, "q4", q8=["embed*", "*.k.*"], keep=["*.k.*"], dry_run=True)
    done = quantize(dense, out, "q4", q8=["embed*", "*.k.*"], keep=["*.k.*"], method="absmax")
    assert planned.tensors == done.tensors and planned.output_bytes == out.stat().st_size
    with OamSource(dense) as before, OamSource(out) as after:
        assert after["embed.weight"].info.encoding == "q8"
        assert after["layers.0.attn.q.weight"].info.encoding == "q4"
        assert after["layers.0.attn.k.weight"].info.encoding == "bf16"  # --keep is stronger
        assert np.array_equal(after["embed.weight"].numpy(), rule(before["embed.weight"].numpy(), 127))
        assert after.metadata["quantization"]["q8"] == ["embed*", "*.k.*"]
    oamref.load(out)
    with pytest.raises(UsageError, match="--q8 'emebd\\*' matches no tensor"):
        quantize(dense, out, "q4", q8=["emebd*"], overwrite=True)


def test_refusals_leave_nothing_behind(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    with pytest.raises(UsageError, match="'emebd\\*' matches no tensor"):
        quantize(dense, out, "q4", keep=["emebd*"])
    with pytest.raises(UsageError, match="unknown target 'q5'"):
        quantize(dense, out, "q5")
    with pytest.raises(UsageError, match="would be packed"):
        quantize(dense, out, "q4", keep=["*"])
    assert [p.name for p in tmp_path.iterdir()] == ["dense.oam"]
    quantize(dense, out, "q8")
    before = out.read_bytes()
    with pytest.raises(UsageError, match="--force"):
        quantize(dense, out, "q4")
    with pytest.raises(UsageError, match=r"quantised already: 3 tensors.*--allow-requantize"):
        quantize(out, tmp_path / "again.oam", "q4")
    assert out.read_bytes() == before
    with pytest.raises((OutputError, UsageError), match="no-such-folder"):
        quantize(dense, tmp_path / "no-such-folder" / "x.oam", "q4")


def test_the_source_is_never_the_output(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "link.oam").symlink_to(dense)
    before = dense.read_bytes()
    for output in (dense, tmp_path / "link.oam"):
        with pytest.raises(UsageError, match="is the source itself"):
            quantize(dense, output, "q8", overwrite=True)
    assert dense.read_bytes() == before


def test_one_pattern_may_stand_alone_and_keeping_everything_is_told(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    report = quantize(dense, out, "q8", keep="*.attn.*", dry_run=True)
    assert {t.name for t in report.tensors if t.target == "q8"} == {"embed.weight"}
    with pytest.raises(UsageError, match=r"--keep leaves nothing in .* that would be packed"):
        quantize(dense, out, "q8", keep=["*"])


@pytest.mark.parametrize("arguments", [["inspect"], ["verify"], ["quantize", "-o", "x.oam", "--to", "q4"]])
def test_a_name_of_the_zoo_is_no_file_but_there_is_a_way(arguments: list[str]) -> None:
    ended = CliRunner().invoke(main, [*arguments, "smollm2-135m-instruct"])
    assert ended.exit_code == 2
    assert "oazoo convert smollm2-135m-instruct -o smollm2-135m-instruct.oam" in ended.stderr


def test_the_configuration_beside_safetensors_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_goldens.source_path("qwen2"), folder)
    for path in (folder, folder / "model.safetensors.index.json"):
        assert "  model_type: qwen2" in CliRunner().invoke(main, ["inspect", str(path)]).stdout
    (folder / "config.json").write_text("{")
    ended = CliRunner().invoke(main, ["inspect", str(folder)])
    assert ended.exit_code == 0 and "config.json" in ended.stdout


def test_verify_tells_scripts_what_is_wrong(dense: Path) -> None:
    dense.write_bytes(dense.read_bytes()[:-1])
    ended = CliRunner().invoke(main, ["verify", str(dense), "--json"])
    assert ended.exit_code == 1
    told = json.loads(ended.stdout)
    assert told["ok"] is False and told["error"] in ended.stderr and told["path"] == str(dense)


def test_what_somebody_elses_file_says_of_itself_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "odd.oam"
    payload = json.dumps(
        {"oazoo": 1, "source": "here\x1b[31m", "generation": [1, 2], "model": None, "family": {}}
    ).encode()
    with OamWriter(path, config=OamConfig("test", payload=payload), entries=[]):
        pass
    shown = CliRunner().invoke(main, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "source: " in shown.output and "generation: [1, 2]" in shown.output and "\x1b" not in shown.output


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path, out = tmp_path / "bad.oam", tmp_path / "out.oam"
    values = np.ones((4, 40), np.float32)
    values[1, 2] = np.nan
    values[3, 0] = np.inf
    with OamWriter(path, config=OamConfig("test"), entries=[OamEntry("w", (4, 40), "f32")]) as writer:
        writer.write("w", values)
    with pytest.raises(FormatError, match="'w' holds values that are not finite: 2 from element 42 on"):
        quantize(path, out, "q8", method="absmax")
    assert not out.exists() and len(list(tmp_path.iterdir())) == 1
    quantize(path, out, "q8", method="absmax", allow_nonfinite=True)
    with OamSource(out) as after:
        wanted = np.where(np.isfinite(values), values, 0)
        assert np.allclose(after["w"].numpy(), wanted, rtol=1e-6)


def test_the_command_line(dense: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "größe 🙂.oam"
    done = runner.invoke(main, ["quantize", str(dense), "-o", str(out), "--to", "q4", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["output_bytes"] == out.stat().st_size
    shown = runner.invoke(main, ["inspect", str(out)])
    assert shown.exit_code == 0 and "q4" in shown.stdout and "quantization:" in shown.stdout
    data = json.loads(runner.invoke(main, ["inspect", str(out), "--json"]).stdout)
    assert data["encodings"]["q4"]["elements"] == 50 * 33 + 7 * 64 + 3 * 5 * 7
    assert data["assets"] == {"tokenizer.json": 2}
    assert runner.invoke(main, ["verify", str(out)]).exit_code == 0
    damaged = bytearray(out.read_bytes())
    with OamSource(out) as source:  # a byte under a checksum, not one of the padding
        raw = source["embed.weight"].raw().tobytes()
    damaged[damaged.find(raw) + 100] ^= 1
    out.write_bytes(damaged)
    verified = runner.invoke(main, ["verify", str(out)])
    assert verified.exit_code == 1 and "Weights is damaged" in verified.stderr
    assert runner.invoke(main, ["quantize", str(dense), "-o", str(out)]).exit_code == 2
