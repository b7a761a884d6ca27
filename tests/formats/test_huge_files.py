"""Tensors of more than four billion elements, and what lies behind them in the file, in every container.

The files are holes but for their ends, so they take a few pages of disk. Sizes, offsets and counts are beyond 32 bits.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from click.testing import CliRunner
from torch_files import View, pickled

from oazoo.cli import main
from oazoo.formats.detect import open_source
from oazoo.formats.oam import OamSource
from oazoo.formats.source import SourceTensor

COUNT = 2**32 + 64
#: What stands at both ends of the large u8 tensor, and the whole of the f32 tensor behind it.
FIRST, LAST, AFTER = b"\1\2\3", b"\4\5\6", np.array([1.5, -2.25, 3.0], "<f4")


def write_sparse(path: Path, pieces: Mapping[int, bytes], size: int) -> Path:
    """A file of holes with some bytes in it; fails where the file system has no holes."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in pieces.items():
            file.seek(offset)
            file.write(data)
    used = path.stat().st_blocks * 512
    assert used < 64 << 20, (
        f"{path.parent}: the file system has no sparse files: {used} bytes of disk are used"
    )
    return path


def ends(start: int) -> dict[int, bytes]:
    """The bytes of the large tensor that begins at ``start``."""
    return {start: FIRST, start + COUNT - len(LAST): LAST}


def check_u8(tensor: SourceTensor) -> None:
    """Both ends of the large tensor, in each way to get at them that does not read it whole."""
    info = tensor.info
    assert info.shape == (COUNT,) and info.numel == info.nbytes == COUNT
    assert next(tensor.chunks(1000))[:4].tolist() == [1, 2, 3, 0]
    assert next(tensor.pieces(1000))[:4].tolist() == [1, 2, 3, 0]
    assert tensor.part(COUNT - 4, COUNT).tolist() == [0, 4, 5, 6]
    mapped = tensor.mapped()
    assert mapped.size == COUNT and mapped[2**32 :].tolist() == [0] * 61 + [4, 5, 6]


