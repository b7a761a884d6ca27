"""Odd tensors through every command: long names, scalars, empty axes, rank 8, rows of any length, NaN and infinity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from oazoo.cli import main
from oazoo.formats.detect import open_source

LONG = "model.layers.0." + "very_" * 40 + "long.weight"
TWIN = LONG[:-7] + ".other"  # the same first 102 bytes
RNG = np.random.default_rng(5)
TENSORS: dict[str, np.ndarray[Any, Any]] = {
    LONG: RNG.normal(size=(40, 33)).astype("f4"),
    TWIN: RNG.normal(size=(3, 64)).astype("f2"),
    "名" * 60: RNG.normal(size=(5, 1)).astype("f4"),
    "scalar": np.array(2.5, "f4"),
    "empty": np.zeros((0, 7), "f4"),
    "hollow": np.zeros((7, 0), "f2"),
    "rank8": RNG.normal(size=(1, 2, 1, 3, 1, 1, 5, 1)).astype("f4"),
    "single": RNG.normal(size=(1, 31)).astype("f4"),
    "mask": np.tril(np.ones((1, 1, 8, 8), np.int64)),
    "flags": np.array([True, False]),
}
#: Packed by quantize: floats of rank 2 and more that have elements.
PACKED = {LONG, TWIN, "名" * 60, "rank8", "single"}


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tensors as SafeTensors, converted, and packed."""
    folder = tmp_path_factory.mktemp("odd")
    save_file(TENSORS, folder / "in.safetensors")
    run("convert", folder / "in.safetensors", "-o", folder / "raw.oam", "--arch", "raw")
    for to in ("q8", "q4"):
        run("quantize", folder / "raw.oam", "-o", folder / f"{to}.oam", "--to", to, "--method", "absmax")
    return folder


def test_conversion_keeps_every_bit(files: Path) -> None:
    with open_source(files / "raw.oam") as source:
        assert set(source) == set(TENSORS)
        for name, value in TENSORS.items():
            found = source[name].numpy()
            assert found.dtype == value.dtype and found.shape == value.shape
            assert found.tobytes() == value.tobytes(), name


@pytest.mark.parametrize("name", ["raw.oam", "q8.oam", "q4.oam"])
def test_inspect_verify_and_diff_show_full_names(name: str, files: Path) -> None:
    shown = json.loads(run("inspect", files / name, "--json").stdout)
    assert {tensor["name"] for tensor in shown["tensors"]} == set(TENSORS)
    assert {tuple(tensor["shape"]) for tensor in shown["tensors"]} == {v.shape for v in TENSORS.values()}
    run("verify", files / name)
    result = CliRunner().invoke(main, ["diff", str(files / "in.safetensors"), str(files / name), "--json"])
    found = json.loads(result.stdout)
    assert not found["missing"] and not found["extra"]
    differing = set(found["differing"])
    assert differing <= PACKED if name != "raw.oam" else not differing
    assert result.exit_code == (0 if name == "raw.oam" else 1)


@pytest.mark.parametrize(("to", "top"), [("q8", 127), ("q4", 7)])
def test_quantize_packs_what_can_be_packed(to: str, top: int, files: Path) -> None:
    with open_source(files / f"{to}.oam") as source:
        assert {name for name, tensor in source.items() if tensor.info.encoding == to} == PACKED
        for name, value in TENSORS.items():
            found = source[name].numpy()
            assert found.shape == value.shape
            if name not in PACKED:
                assert found.tobytes() == value.tobytes()
                continue
            # Within half a step of the block's scale, padding or not.
            flat, got = value.astype("f4").reshape(-1), found.reshape(-1)
            for start in range(0, flat.size, 32):
                block = flat[start : start + 32]
                step = np.abs(block).max() / top
                assert np.abs(got[start : start + 32] - block).max() <= step * 0.5001, name


def test_keep_takes_full_names(files: Path, tmp_path: Path) -> None:
    run(
        "quantize",
        files / "raw.oam",
        "-o",
        tmp_path / "k.oam",
        "--to",
        "q8",
        "--keep",
        LONG,
        "--keep",
        "*.other",
    )
    with open_source(tmp_path / "k.oam") as source:
        assert source[LONG].info.encoding == "f32" and source[TWIN].info.encoding == "f16"
        assert source["名" * 60].info.encoding == "q8"
    result = CliRunner().invoke(
        main,
        [
            "quantize",
            str(files / "raw.oam"),
            "-o",
            str(tmp_path / "l.oam"),
            "--to",
            "q8",
            "--keep",
            LONG[:100],
        ],
    )
    assert result.exit_code == 2 and "matches no tensor" in result.output


