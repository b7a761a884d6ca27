"""FP8 weights with a scale for each block, against the definition computed apart; and such files broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import LLAMA, llama_tensors, write_hf
from click.testing import CliRunner

from oazoo.cli import main
from oazoo.errors import TranslationError
from oazoo.formats.detect import open_source
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.translators import convert, plan

#: Odd on purpose: blocks at the edges of both axes are smaller than the others.
CONFIG = LLAMA | {
    "hidden_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 130,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
UP = "model.layers.0.mlp.up_proj.weight"
Array = np.ndarray[Any, Any]


def value_of(code: int, exponent_bits: int) -> float:
    """A float of 8 bits by its definition: E4M3 has no infinity, NaN is all ones; E5M2 is IEEE's form."""
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent_bits == 4 and code & 0x7F == 0x7F:
        return float("nan")
    if exponent_bits == 5 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def by_definition(codes: Array, scales: Array, exponent_bits: int, block: tuple[int, int]) -> Array:
    """weight × scale of its block, element by element, rounded once to float32."""
    table = [value_of(code, exponent_bits) for code in range(256)]
    out = np.empty(codes.shape, np.float32)
    for i, j in np.ndindex(codes.shape):
        out[i, j] = np.float32(table[int(codes[i, j])] * float(scales[i // block[0], j // block[1]]))
    return out


def fp8_tensors(
    kind: Any = ml_dtypes.float8_e4m3fn, block: tuple[int, int] = (128, 128), scale_type: Any = np.float32
) -> tuple[dict[str, Array], dict[str, Array]]:
    """A Llama whose projections are FP8, and the codes of these."""
    rng = np.random.default_rng(3)
    tensors: dict[str, Array] = {}
    codes: dict[str, Array] = {}
    for name, value in llama_tensors(CONFIG).items():
        tensors[name] = value
        if name.endswith("_proj.weight"):
            raw = rng.integers(0, 256, value.shape, np.uint8)
            if kind is ml_dtypes.float8_e5m2:
                raw[(raw & 0x7C) == 0x7C] = 1
            else:
                raw[(raw & 0x7F) == 0x7F] = 1
            codes[name] = raw
            tensors[name] = raw.view(kind)
            shape = tuple(-(-size // step) for size, step in zip(value.shape, block, strict=True))
            tensors[name + "_scale_inv"] = rng.uniform(1e-4, 3e-4, shape).astype(scale_type)
    return tensors, codes


def folder_of(folder: Path, tensors: dict[str, Array], quantization: Any = FP8) -> Path:
    config = CONFIG | ({"quantization_config": quantization} if quantization is not None else {})
    write_hf(folder, config, {"x": np.zeros(1, np.float32)})
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize(("block", "stated"), [((128, 128), True), ((128, 128), False), ((32, 48), True)])
def test_every_value(kind: Any, block: tuple[int, int], stated: bool, tmp_path: Path) -> None:
    tensors, codes = fp8_tensors(kind, block)
    settings = {**FP8, "weight_block_size": list(block)} if stated else None
    report = convert(folder_of(tmp_path / "hf", tensors, settings), tmp_path / "m.oam")
    assert not report.rounded and not report.nonfinite
    targets = {tensor.sources[0]: tensor.target for tensor in report.tensors}
    bits = 4 if kind is ml_dtypes.float8_e4m3fn else 5
    with open_source(tmp_path / "m.oam") as source:
        assert not [name for name in source if "scale" in name]
        for name in (UP, "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
            found = source[targets[name]]
            assert found.info.encoding == "f32"
            wanted = by_definition(codes[name], tensors[name + "_scale_inv"], bits, block)
            assert np.array_equal(found.numpy(), wanted), name
        assert source["norm.weight"].info.encoding == "f32"
    assert any("14 FP8 weights were multiplied with their scales" in note for note in report.notes)
    assert not report.ignored


def test_the_published_shape(tmp_path: Path) -> None:
    """[130, 200] with scales [2, 2]: three of the four blocks are cut short."""
    tensors, codes = fp8_tensors()
    assert tensors[UP].shape == (130, 200) and tensors[UP + "_scale_inv"].shape == (2, 2)
    tensors[UP + "_scale_inv"] = np.array([[1, 2], [4, 8]], np.float32)
    codes[UP][:] = 0x38  # 1.0
    convert(folder_of(tmp_path / "hf", tensors), tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        found = source["layers.0.mlp.up.weight"].numpy()
    assert (found[:128, :128] == 1).all() and (found[:128, 128:] == 2).all()
    assert (found[128:, :128] == 4).all() and (found[128:, 128:] == 8).all()


@pytest.mark.parametrize("scale_type", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu])
def test_scales_of_other_types(scale_type: Any, tmp_path: Path) -> None:
    tensors, codes = fp8_tensors(scale_type=scale_type)
    convert(folder_of(tmp_path / "hf", tensors), tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        found = source["layers.0.mlp.up.weight"].numpy()
    scales = tensors[UP + "_scale_inv"].astype(np.float32)
    assert np.array_equal(found, by_definition(codes[UP], scales, 4, (128, 128)))


def test_nan_codes_are_counted(tmp_path: Path) -> None:
    tensors, codes = fp8_tensors()
    codes[UP][0, 0], codes[UP][129, 199] = 0x7F, 0xFF
    report = convert(folder_of(tmp_path / "hf", tensors), tmp_path / "m.oam")
    assert [(t.target, t.nan, t.infinite) for t in report.nonfinite] == [("layers.0.mlp.up.weight", 2, 0)]
    with open_source(tmp_path / "m.oam") as source:
        assert np.argwhere(np.isnan(source["layers.0.mlp.up.weight"].numpy())).tolist() == [
            [0, 0],
            [129, 199],
        ]


def test_half_the_size_on_request(tmp_path: Path) -> None:
    tensors, codes = fp8_tensors()
    report = convert(folder_of(tmp_path / "hf", tensors), tmp_path / "m.oam", dtype="bf16")
    with open_source(tmp_path / "m.oam") as source:
        found = source["layers.0.mlp.up.weight"].numpy()
    exact = by_definition(codes[UP], tensors[UP + "_scale_inv"], 4, (128, 128))
    assert np.array_equal(found, exact.astype(ml_dtypes.bfloat16))
    assert "layers.0.mlp.up.weight" in {tensor.target for tensor in report.rounded}


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _set(name: str, value: Any) -> Any:
    return lambda tensors: tensors.__setitem__(name, value)


BROKEN = [
    (_without(UP + "_scale_inv"), "is FP8, but its scale .* is missing"),
    (_without(UP), "scale .* has no weight"),
    (_set(UP + "_scale_inv", np.ones((2, 1), np.float32)), r"takes scales of shape \[2, 2\], not \[2, 1\]"),
    (_set(UP + "_scale_inv", np.float32(1).reshape(())), r"takes scales of shape \[2, 2\], not \[\]"),
    (_set(UP + "_scale_inv", np.ones((2, 2), np.int32)), "its scale is i32"),
    (_set(UP, np.ones((130, 200), np.float32)), "has a scale, but is f32"),
    (_set("model.norm.weight", np.ones(200, ml_dtypes.float8_e4m3fn)), "is FP8, but its scale"),
    (_set("model.norm.weight_scale_inv", np.ones(2, np.float32)), "has a scale, but is f32"),
    (_set("model.layers.0.mlp.up_proj.input_scale", np.ones(1, np.float32)), "FP8 with one scale a tensor"),
    (_set("model.layers.0.mlp.up_proj.weight_scale", np.ones(1, np.float32)), "FP8 with one scale a tensor"),
    (_set("model.layers.0.self_attn.k_scale", np.ones(1, np.float32)), "FP8 with one scale a tensor"),
    (_set("model.layers.0.mlp.up_proj.odd_scale_thing", np.ones(1, np.float32)), "has no use for"),
]


@pytest.mark.parametrize(("damage", "said"), BROKEN)
def test_scales_and_weights_that_do_not_fit(damage: Any, said: str, tmp_path: Path) -> None:
    tensors, _ = fp8_tensors()
    damage(tensors)
    with pytest.raises(TranslationError, match=said):
        plan(folder_of(tmp_path / "hf", tensors))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**FP8, "activation_scheme": "static"}, "scales for activations"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [True, 128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size"),
        ({**FP8, "weight_block_size": None}, "weight_block_size"),
        ({**FP8, "weight_block_size": [64, 128]}, "takes scales of shape"),
        ({"quant_method": "compressed-tensors"}, "packed by compressed-tensors"),
    ],
)
def test_settings_that_are_not_this_form(settings: Any, said: str, tmp_path: Path) -> None:
    tensors, _ = fp8_tensors()
    with pytest.raises(TranslationError, match=said):
        plan(folder_of(tmp_path / "hf", tensors, settings))


def test_said_to_be_fp8_without_any(tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match="no weight of it has a scale"):
        plan(folder_of(tmp_path / "hf", llama_tensors(CONFIG)))


def test_small_floats_without_scales_become_f16_and_the_report_says_so(tmp_path: Path) -> None:
    tensors = llama_tensors(CONFIG)
    codes = np.arange(130 * 200, dtype=np.uint8).reshape(130, 200)
    tensors[UP] = codes.view(ml_dtypes.float8_e4m3fn)
    tensors["model.layers.1.mlp.up_proj.weight"] = codes.view(ml_dtypes.float8_e5m2)
    folder = folder_of(tmp_path / "hf", tensors, None)
    result = CliRunner().invoke(main, ["convert", str(folder), "-o", str(tmp_path / "m.oam"), "--json"])
    assert result.exit_code == 0, result.output
    report = convert(folder, tmp_path / "n.oam")
    assert "1 tensors of f8_e4m3 became f16, which holds every value" in report.summary()
    assert "1 tensors of f8_e5m2 became f16, which holds every value" in report.summary()
    shown = {tensor["target"]: tensor for tensor in json.loads(result.stdout)["tensors"]}
    first = shown["layers.0.mlp.up.weight"]
    assert (first["source_encodings"], first["encoding"], first["rounded"]) == (["f8_e4m3"], "f16", False)
    assert first["nan"] == 2 * (130 * 200 // 256) + (130 * 200 % 256 > 0x7F)
    with open_source(tmp_path / "m.oam") as source:
        for name, bits in (("layers.0.mlp.up.weight", 4), ("layers.1.mlp.up.weight", 5)):
            found = source[name].numpy()
            wanted = np.array([value_of(int(code), bits) for code in codes.reshape(-1)]).reshape(codes.shape)
            assert np.array_equal(found.astype(np.float64), wanted, equal_nan=True)


def test_raw_keeps_codes_and_scales_apart(tmp_path: Path) -> None:
    tensors, codes = fp8_tensors()
    convert(folder_of(tmp_path / "hf", tensors), tmp_path / "m.oam", arch="raw")
    with open_source(tmp_path / "m.oam") as source:
        assert set(source) == set(tensors)
        assert np.array_equal(source[UP].raw().reshape(130, 200), codes[UP])
