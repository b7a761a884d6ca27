"""The head of a GGUF file: version, key/values and tensor descriptions, parsed from bytes that nobody has vouched for.

Every count and length is checked against the bytes that are left in the file before anything is allocated.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from oazoo.errors import FormatError
from oazoo.formats.mapped import MappedFile
from oazoo.formats.messages import quoted
from oazoo.formats.strict_json import decode_utf8

MAGIC = b"GGUF"
MAX_KEY = 65535
#: ggml itself stops at 63 characters; some image models have longer names.
MAX_NAME = 1024
MAX_DIMS = 4
#: Above what any model has.
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 18
DEFAULT_ALIGNMENT = 32
#: Array elements of all metadata together: several times the largest vocabularies (tokens, scores, types, merges).
MAX_ARRAY_ELEMENTS = 1 << 23
MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("<B", "u1"),
    1: ("<b", "i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    _BOOL: ("<B", "u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_U64 = struct.Struct("<Q")
# Smallest key/value: key length, one character, type, one byte. Smallest tensor: the same name, rank, type, offset.
_SMALLEST_PAIR = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the file describes it. ``shape`` is outermost first (the file has it innermost first)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Everything before the data. ``end`` is where the descriptions end in the file, before padding."""

    version: int
    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    alignment: int
    end: int


