"""The registry of tensor encodings: how many bytes a tensor takes, and how its bytes become numbers.

Every encoding stores ``block`` consecutive elements in ``block_bytes`` bytes. Dense types have blocks of one element.
Names are plain strings:

- dense: ``f32 f16 bf16 f64 i8 u8 i16 u16 i32 u32 i64 u64 bool c64 c128`` and ``f8_e4m3 f8_e5m2 f8_e8m0 f8_e4m3fnuz
  f8_e5m2fnuz`` (in memory: NumPy and ``ml_dtypes`` types);
- sub-byte: ``f4_e2m1`` (two a byte, first element in the low nibble), ``f6_e2m3`` and ``f6_e3m2`` (stored, not decoded);
- ``q4`` and ``q8``: the encodings of ``.oam``, over the flattened tensor, the last block padded;
- ``gguf.q4_k`` and its like: the block types of ggml, whose rows are whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats import quant
from oazoo.formats.ggml_types import GGML_TYPES, UNKNOWN_PREFIX, decodable_names, describe
from oazoo.formats.messages import quoted

#: Sizes and counts above this do not fit the signed 64-bit integers that files, NumPy and drivers use.
MAX_SIZE = 2**63 - 1

Bytes = npt.NDArray[np.uint8]
Kind = Literal["dense", "packed", "oam", "gguf", "unknown"]


@dataclass(frozen=True, slots=True)
class Encoding:
    """One encoding. ``dtype`` is the NumPy type of a decoded element (float32 for the quantised ones)."""

    name: str
    kind: Kind
    block: int
    block_bytes: int
    dtype: np.dtype[Any]
    decodable: bool = True
    ggml: int | None = None

    @property
    def quantized(self) -> bool:
        """Whether values are decoded from blocks with scales, rather than stored as they are."""
        return self.kind in ("oam", "gguf")

    def bytes_for(self, shape: tuple[int, ...]) -> int:
        """Exact stored size in bytes of a tensor of ``shape``.

        Raises:
            FormatError: a product overflows 63 bits, or the shape does not divide into blocks.
        """
        count = numel(shape)
        if self.kind == "oam":
            blocks = -(-count // self.block)
        else:
            row = shape[-1] if self.kind == "gguf" and shape else count
            if row % self.block:
                what = "rows" if self.kind == "gguf" else "a size"
                raise FormatError(
                    f"{self.name} needs {what} that are a multiple of {self.block} elements, got shape {list(shape)}"
                )
            blocks = count // self.block
        size = blocks * self.block_bytes
        if size > MAX_SIZE:
            raise FormatError(f"shape {list(shape)} in {self.name} takes more than 2^63 bytes")
        return size

    def ranges(self, count: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Where the bytes of elements ``start`` to ``stop`` lie in the payload of ``count``: (offset, size), in order.

        Joined, they are the payload of a tensor of these elements. ``start`` falls on a block bound, and so does ``stop``
        unless it is the end.
        """
        first, last = start // self.block, -(-stop // self.block)
        if self.kind == "oam":
            return quant.ranges(self.name, count, first, last)
        return [(first * self.block_bytes, (last - first) * self.block_bytes)]

    def chunks(self, raw: Bytes, count: int, elements: int) -> Iterator[npt.NDArray[Any]]:
        """Decode ``raw`` (the whole payload of a tensor of ``count`` elements) piece by piece, flattened.

        Pieces hold about ``elements`` values each and end on block bounds; memory is that of one piece.
        """
        self.require_decodable()
        step = max(1, elements // self.block) * self.block
        for start in range(0, count, step):
            yield self._decode(raw, count, start, min(start + step, count))

    def numpy(self, raw: Bytes, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """All values, of ``shape``: a view of ``raw`` for aligned dense types, else a new array."""
        self.require_decodable()
        count = numel(shape)
        if self.kind == "dense":
            return self._decode(raw, count, 0, count).reshape(shape)
        out = np.empty(count, self.dtype)
        position = 0
        for piece in self.chunks(raw, count, DECODE_STEP):
            out[position : position + piece.size] = piece
            position += piece.size
        return out.reshape(shape)

    def require_decodable(self) -> None:
        """Raise FormatError unless values can be had.

        Before anything is allocated: the shape of a tensor of unknown type is not held against any number of bytes.
        """
        if not self.decodable:
            raise FormatError(undecodable(self.name))

    def _decode(self, raw: Bytes, count: int, start: int, stop: int) -> npt.NDArray[Any]:
        if self.kind == "oam":
            return quant.decode(raw, self.name, count, start, stop)
        first = start // self.block * self.block_bytes
        piece = raw[first : stop // self.block * self.block_bytes]
        if self.kind == "gguf":
            return _dequantize(piece, self.ggml)
        if self.kind == "packed":
            return _unpack_nibbles(piece, self.dtype)
        if self.name == "bool" and piece.size and int(piece.max()) > 1:
            raise FormatError("a bool tensor holds a byte that is neither 0 nor 1")
        values: npt.NDArray[Any] = np.frombuffer(piece, self.dtype)
        return values if values.flags.aligned else values.copy()


#: Elements decoded at a time where the result is whole: bounds the temporaries of the block decoders.
DECODE_STEP = 1 << 18

_F32: np.dtype[Any] = np.dtype(np.float32)

_DENSE: dict[str, Any] = {
    "f32": "<f4",
    "f16": "<f2",
    "bf16": ml_dtypes.bfloat16,
    "f64": "<f8",
    "i8": "i1",
    "u8": "u1",
    "i16": "<i2",
    "u16": "<u2",
    "i32": "<i4",
    "u32": "<u4",
    "i64": "<i8",
    "u64": "<u8",
    "bool": np.bool_,
    "c64": "<c8",
    "c128": "<c16",
    "f8_e4m3": ml_dtypes.float8_e4m3fn,
    "f8_e5m2": ml_dtypes.float8_e5m2,
    "f8_e8m0": ml_dtypes.float8_e8m0fnu,
    "f8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "f8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def _registry() -> dict[str, Encoding]:
    known = {
        name: Encoding(name, "dense", 1, np.dtype(t).itemsize, np.dtype(t)) for name, t in _DENSE.items()
    }
    known["f4_e2m1"] = Encoding("f4_e2m1", "packed", 2, 1, np.dtype(ml_dtypes.float4_e2m1fn))
    for name, kind in (("f6_e2m3", ml_dtypes.float6_e2m3fn), ("f6_e3m2", ml_dtypes.float6_e3m2fn)):
        known[name] = Encoding(name, "packed", 4, 3, np.dtype(kind), decodable=False)
    known["q4"] = Encoding("q4", "oam", quant.BLOCK, 16 + 4, _F32)
    known["q8"] = Encoding("q8", "oam", quant.BLOCK, 32 + 4, _F32)
    for ggml in GGML_TYPES.values():
        if ggml.dense is None:
            known[ggml.encoding] = Encoding(
                ggml.encoding, "gguf", ggml.block, ggml.block_bytes, _F32, ggml.decodable, ggml.number
            )
    return known


ENCODINGS: dict[str, Encoding] = _registry()


def get(name: str) -> Encoding:
    """The encoding called ``name``; ``gguf.type_N`` gives an undecodable stand-in for an unpublished ggml type.

    Raises:
        FormatError: nothing has this name.
    """
    found = ENCODINGS.get(name)
    if found is not None:
        return found
    if name.startswith(UNKNOWN_PREFIX) and name[len(UNKNOWN_PREFIX) :].isdigit():
        return Encoding(name, "unknown", 1, 1, _F32, decodable=False, ggml=int(name[len(UNKNOWN_PREFIX) :]))
    raise FormatError(f"unknown tensor encoding {quoted(name)}; known: {', '.join(ENCODINGS)}")


def for_dtype(dtype: npt.DTypeLike) -> str:
    """The name of the dense encoding that stores NumPy ``dtype`` as it is.

    Raises:
        FormatError: no encoding does (strings, objects, extended floats …).
    """
    wanted = np.dtype(dtype).newbyteorder("=")
    for name in _DENSE:
        if ENCODINGS[name].dtype == wanted:
            return name
    raise FormatError(f"NumPy type {np.dtype(dtype)} has no tensor encoding; known: {', '.join(_DENSE)}")


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of ``shape`` (1 for a scalar).

    Raises:
        FormatError: a negative size, or a product over 2^63 - 1. The product is taken without zero sizes, so that a
            shape does not become acceptable by an empty axis after its product has wrapped elsewhere.
    """
    count = 1
    empty = False
    for size in shape:
        if size < 0:
            raise FormatError(f"shape {list(shape)} has a negative size")
        if size == 0:
            empty = True
            continue
        count *= size
        if count > MAX_SIZE:
            raise FormatError(f"shape {list(shape)} has more than 2^63 elements")
    return 0 if empty else count


def undecodable(name: str) -> str:
    """Why values of encoding ``name`` cannot be had, and which ones can."""
    encoding = get(name)
    if encoding.ggml is not None:
        return f"{describe(encoding.ggml)} is not supported; types that are: {', '.join(decodable_names())}"
    return f"{name} has no published packing to decode; its bytes can only be copied"


def _dequantize(piece: Bytes, number: int | None) -> npt.NDArray[np.float32]:
    # Imported here: the package takes a while to load, and most runs do not decode ggml blocks.
    from gguf import GGMLQuantizationType, quants

    # One long row: the package loops over rows in Python.
    with np.errstate(all="ignore"):
        values: npt.NDArray[np.float32] = quants.dequantize(
            piece.reshape(1, -1), GGMLQuantizationType(number)
        ).ravel()
    return values


def _unpack_nibbles(piece: Bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    nibbles = np.empty(piece.size * 2, np.uint8)
    np.bitwise_and(piece, 15, out=nibbles[0::2])
    np.right_shift(piece, 4, out=nibbles[1::2])
    return nibbles.view(dtype)
