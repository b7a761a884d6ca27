"""GGUF as we write it, read by the gguf package and by our own strict reader; blocks against the package's decoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize

from oazoo.errors import FormatError, UsageError
from oazoo.formats import encodings, quant
from oazoo.formats.detect import open_source
from oazoo.formats.gguf_writer import write_gguf
from oazoo.formats.source import TensorInfo
from oazoo.formats.streamed import StreamedTensor

ARCH = {"general.architecture": "test"}


def dense(name: str, values: npt.NDArray[Any], pieces: int = 1) -> StreamedTensor:
    encoding = encodings.for_dtype(values.dtype)
    parts = np.array_split(values.reshape(-1), pieces)
    return StreamedTensor(TensorInfo(name, values.shape, encoding, values.nbytes), lambda: iter(parts))


def test_values_of_every_kind(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "yes": True,
        "small": 7,
        "negative": -7,
        "large": 1 << 40,
        "largest": (1 << 64) - 1,
        "float": 0.5,
        "text": "naïve 😀",
        "empty": "",
        "texts": ["a", "", "Ġthe"],
        "whole": [1, -2, 3],
        "wide": [1 << 40],
        "floats": [0.5, -1.0],
        "flags": [True, False],
    }
    write_gguf(tmp_path / "x.gguf", ARCH | values, [])
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    kinds = gguf.GGUFValueType
    for key, value in values.items():
        assert reader.fields[key].contents() == value, key
    for key, kind in (("small", kinds.UINT32), ("negative", kinds.INT32), ("large", kinds.UINT64)):
        assert reader.fields[key].types == [kind]
    assert reader.fields["whole"].types[-1] == kinds.INT32 and reader.fields["float"].types == [kinds.FLOAT32]
    with open_source(tmp_path / "x.gguf") as source:
        assert dict(source.metadata) == ARCH | values
    write_gguf(tmp_path / "none.gguf", ARCH | {"none": []}, [])
    with open_source(tmp_path / "none.gguf") as source:
        assert source.metadata["none"] == []


def test_tensors_of_odd_sizes_are_aligned(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = {
        "a": random.normal(size=(3, 5)).astype("f4"),
        "b": random.normal(size=(7,)).astype("f2"),
        "c": np.arange(33, dtype="i1"),
        "d": random.normal(size=(2, 3, 4)).astype("f8"),
    }
    write_gguf(tmp_path / "x.gguf", ARCH, [dense(name, value, 3) for name, value in values.items()])
    for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        wanted = values[tensor.name]
        assert tensor.data_offset % 32 == 0 and tuple(reversed(tensor.shape)) == wanted.shape
        assert np.array_equal(tensor.data.reshape(wanted.shape), wanted)
    with open_source(tmp_path / "x.gguf") as source:
        assert list(source) == list(values)
        assert all(np.array_equal(source[name].numpy(), value) for name, value in values.items())


@pytest.mark.parametrize(
    ("metadata", "tensor", "message"),
    [
        ({"": 1}, None, "cannot be a key"),
        ({"k" * 65536: 1}, None, "cannot be a key"),
        ({"k": None}, None, "a NoneType cannot be a value"),
        ({"k": {"a": 1}}, None, "a dict cannot be a value"),
        ({"k": [1, "a"]}, None, "values of one type"),
        ({"k": 1 << 64}, None, "does not fit 64 bits"),
        ({"k": 1e300}, None, "does not fit a 32-bit float"),
        ({}, TensorInfo("", (1,), "f32", 4), "cannot be a tensor name"),
        ({}, TensorInfo("é" * 32, (1,), "f32", 4), "1 to 63 bytes"),
        ({}, TensorInfo("w", (1,) * 5, "f32", 4), "4 dimensions, not 5"),
        ({}, TensorInfo("w", (1,), "bool", 1), "no type for bool"),
        ({}, TensorInfo("w", (1,), "f32", 8), "do not follow from its shape"),
    ],
)
def test_what_gguf_cannot_hold(
    metadata: dict[str, Any], tensor: TensorInfo | None, message: str, tmp_path: Path
) -> None:
    tensors = [] if tensor is None else [StreamedTensor(tensor, lambda: iter([np.zeros(1, "f4")]))]
    with pytest.raises(FormatError, match=message):
        write_gguf(tmp_path / "x.gguf", metadata, tensors)
    assert not list(tmp_path.iterdir())


def test_names_come_once_and_files_are_not_replaced(tmp_path: Path) -> None:
    one = dense("w", np.zeros(1, "f4"))
    with pytest.raises(FormatError, match="'w' would be written twice"):
        write_gguf(tmp_path / "x.gguf", ARCH, [one, one])
    write_gguf(tmp_path / "x.gguf", ARCH, [one])
    with pytest.raises(UsageError, match="exists already"):
        write_gguf(tmp_path / "x.gguf", ARCH, [one])


@pytest.mark.parametrize(("name", "encoding"), [("Q8_0", "q8"), ("Q4_0", "q4")])
def test_blocks_return_to_the_bit(name: str, encoding: str) -> None:
    """Every code and odd scales: zero, negative zero, subnormal, largest, infinite, NaN."""
    random = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[name]
    width = {"Q8_0": 34, "Q4_0": 18}[name]
    blocks = quantize(random.normal(size=(300, 32)).astype("f4"), kind).reshape(-1, width)
    blocks[:256, 2:] = np.arange(256, dtype=np.uint8)[:, None]
    odd = struct.pack("<7e", 0.0, -0.0, 6e-8, 65504.0, float("inf"), -float("inf"), -1.5)
    blocks[:7, :2] = np.frombuffer(odd, np.uint8).reshape(-1, 2)
    payload = np.concatenate(
        [
            np.ascontiguousarray(p).view(np.uint8)
            for p in quant.reencode_stream(blocks.reshape(-1), f"gguf.{name.lower()}")
        ]
    )
    codes, scales = quant.planes(payload, encoding)
    assert quant.scales_fit_f16(scales)
    back = np.concatenate(list(quant.to_ggml_stream(codes, scales, encoding)))
    assert back.tobytes() == blocks.tobytes()
    with np.errstate(all="ignore"):
        wanted = dequantize(back.reshape(1, -1), kind).ravel()
        assert np.array_equal(wanted, quant.decode(payload, encoding, 300 * 32), equal_nan=True)


@pytest.mark.parametrize(
    ("scale", "fits"),
    [(0.5, True), (0.1, False), (1e6, False), (1e-9, False), (-0.0, True), (6.103515625e-05, True)],
)
def test_which_scales_fit(scale: float, fits: bool) -> None:
    assert quant.scales_fit_f16(np.array([1.0, scale], np.float32)) is fits
