"""TensorProto: an ONNX tensor in any of the places where its values may lie.

Raw bytes and external data stay in their files. Typed fields are decoded when asked for: 16-bit floats and smaller types are
bit patterns in ``int32_data``; types below a byte are packed low bits first, and come out as the next type of a byte
(INT4 as i8, UINT4 as u8, FLOAT4E2M1 as f8_e4m3; no value changes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats import protobuf as pb
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.source import SourceTensor, TensorInfo

MAX_RANK = 64
MAX_NAME = 4096
#: Longest key or value of a key and value, in bytes.
MAX_TEXT = 1 << 20

#: TensorProto.DataType: our encoding.
ENCODINGS = {
    1: "f32",
    2: "u8",
    3: "i8",
    4: "u16",
    5: "i16",
    6: "i32",
    7: "i64",
    9: "bool",
    10: "f16",
    11: "f64",
    12: "u32",
    13: "u64",
    14: "c64",
    15: "c128",
    16: "bf16",
    17: "f8_e4m3",
    18: "f8_e4m3fnuz",
    19: "f8_e5m2",
    20: "f8_e5m2fnuz",
    21: "u8",
    22: "i8",
    23: "f8_e4m3",
    24: "f8_e8m0",
    25: "u8",
    26: "i8",
}
#: Types below a byte: bits of an element.
_BITS = {21: 4, 22: 4, 23: 4, 25: 2, 26: 2}
_SIGNED = (22, 26)
_STRING = 8
_FLOAT4 = 23

#: Field number → name of the field, and the types whose values it may hold.
_TYPED: dict[int, tuple[str, tuple[int, ...]]] = {
    4: ("float_data", (1, 14)),
    5: ("int32_data", (2, 3, 4, 5, 6, 9, 10, *range(16, 27))),
    7: ("int64_data", (7,)),
    10: ("double_data", (11, 15)),
    11: ("uint64_data", (12, 13)),
}
_VARINTS = (5, 7, 11)

Bytes = npt.NDArray[np.uint8]


@dataclass
class TensorRecord:
    """A TensorProto as it stands in the file: where its values lie, not yet held against its shape."""

    name: str = ""
    shape: tuple[int, ...] = ()
    data_type: int = 0
    raw: tuple[int, int] | None = None
    typed: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    external: dict[str, str] | None = None


def parse_tensor(data: pb.Message, start: int, stop: int) -> TensorRecord:
    """Read one TensorProto.

    Raises:
        FormatError: it is damaged, segmented, or of texts.
    """
    record, sizes, located = TensorRecord(), list[int](), 0
    external: dict[str, str] = {}
    for item in pb.fields(data, start, stop):
        number = item.number
        if number == 1:
            sizes += integers(data, item, "dims")
            if len(sizes) > MAX_RANK:
                raise FormatError(f"a tensor of more than {MAX_RANK} dimensions at byte {start}")
        elif number == 2:
            record.data_type = pb.expect(item, pb.VARINT, "data_type").value
        elif number in (3, 6):
            what = "is stored in segments" if number == 3 else "holds texts"
            raise FormatError(f"the tensor at byte {start} {what}, which is not supported")
        elif number in _TYPED:
            pb.expect(item, pb.BYTES, _TYPED[number][0])
            record.typed.setdefault(number, []).append((item.start, item.stop))
        elif number == 8:
            record.name = pb.text(data, item, "the name of a tensor", MAX_NAME)
        elif number == 9:
            if record.raw is not None:
                raise FormatError(f"the tensor at byte {start} has raw_data twice")
            pb.expect(item, pb.BYTES, "raw_data")
            record.raw = (item.start, item.stop)
        elif number == 13:
            key, value = entry(data, pb.expect(item, pb.BYTES, "external_data"))
            if key in external:
                raise FormatError(f"the tensor at byte {start} has external_data {quoted(key)} twice")
            external[key] = value
        elif number == 14:
            located = pb.expect(item, pb.VARINT, "data_location").value
    if located > 1:
        raise FormatError(f"the tensor at byte {start} has the unknown data_location {located}")
    if external and not located:
        raise FormatError(
            f"the tensor at byte {start} has external_data, but its data_location says otherwise"
        )
    record.external = external if located else None
    if any(not 0 <= size <= encodings.MAX_SIZE for size in sizes):
        raise FormatError(f"tensor {quoted(record.name)}: shape {sizes[:MAX_RANK]} has a negative size")
    record.shape = tuple(sizes)
    return record


def entry(data: pb.Message, item: pb.Field) -> tuple[str, str]:
    """A StringStringEntryProto."""
    found = {1: "", 2: ""}
    for part in pb.fields(data, item.start, item.stop):
        if part.number in found:
            found[part.number] = pb.text(data, part, "a text of a key and value", MAX_TEXT)
    return found[1], found[2]


def integers(data: pb.Message, item: pb.Field, what: str) -> list[int]:
    """A repeated int64 field, packed or one at a time."""
    if item.wire == pb.VARINT:
        return [item.signed]
    pb.expect(item, pb.BYTES, what)
    values, at = [], item.start
    while at < item.stop:
        value, at = pb.varint(data, at, item.stop)
        values.append(value - (1 << 64) if value >> 63 else value)
        if len(values) > 1 << 20:
            raise FormatError(f"{what} at byte {item.start} has too many numbers")
    return values


def build_tensor(
    record: TensorRecord, file: MappedFile, external: Callable[[dict[str, str], int], tuple[MappedFile, int]]
) -> SourceTensor:
    """Hold a record against its shape and give access to its values.

    Args:
        record: the tensor.
        file: the model's file.
        external: from the entries of ``external_data`` and the number of bytes to the file and the offset there.

    Raises:
        FormatError: an unknown type, values in more than one place or in the wrong one, or not as many as the shape says.
    """
    try:
        return _build(record, file, external)
    except FormatError as error:
        raise FormatError(f"tensor {quoted(record.name)}: {error}") from error


def _build(
    record: TensorRecord, file: MappedFile, external: Callable[[dict[str, str], int], tuple[MappedFile, int]]
) -> SourceTensor:
    kind = record.data_type
    if kind not in ENCODINGS:
        what = "texts" if kind == _STRING else f"the unknown data type {kind}"
        raise FormatError(f"holds {what}, which is not supported")
    count = encodings.numel(record.shape)
    info = TensorInfo(
        record.name, record.shape, ENCODINGS[kind], encodings.get(ENCODINGS[kind]).bytes_for(record.shape)
    )
    stored = -(-count * _BITS[kind] // 8) if kind in _BITS else info.nbytes
    typed = {number: ranges for number, ranges in record.typed.items() if any(a < b for a, b in ranges)}
    places = [_TYPED[number][0] for number in typed]
    if record.raw is not None and (record.raw[0] < record.raw[1] or not (places or record.external)):
        places.append("raw_data")
    if record.external is not None:
        places.append("external_data")
    if len(places) > 1:
        raise FormatError(f"has values in more than one place: {' and '.join(places)}")
    if not places:
        if count:
            raise FormatError(f"has no values, but shape {list(record.shape)} asks for {count}")
        return MappedTensor(info, file, 0)
    if typed:
        ((number, ranges),) = typed.items()
        return _typed(record, info, count, number, ranges, file)
    if record.external is not None:
        where, offset = external(record.external, stored)
    else:
        assert record.raw is not None
        offset, end = record.raw
        where = file
        if end - offset != stored:
            raise FormatError(
                f"raw_data has {end - offset} bytes, but shape {list(record.shape)} takes {stored} bytes"
            )
    if kind in _BITS:
        return DecodedTensor(info, file, lambda: _unpack(where.array((offset, stored)), kind, count))
    return MappedTensor(info, where, offset)


def _typed(
    record: TensorRecord,
    info: TensorInfo,
    count: int,
    number: int,
    ranges: list[tuple[int, int]],
    file: MappedFile,
) -> SourceTensor:
    kind, (name, allowed) = record.data_type, _TYPED[number]
    if kind not in allowed:
        raise FormatError(f"has its values in {name}, which does not hold {info.encoding}")
    if number not in _VARINTS:
        found = sum(stop - start for start, stop in ranges)
        if found != info.nbytes:
            raise FormatError(f"{name} has {found} bytes, but its shape takes {info.nbytes} bytes")
        if len(ranges) == 1:
            return MappedTensor(info, file, ranges[0][0])
        return DecodedTensor(
            info, file, lambda: file.array(*((start, stop - start) for start, stop in ranges))
        )
    numbers = sum(pb.count_varints(file.array((start, stop - start))) for start, stop in ranges)
    expected = -(-count * _BITS[kind] // 8) if kind in _BITS else count
    if numbers != expected:
        raise FormatError(f"{name} has {numbers} numbers, but its shape takes {expected}")
    storage = np.dtype(np.uint8) if kind in _BITS else _storage(info.encoding)

    def decode() -> Bytes:
        out = np.empty(numbers, storage)
        at = 0
        for start, stop in ranges:
            for values in pb.packed_varints(file.array((start, stop - start))):
                out[at : at + values.size] = _narrowed(values, storage, info.encoding)
                at += values.size
        packed = out.view(np.uint8)
        return _unpack(packed, kind, count) if kind in _BITS else packed

    return DecodedTensor(info, file, decode)


def _storage(encoding: str) -> np.dtype[Any]:
    """The integer type whose bits a varint of this encoding carries."""
    dtype = encodings.get(encoding).dtype
    if dtype.kind in "iu":
        return dtype
    return np.dtype(f"<u{dtype.itemsize}")


def _narrowed(values: npt.NDArray[np.uint64], storage: np.dtype[Any], encoding: str) -> npt.NDArray[Any]:
    """Numbers of a varint field as the type that they stand for; FormatError for one out of its range."""
    limits = np.iinfo(storage)
    if storage.itemsize == 8 and limits.min == 0:
        return values
    signed = values.view(np.int64)
    top = 1 if encoding == "bool" else limits.max
    if signed.size and (int(signed.min()) < limits.min or int(signed.max()) > top):
        raise FormatError(
            f"a number of the typed field is out of the range of {encoding} ({limits.min} to {top})"
        )
    return signed.astype(storage)


def _unpack(packed: Bytes, kind: int, count: int) -> Bytes:
    """Elements of 2 or 4 bits, low bits first, as bytes; what the last byte has beyond ``count`` is padding."""
    bits = _BITS[kind]
    a_byte = 8 // bits
    out = np.empty((packed.size, a_byte), np.uint8)
    for k in range(a_byte):
        out[:, k] = packed >> (bits * k) & ((1 << bits) - 1)
    values: Bytes = out.reshape(-1)[:count]
    if kind in _SIGNED:
        half = 1 << (bits - 1)
        return ((values ^ half).astype(np.int8) - np.int8(half)).view(np.uint8)
    if kind == _FLOAT4:
        values = values.view(ml_dtypes.float4_e2m1fn).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return values


class DecodedTensor(SourceTensor):
    """A tensor whose bytes are computed from what is stored, every time they are asked for."""

    def __init__(self, info: TensorInfo, file: MappedFile, decode: Callable[[], Bytes]) -> None:
        self.info = info
        self._file = file
        self._decode = decode

    def raw(self) -> Bytes:
        try:
            data = self._decode()
        except FormatError as error:
            raise FormatError(f"{self._file.path}: tensor {quoted(self.info.name)}: {error}") from error
        data.flags.writeable = False
        return data

    def numpy(self) -> npt.NDArray[Any]:
        return encodings.get(self.info.encoding).numpy(self.raw(), self.info.shape)

    def chunks(self, elements: int) -> Iterator[npt.NDArray[Any]]:
        yield from encodings.get(self.info.encoding).chunks(self.raw(), self.info.numel, elements)
