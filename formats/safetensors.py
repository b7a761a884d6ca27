"""SafeTensors: a strict reader of one file.

Layout: header length N (u64), N bytes of JSON, then the data. Every tensor names its type, shape and byte range; the ranges
must cover the data exactly, without holes and overlaps. Specification: https://github.com/huggingface/safetensors.
Sharded models are read by :mod:`oazoo.formats.hf_folder`; files are written by :mod:`oazoo.formats.safetensors_writer`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.source import TensorInfo, WeightSource
from oazoo.formats.strict_json import Cursor, decode_utf8

#: The format's own limit on the header.
MAX_HEADER = 100_000_000
#: NumPy holds no more dimensions.
MAX_RANK = 64
MAX_NAME = 4096
#: Above what any model has: the largest have some hundred thousand tensors, over all their files.
MAX_TENSORS = 1 << 18
MAX_METADATA = 1 << 16

#: Type names in a header, and our encodings.
DTYPES = {
    "BOOL": "bool",
    "U8": "u8",
    "I8": "i8",
    "I16": "i16",
    "U16": "u16",
    "F16": "f16",
    "BF16": "bf16",
    "I32": "i32",
    "U32": "u32",
    "F32": "f32",
    "F64": "f64",
    "I64": "i64",
    "U64": "u64",
    "C64": "c64",
    "F8_E4M3": "f8_e4m3",
    "F8_E5M2": "f8_e5m2",
    "F8_E8M0": "f8_e8m0",
    "F8_E4M3FNUZ": "f8_e4m3fnuz",
    "F8_E5M2FNUZ": "f8_e5m2fnuz",
    "F4": "f4_e2m1",
    "F6_E2M3": "f6_e2m3",
    "F6_E3M2": "f6_e3m2",
}


class SafetensorsSource(WeightSource):
    """One SafeTensors file. ``metadata`` is its ``__metadata__`` (text to text).

    Raises:
        FormatError: the file breaks a rule of the format; the message has the tensor and the numbers that disagree.
        UsageError: there is no such file.
    """

    format = "safetensors"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self._file = MappedFile(self.path)
        try:
            self.metadata, self._tensors = _read(self._file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()


def _read(file: MappedFile) -> tuple[MappingProxyType[str, Any], dict[str, MappedTensor]]:
    path = file.path
    if file.size < 8:
        raise FormatError(
            f"{path}: cut short: {file.size} bytes, a SafeTensors file has at least 8; fetch it again"
        )
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > MAX_HEADER:
        raise FormatError(f"{path}: header length {length} is over the format's limit of {MAX_HEADER} bytes")
    if length > file.size - 8:
        raise FormatError(
            f"{path}: cut short inside the header: expected at least {8 + length} bytes, the file has {file.size}; "
            "fetch this file again"
        )
    text = decode_utf8(file.read(8, length), f"{path}: header")
    if not text.startswith("{"):
        raise FormatError(f"{path}: the header does not start with '{{': this is not a SafeTensors file")

    data_start, data_size = 8 + length, file.size - 8 - length
    metadata: dict[str, str] = {}
    ranges: list[tuple[int, int, TensorInfo]] = []
    cursor = Cursor(text, f"{path}: header")
    for name in cursor.keys("the header"):
        if name == "__metadata__":
            for key in cursor.keys("__metadata__"):
                metadata[key] = cursor.string(f"__metadata__[{quoted(key)}]")
                if len(metadata) > MAX_METADATA:
                    raise FormatError(f"{path}: __metadata__ has more than {MAX_METADATA} keys")
            continue
        entry = cursor.small_object(name)
        try:
            ranges.append(_entry(name, entry))
        except FormatError as error:
            raise FormatError(f"{path}: tensor {quoted(name)}: {error}") from error
        if len(ranges) > MAX_TENSORS:
            raise FormatError(f"{path}: has more than {MAX_TENSORS} tensors")
    cursor.finish(" ")
    _check_cover(path, ranges, data_size)
    return MappingProxyType(metadata), {
        info.name: MappedTensor(info, file, data_start + begin) for begin, _, info in ranges
    }


def _entry(name: str, entry: dict[str, Any]) -> tuple[int, int, TensorInfo]:
    if not name or len(name) > MAX_NAME or "\0" in name:
        raise FormatError(f"a tensor name has 1 to {MAX_NAME} characters, without NUL")
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(
            f"has the fields {quoted(sorted(entry))}, must have exactly 'data_offsets', 'dtype' and 'shape'"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"unknown dtype {quoted(dtype)}; known: {', '.join(DTYPES)}")
    if not _is_sizes(shape):
        raise FormatError(f"shape {quoted(shape)} is not a list of sizes")
    if len(shape) > MAX_RANK:
        raise FormatError(f"has {len(shape)} dimensions; at most {MAX_RANK} are read")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(f"data_offsets {quoted(offsets)} is not a pair of offsets")
    begin, end = offsets
    if begin > end:
        raise FormatError(f"data_offsets are inverted: begin {begin} lies after end {end}")
    encoding = encodings.get(DTYPES[dtype])
    size = encoding.bytes_for(tuple(shape))
    if size != end - begin:
        raise FormatError(
            f"data_offsets span {end - begin} bytes, but {dtype} of shape {shape} takes {size} bytes"
        )
    return begin, end, TensorInfo(name, tuple(shape), encoding.name, size)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= encodings.MAX_SIZE for size in value
    )


def _check_cover(path: Path, ranges: list[tuple[int, int, TensorInfo]], data_size: int) -> None:
    """Check that the byte ranges tile the data."""
    position = 0
    previous = ""
    for begin, end, info in sorted(ranges, key=lambda item: item[:2]):
        if end > data_size:
            total = max(stop for _, stop, _ in ranges)
            raise FormatError(
                f"{path}: tensor {quoted(info.name)} ends at byte {end} of the data, which has {data_size}: the file is cut "
                f"short or damaged (expected {path_size(path) - data_size + total} bytes, the file has "
                f"{path_size(path)}); fetch this file again"
            )
        if begin < position:
            raise FormatError(
                f"{path}: tensors {quoted(previous)} and {quoted(info.name)} overlap: "
                f"one ends at byte {position} of the data, the other begins at {begin}"
            )
        if begin > position:
            raise FormatError(
                f"{path}: hole of {begin - position} bytes before tensor {quoted(info.name)}: the tensors before it end at "
                f"byte {position} of the data, it begins at {begin}"
            )
        position, previous = end, info.name
    if position != data_size:
        raise FormatError(
            f"{path}: {data_size - position} bytes after the last tensor belong to nothing (the tensors end at byte "
            f"{position} of the data, which has {data_size}); the file is damaged or was appended to"
        )


def path_size(path: Path) -> int:
    """Size of the file in bytes, for messages."""
    return path.stat().st_size
