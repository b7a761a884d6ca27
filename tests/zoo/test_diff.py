"""`oazoo diff`: numbers against NumPy, containers against each other, exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import (
    GPT2,
    LLAMA,
    gguf_names,
    gpt2_tensors,
    llama_folder,
    llama_metadata,
    llama_tensors,
    write_gguf,
    write_hf,
)
from click.testing import CliRunner
from gguf.quants import dequantize
from model_goldens import GGUF, HF, NOT_GGUF, source_path
from safetensors.numpy import save_file

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.translators.export import export
from oazoo.zoo.diff import diff


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["diff", *map(str, arguments)])
    return done.exit_code, done.stdout


@pytest.mark.parametrize("name", (*HF, *GGUF))
def test_every_container_of_a_golden_is_the_same(name: str, tmp_path: Path) -> None:
    source = source_path(name)
    oazoo.convert(source, tmp_path / "m.oam", dtype="f32")
    written = ["m-hf"] if name in NOT_GGUF else ["m-hf", "m.gguf"]
    for output in written:
        export(tmp_path / "m.oam", tmp_path / output)
    versions = [source, tmp_path / "m.oam", *(tmp_path / output for output in written)]
    for other in versions:
        for one in (source, tmp_path / written[-1]):
            found = diff(one, other)
            assert found.equal and found.names == "translated" and len(found.tensors) > 10, (one, other)
            assert found.equal is diff(other, one).equal


def test_numbers(tmp_path: Path) -> None:
    kind = "Q8_0"
    found = oazoo.diff(source_path("F32"), source_path(kind))
    first, second = (
        {t.name: dequantize(t.data, t.tensor_type).astype(np.float64).ravel() for t in reader.tensors}
        for reader in (gguf.GGUFReader(source_path(name)) for name in ("F32", kind))
    )
    a, b = first["token_embd.weight"], second["token_embd.weight"]
    row = next(t for t in found.tensors if t.name == "embed.weight")
    assert row.max_abs == np.abs(a - b).max()
    assert row.mean_abs == pytest.approx(np.abs(a - b).mean(), rel=1e-12)
    assert row.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
    assert row.encodings == ("f32", "gguf.q8_0") and row.nonfinite == 0
    assert not found.equal and not found.missing and not found.extra and not found.config
    assert {t.name for t in found.differing} == {t.name for t in found.tensors if len(t.shapes[0]) > 1}
    largest = max(t.max_abs or 0 for t in found.tensors)
    assert diff(source_path("F32"), source_path(kind), tolerance=largest).equal
    assert not diff(source_path("F32"), source_path(kind), tolerance=largest * 0.999).equal


def changed(folder: Path, name: str, changes: Any, config: dict[str, Any] | None = None) -> Path:
    tensors = llama_tensors(LLAMA)
    changes(tensors)
    return write_hf(folder / name, LLAMA | (config or {}), tensors)


def test_a_permutation_forgotten_is_seen(tmp_path: Path) -> None:
    right = write_gguf(tmp_path / "right.gguf", llama_metadata(), gguf_names(llama_tensors(LLAMA)))
    wrong = write_gguf(
        tmp_path / "wrong.gguf", llama_metadata(), gguf_names(llama_tensors(LLAMA), permute=False)
    )
    folder = llama_folder(tmp_path / "hf")
    assert diff(folder, right).equal
    found = diff(folder, wrong)
    assert {t.name.split(".", 2)[2] for t in found.differing} == {"attn.q.weight", "attn.k.weight"}
    assert all(t.cosine is not None and abs(t.cosine) < 0.9 for t in found.differing)


def test_not_finite_values(tmp_path: Path) -> None:
    def put(*values: float) -> Any:
        def change(tensors: dict[str, Any]) -> None:
            tensors["model.norm.weight"][: len(values)] = values

        return change

    odd = (np.nan, np.inf, -np.inf)
    first = changed(tmp_path, "a", put(*odd, 1.0))
    assert diff(first, changed(tmp_path, "b", put(*odd, 1.0))).equal
    found = diff(first, changed(tmp_path, "c", put(np.nan, -np.inf, 0.0, 1.5)))
    (row,) = found.differing
    assert (row.name, row.nonfinite, row.max_abs) == ("norm.weight", 2, 0.5)
    assert not diff(first, changed(tmp_path, "d", put(1.0, np.inf, -np.inf, 1.0)), tolerance=1e9).equal
    status, text = run("--json", first, tmp_path / "c")
    assert status == 1 and json.loads(text)["tensors"][0]["nonfinite"] == 2


def test_config_and_options(tmp_path: Path) -> None:
    first = llama_folder(tmp_path / "a", generation_config__json={"temperature": 0.5})
    second = llama_folder(
        tmp_path / "b", generation_config__json={"temperature": 0.7, "eos_token_id": [2, 3]}
    )
    found = diff(first, second)
    assert found.equal and not found.config
    assert ("generation.temperature", 0.5, 0.7) in found.options
    assert ("generation.eos_ids", [2], [2, 3]) in found.options
    third = llama_folder(tmp_path / "c", {"rms_norm_eps": 1e-6, "rope_theta": 5e5})
    found = diff(first, third)
    assert not found.equal and not found.differing
    assert {name for name, _, _ in found.config} == {"norm_eps", "rope_theta"}
    assert diff(first, llama_folder(tmp_path / "d", {"rms_norm_eps": float(np.float32(1e-5))})).equal
    for folder in (first, third):
        oazoo.convert(folder, tmp_path / f"{folder.name}.oam")
    assert {n for n, _, _ in diff(tmp_path / "a.oam", tmp_path / "c.oam").config} == {
        "norm_eps",
        "rope_theta",
    }
    assert any(n == "generation.temperature" for n, _, _ in diff(tmp_path / "a.oam", second).options)


def test_missing_extra_and_shapes(tmp_path: Path) -> None:
    def save(name: str, **tensors: npt.NDArray[Any]) -> Path:
        save_file(tensors, tmp_path / name)
        return tmp_path / name

    x = np.arange(6, dtype=np.float32)
    first = save("a.safetensors", same=x, gone=x, shape=x, kind=x, whole=np.arange(5))
    second = save(
        "b.safetensors",
        same=x,
        new=x,
        shape=x.reshape(2, 3),
        kind=x.astype(np.float16),
        whole=np.arange(5) + 1,
    )
    found = diff(first, second)
    assert (found.missing, found.extra, found.names) == (("gone",), ("new",), "raw")
    assert "no config.json" in found.why_raw
    assert {t.name for t in found.differing} == {"shape", "whole"}
    shape = next(t for t in found.tensors if t.name == "shape")
    assert shape.shapes == ((6,), (2, 3)) and shape.max_abs is None
    assert next(t for t in found.tensors if t.name == "whole").max_abs == 1
    status, text = run(first, second)
    assert status == 1 and "6 / 2×3" in text and "f32 / f16" in text and "same values" in text
    assert diff(first, first).equal
    both = diff(first, source_path("F32"))
    assert both.names == "raw" and len(both.missing) == 5 and not both.tensors and not both.equal


def test_models_of_two_families(tmp_path: Path) -> None:
    found = diff(write_hf(tmp_path / "g", GPT2, gpt2_tensors(GPT2)), llama_folder(tmp_path / "l"))
    assert found.names == "raw" and "different families: nanogpt and decoder" in found.why_raw


def test_small_floats_are_compared_exactly(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    first = write_hf(tmp_path / "a", LLAMA, tensors)
    double = {name: value.astype(np.float64) for name, value in tensors.items()}
    double["model.norm.weight"][0] += 1e-12
    second = write_hf(tmp_path / "b", LLAMA, double)
    (row,) = diff(first, second).differing
    assert row.name == "norm.weight" and row.max_abs == pytest.approx(1e-12, rel=1e-3)
    half = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in tensors.items()}
    worst = max(float(np.abs(half[name].astype("f8") - value).max()) for name, value in tensors.items())
    assert max(t.max_abs or 0 for t in diff(first, write_hf(tmp_path / "c", LLAMA, half)).tensors) == worst


def test_the_command(tmp_path: Path) -> None:
    path = source_path("F32")
    status, text = run(path, path)
    assert status == 0 and text.startswith("equal: 12 of 12")
    status, text = run(path, source_path("Q8_0"))
    assert status == 1 and "layers.0.attn.q.weight" in text and "f32 / gguf.q8_0" in text
    status, text = run("--tol", "0.1", path, source_path("Q8_0"))
    assert status == 0 and "within --tol" in text
    status, text = run("--json", path, source_path("Q8_0"))
    shown = json.loads(text)
    assert status == 1 and shown["names"] == "translated" and len(shown["differing"]) == 9
    assert shown["compared"] == 12 and not shown["equal"]


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Two files of 256 MB in 160 MB of address space above what the interpreter takes; one value of each tensor differs."""
    for name, last in (("a", 0), ("b", 1)):
        tensors = {f"t{number}": np.zeros(2 << 20, np.float32) for number in range(32)}
        for tensor in tensors.values():
            tensor[-1] = last
        save_file(tensors, tmp_path / f"{name}.safetensors")
    del tensors
    program = (
        "import resource, sys\n"
        "from oazoo.zoo.diff import diff\n"
        "import oazoo.translators.translator as t; t.translators()\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (160 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "found = diff(sys.argv[1], sys.argv[2])\n"
        "print(len(found.differing), {t.max_abs for t in found.tensors})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "a.safetensors", tmp_path / "b.safetensors"],
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "32 {1.0}", done.stderr[-2000:]


def test_misuse(tmp_path: Path) -> None:
    path = source_path("F32")
    assert run(path)[0] == 2
    assert run(path, tmp_path / "none")[0] == run(path, "smollm2-135m-instruct")[0] == 2
    assert run("--tol", "-1", path, path)[0] == 2
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert run(path, tmp_path / "bad.gguf")[0] == 1
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="a tolerance is a number"):
            diff(path, path, tolerance=tolerance)
    with pytest.raises(FormatError):
        diff(path, tmp_path / "bad.gguf")
