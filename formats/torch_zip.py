"""PyTorch checkpoints (``torch.save``): the tensors of the zip, and its plain values, without unpickling.

The archive holds ``NAME/data.pkl``, read by :mod:`oazoo.formats.plain_pickle`, and a stored (never compressed) record
``NAME/data/KEY`` for each storage, which stays in the file. A checkpoint that holds more than tensors and plain values is
refused.
"""

from __future__ import annotations

import itertools
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats import encodings, plain_pickle
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.plain_pickle import TensorView
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource

MAX_RECORDS = 1 << 18
MAX_DEPTH = 64
MAX_NAME = 4096
MAX_VALUES = 1 << 20
_SMALL = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_END = struct.Struct("<4s4H2IH")
HOW = (
    "take the SafeTensors files of the model, or convert it where you trust it: "
    "safetensors.torch.save_file(torch.load(FILE, weights_only=True), OUT)"
)


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    start: int
    size: int


class TorchSource(WeightSource):
    """One checkpoint. Tensors are named by their path in the pickle, joined by dots (``model.lm_head.weight``).

    ``metadata`` holds what is no tensor, as nested dicts and lists. ``shared`` maps the name of a tensor to the first one
    with the very same elements of the same storage (tied weights).

    Raises:
        FormatError: the archive is damaged, compressed, or of TorchScript; the pickle is not plain (the message names what
            it asks for); a tensor does not fit its storage, or overlaps another.
        UsageError: there is no such file.
    """

    format = "torch"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self._file = MappedFile(self.path)
        with self._file.reading_head():
            self._open()

    def _open(self) -> None:
        records = _records(self._file)
        prefix, pickled = _pickle_record(records)
        data = self._file.read(pickled.start, pickled.size)
        try:
            value = plain_pickle.loads(data)
        except FormatError as error:
            raise FormatError(
                f"is a PyTorch checkpoint whose pickle is refused: {error}. Instead, {HOW}"
            ) from error
        order = records.get(f"{prefix}byteorder")
        if order is not None and self._file.read(order.start, min(order.size, _SMALL)) != b"little":
            raise FormatError("is a big-endian checkpoint, which is not supported")
        views: dict[str, TensorView] = {}
        metadata = _Walk(views).plain(value, (), 0)
        self.metadata = MappingProxyType(metadata if isinstance(metadata, dict) else {"value": metadata})
        self.shared = _check_disjoint(views)
        self._tensors = {name: self._tensor(name, view, prefix, records) for name, view in views.items()}

    def _tensor(self, name: str, view: TensorView, prefix: str, records: dict[str, _Record]) -> SourceTensor:
        storage, encoding = view.storage, encodings.get(view.storage.encoding)
        what = f"tensor {quoted(name)}"
        record = records.get(f"{prefix}data/{storage.key}")
        if record is None:
            raise FormatError(f"{what}: its record data/{storage.key} is missing")
        width = encoding.block_bytes
        if record.size != storage.count * width:
            raise FormatError(
                f"{what}: record data/{storage.key} has {record.size} bytes, but {storage.count} elements of "
                f"{encoding.name} take {storage.count * width}"
            )
        info = TensorInfo(name, view.shape, encoding.name, encoding.bytes_for(view.shape))
        order = _axis_order(view, what)
        start = record.start + view.offset * width
        if info.nbytes and view.offset + info.numel > storage.count:
            raise FormatError(
                f"{what}: elements {view.offset} to {view.offset + info.numel} leave its storage of {storage.count}"
            )
        if order == tuple(range(len(view.shape))):
            return MappedTensor(info, self._file, start)
        return PermutedTensor(info, self._file, start, order)

    def close(self) -> None:
        self._file.close()


class PermutedTensor(SourceTensor):
    """A tensor stored with its axes in another order (a saved transpose); it is put in order when asked for."""

    def __init__(self, info: TensorInfo, file: MappedFile, start: int, order: tuple[int, ...]) -> None:
        self.info = info
        stored = tuple(info.shape[axis] for axis in order)
        self._stored = MappedTensor(TensorInfo(info.name, stored, info.encoding, info.nbytes), file, start)
        self._back = tuple(int(axis) for axis in np.argsort(order))

    def raw(self) -> npt.NDArray[np.uint8]:
        width = encodings.get(self.info.encoding).block_bytes
        whole = self._stored.raw().reshape(*self._stored.info.shape, width)
        data = np.ascontiguousarray(whole.transpose(*self._back, len(self._back))).reshape(-1)
        data.flags.writeable = False
        return data

    def numpy(self) -> npt.NDArray[Any]:
        return self._stored.numpy().transpose(self._back)

    def chunks(self, elements: int) -> Iterator[npt.NDArray[Any]]:
        yield from encodings.get(self.info.encoding).chunks(self.raw(), self.info.numel, elements)