class _Reader:
    """A forward cursor over the file that reads ahead and never past the end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.buffer = b""
        self.base = 0  # file offset of buffer[0]
        self.at = 0  # position in the buffer

    @property
    def offset(self) -> int:
        return self.base + self.at

    @property
    def left(self) -> int:
        return self.file.size - self.offset

    def need(self, count: int, what: str) -> int:
        """Make ``count`` bytes available; returns their position in the buffer and steps over them."""
        at = self.at
        if at + count > len(self.buffer):
            if count > self.left:
                raise FormatError(
                    f"{self.file.path}: cut short or damaged: {what} at offset {self.offset} takes {count} bytes, "
                    f"the file has {self.left} left"
                )
            self.base, at = self.offset, 0
            self.buffer = self.file.read(self.base, min(max(count, 1 << 20), self.file.size - self.base))
        self.at = at + count
        return at

    def unpack(self, form: str, what: str) -> Any:
        at = self.need(struct.calcsize(form), what)
        return struct.unpack_from(form, self.buffer, at)[0]

    def string(self, what: str) -> str:
        size = self.unpack("<Q", f"the length of {what}")
        at = self.need(size, what)
        return decode_utf8(self.buffer[at : at + size], f"{self.file.path}: {what}")


def read_head(file: MappedFile) -> GgufHead:
    """Parse everything before the data of a GGUF file of version 2 or 3.

    Raises:
        FormatError: anything is wrong; the message has the offset, and the key or tensor.
    """
    reader = _Reader(file)
    version = _version(reader)
    tensor_count = reader.unpack("<Q", "the number of tensors")
    pair_count = reader.unpack("<Q", "the number of key/values")
    for count, smallest, most, noun in (
        (pair_count, _SMALLEST_PAIR, MAX_PAIRS, "key/values"),
        (tensor_count, _SMALLEST_TENSOR, MAX_TENSORS, "tensors"),
    ):
        if count * smallest > reader.left:
            raise FormatError(
                f"{file.path}: announces {count} {noun}, more than its {file.size} bytes can hold; cut short or damaged"
            )
        if count > most:
            raise FormatError(f"{file.path}: announces {count} {noun}; at most {most} are read")
    metadata = _pairs(reader, pair_count)
    tensors = _tensors(reader, tensor_count)
    return GgufHead(version, metadata, tensors, _alignment(file, metadata), reader.offset)


def _version(reader: _Reader) -> int:
    path = reader.file.path
    at = reader.need(4, "the magic number")
    if reader.buffer[at : at + 4] != MAGIC:
        raise FormatError(f"{path}: is not a GGUF file: begins with {reader.buffer[at : at + 4]!r}")
    version = int(reader.unpack("<I", "the version"))
    if version in (2, 3):
        return version
    if version == 1:
        raise FormatError(
            f"{path}: GGUF version 1 (of 2023) is not supported; convert it with a llama.cpp of 2023"
        )
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if 0 < swapped < 16:
        raise FormatError(
            f"{path}: big-endian GGUF (version {swapped}) is not supported; get the little-endian file"
        )
    raise FormatError(f"{path}: unknown GGUF version {version}; versions 2 and 3 are supported")


def _pairs(reader: _Reader, count: int) -> dict[str, Any]:
    path = reader.file.path
    metadata: dict[str, Any] = {}
    budget = [MAX_ARRAY_ELEMENTS]
    for index in range(count):
        key = reader.string(f"key {index}")
        if not key or len(key) > MAX_KEY or "\0" in key:
            problem = "is empty" if not key else "holds a NUL" if "\0" in key else f"is longer than {MAX_KEY}"
            raise FormatError(f"{path}: key {index} of {count} {problem}")
        if key in metadata:
            raise FormatError(f"{path}: key {quoted(key)} comes twice")
        what = quoted(key)
        metadata[key] = _value(reader, reader.unpack("<I", f"the type of {what}"), what, budget, 0)
    return metadata


def _value(reader: _Reader, kind: int, what: str, budget: list[int], depth: int) -> Any:
    if kind == _STRING:
        return reader.string(f"the value of {what}")
    if kind == _ARRAY:
        return _array(reader, what, budget, depth + 1)
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise FormatError(f"{reader.file.path}: the value of {what} has the unknown type {kind}")
    value = reader.unpack(scalar[0], f"the value of {what}")
    if kind == _BOOL:
        if value > 1:
            raise FormatError(f"{reader.file.path}: the value of {what} is boolean, but its byte is {value}")
        return bool(value)
    return value


def _array(reader: _Reader, what: str, budget: list[int], depth: int) -> list[Any]:
    path = reader.file.path
    if depth > MAX_ARRAY_DEPTH:
        raise FormatError(f"{path}: {what}: arrays nested deeper than {MAX_ARRAY_DEPTH}")
    kind = reader.unpack("<I", f"the element type of {what}")
    count = reader.unpack("<Q", f"the length of {what}")
    scalar = _SCALARS.get(kind)
    if scalar is None and kind not in (_STRING, _ARRAY):
        raise FormatError(f"{path}: {what} is an array of the unknown type {kind}")
    smallest = struct.calcsize(scalar[0]) if scalar else 8 if kind == _STRING else 12
    if count * smallest > reader.left:
        raise FormatError(
            f"{path}: cut short or damaged: {what} announces {count} elements of at least {smallest} bytes, "
            f"the file has {reader.left} bytes left"
        )
    # An array inside another is an object of its own, which costs far more than the bytes that announce it.
    budget[0] -= count if depth == 1 else count + 128
    if budget[0] < 0:
        raise FormatError(f"{path}: {what}: the metadata arrays hold more than {MAX_ARRAY_ELEMENTS} elements")
    if kind == _STRING:
        return _strings(reader, count, what)
    if kind == _ARRAY:
        return [_array(reader, what, budget, depth + 1) for _ in range(count)]
    assert scalar is not None
    at = reader.need(count * smallest, f"the array {what}")
    values = np.frombuffer(reader.buffer, scalar[1], count, at)
    if kind == _BOOL:
        if count and int(values.max()) > 1:
            raise FormatError(
                f"{path}: {what} is an array of booleans, but has a byte of {int(values.max())}"
            )
        values = values.astype(np.bool_)
    return list(values.tolist())


def _strings(reader: _Reader, count: int, what: str) -> list[str]:
    # The vocabulary: a hundred thousand short strings. The common case is inlined, anything odd goes the checked way.
    result: list[str] = []
    append, length_at = result.append, _U64.unpack_from
    while len(result) < count:
        buffer, at = reader.buffer, reader.at
        end = len(buffer)
        try:
            for _ in range(count - len(result)):
                if at + 8 > end:
                    break
                stop = at + 8 + length_at(buffer, at)[0]
                if stop > end:
                    break
                append(buffer[at + 8 : stop].decode())
                at = stop
        except UnicodeDecodeError:
            pass
        reader.at = at
        if len(result) < count:
            append(reader.string(f"element {len(result)} of {what}"))
    return result


def _tensors(reader: _Reader, count: int) -> list[GgufTensor]:
    path = reader.file.path
    tensors: list[GgufTensor] = []
    seen: set[str] = set()
    for index in range(count):
        name = reader.string(f"the name of tensor {index}")
        if not name or len(name) > MAX_NAME or "\0" in name:
            raise FormatError(
                f"{path}: tensor {index} of {count} has the name {quoted(name)}; a name has 1 to {MAX_NAME} characters, "
                "without NUL"
            )
        if name in seen:
            raise FormatError(f"{path}: tensor {quoted(name)} comes twice")
        seen.add(name)
        rank = reader.unpack("<I", f"the rank of tensor {quoted(name)}")
        if rank > MAX_DIMS:
            raise FormatError(f"{path}: tensor {quoted(name)} has {rank} dimensions; GGUF allows {MAX_DIMS}")
        at = reader.need(8 * rank + 12, f"the description of tensor {quoted(name)}")
        *sizes, kind, offset = struct.unpack_from(f"<{rank}QIQ", reader.buffer, at)
        tensors.append(GgufTensor(name, tuple(reversed(sizes)), kind, offset))
    return tensors


def _alignment(file: MappedFile, metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or value <= 0 or value & (value - 1):
        raise FormatError(f"{file.path}: general.alignment is {quoted(value)}; it must be a power of two")
    return value
