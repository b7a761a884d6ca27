"""The registry of encodings against the packages that define the types."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, quants

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.ggml_types import GGML_TYPES
from oazoo.formats.gguf import GgufSource

# The package still has the sizes of before 2024 for this one; files do not hold it.
_STALE = {"Q8_1"}


def test_every_ggml_type_of_the_package_is_known() -> None:
    for kind, (block, size) in GGML_QUANT_SIZES.items():
        ours = GGML_TYPES[kind.value]
        assert ours.name == kind.name
        if kind.name not in _STALE:
            assert (ours.block, ours.block_bytes) == (block, size), kind.name


def test_what_the_package_decodes_is_decodable() -> None:
    for number, kind in GGML_TYPES.items():
        if kind.dense or kind.removed:
            continue
        raw = np.zeros((1, kind.block_bytes), np.uint8)
        try:
            with np.errstate(all="ignore"):
                quants.dequantize(raw, GGMLQuantizationType(number))
            decodes = True
        except NotImplementedError:
            decodes = False
        assert kind.decodable == decodes, kind.name


def test_numbers_are_without_gaps() -> None:
    assert list(GGML_TYPES) == list(range(42))


@pytest.mark.parametrize(
    "name", [name for name, e in encodings.ENCODINGS.items() if e.kind == "gguf" and e.decodable]
)
def test_ggml_blocks_decode_as_the_package_does(tmp_path: Path, name: str) -> None:
    encoding = encodings.get(name)
    assert encoding.ggml is not None
    kind = GGMLQuantizationType(encoding.ggml)
    rows, columns = 6, 3 * encoding.block
    raw = np.random.default_rng(encoding.ggml).integers(0, 256, (rows, 3 * encoding.block_bytes), np.uint8)
    path = tmp_path / "file.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GgufSource(path)["w"]
    theirs = GGUFReader(path).tensors[0]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = quants.dequantize(theirs.data, kind)
    assert ours.info.shape == (rows, columns) and ours.info.encoding == name
    np.testing.assert_array_equal(ours.numpy(), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = list(ours.chunks(encoding.block * 2 + 1))
    assert {part.size for part in parts[:-1]} == {2 * encoding.block}
    np.testing.assert_array_equal(np.concatenate(parts), expected.ravel())


@pytest.mark.parametrize("name", [name for name, e in encodings.ENCODINGS.items() if e.kind == "dense"])
def test_dense_types_are_views(name: str) -> None:
    encoding = encodings.get(name)
    raw = np.arange(encoding.block_bytes * 6, dtype=np.uint8) % 2
    values = encoding.numpy(raw, (2, 3))
    assert values.dtype == encoding.dtype and values.tobytes() == raw.tobytes()
    assert np.shares_memory(values, raw)
    assert encodings.for_dtype(values.dtype) == name
    odd = np.concatenate([raw[:1], raw])[1:]
    assert encoding.numpy(odd, (6,)).tobytes() == raw.tobytes()
    assert encoding.numpy(raw[: encoding.block_bytes], ()).shape == ()


def test_a_boolean_is_0_or_1() -> None:
    with pytest.raises(FormatError, match="neither 0 nor 1"):
        encodings.get("bool").numpy(np.array([0, 1, 2], np.uint8), (3,))


def test_four_bit_floats() -> None:
    # E2M1: sign, two exponent bits, one mantissa bit; the first element in the low nibble.
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    raw = np.array([low | (low + 8) << 4 for low in range(8)], np.uint8)
    values = encodings.get("f4_e2m1").numpy(raw, (8, 2)).astype(np.float32)
    np.testing.assert_array_equal(values[:, 0], magnitudes)
    np.testing.assert_array_equal(values[:, 1], [-value for value in magnitudes])


def test_six_bit_floats_are_sized_but_not_decoded() -> None:
    encoding = encodings.get("f6_e2m3")
    assert encoding.bytes_for((4, 3)) == 9
    with pytest.raises(FormatError, match="f6_e2m3"):
        encoding.numpy(np.zeros(9, np.uint8), (4, 3))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("f32", (2**61, 4)),
        ("f32", (2**62,)),
        ("u8", (2**32, 2**32)),
        ("u8", (2**63,)),
        ("u8", (2**63, 2**63, 0)),
        ("q8", (2**63 - 1,)),
        ("u8", (-1,)),
        ("gguf.q4_k", (255,)),
        ("gguf.q4_k", (256, 1)),
        ("gguf.q8_0", ()),
        ("f4_e2m1", (3,)),
        ("f6_e3m2", (2, 3)),
    ],
)
def test_impossible_sizes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        encodings.get(name).bytes_for(shape)


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [
        ("f32", (), 4),
        ("f32", (0, 2**40), 0),
        ("u8", (2**62,), 2**62),
        ("q4", (33,), 40),
        ("q8", (2, 31), 72),
        ("q4", (), 20),
        ("gguf.q4_0", (0, 64), 0),
        ("gguf.q4_0", (3, 64), 108),
        ("gguf.q6_k", (2, 2, 256), 840),
        ("f4_e2m1", (3, 2), 3),
    ],
)
def test_sizes(name: str, shape: tuple[int, ...], size: int) -> None:
    assert encodings.get(name).bytes_for(shape) == size


def test_unknown_names() -> None:
    for name in ("", "f33", "gguf.type_", "gguf.type_x", "Q4"):
        with pytest.raises(FormatError, match="unknown tensor encoding"):
            encodings.get(name)
    for dtype in ("U4", object, np.dtype("M8[s]")):
        with pytest.raises(FormatError, match="no tensor encoding"):
            encodings.for_dtype(dtype)