def _records(file: MappedFile) -> dict[str, _Record]:
    """Every member of the zip with the range of its bytes; stored, whole, and apart from the others."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            members = archive.infolist()
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        ValueError,
        OverflowError,
        EOFError,
        struct.error,
    ) as error:
        raise FormatError(f"is a damaged zip archive: {error}") from error
    if file.read(file.size - _END.size, _END.size)[:4] != b"PK\x05\x06":
        raise FormatError(
            "has bytes after the end of its archive, or a comment, which torch.save never writes"
        )
    if len(members) > MAX_RECORDS:
        raise FormatError(f"has {len(members)} records; at most {MAX_RECORDS} are read")
    records: dict[str, _Record] = {}
    for member in members:
        what = f"record {quoted(member.filename)}"
        if member.filename in records:
            raise FormatError(f"{what} comes twice")
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise FormatError(f"{what} is compressed, which torch.save never does")
        if member.flag_bits & 1:
            raise FormatError(f"{what} is encrypted")
        if member.header_offset < 0:
            raise FormatError(f"{what} begins before the file")
        header = _LOCAL.unpack(file.read(member.header_offset, _LOCAL.size))
        if header[0] != b"PK\x03\x04":
            raise FormatError(f"{what} has no header at byte {member.header_offset}")
        start = member.header_offset + _LOCAL.size + header[-2] + header[-1]
        name = file.read(member.header_offset + _LOCAL.size, header[-2])
        if name != member.orig_filename.encode("utf-8", "replace") or header[3] != zipfile.ZIP_STORED:
            raise FormatError(f"{what} has another name or compression in its own header: {quoted(name)}")
        if start + member.file_size > file.size:
            raise FormatError(f"{what} takes bytes {start} to {start + member.file_size}, outside the file")
        records[member.filename] = _Record(member.filename, start, member.file_size)
    position, previous = 0, ""
    for record in sorted(records.values(), key=lambda record: (record.start, record.size)):
        if record.start < position:
            raise FormatError(f"records {quoted(previous)} and {quoted(record.name)} overlap")
        position, previous = record.start + record.size, record.name
    return records


def _pickle_record(records: dict[str, _Record]) -> tuple[str, _Record]:
    found = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in records):
        raise FormatError(f"is a TorchScript archive (it holds code, which is never run); {HOW}")
    if len(found) != 1 or found[0].count("/") > 1:
        raise FormatError(
            f"is a zip archive with {len(found)} pickles named data.pkl, so no PyTorch checkpoint; unpack it, or if it is "
            f"one: {HOW}"
        )
    record = records[found[0]]
    if record.size > plain_pickle.MAX_BYTES:
        raise FormatError(f"{found[0]} has {record.size} bytes; at most {plain_pickle.MAX_BYTES} are read")
    return found[0].removesuffix("data.pkl"), record


def _axis_order(view: TensorView, what: str) -> tuple[int, ...]:
    """The axes from the slowest to the fastest in the storage; a tensor that is not one dense block is refused."""
    moving = [axis for axis, size in enumerate(view.shape) if size != 1]
    if 0 in view.shape:
        return tuple(range(len(view.shape)))
    ordered = sorted(moving, key=lambda axis: -view.strides[axis])
    expected = 1
    for axis in reversed(ordered):
        if view.strides[axis] != expected:
            raise FormatError(
                f"{what}: strides {list(view.strides)} for shape {list(view.shape)} do not make one dense block; save a "
                "copy (tensor.contiguous())"
            )
        expected *= view.shape[axis]
    if ordered == moving:
        return tuple(range(len(view.shape)))
    fixed = [axis for axis, size in enumerate(view.shape) if size == 1]
    return (*fixed, *ordered)


class _Walk:
    """Takes the tensors out of nested plain data, naming them by their path."""

    def __init__(self, views: dict[str, TensorView]) -> None:
        self._views = views
        self._values = 0

    def plain(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_VALUES:
            raise FormatError("the pickle's values are nested too deeply, or too many")
        if isinstance(value, TensorView):
            self._add(".".join(path), value)
            return None
        if isinstance(value, dict):
            items = {str(key): (key, item) for key, item in value.items()}
            if len(items) != len(value):
                raise FormatError(
                    f"the pickle has a text and a number of the same form as keys of {quoted('.'.join(path))}"
                )
            kept = {name: self.plain(item, (*path, name), depth + 1) for name, (_, item) in items.items()}
            return {name: item for name, item in kept.items() if not isinstance(items[name][1], TensorView)}
        if isinstance(value, (list, tuple)):
            return [self.plain(item, (*path, str(index)), depth + 1) for index, item in enumerate(value)]
        if value is None or isinstance(value, (str, int, float)):
            return value
        raise FormatError(f"the pickle holds a {type(value).__name__} by itself, which is no plain value")

    def _add(self, name: str, view: TensorView) -> None:
        if not name or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME or "\0" in name:
            raise FormatError(f"{quoted(name)} cannot be the name of a tensor")
        if name in self._views:
            raise FormatError(f"two tensors are named {quoted(name)}")
        self._views[name] = view


def _check_disjoint(views: dict[str, TensorView]) -> dict[str, str]:
    """Tensors of one storage are the same (tied) or apart; returns the tied ones."""
    first: dict[TensorView, str] = {}
    shared: dict[str, str] = {}
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    storages: dict[str, Any] = {}
    for name, view in views.items():
        if storages.setdefault(view.storage.key, view.storage) != view.storage:
            raise FormatError(
                f"tensor {quoted(name)}: record data/{view.storage.key} is given two types or sizes"
            )
        if view in first:
            shared[name] = first[view]
            continue
        first[view] = name
        count = encodings.numel(view.shape)
        if count:
            ranges.setdefault(view.storage.key, []).append((view.offset, view.offset + count, name))
    for places in ranges.values():
        places.sort()
        for (_, end, one), (begin, _, other) in itertools.pairwise(places):
            if begin < end:
                raise FormatError(f"tensors {quoted(one)} and {quoted(other)} overlap in their storage")
    return shared
