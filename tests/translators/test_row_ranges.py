"""Rows cut out of stored tensors and joined, read from files in small pieces: the same as NumPy does with them whole."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from oazoo.formats import encodings, quant
from oazoo.formats.gguf import GgufSource
from oazoo.translators import engine
from oazoo.translators.engine import Measured, TensorPlan, stream
from oazoo.translators.rules import Concat, Identity, RopePermute, Rule, Slice, Transform

ROWS, COLUMNS = 12, 256
KINDS = ["f32", "f16", "gguf.q8_0", "gguf.q4_0", "gguf.q5_1", "gguf.q6_k"]
CASES: dict[str, tuple[Transform, tuple[str, ...]]] = {
    "whole": (Identity(), ("a",)),
    "first rows": (Slice(0, 0, 5, ROWS), ("a",)),
    "middle rows": (Slice(0, 3, 11, ROWS), ("b",)),
    "joined": (Concat(0, (ROWS, ROWS)), ("b", "a")),
    "moved": (RopePermute(2), ("a",)),
    "columns": (Slice(1, 32, 160, COLUMNS), ("a",)),
}


def write(path: Path, kind: str) -> tuple[GgufSource, dict[str, np.ndarray]]:
    """Two matrices of a kind, and what the gguf package says that they hold."""
    random = np.random.default_rng(len(kind))
    writer = gguf.GGUFWriter(path, "none")
    values = {}
    for name in ("a", "b"):
        value = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        if kind in ("f32", "f16"):
            values[name] = value.astype(kind.replace("f", "float"))
            writer.add_tensor(name, values[name])
            continue
        number = Type[kind.removeprefix("gguf.").upper()]
        if number == Type.Q6_K:  # the package does not quantise it: any codes, and the scale last
            raw = random.integers(0, 256, (ROWS, 210), np.uint8)
            raw[:, -2:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        else:
            raw = gguf.quants.quantize(value, number)
        writer.add_tensor(name, raw, raw_dtype=number)
        values[name] = gguf.quants.dequantize(raw, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(path), values


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_row_ranges(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CHUNK", 600)  # neither whole rows nor whole blocks
    monkeypatch.setattr(quant, "_STEP_BLOCKS", 3)
    transform, names = CASES[case]
    source, values = write(tmp_path / "m.gguf", kind)
    expected = transform.apply([values[name] for name in names])
    targets = [("f32", "copy" if kind == "f32" else "convert")]
    if kind in quant.LOSSLESS_TARGETS and case != "columns":
        targets.append((quant.LOSSLESS_TARGETS[kind], "repack"))
    for encoding, action in targets:
        size = encodings.get(encoding).bytes_for(expected.shape)
        plan = TensorPlan(
            Rule("t", names, transform), expected.shape, encoding, size, (kind,) * len(names), action
        )
        with source if encoding == targets[-1][0] else GgufSource(source.path) as opened:
            pieces = [np.array(piece) for piece in stream(plan, opened, Measured())]
            assert plan.working_bytes(opened) > 0
        stored = np.concatenate([piece.reshape(-1).view(np.uint8) for piece in pieces])
        found = encodings.get(encoding).numpy(stored, expected.shape)
        np.testing.assert_array_equal(found, expected.astype(np.float32))
        if case not in ("moved", "columns"):
            assert len(pieces) > 2, "it was not streamed"
