"""GGUF: a strict reader of versions 2 and 3.

The head is parsed by :mod:`oazoo.formats.gguf_metadata`; here the tensors are placed in the file and checked. Values are
decoded by the ``gguf`` package, piece by piece.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from types import MappingProxyType

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.ggml_types import GGML_TYPES, UNKNOWN_PREFIX
from oazoo.formats.gguf_metadata import MAGIC, GgufHead, GgufTensor, read_head
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.source import TensorInfo, WeightSource

_STEP = 1 << 16


class GgufSource(WeightSource):
    """One GGUF file. ``metadata`` is its key/values as plain Python values, in file order.

    It may be one part of a model in several files: :func:`oazoo.formats.gguf_split.open_gguf` opens them together.

    Shapes are outermost first. A tensor of a type that cannot be decoded is listed all the same (``gguf.q8_k``,
    ``gguf.type_200``); asking for its values is an error that names the type. The size of a type that nobody has published
    is not known: ``nbytes`` is then the space up to the next tensor.

    Raises:
        FormatError: the file breaks a rule of the format, is big-endian, or of version 1.
        UsageError: there is no such file.
    """

    format = "gguf"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self._file = MappedFile(self.path)
        try:
            head = read_head(self._file)
            self.version = head.version
            self.alignment = head.alignment
            self.metadata = MappingProxyType(head.metadata)
            self._tensors = _place(self._file, head)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()


def _place(file: MappedFile, head: GgufHead) -> dict[str, MappedTensor]:
    """Give every tensor its byte range, and check that the ranges tile the data up to padding."""
    path, alignment = file.path, head.alignment
    start = -(-head.end // alignment) * alignment
    available = file.size - start
    if available < 0:
        if head.tensors:
            raise FormatError(
                f"{path}: cut short: ends at byte {file.size}, before its data, which starts at {start}"
            )
        start, available = head.end, file.size - head.end
    infos = _infos(path, head.tensors, available)
    previous, position = "", 0
    for tensor in sorted(head.tensors, key=lambda tensor: (tensor.offset, infos[tensor.name].nbytes)):
        end = tensor.offset + infos[tensor.name].nbytes
        what = f"{path}: tensor {quoted(tensor.name)}"
        if tensor.offset % alignment:
            raise FormatError(
                f"{what} begins at byte {tensor.offset} of the data, not at a multiple of the alignment {alignment}"
            )
        if end > available:
            raise FormatError(
                f"{what} takes bytes {tensor.offset} to {end} of the data, which has {available}: the file is "
                "cut short or damaged; fetch it again"
            )
        if tensor.offset < position:
            raise FormatError(
                f"{what} begins at byte {tensor.offset} of the data and overlaps {quoted(previous)}, which ends "
                f"at byte {position}"
            )
        if tensor.offset - position >= alignment:
            raise FormatError(
                f"{what}: hole of {tensor.offset - position} bytes before it (byte {tensor.offset} of the data)"
            )
        position, previous = end, tensor.name
    _check_tail(file, start + position if head.tensors else head.end, alignment)
    return {
        tensor.name: MappedTensor(infos[tensor.name], file, start + tensor.offset) for tensor in head.tensors
    }


def _infos(path: Path, tensors: list[GgufTensor], available: int) -> dict[str, TensorInfo]:
    """Encoding and size of every tensor; one of an unpublished type gets the space up to the next tensor."""
    starts = sorted({tensor.offset for tensor in tensors})
    infos: dict[str, TensorInfo] = {}
    for tensor in tensors:
        kind = GGML_TYPES.get(tensor.ggml_type)
        try:
            if kind is not None:
                name = kind.encoding
                size = encodings.get(name).bytes_for(tensor.shape)
            else:
                encodings.numel(tensor.shape)
                name = f"{UNKNOWN_PREFIX}{tensor.ggml_type}"
                after = bisect_right(starts, tensor.offset)
                size = max(0, (starts[after] if after < len(starts) else available) - tensor.offset)
        except FormatError as error:
            raise FormatError(f"{path}: tensor {quoted(tensor.name)}: {error}") from error
        infos[tensor.name] = TensorInfo(tensor.name, tensor.shape, name, size)
    return infos


def _check_tail(file: MappedFile, end: int, alignment: int) -> None:
    """After the last tensor, only zeros up to the alignment may follow."""
    extra, padding = file.size - end, -end % alignment
    if extra <= padding and not any(
        any(file.read(start, min(_STEP, file.size - start))) for start in range(end, file.size, _STEP)
    ):
        return
    joined = MAGIC in file.read(end, min(extra, min(alignment, _STEP) + len(MAGIC)))
    hint = (
        "several GGUF files joined end to end; the parts of a split model stay as they are, open the first"
        if joined
        else "the file is damaged or was appended to"
    )
    raise FormatError(
        f"{file.path}: {extra} bytes after the last tensor (from byte {end}) belong to nothing: {hint}"
    )
