"""The protobuf wire format, read strictly and in place: tags, varints and lengths held against the bytes that are left.

A length-delimited field is a range of the message, which stays where it is, in memory or in its file.
Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats.mapped import MappedFile
from oazoo.formats.messages import quoted

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WIDTH = {FIXED64: 8, FIXED32: 4}
_STEP = 1 << 18
_LONGEST_VARINT = 10
#: Bytes of a file that are read at a time: messages jump over what is long.
_WINDOW = 1 << 14


class Message(Protocol):
    """Bytes by position: a memoryview, or those of a file."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes | memoryview: ...


class FileMessage:
    """The bytes of a file by position, read where they are looked at."""

    def __init__(self, file: MappedFile) -> None:
        self._file = file
        self._window, self._start = b"", 0

    def __len__(self) -> int:
        return self._file.size

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def __getitem__(self, at: int | slice, /) -> int | bytes:
        if isinstance(at, int):
            return self[at : at + 1][0]
        start, stop, _ = at.indices(self._file.size)
        first = start - self._start
        if first < 0 or stop > self._start + len(self._window):
            if stop - start > _WINDOW:
                return self._file.read(start, stop - start)
            self._window = self._file.read(start, min(_WINDOW, self._file.size - start))
            self._start, first = start, 0
        return self._window[first : first + stop - start]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number and wire type, and the range of its payload. ``value`` is that of a varint."""

    number: int
    wire: int
    start: int
    stop: int
    value: int

    @property
    def signed(self) -> int:
        """The varint as a signed 64-bit number."""
        return self.value - (1 << 64) if self.value >> 63 else self.value


def varint(data: Message, at: int, stop: int) -> tuple[int, int]:
    """The varint at ``at`` and where it ends.

    Raises:
        FormatError: it runs over ``stop``, or is longer than ten bytes or 64 bits.
    """
    value = shift = 0
    for position, byte in enumerate(data[at : min(stop, at + _LONGEST_VARINT)], at):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise FormatError(f"the number at byte {at} has more than 64 bits")
            return value, position + 1
        shift += 7
    if stop - at >= _LONGEST_VARINT:
        raise FormatError(f"the number at byte {at} is longer than {_LONGEST_VARINT} bytes")
    raise FormatError(f"cut short: the number at byte {at} has no end")


def fields(data: Message, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message in ``[start, stop)``, in order.

    Raises:
        FormatError: a tag, number or length is damaged, or leaves the message.
    """
    at = start
    while at < stop:
        tag, after = varint(data, at, stop)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise FormatError(f"field number {number} at byte {at} is out of range")
        value = 0
        if wire == VARINT:
            value, end = varint(data, after, stop)
        elif wire == BYTES:
            length, after = varint(data, after, stop)
            end = after + length
        elif wire in _WIDTH:
            end = after + _WIDTH[wire]
        else:
            raise FormatError(f"wire type {wire} of field {number} at byte {at} is not one that is used")
        if end > stop:
            raise FormatError(
                f"field {number} at byte {at} takes {end - after} bytes, but {max(0, stop - after)} are left: cut short or "
                "damaged"
            )
        yield Field(number, wire, after, end, value)
        at = end


def expect(field: Field, wire: int, what: str) -> Field:
    """The field itself, if it is of the wire type that its meaning asks for."""
    if field.wire != wire:
        raise FormatError(f"{what} at byte {field.start} has wire type {field.wire}, not {wire}")
    return field


def text(data: Message, field: Field, what: str, longest: int = 1 << 16) -> str:
    """A text field.

    Raises:
        FormatError: too long, not UTF-8, or with NUL.
    """
    expect(field, BYTES, what)
    if field.stop - field.start > longest:
        raise FormatError(
            f"{what} at byte {field.start} has {field.stop - field.start} bytes, over {longest}"
        )
    raw = bytes(data[field.start : field.stop])
    try:
        value = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{what} at byte {field.start} is not UTF-8: {quoted(raw[:64])}") from error
    if "\0" in value:
        raise FormatError(f"{what} at byte {field.start} holds NUL: {quoted(value)}")
    return value


def count_varints(data: npt.NDArray[np.uint8]) -> int:
    """How many varints a packed field holds; FormatError if the last has no end."""
    if data.size and int(data[-1]) & 0x80:
        raise FormatError("cut short: the last number of a packed field has no end")
    return sum(int(np.count_nonzero(data[at : at + _STEP] < 0x80)) for at in range(0, data.size, _STEP))


def packed_varints(data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint64]]:
    """The numbers of a packed field, in pieces, so that memory is bounded by a constant.

    Raises:
        FormatError: a number is longer than ten bytes or 64 bits, or has no end.
    """
    at = 0
    while at < data.size:
        piece = data[at : at + _STEP]
        ends = np.flatnonzero(piece < 0x80)
        if not ends.size:
            raise FormatError("a number of a packed field has no end, or more than ten bytes")
        starts = np.concatenate([[0], ends[:-1] + 1])
        lengths = ends - starts + 1
        longest = int(lengths.max())
        if longest > _LONGEST_VARINT:
            raise FormatError(f"a number of a packed field is longer than {_LONGEST_VARINT} bytes")
        values = np.zeros(ends.size, np.uint64)
        for k in range(longest):
            has = lengths > k
            bits = (piece[starts[has] + k] & 0x7F).astype(np.uint64)
            if k == _LONGEST_VARINT - 1 and int(bits.max()) > 1:
                raise FormatError("a number of a packed field has more than 64 bits")
            values[has] |= bits << np.uint64(7 * k)
        yield values
        at += int(ends[-1]) + 1
