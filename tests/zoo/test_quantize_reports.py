"""What users of other quantizers reported (QZ): odd rows, bad values, files told apart, tensors kept out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.quant import planes

TOP = {"q8": 127, "q4": 7}


def write(path: Path, tensors: dict[str, npt.NDArray[Any]]) -> Path:
    entries = [OamEntry(name, array.shape, "f32") for name, array in tensors.items()]
    config = OamConfig("test", payload=b'{"oazoo":1}')
    with OamWriter(path, config=config, entries=entries) as writer:
        for name, array in tensors.items():
            if array.size:
                writer.write(name, array)
    return path


@pytest.mark.parametrize("to", ["q8", "q4"])
def test_rows_of_any_length(tmp_path: Path, to: str) -> None:
    """QZ-01: exactly as many values come back, padding does not count, and what is not packed is listed with its bytes."""
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 33), "b": (1, 31), "c": (7, 1), "flat": (5,), "none": (2, 0)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) + 3 for name, shape in shapes.items()}
    source = write(tmp_path / "in.oam", tensors)
    report = oazoo.quantize(source, tmp_path / "out.oam", to, method="absmax")
    kept = {t.name: (t.target, t.bytes_after, t.reason) for t in report.tensors if t.reason}
    assert kept == {
        "flat": ("f32", 20, "fewer than 2 dimensions"),
        "none": ("f32", 0, "no elements"),
    }
    with OamSource(tmp_path / "out.oam") as packed:
        for name, array in tensors.items():
            assert packed[name].info.shape == array.shape
            assert packed[name].numpy().shape == array.shape
            if name in kept:
                assert np.array_equal(packed[name].numpy(), array)
                continue
            assert packed[name].info.encoding == to
            assert sum(chunk.size for chunk in packed[name].chunks(32)) == array.size
            _, scales = planes(packed[name].raw(), to)
            flat = np.abs(array.reshape(-1))
            tail = flat[(flat.size - 1) // 32 * 32 :]
            assert scales.size == -(-array.size // 32)
            assert scales[-1] == tail.max() / np.float32(TOP[to])


@pytest.mark.parametrize("method", ["absmax", "search"])
@pytest.mark.parametrize("to", ["q8", "q4"])
def test_extreme_values_through_a_file(tmp_path: Path, to: str, method: str) -> None:
    """QZ-03: tiny blocks keep their values to the precision of a block, huge ones stay finite, by every method."""
    rows = np.zeros((6, 32), np.float32)
    rows[0] = -0.0
    rows[1] = 1e30 * np.linspace(-1, 1, 32)
    rows[2] = 1e-30 * np.linspace(-1, 1, 32)
    rows[3] = 1e-3
    rows[3, 7] = 1e4
    rows[4] = 1e-3
    rows[5] = 3.4e38
    source = write(tmp_path / "in.oam", {"w": rows})
    oazoo.quantize(source, tmp_path / "out.oam", to, method=method)
    with OamSource(tmp_path / "out.oam") as packed:
        got = packed["w"].numpy().astype(np.float64)
    step = np.abs(rows.astype(np.float64)).max(1, keepdims=True) / TOP[to]
    assert np.all(np.isfinite(got)) and np.all(got[0] == 0)
    if method == "absmax":
        assert np.all(np.abs(got - rows) <= step * 0.5000001)
    # A uniform error of half a step is what a block's sum of squares may reach.
    assert np.all(((got - rows) ** 2).sum(1) <= 32 * (step[:, 0] * 0.5000001) ** 2)
    assert np.abs(got[4] / 1e-3 - 1).max() < 1e-6  # the outlier is in another block
    for bad in (np.nan, np.inf, -np.inf):
        rows[2, 9] = bad
        source = write(tmp_path / f"{bad}.oam", {"w": rows})
        with pytest.raises(FormatError, match="'w' holds values that are not finite: 1 from element 73 on"):
            oazoo.quantize(source, tmp_path / "bad.oam", to, method=method)
        assert not (tmp_path / "bad.oam").exists()


def test_files_of_one_source_are_told_apart(tmp_path: Path) -> None:
    """QZ-05: a file records how it was made and from what; `diff` names the tensors and the options that differ."""
    dense, one, two = (tmp_path / f"{name}.oam" for name in ("dense", "one", "two"))
    oazoo.convert(source_path("F32"), dense)
    oazoo.quantize(dense, one, "q4", method="absmax")
    oazoo.quantize(dense, two, "q4", keep=["*.attn.v.weight"], method="absmax")
    with OamSource(dense) as source, OamSource(one) as packed:
        note = packed.metadata["quantization"]
        assert note["source_weights"] == source.weights_checksum
        assert note["tool"].startswith("oazoo ") and note["to"] == "q4" and note["keep"] == []
    found = oazoo.diff(one, two)
    assert {t.name for t in found.differing} == {n for n in OamSource(one) if n.endswith("attn.v.weight")}
    assert [o for o in found.options if o[0].startswith("quantization.")] == [
        ("quantization.keep", [], ["*.attn.v.weight"])
    ]
    shown = CliRunner().invoke(main, ["diff", str(one), str(two)])
    assert shown.exit_code == 1 and "quantization.keep" in shown.stdout and "attn.v.weight" in shown.stdout


def test_an_embedding_that_is_kept_keeps_its_tied_head(tmp_path: Path) -> None:
    """QZ-06: a pattern that matches nothing is an error, and a tied head is what the embedding is."""
    dense, out = tmp_path / "dense.oam", tmp_path / "out.oam"
    oazoo.convert(source_path("llama_tied_bf16"), dense)
    for pattern in ("emebd*", "lm_head*"):
        with pytest.raises(UsageError, match="matches no tensor"):
            oazoo.quantize(dense, out, "q4", keep=[pattern], method="absmax")
    assert not out.exists()
    oazoo.quantize(dense, out, "q4", keep=["embed*"], method="absmax")
    with OamSource(out) as packed, OamSource(dense) as source:
        assert "head.weight" not in packed
        assert packed["embed.weight"].raw().tobytes() == source["embed.weight"].raw().tobytes()
        assert packed["layers.0.mlp.up.weight"].info.encoding == "q4"
    ids = np.arange(1, 20)
    whole = oazoo.load(dense).logits(ids)
    assert 0 < np.abs(oazoo.load(out).logits(ids) - whole).max() < np.abs(whole).max()