@pytest.mark.parametrize(("dtype", "kind"), [("keep", "f2"), ("f32", "f4"), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("name", ["raw.oam", "q8.oam"])
def test_back_to_safetensors(name: str, dtype: str, kind: Any, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    shown = json.loads(run("export", files / name, "-o", out, "--dtype", dtype, "--json").stdout)
    assert shown["container"] == "safetensors" and [*shown["files"]] == ["out.safetensors"]
    assert {tensor["target"] for tensor in shown["tensors"]} == set(TENSORS)
    found = load_file(out)
    with open_source(files / name) as source:
        for key, tensor in source.items():
            value = tensor.numpy()
            packed = tensor.info.encoding == "q8"
            if packed or (dtype != "keep" and value.dtype.kind == "f"):
                value = value.astype(kind)
            assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
            assert found[key].tobytes() == value.tobytes(), key
    if (name, dtype) == ("raw.oam", "keep"):
        run("convert", out, "-o", tmp_path / "again.oam", "--arch", "raw")
        run("diff", files / "raw.oam", tmp_path / "again.oam")


def test_raw_export_has_no_other_form(files: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (["-o", tmp_path / "folder"], "name OUT.safetensors"),
        (["-o", tmp_path / "out.gguf"], "without a model"),
        (["-o", tmp_path / "out.onnx"], "without a model"),
        (["--to", "safetensors", "--dry-run"], "without a model"),
    ):
        result = CliRunner().invoke(main, ["export", str(files / "raw.oam"), *map(str, arguments)])
        assert result.exit_code in (1, 2) and said in result.output.replace("\n", " "), result.output
    assert not list(tmp_path.iterdir())


def test_nine_dimensions_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_file({"t": np.zeros((1,) * 9, "f4")}, tmp_path / "a.safetensors")
    result = CliRunner().invoke(
        main, ["convert", str(tmp_path / "a.safetensors"), "-o", str(tmp_path / "m.oam"), "--arch", "raw"]
    )
    assert result.exit_code == 1 and "9 dimensions; an .oam holds 8" in result.output
    assert not (tmp_path / "m.oam").exists()


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    """A block with NaN and infinities among others that are well."""
    well = np.linspace(-1, 1, 96, dtype="f4").reshape(2, 48)
    sick = well.copy()
    sick[0, 3], sick[0, 40], sick[1, 47] = np.nan, np.inf, -np.inf
    save_file({"sick": sick, "well": well, "vector": np.array([np.nan, 1], "f2")}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_what_is_not_finite_is_counted_and_shown(sick: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.oam"
    result = run("convert", sick, "-o", out, "--arch", "raw")
    assert "Not finite" in result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["sick", "1", "2"] in rows and ["vector", "1", "0"] in rows
    assert "2 tensors hold 2 NaN and 2 infinite values: sick, vector" in result.output.replace("\n", " ")
    shown = json.loads(run("convert", sick, "-o", out, "--arch", "raw", "--force", "--json").stdout)
    counts = {tensor["target"]: (tensor["nan"], tensor["infinite"]) for tensor in shown["tensors"]}
    assert counts == {"sick": (1, 2), "vector": (1, 0), "well": (0, 0)}


@pytest.mark.parametrize(("to", "top"), [("q8", 127), ("q4", 7)])
def test_quantize_refuses_what_is_not_finite_unless_it_is_allowed(
    to: str, top: int, sick: Path, tmp_path: Path
) -> None:
    run("convert", sick, "-o", tmp_path / "m.oam", "--arch", "raw")
    packed = tmp_path / "q.oam"
    command = ["quantize", str(tmp_path / "m.oam"), "-o", str(packed), "--to", to, "--method", "absmax"]
    result = CliRunner().invoke(main, command)
    said = result.output.replace("\n", " ")
    assert result.exit_code == 1 and "'sick'" in said and "3 from element 3 on (nan)" in said
    assert not packed.exists()
    run(*command, "--allow-nonfinite")
    with open_source(packed) as source:
        found, well = source["sick"].numpy().reshape(-1), source["well"].numpy().reshape(-1)
    # The three become 0; the scale of their blocks follows from the finite values, so their neighbours are as in "well".
    assert found[[3, 40, 95]].tolist() == [0, 0, 0]
    others = np.setdiff1d(np.arange(96), [3, 40, 95])
    wanted = np.linspace(-1, 1, 96, dtype="f4")
    assert np.abs(found[others] - wanted[others]).max() <= 0.5001 / top
    assert np.array_equal(found[32:64][np.arange(32) != 8], well[32:64][np.arange(32) != 8])
