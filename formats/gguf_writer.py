"""Writing GGUF version 3: streaming, atomic, aligned.

Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.atomic import atomic_file
from oazoo.formats.ggml_types import GGML_TYPES
from oazoo.formats.gguf_metadata import DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, MAX_KEY
from oazoo.formats.messages import quoted
from oazoo.formats.streamed import StreamedTensor

VERSION = 3
#: What ggml itself can hold in a tensor's name, in bytes.
MAX_NAME = 63
_NUMBERS = {kind.encoding: kind.number for kind in GGML_TYPES.values() if not kind.removed}

_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64, _I64 = 4, 5, 6, 7, 8, 9, 10, 11
_PACKED = {_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<B", _U64: "<Q", _I64: "<q"}


def write_gguf(
    path: Path | str,
    metadata: Mapping[str, Any],
    tensors: Sequence[StreamedTensor],
    *,
    overwrite: bool = False,
) -> None:
    """Write one GGUF file, atomically and without holding more than a piece of a tensor.

    ``metadata`` is written in its order: bool, int (u32 where it fits, else u64 or i64), float (f32), text, and lists of
    one of these (int as i32 where it fits). Tensors follow in the order given, each at a multiple of 32 bytes; shapes
    are outermost first.

    Raises:
        FormatError: a value, name, shape or encoding that GGUF cannot hold.
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`.
    """
    head = head_bytes(metadata, tensors)
    with atomic_file(path, overwrite=overwrite) as file:
        file.write(head)
        for tensor in tensors:
            _pad(file, len(head), DEFAULT_ALIGNMENT)
            for piece in tensor.stored():
                file.write(piece.data)
        _pad(file, len(head), DEFAULT_ALIGNMENT)


def head_bytes(metadata: Mapping[str, Any], tensors: Sequence[StreamedTensor]) -> bytes:
    """Everything before the tensors' bytes, padded to the alignment."""
    names = [tensor.info.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"the tensor {quoted(twice)} would be written twice")
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not key or len(key.encode()) > MAX_KEY:
            raise FormatError(f"{quoted(key)} cannot be a key in GGUF")
        parts += (_text(key), _value(key, value))
    position = 0
    for tensor in tensors:
        parts.append(_describe(tensor, position))
        position += -(-tensor.info.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    head = b"".join(parts)
    return head + bytes(-len(head) % DEFAULT_ALIGNMENT)


def _describe(tensor: StreamedTensor, position: int) -> bytes:
    name, shape = tensor.info.name, tensor.info.shape
    if not name or len(name.encode()) > MAX_NAME:
        raise FormatError(
            f"{quoted(name)} cannot be a tensor name in GGUF: it takes 1 to {MAX_NAME} bytes of UTF-8"
        )
    if len(shape) > MAX_DIMS:
        raise FormatError(f"tensor {quoted(name)}: GGUF holds {MAX_DIMS} dimensions, not {len(shape)}")
    if tensor.info.encoding not in _NUMBERS:
        raise FormatError(f"tensor {quoted(name)}: GGUF has no type for {tensor.info.encoding}")
    if encodings.get(tensor.info.encoding).bytes_for(shape) != tensor.info.nbytes:
        raise FormatError(f"tensor {quoted(name)}: {tensor.info.nbytes} bytes do not follow from its shape")
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return _text(name) + sizes + struct.pack("<IQ", _NUMBERS[tensor.info.encoding], position)


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _kind(key: str, value: Any, in_list: bool = False) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        small, wide = (_I32, 1 << 31) if in_list else (_U32, 1 << 32)
        if -(1 << 31) <= value < wide:
            return small if value >= 0 or in_list else _I32
        if -(1 << 63) <= value < 1 << 64:
            return _U64 if value >= 0 else _I64
        raise FormatError(f"{quoted(key)}: {value} does not fit 64 bits")
    if isinstance(value, float):
        return _F32
    if isinstance(value, str):
        return _STRING
    raise FormatError(f"{quoted(key)}: a {type(value).__name__} cannot be a value in GGUF")


def _value(key: str, value: Any) -> bytes:
    if not isinstance(value, (list, tuple)):
        kind = _kind(key, value)
        return struct.pack("<I", kind) + _payload(key, kind, value)
    kinds = {_kind(key, item, in_list=True) for item in value} or {_I32}
    if len(kinds) > 1:
        raise FormatError(f"{quoted(key)}: a list in GGUF holds values of one type")
    kind = kinds.pop()
    items = (_payload(key, kind, item) for item in value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(items)


def _payload(key: str, kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    try:
        return struct.pack(_PACKED[kind], value)
    except OverflowError as error:
        raise FormatError(f"{quoted(key)}: {value} does not fit a 32-bit float") from error


def _pad(file: BinaryIO, start: int, alignment: int) -> None:
    file.write(bytes(-(file.tell() - start) % alignment))
