"""Sums, decoding of weights and argmax against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.elementwise import add, argmax, dequantize
from oazoo.runtime.ops.pack import pack


@pytest.mark.parametrize("shape", [(1,), (3,), (4, 64), (7, 37), (0, 5), (300, 1001)])
def test_add(shape: tuple[int, ...]) -> None:
    a, b = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)
    got = add(Tensor.from_numpy(get_device(), a), Tensor.from_numpy(get_device(), b)).numpy()
    assert np.array_equal(got, a + b)


@pytest.mark.parametrize("shape", [(1,), (5,), (32,), (3, 33), (1, 31), (64, 96), (0, 4)])
def test_dequantize(shape: tuple[int, ...]) -> None:
    device = get_device()
    values = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        dense = values.astype(dtype)
        got = dequantize(Tensor.from_numpy(device, dense)).numpy()
        assert np.array_equal(got, dense.astype(np.float32))
    if values.size:
        for encoding in ("q4", "q8"):
            packed = pack(Tensor.from_numpy(device, values), encoding)
            wanted = decode(packed.bytes(), encoding, values.size).reshape(shape)
            assert np.array_equal(dequantize(packed).numpy(), wanted)


def test_dequantize_every_code() -> None:
    """All 16 nibbles and all 256 bytes, also those that no encoder writes."""
    device = get_device()
    scales = np.array([0.5, -3.0, 2.0**-120, 1e30] * 2, np.float32)
    nibbles = np.tile(np.arange(16, dtype=np.uint8), 16)
    raw = (nibbles[0::2] | nibbles[1::2] << 4).tobytes() + scales.tobytes()
    wanted = (nibbles.astype(np.float32) - 7) * np.repeat(scales, 32)
    assert np.array_equal(
        dequantize(Tensor.from_bytes(device, (8, 32), "q4", raw)).numpy().reshape(-1), wanted
    )
    codes = np.arange(256).astype(np.uint8).view(np.int8)
    raw = codes.tobytes() + scales.tobytes()
    wanted = codes.astype(np.float32) * np.repeat(scales, 32)
    assert np.array_equal(dequantize(Tensor.from_bytes(device, (256,), "q8", raw)).numpy(), wanted)


@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 1000, 49152])
def test_argmax(width: int) -> None:
    x = np.random.default_rng(width).normal(size=(3, width)).astype(np.float32)
    got = argmax(Tensor.from_numpy(get_device(), x)).numpy()
    assert got.dtype == np.int32
    assert np.array_equal(got, x.argmax(1))


def test_argmax_of_equals_and_non_numbers() -> None:
    rows = np.full((6, 200), -5, np.float32)
    rows[0, [70, 130]] = 2
    rows[1, [199, 3]] = 2
    rows[2] = -np.inf
    rows[3, 150] = np.inf
    rows[4, :] = np.nan
    rows[4, 77] = -9
    rows[5, [0, 64]] = np.nan
    got = argmax(Tensor.from_numpy(get_device(), rows)).numpy()
    assert got.tolist() == [70, 3, 0, 150, 77, 1]


def test_arguments_are_checked() -> None:
    device = get_device()
    with pytest.raises(DeviceError, match=r"b must be f32\[2, 3\]"):
        add(Tensor.empty(device, (2, 3)), Tensor.empty(device, (3, 2)))
    with pytest.raises(DeviceError, match="x cannot be i32"):
        dequantize(Tensor.empty(device, (2,), "i32"))
    with pytest.raises(DeviceError, match="no values"):
        argmax(Tensor.empty(device, (2, 0)))
