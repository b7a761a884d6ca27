"""Q4 and Q8, the block encodings of ``.oam``: encoder, decoder, and lossless re-encoding from GGUF.

The flattened tensor is cut into blocks of 32, the last one padded with zeros. A payload is the code plane of all blocks
followed by the plane of their float32 scales. The encoder follows the ``.oam`` specification to the bit; the device
kernels are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError

#: Elements in a block, of both encodings.
BLOCK = 32
#: Code bytes of a block.
CODE_BYTES = {"q4": 16, "q8": 32}
_LARGEST = {"q4": 7, "q8": 127}
_STEP_BLOCKS = 1 << 15

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def encode(values: npt.NDArray[Any], encoding: str) -> tuple[Bytes, Floats]:
    """Quantise ``values`` (any shape; float32, float16 or bfloat16) to ``"q4"`` or ``"q8"``.

    Returns:
        The code plane (uint8, 16 or 32 bytes a block) and the scale plane (float32, one a block).
        A block's scale is max|x| / 7 (Q4) or / 127 (Q8) over its finite values, or 1 where that is not finite and
        positive; a code is the float32 quotient rounded to nearest, ties to even; a value that is not finite gets 0.
    """
    if values.dtype.name not in ("float32", "float16", "bfloat16"):
        raise UsageError(
            f"{encoding} is made from float32, float16 or bfloat16 values, not {values.dtype.name}"
        )
    flat = np.ravel(values)
    blocks = -(-flat.size // BLOCK)
    codes = np.empty((blocks, CODE_BYTES[encoding]), np.uint8)
    scales = np.empty(blocks, np.float32)
    for first in range(0, blocks, _STEP_BLOCKS):
        last = min(first + _STEP_BLOCKS, blocks)
        part = flat[first * BLOCK : last * BLOCK].astype(np.float32, copy=False)
        if part.size < (last - first) * BLOCK:
            part = np.concatenate([part, np.zeros((last - first) * BLOCK - part.size, np.float32)])
        codes[first:last], scales[first:last] = _encode_blocks(part.reshape(-1, BLOCK), encoding)
    return codes.reshape(-1), scales


def _encode_blocks(blocks: Floats, encoding: str) -> tuple[Bytes, Floats]:
    largest = np.float32(_LARGEST[encoding])
    finite = np.isfinite(blocks)
    known = np.where(finite, blocks, np.float32(0))
    scale = np.abs(known).max(axis=1) / largest
    scale[~(np.isfinite(scale) & (scale > 0))] = 1
    # A subnormal scale can be so coarse that the quotient of the largest value exceeds the code range.
    code = np.clip(np.rint(known / scale[:, None]), -largest, largest).astype(np.int8)
    if encoding == "q8":
        return code.view(np.uint8), scale
    return _join_nibbles((code + np.int8(7)).view(np.uint8)), scale


def _join_nibbles(nibble: Bytes) -> Bytes:
    """Element 2i to the low nibble of byte i, element 2i + 1 to the high one."""
    joined: Bytes = nibble[:, 0::2] | (nibble[:, 1::2] << np.uint8(4))
    return joined


def encode_stream(chunks: Iterable[npt.NDArray[Any]], encoding: str) -> Iterator[npt.NDArray[Any]]:
    """Quantise a flattened tensor that comes in chunks of any size; yields the payload in file order.

    Codes are yielded as they are made. The scale plane, an eighth of a byte an element, is kept to the end.
    """
    scales: list[Floats] = []
    rest: npt.NDArray[Any] | None = None
    for chunk in chunks:
        flat = np.ravel(chunk)
        if rest is not None:
            flat = np.concatenate([rest, flat])
        whole = flat.size // BLOCK * BLOCK
        rest = flat[whole:].copy() if whole < flat.size else None
        if whole:
            codes, scale = encode(flat[:whole], encoding)
            scales.append(scale)
            yield codes
    if rest is not None:
        codes, scale = encode(rest, encoding)
        scales.append(scale)
        yield codes
    yield from scales


def decode(raw: Bytes, encoding: str, count: int, start: int = 0, stop: int | None = None) -> Floats:
    """Values ``[start, stop)`` of a payload of ``count`` elements; ``start`` falls on a block bound.

    Any scale and any code is legal here, also negative scales and code 15 of Q4, which our encoder does not produce.
    """
    stop = count if stop is None else stop
    blocks = -(-count // BLOCK)
    width = CODE_BYTES[encoding]
    first, last = start // BLOCK, -(-stop // BLOCK)
    codes = raw[first * width : last * width].reshape(-1, width)
    scales = np.frombuffer(raw[blocks * width + first * 4 : blocks * width + last * 4], "<f4")
    out = np.empty((last - first, BLOCK), np.float32)
    if encoding == "q8":
        out[:] = codes.view(np.int8)
    else:
        np.bitwise_and(codes, 15, out=out[:, 0::2], casting="unsafe")
        np.right_shift(codes, 4, out=out[:, 1::2], casting="unsafe")
        out -= 7
    with np.errstate(all="ignore"):
        out *= scales[:, None]
    return out.reshape(-1)[: stop - start]


def ranges(encoding: str, count: int, first: int, last: int) -> list[tuple[int, int]]:
    """Offset and size of the codes, then the scales, of blocks ``first`` to ``last`` in a payload of ``count`` elements."""
    width, blocks = CODE_BYTES[encoding], -(-count // BLOCK)
    return [(first * width, (last - first) * width), (blocks * width + 4 * first, 4 * (last - first))]


def _from_q8_0(blocks: Bytes) -> tuple[Bytes, Floats]:
    return blocks[:, 2:], _f16_scale(blocks)


def _from_q4_0(blocks: Bytes) -> tuple[Bytes, Floats]:
    # ggml keeps elements i and i + 16 in byte i; value = (n - 8) d. With scale -d and nibble 15 - n:
    # (15 - n - 7)(-d) = (n - 8) d, exactly.
    packed = blocks[:, 2:]
    nibble = np.empty((blocks.shape[0], BLOCK), np.uint8)
    np.subtract(np.uint8(15), packed & np.uint8(15), out=nibble[:, :16])
    np.subtract(np.uint8(15), packed >> np.uint8(4), out=nibble[:, 16:])
    return _join_nibbles(nibble), -_f16_scale(blocks)


def _f16_scale(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").ravel().astype(np.float32)


#: GGUF encodings that become an ``.oam`` one without loss: target, bytes of a source block, and the conversion.
_LOSSLESS: dict[str, tuple[str, int, Callable[[Bytes], tuple[Bytes, Floats]]]] = {
    "gguf.q8_0": ("q8", 34, _from_q8_0),
    "gguf.q4_0": ("q4", 18, _from_q4_0),
}
LOSSLESS_TARGETS: dict[str, str] = {source: target for source, (target, _, _) in _LOSSLESS.items()}


def reencode_stream(raw: Bytes | Callable[[int], Iterable[Bytes]], source: str) -> Iterator[npt.NDArray[Any]]:
    """Turn the payload of a ``gguf.q8_0`` or ``gguf.q4_0`` tensor into that of Q8 or Q4, every value kept exactly.

    Yields the new payload in file order; memory is bounded, and the payload is read twice. ``raw`` is all of it, or gives it
    in pieces of a number of bytes (:meth:`oazoo.formats.source.SourceTensor.pieces`).
    """
    _, size, convert = _LOSSLESS[source]
    step = _STEP_BLOCKS * size

    def pieces() -> Iterator[Bytes]:
        parts = raw(step) if callable(raw) else (raw[at : at + step] for at in range(0, raw.size, step))
        for part in parts:
            yield part.reshape(-1, size)

    for blocks in pieces():
        yield np.ascontiguousarray(convert(blocks)[0]).reshape(-1)
    sign = -1 if source == "gguf.q4_0" else 1
    for blocks in pieces():
        yield sign * _f16_scale(blocks)


#: ``.oam`` encodings and the GGUF encoding that can hold them, if every scale is a float16.
GGML_TARGETS: dict[str, str] = {target: source for source, target in LOSSLESS_TARGETS.items()}


def planes(raw: Bytes, encoding: str) -> tuple[Bytes, Floats]:
    """The code plane [blocks, bytes] and the scale plane [blocks] of a Q4 or Q8 payload, as views."""
    width = CODE_BYTES[encoding]
    blocks = raw.size // (width + 4)
    return raw[: blocks * width].reshape(blocks, width), np.frombuffer(raw[blocks * width :], "<f4")


def scales_fit_f16(scales: Floats) -> bool:
    """Whether every scale is a float16 to the bit, so that its block can be Q8_0 or Q4_0 without loss."""
    for first in range(0, scales.size, 1 << 20):
        part = scales[first : first + (1 << 20)]
        with np.errstate(all="ignore"):
            back = part.astype(np.float16).astype(np.float32)
        if not np.array_equal(back.view(np.uint32), np.ascontiguousarray(part).view(np.uint32)):
            return False
    return True


def to_ggml_stream(codes: Bytes, scales: Floats, encoding: str) -> Iterator[Bytes]:
    """Blocks of Q8_0 or Q4_0 from planes of Q8 or Q4: the inverse of :func:`reencode_stream`.

    Args:
        codes: [blocks, 32 or 16].
        scales: [blocks], all of them float16 values (:func:`scales_fit_f16`).
        encoding: ``"q8"`` or ``"q4"``.
    """
    for first in range(0, len(codes), _STEP_BLOCKS):
        part, scale = codes[first : first + _STEP_BLOCKS], scales[first : first + _STEP_BLOCKS]
        out = np.empty((len(part), 2 + part.shape[1]), np.uint8)
        if encoding == "q4":
            nibble = np.empty((len(part), BLOCK), np.uint8)
            np.subtract(np.uint8(15), part & np.uint8(15), out=nibble[:, 0::2])
            np.subtract(np.uint8(15), part >> np.uint8(4), out=nibble[:, 1::2])
            out[:, 2:] = nibble[:, :16] | (nibble[:, 16:] << np.uint8(4))
            scale = -scale
        else:
            out[:, 2:] = part
        out[:, :2] = scale.astype("<f2").reshape(-1, 1).view(np.uint8)
        yield out.reshape(-1)
