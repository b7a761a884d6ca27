"""Writing SafeTensors: streaming, atomic, aligned; and the exporter from ``.oam``."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats import encodings
from oazoo.formats.atomic import atomic_file
from oazoo.formats.safetensors import DTYPES, MAX_HEADER
from oazoo.formats.source import SourceTensor, WeightSource
from oazoo.formats.streamed import StreamedTensor, as_bytes

_NAMES = {encoding: name for name, encoding in DTYPES.items()}
_STEP = 1 << 22

#: What can be written as a tensor.
Tensor = SourceTensor | StreamedTensor | npt.NDArray[Any]


def write_safetensors(
    path: Path | str,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    dequantize: bool = False,
    overwrite: bool = False,
) -> None:
    """Write ``tensors`` to one SafeTensors file, atomically and without holding more than a small buffer.

    Tensors are laid out by descending element size, so that all of them are aligned; bytes are stored as they are.

    Raises:
        FormatError: an encoding that SafeTensors lacks (``q4``, ``gguf.*``, ``c128``), or a name it cannot hold.
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`.
    """
    described = {name: _describe(name, tensor, dequantize) for name, tensor in tensors.items()}
    order = sorted(tensors, key=lambda name: -_alignment(described[name][0]))
    header: dict[str, Any] = {}
    if metadata:
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
            raise FormatError("SafeTensors metadata holds only text")
        header["__metadata__"] = dict(metadata)
    position = 0
    for name in order:
        encoding, shape = described[name]
        size = encodings.get(encoding).bytes_for(shape)
        header[name] = {
            "dtype": _NAMES[encoding],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise FormatError(f"{path}: the header would take {len(text)} bytes; the format allows {MAX_HEADER}")
    with atomic_file(path, overwrite=overwrite) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            for piece in _pieces(tensors[name]):
                file.write(piece.data)


def export_safetensors(
    source: WeightSource, path: Path | str, *, dequantize: bool = False, overwrite: bool = False
) -> None:
    """Write all weights of ``source`` (an ``.oam``, or any other container) to one SafeTensors file.

    Dense tensors keep every bit. Quantised ones are refused, or become float32 if ``dequantize`` is set; the precision that
    quantising took does not come back.

    Raises:
        UsageError: ``source`` has quantised tensors and ``dequantize`` is not set.
        FormatError: a type that SafeTensors lacks.
    """
    quantized = [name for name, tensor in source.items() if encodings.get(tensor.info.encoding).quantized]
    if quantized and not dequantize:
        kinds = sorted({source[name].info.encoding for name in quantized})
        raise UsageError(
            f"{source.path}: {len(quantized)} tensors are stored as {', '.join(kinds)} (the first is {quantized[0]!r}), "
            "which SafeTensors cannot hold; export them as float32 with dequantize=True"
        )
    write_safetensors(path, source, metadata={"format": "pt"}, dequantize=dequantize, overwrite=overwrite)


def _describe(name: str, tensor: Tensor, dequantize: bool) -> tuple[str, tuple[int, ...]]:
    """The stored encoding and shape of one tensor, checked."""
    if not name or "\0" in name or name == "__metadata__":
        raise FormatError(f"{name!r} cannot be a tensor name in SafeTensors")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"{name!r} cannot be a tensor name in SafeTensors: it is not valid Unicode"
        ) from error
    if isinstance(tensor, (SourceTensor, StreamedTensor)):
        encoding, shape = tensor.info.encoding, tensor.info.shape
        if dequantize and isinstance(tensor, SourceTensor) and encodings.get(encoding).quantized:
            encoding = "f32"
    else:
        encoding, shape = encodings.for_dtype(tensor.dtype), tensor.shape
    if encoding not in _NAMES:
        raise FormatError(f"tensor {name!r}: SafeTensors has no type for {encoding}")
    return encoding, shape


def _alignment(encoding: str) -> int:
    known = encodings.get(encoding)
    return known.dtype.itemsize if known.kind == "dense" else 1


def _pieces(tensor: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    if isinstance(tensor, StreamedTensor):
        yield from tensor.stored()
    elif not isinstance(tensor, SourceTensor):
        yield as_bytes(tensor)
    elif encodings.get(tensor.info.encoding).quantized:
        for chunk in tensor.chunks(_STEP):
            yield chunk.astype("<f4", copy=False).view(np.uint8)
    else:
        yield from tensor.pieces(_STEP)
