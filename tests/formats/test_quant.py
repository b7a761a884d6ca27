"""Q4 and Q8 against an encoder written from the specification, one value at a time, and against the ``gguf`` package."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oazoo.errors import UsageError
from oazoo.formats import quant
from oazoo.formats.encodings import ENCODINGS

# More blocks than are converted at a time.
BLOCKS = 33_000


def specified(values: npt.NDArray[Any], encoding: str) -> bytes:
    """The payload that the specification prescribes, computed value by value."""
    top = {"q4": 7, "q8": 127}[encoding]
    flat = values.astype(np.float32).ravel()
    codes, scales = bytearray(), b""
    for start in range(0, flat.size, 32):
        block = [*flat[start : start + 32], *[np.float32(0)] * (start + 32 - min(start + 32, flat.size))]
        finite = [abs(x) for x in block if np.isfinite(x)]
        scale = np.float32(max(finite, default=np.float32(0))) / np.float32(top)
        if not (np.isfinite(scale) and scale > 0):
            scale = np.float32(1)
        scales += scale.tobytes()
        quotients = [x / scale if np.isfinite(x) else np.float32(0) for x in block]
        # round() of a Python float takes ties to even.
        numbers = [max(-top, min(top, round(float(q)))) for q in quotients]
        if encoding == "q8":
            codes += bytes(n % 256 for n in numbers)
        else:
            codes += bytes(numbers[i] + 7 | numbers[i + 1] + 7 << 4 for i in range(0, 32, 2))
    return bytes(codes) + scales


def payload(values: npt.NDArray[Any], encoding: str) -> npt.NDArray[np.uint8]:
    codes, scales = quant.encode(values, encoding)
    return np.concatenate([codes, scales.view(np.uint8)])


floats = st.floats(width=32) | st.sampled_from(
    [0.0, -0.0, 1e-45, 3e-44, 1e-38, 3.4e38, float("inf"), float("nan"), 0.5, 1.5, 3.5, 63.5]
)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
@settings(max_examples=60, deadline=None)
@given(values=hnp.arrays(np.float32, st.integers(1, 100), elements=floats))
def test_encoder_is_exact(encoding: str, values: npt.NDArray[np.float32]) -> None:
    assert payload(values, encoding).tobytes() == specified(values, encoding)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(3, 33), (1, 31), (7, 1), (5,), (64,), (2, 3, 5)])
def test_shapes_and_types(encoding: str, dtype: Any, shape: tuple[int, ...], oamref: ModuleType) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    stored = payload(values, encoding)
    assert stored.tobytes() == specified(values, encoding)
    assert stored.size == ENCODINGS[encoding].bytes_for(shape)
    ours = ENCODINGS[encoding].numpy(stored, shape)
    theirs = oamref.dense({"shape": shape, "enc": {"q4": 1, "q8": 2}[encoding], "data": stored.tobytes()})
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
@pytest.mark.parametrize(
    "block",
    [
        [float("nan")] * 32,
        [float("inf"), -1.0, 2.0],
        [-0.0] * 32,
        [1e30, -1e30, 1e29],
        [1e-30] * 32,
        [1e-45, 2e-45],
        [2.7e-43, 1e-45],
        [1e4, *[1e-3] * 31],
        [3.4028235e38] * 3,
        [0.5 * k for k in range(-14, 15)],
    ],
)
def test_difficult_blocks(encoding: str, block: list[float]) -> None:
    values = np.array(block, np.float32)
    assert payload(values, encoding).tobytes() == specified(values, encoding)


def test_tiny_blocks_keep_their_values() -> None:
    values = np.full(32, 1e-30, np.float32)
    np.testing.assert_allclose(quant.decode(payload(values, "q8"), "q8", 32), values, rtol=1e-6)


def test_nothing_encodes_to_nothing() -> None:
    assert payload(np.empty((2, 0), np.float32), "q4").size == 0
    assert list(quant.encode_stream([], "q8")) == []
    assert quant.decode(np.empty(0, np.uint8), "q4", 0).size == 0


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_other_types_are_refused(dtype: Any) -> None:
    with pytest.raises(UsageError, match="float32, float16 or bfloat16"):
        quant.encode(np.zeros(4, dtype), "q4")


@pytest.mark.parametrize("encoding", ["q4", "q8"])
@given(sizes=st.lists(st.integers(0, 150), max_size=6))
def test_streaming_gives_the_same_bytes(encoding: str, sizes: list[int]) -> None:
    values = np.random.default_rng(2).standard_normal(sum(sizes)).astype(np.float32)
    chunks = np.split(values, np.cumsum(sizes)[:-1]) if sizes else []
    streamed = b"".join(piece.tobytes() for piece in quant.encode_stream(chunks, encoding))
    assert streamed == payload(values, encoding).tobytes()


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_decoder_takes_any_code_and_scale(encoding: str, oamref: ModuleType) -> None:
    rng = np.random.default_rng(3)
    count = 5 * 32 + 7
    width = quant.CODE_BYTES[encoding]
    codes = rng.integers(0, 256, 6 * width, np.uint8)
    scales = np.array([-1.5, 0.0, -0.0, np.inf, 1e-45, 2.0], np.float32)
    raw = np.concatenate([codes, scales.view(np.uint8)])
    with np.errstate(all="ignore"):
        theirs = oamref.dense({"shape": (count,), "enc": {"q4": 1, "q8": 2}[encoding], "data": raw.tobytes()})
    np.testing.assert_array_equal(quant.decode(raw, encoding, count), theirs)
    np.testing.assert_array_equal(quant.decode(raw, encoding, count, 64, 100), theirs[64:100])
    parts = [part for size in (1, 32, 70, 1000) for part in ENCODINGS[encoding].chunks(raw, count, size)]
    np.testing.assert_array_equal(np.concatenate(parts), np.tile(theirs, 4))


@pytest.mark.parametrize(
    ("source", "kind"), [("gguf.q4_0", GGMLQuantizationType.Q4_0), ("gguf.q8_0", GGMLQuantizationType.Q8_0)]
)
def test_reencoding_keeps_every_value(source: str, kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (BLOCKS, ENCODINGS[source].block_bytes), np.uint8)
    # Any finite scale, negative and subnormal ones too.
    scales = rng.integers(0, 2**16, BLOCKS, np.uint16)
    scales[(scales >> 10) & 31 == 31] &= 0x83FF
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    raw = blocks.ravel()
    target = quant.LOSSLESS_TARGETS[source]
    stored = np.concatenate([piece.view(np.uint8) for piece in quant.reencode_stream(raw, source)])
    count = BLOCKS * 32
    assert stored.size == ENCODINGS[target].bytes_for((count,))
    np.testing.assert_array_equal(
        quant.decode(stored, target, count), quants.dequantize(raw.reshape(1, -1), kind).ravel()
    )


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_large_tensors_are_encoded_in_pieces(encoding: str) -> None:
    values = np.random.default_rng(6).standard_normal(1_100_017).astype(np.float32)
    codes, scales = quant.encode(values, encoding)
    half = 17_000 * 32
    parts = [quant.encode(values[:half], encoding), quant.encode(values[half:], encoding)]
    np.testing.assert_array_equal(codes, np.concatenate([part[0] for part in parts]))
    np.testing.assert_array_equal(scales, np.concatenate([part[1] for part in parts]))
