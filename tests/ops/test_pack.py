"""The packing kernels against a NumPy encoder written from the format's rules, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.pack import Packer, pack

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


def encode(values: npt.NDArray[Any], encoding: str) -> bytes:
    """The encoder rules of the `.oam` specification; float32 division in NumPy rounds correctly."""
    flat = values.astype(np.float32).reshape(-1)
    blocks = -(-flat.size // 32)
    x = np.zeros((blocks, 32), np.float32)
    x.reshape(-1)[: flat.size] = flat
    finite = np.isfinite(x)
    top = np.float32(7 if encoding == "q4" else 127)
    scale = np.max(np.abs(np.where(finite, x, 0)), axis=1) / top
    scale = np.where(np.isfinite(scale) & (scale > 0), scale, np.float32(1)).astype(np.float32)
    with np.errstate(all="ignore"):
        q = np.clip(np.rint(np.where(finite, x / scale[:, None], 0)), -top, top).astype(np.int32)
    if encoding == "q8":
        return q.astype(np.int8).tobytes() + scale.tobytes()
    nibbles = (q + 7).astype(np.uint8)
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes() + scale.tobytes()


def check(values: npt.NDArray[Any], encoding: str) -> None:
    """At an address that is a multiple of 8, and at one that is not: there are kernels of their own for both."""
    wanted = encode(values, encoding)
    same(pack(Tensor.from_numpy(get_device(), values), encoding), wanted)
    if values.dtype == np.float32:
        room = np.concatenate([np.full(1, np.nan, np.float32), values.reshape(-1), np.zeros(31, np.float32)])
        same(pack(Tensor.from_numpy(get_device(), room).rows(1, 1 + values.size), encoding), wanted)


def same(packed: Tensor, wanted: bytes) -> None:
    got = packed.bytes().tobytes()
    if got != wanted:
        planes = [np.frombuffer(b, np.uint8) for b in (got, wanted)]
        where = np.flatnonzero(planes[0] != planes[1])
        raise AssertionError(f"{where.size} of {len(wanted)} bytes differ, first at {where[:5]}")


@pytest.mark.parametrize("encoding", ["q4", "q8"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 31), (32,), (3, 33), (7, 1), (64, 96), (257, 100)])
def test_shapes(shape: tuple[int, ...], dtype: type, encoding: str) -> None:
    check(np.random.default_rng(1).normal(size=shape).astype(dtype), encoding)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_random_bit_patterns(encoding: str) -> None:
    """Every exponent, subnormals, infinities and NaNs, mixed within blocks and alone in blocks of one magnitude."""
    rng = np.random.default_rng(2)
    check(rng.integers(0, 2**32, 32 * 4000, dtype=np.uint32).view(np.float32), encoding)
    exponents = np.repeat(np.arange(255, dtype=np.uint32), 32 * 8) << 23
    bits = exponents | rng.integers(0, 2**23, exponents.size, dtype=np.uint32)
    check((bits | rng.integers(0, 2, bits.size, dtype=np.uint32) << 31).view(np.float32), encoding)
    halves = np.arange(2**16, dtype=np.uint16)
    check(rng.permutation(halves).view(np.float16), encoding)
    check(halves.view(np.float16), encoding)
    check(rng.permutation(halves).view(ml_dtypes.bfloat16), encoding)
    check(halves.view(ml_dtypes.bfloat16), encoding)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_ties_and_their_neighbours(encoding: str) -> None:
    """Quotients at k + 1/2 and a few float32 steps around it, for many scales: where an inexact division goes wrong."""
    top = 7 if encoding == "q4" else 127
    rng = np.random.default_rng(3)
    blocks = []
    for exponent in (-149, -140, -127, -126, -125, -60, -7, 0, 3, 100, 119):
        for _ in range(60):
            scale = np.float32(rng.uniform(1, 2) * 2.0**exponent)
            largest = np.float32(scale * np.float32(top))
            exact = np.float32(largest / np.float32(top))
            k = rng.integers(0, top, 31) + 0.5
            near = (k * np.float64(exact)).astype(np.float32)
            steps = rng.integers(-3, 4, 31).astype(np.int32)
            moved = np.maximum(near.view(np.int32) + steps, 0).view(np.float32)
            signs = rng.choice(np.array([-1, 1], np.float32), 31)
            blocks.append(np.concatenate([[largest], np.minimum(moved, largest) * signs]))
    check(np.concatenate(blocks).astype(np.float32), encoding)


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_odd_blocks(encoding: str) -> None:
    """QZ-03: what must neither poison a block nor vanish."""
    rows = np.zeros((10, 32), np.float32)
    rows[0, 3] = np.nan
    rows[0, 4] = 2
    rows[1, 0] = np.inf
    rows[1, 1:] = 0.25
    rows[2] = -0.0
    rows[3] = 1e30
    rows[3, 1] = -np.finfo(np.float32).max
    rows[4] = 1e-30
    rows[5, :] = 1e-3
    rows[5, 7] = 1e4
    rows[6] = np.nan
    rows[7] = 1e-45
    rows[8, 0] = -np.inf
    rows[9] = np.finfo(np.float32).max
    check(rows, encoding)
    packed = pack(Tensor.from_numpy(get_device(), rows[4]), encoding)
    assert packed.planes()[1].numpy()[0] == np.float32(1e-30) / np.float32(7 if encoding == "q4" else 127)


def test_what_lies_past_the_end_has_no_influence() -> None:
    device = get_device()
    longer = Tensor.from_numpy(
        device, np.concatenate([np.full(40, 0.5), np.full(24, 1e9)]).astype(np.float32)
    )
    packed = pack(longer.rows(0, 40), "q8")
    assert packed.bytes().tobytes() == encode(np.full(40, 0.5, np.float32), "q8")


def test_views_are_packed_where_their_last_block_is_in_memory() -> None:
    x = np.random.default_rng(5).normal(size=(7, 3)).astype(np.float32)
    whole = Tensor.from_numpy(get_device(), x)
    part = pack(whole.rows(2, 7), "q8").bytes()
    assert np.array_equal(part, pack(Tensor.from_numpy(get_device(), x[2:]), "q8").bytes())
    full = Tensor.from_numpy(get_device(), np.ones((64, 1), np.float32))  # fills its memory
    with pytest.raises(DeviceError, match="pack a copy"):
        pack(full.rows(1, 64), "q8")
    halves = Tensor.from_numpy(get_device(), np.ones((64, 1), np.float16))
    with pytest.raises(DeviceError, match="pack a copy"):
        pack(halves.rows(1, 3), "q8")


def test_refusals() -> None:
    device = get_device()
    with pytest.raises(DeviceError, match="without elements"):
        pack(Tensor.empty(device, (2, 0)), "q4")
    with pytest.raises(DeviceError, match="no encoding 'q5'"):
        pack(Tensor.empty(device, (2, 2)), "q5")
    with pytest.raises(DeviceError, match="q4 tensors cannot be packed"):
        pack(Tensor.empty(device, (64,), "q4"), "q8")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_packer_takes_pieces_and_counts_what_is_not_finite(dtype: type) -> None:
    rng = np.random.default_rng(4)
    packer = Packer(get_device(), "q8", 1000)
    for size in (1000, 1, 33, 640):
        values = rng.normal(size=size).astype(dtype)
        codes, scales, odd = packer(values)
        assert codes.tobytes() + scales.tobytes() == encode(values, "q8")
        assert (odd.count, odd.first) == (0, -1)
    values = rng.normal(size=997).astype(dtype)
    values[[123, 500, 996]] = [np.inf, np.nan, -np.inf]
    codes, scales, odd = packer(values)
    assert codes.tobytes() + scales.tobytes() == encode(values, "q8")
    assert (odd.count, odd.first) == (3, 123)
    with pytest.raises(DeviceError, match="1001 values for a packer of 1000"):
        packer(np.zeros(1001, dtype))
