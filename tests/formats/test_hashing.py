"""FNV-1a 64 against its definition, whole and in pieces."""

from __future__ import annotations

import mmap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oazoo.formats.hashing import BackgroundFnv1a64, Fnv1a64, fnv1a64


def plain(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@pytest.mark.parametrize(
    ("data", "value"),
    # From the test vectors that the authors of FNV publish.
    [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)],
)
def test_published_vectors(data: bytes, value: int) -> None:
    digest = Fnv1a64()
    digest.update(data)
    assert fnv1a64(data) == digest.value == value


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_pieces_chain(pieces: list[bytes]) -> None:
    digest = Fnv1a64()
    for piece in pieces:
        digest.update(piece)
    assert digest.value == plain(b"".join(pieces)) == fnv1a64(b"".join(pieces))


def test_every_low_byte_is_steered_to() -> None:
    # The chaining puts one byte before a piece; all 256 states of the low byte must come out right.
    tail = bytes(range(50))
    seen = set()
    for first in range(256):
        digest = Fnv1a64()
        digest.update(bytes([first]))
        seen.add(digest.value & 0xFF)
        digest.update(tail)
        assert digest.value == plain(bytes([first]) + tail)
    assert len(seen) == 256


@pytest.mark.parametrize("kind", ["array", "read-only array", "mmap", "memoryview", "2-D array"])
def test_any_buffer(tmp_path: Path, kind: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    readonly = data.copy()
    readonly.flags.writeable = False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        buffers = {
            "array": data,
            "read-only array": readonly,
            "mmap": mapped,
            "memoryview": memoryview(data.tobytes()),
            "2-D array": data.view("<f4").reshape(125, 10),
        }
        assert fnv1a64(buffers[kind]) == plain(data.tobytes())


def test_files_are_hashed_in_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(1000)
        file.write(b"something")
    whole = np.memmap(path, np.uint8, "r")
    done: list[int] = []
    tracemalloc.start()
    try:
        digest = Fnv1a64()
        with path.open("rb") as file:
            digest.update_from_file(file, 3, whole.size - 3, done.append)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert digest.value == fnv1a64(whole[3:])
    assert used < 16 << 20 and sum(done) == whole.size - 3


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"12345")
    with path.open("rb") as file, pytest.raises(EOFError, match="5 bytes early"):
        Fnv1a64().update_from_file(file, 0, 10)


def test_a_thread_gives_the_same_hash() -> None:
    data = np.random.default_rng(3).integers(0, 256, 7_000_003, np.uint8).tobytes()
    digest = BackgroundFnv1a64()
    position = 0
    for size in (0, 1, 63, 1 << 20, (1 << 20) + 1, 3_500_000, len(data)):
        piece = bytearray(data[position : position + size])
        digest.update(memoryview(piece))
        piece[:] = bytes(len(piece))  # the caller's buffer may be used again at once
        position += size
    assert digest.finish().value == fnv1a64(data)
    assert BackgroundFnv1a64().finish().value == fnv1a64(b"")


def test_a_failure_in_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("too little")

    monkeypatch.setattr(Fnv1a64, "_absorb", fail)
    digest = BackgroundFnv1a64()
    with pytest.raises(MemoryError, match="too little"):
        digest.update(memoryview(bytes(10 << 20)))  # more than the thread has buffers for
    with pytest.raises(MemoryError, match="too little"):
        digest.finish()


def test_a_second_thread_is_given_what_was_hashed() -> None:
    data = np.random.default_rng(4).integers(0, 256, 9_000_001, np.uint8).tobytes()
    stored = bytearray(len(data))

    def store(piece: memoryview, position: int) -> None:
        stored[position : position + len(piece)] = piece

    digest = BackgroundFnv1a64(store)
    for start in range(0, len(data), 2_500_000):
        digest.update(memoryview(data)[start : start + 2_500_000], start)
    assert digest.finish().value == fnv1a64(data)
    assert stored == data


def test_a_failure_of_the_second_thread_is_raised() -> None:
    def refuse(piece: memoryview, position: int) -> None:
        if position >= 5 << 20:
            raise OSError(28, "no space")

    digest = BackgroundFnv1a64(refuse)
    with pytest.raises(OSError, match="no space"):
        digest.update(memoryview(bytes(30 << 20)))
    with pytest.raises(OSError, match="no space"):
        digest.finish()


def test_pieces_that_the_caller_fills() -> None:
    data = np.random.default_rng(5).integers(0, 256, 5_000_001, np.uint8)
    stored = np.zeros_like(data)
    seen: list[tuple[int, bytes]] = []

    def store(piece: memoryview, position: int) -> None:
        stored[position : position + len(piece)] = piece

    digest = BackgroundFnv1a64(store)
    for start in range(0, data.size, digest.PIECE):
        part = data[start : start + digest.PIECE]
        piece = digest.take()
        assert piece.data.ctypes.data % 64 == 0
        piece.data[: part.size] = part
        digest.give(piece, part.size, start, lambda view, start=start: seen.append((start, bytes(view))))
        digest.give(digest.take(), 0)  # one that stayed empty counts for nothing
    assert digest.finish().value == fnv1a64(data)
    assert np.array_equal(stored, data)
    assert b"".join(part for _, part in seen) == data.tobytes()
    assert [start for start, _ in seen] == list(range(0, data.size, digest.PIECE))
