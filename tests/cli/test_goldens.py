"""Every golden through the command line: in, its logits, out to each container, and in again with the same tensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from exported import oam_bytes, oam_values
from model_goldens import DATA, GGUF, HF, NOT_GGUF, NOT_ONNX, ONNX, reference, source_path
from onnx.reference import ReferenceEvaluator
from reference_models import load_oam, logits

from oazoo.cli import main

NOBIAS = tuple(name for name in ONNX if "nobias" in name)
#: Golden → outputs that are refused, with the words that say why; every other pair is done.
REFUSED: dict[tuple[str, str], str] = {
    (name, "model.gguf"): words.replace("\\", "") for name, words in NOT_GGUF.items()
}
REFUSED |= {
    (n, o): "GPT-2 has a bias in every linear layer" for n in NOBIAS for o in ("folder", "model.gguf")
}
REFUSED |= {(name, "model.onnx"): words for name, words in NOT_ONNX.items()}
OUTPUTS = ("folder", "one.safetensors", "model.gguf", "model.onnx")
PACKED = ("Q4_0", "Q8_0")


def run(*arguments: object) -> dict[str, Any]:
    """A command that has to succeed; what it says with --json."""
    done = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_logits(name: str, path: Path) -> None:
    """The golden's logits, in float64. K-quants have become f16."""
    params, config = load_oam(path)
    ids, wanted = (np.atleast_2d(reference(name)[0]), reference(name)[1])
    tolerance = (
        2e-2 if name.endswith(("_K", "_K_M", "bf16", "BF16")) else 1e-3 if name in (*GGUF, *ONNX) else 5e-5
    )
    for sequence, expected in zip(ids, wanted.reshape(*ids.shape, -1), strict=True):
        assert np.abs(logits(params, config, sequence) - expected).max() < tolerance


def check_tensors(first: Path, second: Path, output: str, exact: bool) -> set[str]:
    """Bit for bit, or by value where a container holds the same values in another type. Gives tensors that were rounded."""
    before, after = oam_bytes(first), oam_bytes(second)
    assert sorted(before) == sorted(after)
    if exact:
        for key, (encoding, shape, data) in before.items():
            if not (
                output == "model.gguf" and (len(shape) < 2 or key == "positions.weight")
            ):  # these are f32 there
                assert after[key] == (encoding, shape, data), key
    a, b = oam_values(first), oam_values(second)
    (_, one), (_, other) = load_oam(first), load_oam(second)
    rounded = set()
    for key, value in a.items():
        offsets = getattr(one, "norm_offset", 0.0), getattr(other, "norm_offset", 0.0)
        if offsets[0] != offsets[1] and value.ndim == 1:
            # Gemma's norms: w that means 1 + w here, the sum there; the sum is what both compute with.
            x, y = (
                v.astype(np.float32) + np.float32(offset)
                for v, offset in zip((value, b[key]), offsets, strict=True)
            )
            assert np.array_equal(x, y), key
            if not np.array_equal(y.astype(np.float64) - offsets[0], value):
                rounded.add(key)  # the sum has fewer bits than w
            continue
        assert np.array_equal(value, b[key]), key
    assert type(one) is type(other) and one.vocab_size == other.vocab_size
    return rounded


def test_the_goldens_are_all_there_are() -> None:
    """A golden that is added is tested here, without being named."""
    assert {path.name for path in (DATA / "hf").iterdir() if path.is_dir()} == set(HF)
    assert {path.stem for path in (DATA / "gguf").glob("*.gguf")} == {f"tiny-{kind}" for kind in GGUF}
    assert {f"{path.parent.name}/{path.name}" for path in (DATA / "onnx").glob("*/[mc]*.*")} == set(ONNX)


@pytest.mark.parametrize("name", [*HF, *GGUF, *ONNX])
def test_in_out_and_in_again(name: str, tmp_path: Path) -> None:
    first = tmp_path / "first.oam"
    run("convert", source_path(name), "-o", first)
    check_logits(name, first)
    before = first.read_bytes()
    for output in OUTPUTS:
        target = tmp_path / output.partition(".")[2] / output
        target.parent.mkdir(exist_ok=True)
        if (name, output.replace("one.safetensors", "folder")) in REFUSED:
            done = CliRunner().invoke(main, ["export", str(first), "-o", str(target)])
            words = REFUSED[name, output.replace("one.safetensors", "folder")]
            assert done.exit_code == 1 and words in " ".join(done.stderr.split()), done.output
            assert not (target).exists()
            continue
        # What is packed comes back to the bit from GGUF, and by value from what holds it as f32.
        packed = name in PACKED and output != "model.gguf"
        report = run("export", first, "-o", target, *(["--dtype", "f32"] if packed else []))
        second = tmp_path / f"{output}.oam"
        run("convert", target, "-o", second)
        rounded = check_tensors(first, second, output, exact=not packed)
        check_logits(name, second)
        sources = {source for t in report["tensors"] if t["rounded"] for source in t["sources"]}
        assert sources == rounded
    assert first.read_bytes() == before


@pytest.mark.parametrize("name", [name for name in (*HF, *GGUF, *ONNX) if name not in NOT_ONNX])
def test_graphs_compute_the_logits(name: str, tmp_path: Path) -> None:
    """What goes out as ONNX, in the evaluator of the onnx package; half of them with their weights beside."""
    external = name in ("llama_tied_bf16", "F32", ONNX[0])
    run("convert", source_path(name), "-o", tmp_path / "m.oam")
    report = run(
        "export", tmp_path / "m.oam", "-o", tmp_path / "out.onnx", *(["--external"] if external else [])
    )
    assert ("out.onnx.data" in report["files"]) == external
    ids, wanted = reference(name)
    (found,) = ReferenceEvaluator(str(tmp_path / "out.onnx")).run(None, {"input_ids": np.atleast_2d(ids)})
    packed = name in PACKED  # these become f16
    tolerance = 2e-2 if packed or name.endswith(("_K", "_K_M", "bf16", "BF16")) else 1e-4
    assert np.abs(found - wanted.reshape(found.shape)).max() < tolerance
    assert any(tensor["rounded"] for tensor in report["tensors"]) == packed


def test_as_programs_of_their_own(tmp_path: Path) -> None:
    """The same with a process for each command, as a person calls them."""

    def call(*arguments: object) -> None:
        command = [sys.executable, "-m", "oazoo", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)

    call("convert", source_path("gemma3_six"), "-o", "first.oam")
    call("export", "first.oam", "-o", "out.gguf")
    call("convert", "out.gguf", "-o", "second.oam")
    check_logits("gemma3_six", tmp_path / "second.oam")
    check_tensors(tmp_path / "first.oam", tmp_path / "second.oam", "model.gguf", exact=True)