def make_safetensors(path: Path) -> Path:
    header = json.dumps(
        {
            "w": {"dtype": "U8", "shape": [COUNT], "data_offsets": [0, COUNT]},
            "after": {"dtype": "F32", "shape": [3], "data_offsets": [COUNT, COUNT + 12]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    pieces = {0: struct.pack("<Q", len(header)) + header, **ends(start), start + COUNT: AFTER.tobytes()}
    return write_sparse(path, pieces, start + COUNT + 12)


def q4_block(low: int, high: int, scale: float) -> bytes:
    """A block of Q4_0: all its low nibbles, its high ones, its scale."""
    return np.float16(scale).tobytes() + bytes([high << 4 | low]) * 16


def make_gguf(path: Path) -> Path:
    """The u8 tensor (i8 in GGUF), a Q4_0 matrix of 2^33 elements behind it, an f32 vector behind that."""
    rows = 2**33 // 32
    packed = rows * 18
    offsets = [0, COUNT, COUNT + packed + -packed % 32]
    head = b"GGUF" + struct.pack("<IQQ", 3, 3, 1)
    text = [name.encode() for name in ("general.architecture", "llama", "w", "q", "after")]
    sized = [struct.pack("<Q", len(part)) + part for part in text]
    head += sized[0] + struct.pack("<I", 8) + sized[1]
    for name, dims, kind, offset in zip(
        sized[2:], ([COUNT], [32, rows], [3]), (24, 2, 0), offsets, strict=True
    ):
        head += name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    start = len(head) + -len(head) % 32
    last = start + offsets[1] + packed - 18
    pieces = {0: head, **ends(start), last: q4_block(3, 12, 0.5), start + offsets[2]: AFTER.tobytes()}
    return write_sparse(path, pieces, start + offsets[2] + 32)


def make_onnx(path: Path) -> Path:
    """External data: one file, the large tensor first."""
    tensors = []
    for name, kind, shape, offset, length in (
        ("w", onnx.TensorProto.UINT8, [COUNT], 0, COUNT),
        ("after", onnx.TensorProto.FLOAT, [3], COUNT, 12),
    ):
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape, data_location=1)
        for key, value in {"location": "data", "offset": offset, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    graph = onnx.helper.make_graph([], "g", [], [], initializer=tensors)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    write_sparse(path.parent / "data", {**ends(0), COUNT: AFTER.tobytes()}, COUNT + 12)
    return path


def make_torch(path: Path) -> Path:
    """A checkpoint whose zip needs 64-bit sizes and offsets (ZIP64), by the published layout of the format."""
    storages = {"0": np.empty(0, "u1"), "1": AFTER}
    views = {"w": View("0", 0, (COUNT,), (1,), COUNT), "after": View("1", 0, (3,), (1,))}
    data = pickled(views, storages)
    members = [("x/data.pkl", data, len(data)), ("x/data/0", None, COUNT), ("x/data/1", AFTER.tobytes(), 12)]
    pieces: dict[int, bytes] = {}
    directory, at, limit = b"", 0, 0xFFFFFFFF
    for name, content, size in members:
        encoded, check = name.encode(), zlib.crc32(content or b"")
        extra = struct.pack("<HHQQ", 1, 16, size, size)
        local = struct.pack(
            "<4s5H3I2H", b"PK\3\4", 45, 0, 0, 0, 0, check, limit, limit, len(encoded), len(extra)
        )
        pieces[at] = local + encoded + extra
        extra = struct.pack("<HHQQQ", 1, 24, size, size, at)
        directory += struct.pack(
            "<4s6H3I5H2I",
            b"PK\1\2",
            45,
            45,
            0,
            0,
            0,
            0,
            check,
            limit,
            limit,
            len(encoded),
            len(extra),
            0,
            0,
            0,
            0,
            limit,
        )
        directory += encoded + extra
        at += len(local) + len(encoded) + 20
        pieces |= ends(at) if content is None else {at: content}
        at += size
    tail = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 3, 3, len(directory), at)
    tail += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
    tail += struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 3, 3, len(directory), limit, 0)
    pieces[at] = directory + tail
    return write_sparse(path, pieces, at + len(directory) + len(tail))


@pytest.mark.parametrize("make", [make_safetensors, make_gguf, make_onnx, make_torch])
def test_containers(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path / make.__name__)
    with open_source(path) as source:
        check_u8(source["w"])
        assert source["after"].numpy().tolist() == AFTER.tolist()
    shown = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    assert shown.exit_code == 0, shown.stderr
    tensors = {tensor["name"]: tensor for tensor in json.loads(shown.stdout)["tensors"]}
    assert tensors["w"]["shape"] == [COUNT] and tensors["w"]["bytes"] == COUNT


def test_blocks_of_gguf(tmp_path: Path) -> None:
    """The last row of eight billion packed values; and the gguf package sees the same in this file."""
    path = make_gguf(tmp_path / "m.gguf")
    expected = np.repeat([(3 - 8) * 0.5, (12 - 8) * 0.5], 16).astype("f4")
    theirs = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "q")
    np.testing.assert_array_equal(gguf.quants.dequantize(theirs.data[-1:], theirs.tensor_type)[0], expected)
    with open_source(path) as source:
        tensor = source["q"]
        assert tensor.info.shape == (2**28, 32) and tensor.info.numel == 2**33
        part = tensor.part(2**33 - 64, 2**33)
        values = gguf.quants.dequantize(part.reshape(2, 18), gguf.GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(values, [np.zeros(32), expected])


def oam_entry(name: str, offset: int, size: int, codes: tuple[int, int, int], shape: list[int]) -> bytes:
    """A row of a tensor table: dtype code, encoding, block size."""
    dtype, encoding, block = codes
    rank = (shape + [0] * 8)[:8]
    return struct.pack(
        "<128sQQ4BI8Q", name.encode(), offset, size, dtype, len(shape), encoding, block, 0, *rank
    )


def test_oam(tmp_path: Path, oamref: ModuleType) -> None:
    """A u8 tensor, a Q4 one whose codes alone take 4 GiB, an f32 one; and behind these weights an asset."""
    numel = 2**33
    q4 = numel // 2 + numel // 8
    second, third = COUNT, COUNT + q4
    table = struct.pack("<II", 3, 0) + oam_entry("w", 0, COUNT, (5, 0, 0), [COUNT])
    table += oam_entry("q", second, q4, (0, 1, 32), [2**28, 32]) + oam_entry(
        "after", third, 12, (0, 0, 0), [3]
    )
    config = struct.pack("<32s6I", b"test", 1, 0, 0, 0, 0, 0) + bytes(52)
    state = struct.pack("<II", 1, 0) + oam_entry("asset/note", 0, 5, (5, 0, 0), [5]) + b"hello"
    progress = struct.pack("<IqQQffI32s32x", 0, 7, 0, 0, 0.0, 0.0, 0, b"loss")
    weights_at, blob = 8192, 8192 + len(table)
    weights_size = len(table) + third + 12
    state_at = weights_at + -(-weights_size // 4096) * 4096
    progress_at = state_at + 4096
    total = progress_at + len(progress)
    # The checksum of the weights takes reading them all; nothing here does.
    sections = [
        (1, 4096, len(config), oamref.fnv(config)),
        (2, weights_at, weights_size, 0),
        (3, state_at, len(state), oamref.fnv(state)),
        (5, progress_at, len(progress), oamref.fnv(progress)),
    ]
    rows = b"".join(
        struct.pack("<IB3xIQQQQ20x", kind, 0, 0, at, size, 0, check) for kind, at, size, check in sections
    )
    head = struct.pack("<IIIIQQ32x", 0x004D414F, 3, len(sections), 0, total, 0)
    head = head[:24] + struct.pack("<Q", oamref.fnv(head + rows)) + head[32:]
    pieces = {0: head + rows, 4096: config, weights_at: table, state_at: state, progress_at: progress}
    pieces |= ends(blob) | {blob + third: AFTER.tobytes()}
    # The last block of q: nibbles 1 and 14 in turn, and its scale, which is the last value of the other plane.
    pieces |= {blob + second + numel // 2 - 16: bytes([0xE1]) * 16, blob + third - 4: struct.pack("<f", 0.25)}
    path = write_sparse(tmp_path / "m.oam", pieces, total)
    with OamSource(path) as source:
        check_u8(source["w"])
        assert source["after"].numpy().tolist() == AFTER.tolist()
        assert source.asset("asset/note") == b"hello" and source.progress.step == 7
        expected: npt.NDArray[np.float32] = np.tile([(1 - 7) * 0.25, (14 - 7) * 0.25], 16).astype("f4")
        part = source["q"].part(numel - 64, numel)
        values = oamref.dense({"enc": 1, "shape": (2, 32), "data": part.tobytes(), "dtype": 0})
        np.testing.assert_array_equal(values, [np.zeros(32), expected])
        assert next(source["q"].chunks(64)).tolist() == [0.0] * 64
