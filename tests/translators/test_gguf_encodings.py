"""Every tensor type that the gguf package knows, through ``oazoo convert``: its values, or a refusal that names it.

The files come from the package's own writer and the values from its own decoders. The list of types is the package's, so one
that a newer package adds makes a test of its own here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import LLAMA, llama_shapes, write_hf
from click.testing import CliRunner, Result
from exported import oam_bytes
from gguf import GGMLQuantizationType as Type

from oazoo.cli import main
from oazoo.formats.oam import OamSource

#: One layer whose matrices have rows of one super-block.
CONFIG = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
#: What a weight may be stored as without blocks; the package reads these as arrays and not through its decoders.
FLOATS = {Type.F32: np.float32, Type.F16: np.float16, Type.F64: np.float64}
INTEGERS = {Type.I8: np.int8, Type.I16: np.int16, Type.I32: np.int32, Type.I64: np.int64}
#: GGUF's name of a matrix → ours, and the heads whose rows llama.cpp stores in another order.
MATRICES = {
    "token_embd": ("embed", 0),
    "output": ("head", 0),
    "blk.0.attn_q": ("layers.0.attn.q", 4),
    "blk.0.attn_k": ("layers.0.attn.k", 2),
    "blk.0.attn_v": ("layers.0.attn.v", 0),
    "blk.0.attn_output": ("layers.0.attn.o", 0),
    "blk.0.ffn_gate": ("layers.0.mlp.gate", 0),
    "blk.0.ffn_up": ("layers.0.mlp.up", 0),
    "blk.0.ffn_down": ("layers.0.mlp.down", 0),
}
NORMS = {
    "output_norm": "norm",
    "blk.0.attn_norm": "layers.0.attn_norm",
    "blk.0.ffn_norm": "layers.0.mlp_norm",
}


def decode(raw: npt.NDArray[np.uint8], kind: Type) -> npt.NDArray[np.float32]:
    """What the package says that rows of bytes mean; NotImplementedError for types without a decoder."""
    with np.errstate(all="ignore"):  # as one long row, because the package loops over rows
        return gguf.quants.dequantize(raw.reshape(1, -1), kind).reshape(raw.shape[0], -1)


def decodes(kind: Type) -> bool:
    if kind in INTEGERS:
        return False
    try:
        decode(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return kind in FLOATS
    return True


def blocks(kind: Type, rows: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """[rows, bytes]: any codes, and scales under which every value fits a float16."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (rows * 256 // block, size), np.uint8)
    if decodes(kind):
        bad = np.arange(len(raw))
        for _ in range(1000):
            bad = bad[~(np.abs(decode(raw[bad], kind)) < 1000).all(axis=1)]  # also where it is NaN
            if not bad.size:
                break
            raw[bad] = random.integers(0, 256, (bad.size, size), np.uint8)
        assert not bad.size, f"random blocks of {kind.name} are never of moderate size"
    return raw.reshape(rows, -1)


def model(path: Path, kind: Type) -> dict[str, npt.NDArray[Any]]:
    """Write a Llama with all matrices in ``kind``; returns what each parameter has to be (none without a decoder)."""
    random = np.random.default_rng(kind.value)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(40)
    expected = {}
    for name, (ours, heads) in MATRICES.items():
        rows = {"token_embd": 40, "output": 40, "blk.0.attn_k": 128, "blk.0.attn_v": 128}.get(name, 256)
        if kind in FLOATS or kind in INTEGERS:
            values = (random.normal(size=(rows, 256)) * 3).astype((FLOATS | INTEGERS)[kind])
            writer.add_tensor(f"{name}.weight", values)
        else:
            raw = blocks(kind, rows, random)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
            values = decode(raw, kind) if decodes(kind) else np.empty(0)
        if heads and values.size:  # pairs of rows lie beside each other there, and half a head apart here
            values = values.reshape(heads, 32, 2, 256).swapaxes(1, 2).reshape(rows, 256)
        expected[f"{ours}.weight"] = values
    for name, ours in NORMS.items():
        values = random.normal(size=256).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values)
        expected[f"{ours}.weight"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def compare(path: Path, expected: dict[str, npt.NDArray[Any]], kind: str | None) -> None:
    """Every parameter is there, in the dtype that was asked for, with the bits that rounding gives."""
    dtypes = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
    with OamSource(path) as source:
        assert set(source) == set(expected)
        for name, values in expected.items():
            stored = source[name].info.encoding
            if kind is not None:
                assert stored == kind, name
            wanted = values if stored in ("q4", "q8") else values.astype(dtypes[stored])
            found = source[name].numpy()
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.parametrize("kind", list(Type), ids=[kind.name for kind in Type])
def test_every_type(kind: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package still has the size of before 2024 for this one, and would write what is no GGUF.
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, Type.Q8_1, (32, 36))
    path, out = tmp_path / "m.gguf", tmp_path / "m.oam"
    expected = model(path, kind)
    shown = run("inspect", path)
    assert shown.exit_code == 0 and (kind.name.lower() in shown.output.lower())
    if not decodes(kind):
        for dtype in ("keep", "f32"):
            result = run("convert", path, "-o", out, "--dtype", dtype)
            said = " ".join(result.output.split())
            assert result.exit_code == 1 and "error: " in said and "fault in oazoo" not in said, said
            named = kind.name.lower() if kind in INTEGERS else f"{kind.name} ({kind.value})"
            assert named in said and "token_embd.weight" in said
            # What to do about it: every type that would have been read.
            assert kind in INTEGERS or all(t.name in said for t in Type if decodes(t) and t not in FLOATS)
            assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]
        return
    result = run("convert", path, "-o", out, "--dtype", "f32")
    assert result.exit_code == 0, result.output
    compare(out, expected, "f32")
    result = run("convert", path, "-o", out, "--force")
    assert result.exit_code == 0, result.output
    compare(out, expected, None)
    kept = {stored for name, (stored, _, _) in oam_bytes(out).items() if "norm" not in name}
    whole = {Type.Q8_0: "q8", Type.Q4_0: "q4", Type.F32: "f32", Type.F64: "f64", Type.BF16: "bf16"}
    assert kept == {whole.get(kind, "f16")}


def test_the_shapes_are_those_of_the_family(tmp_path: Path) -> None:
    """The model above is a Llama by Hugging Face's names as well."""
    shapes = llama_shapes(CONFIG)
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert (
        run("convert", write_hf(tmp_path / "hf", CONFIG, tensors), "-o", tmp_path / "hf.oam").exit_code == 0
    )
    expected = model(tmp_path / "m.gguf", Type.F32)
    assert {name: shape for name, (_, shape, _) in oam_bytes(tmp_path / "hf.oam").items()} == {
        name: values.shape for name, values in expected.items()
    }
