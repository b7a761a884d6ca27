"""Writing ``.oam`` version 3: laid out from descriptions, streamed, atomic.

The whole layout follows from the names, shapes and encodings, so every payload has its place in the file before a byte
moves, payloads can come in any order and in pieces, and memory stays at a few small buffers. Weights that come in the order
of the entries are hashed by one thread and written by another while the next are made; what comes otherwise is read again
for its checksum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats import encodings
from oazoo.formats import oam_layout as layout
from oazoo.formats.atomic import AtomicFile, EarlyFlush, check_output, check_space, output_error, reserve
from oazoo.formats.hashing import BackgroundFnv1a64, Fnv1a64, fnv1a64
from oazoo.formats.messages import quoted
from oazoo.formats.oam_layout import OamConfig, OamOptimizer, OamProgress
from oazoo.formats.oam_names import stored_names, with_names

#: Weights below this are hashed at the end: starting a thread would take longer.
_WORTH_A_THREAD = 1 << 20
#: Whether the system can write at a position, so that any thread may.
_STORES = hasattr(os, "pwrite")


@dataclass(frozen=True)
class OamEntry:
    """A tensor to be written.

    ``encoding`` is a dense type, ``q4``/``q8`` (weights only), or a type that ``.oam`` has no code for and that is carried
    as u8 (f8, f4, f6; weights only).
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    section: Literal["weights", "state"] = "weights"


@dataclass(frozen=True, slots=True)
class Filling:
    """A payload that is put where it is wanted, part by part and in order: nothing is copied twice.

    ``fill(start, out)`` stores the bytes from ``start`` on into all of ``out``, a u8 array in memory that is aligned for
    any type; every part but the last has a multiple of :attr:`BackgroundFnv1a64.PIECE` bytes before it.
    """

    nbytes: int
    fill: Callable[[int, npt.NDArray[np.uint8]], None]
    #: Given (start, bytes) in the same order by another thread, when they have been stored and before they are gone.
    seen: Callable[[int, memoryview], None] | None = None

    def pieces(self) -> Iterator[memoryview]:
        """The payload in buffers of its own."""
        for start in range(0, self.nbytes, BackgroundFnv1a64.PIECE):
            out = np.empty(min(BackgroundFnv1a64.PIECE, self.nbytes - start), np.uint8)
            self.fill(start, out)
            yield out.data
            if self.seen is not None:
                self.seen(start, out.data)


@dataclass(slots=True)
class _Slot:
    """Where a tensor's payload goes in the file. ``begin`` is where the payload before it ends; zeros are between."""

    offset: int
    size: int
    begin: int
    written: bool = False


class OamWriter:
    """Write an ``.oam`` file::

        with OamWriter(path, config=config, entries=[OamEntry("w", (2, 3), "f32")]) as writer:
            writer.write("w", array)

    Leaving the block without an error computes the checksums, flushes to disk and gives the file its name; an error of any
    kind removes the temporary file.

    Args:
        path: the file to write.
        config: its Config section.
        entries: every tensor that will be written; names are unique. Weights whose names are over 127 bytes need a config of
            ours, which then maps the stored names to these (:mod:`oazoo.formats.oam_names`).
        assets: files that travel with the model, by name without the ``asset/`` prefix (``tokenizer.json``).
        progress: the Progress section (104 bytes if given as bytes); by default that of an untrained model.
        optimizer: the Optimizer section, if any.
        overwrite: replace an existing file (only at success).

    Raises:
        FormatError: something that the format cannot hold.
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`; also when the disk has too little room.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        config: OamConfig,
        entries: Sequence[OamEntry],
        assets: dict[str, bytes] | None = None,
        progress: OamProgress | bytes | None = None,
        optimizer: OamOptimizer | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._optimizer = optimizer
        self._stored = stored_names(entry.name for entry in entries if entry.section == "weights")
        self._config = self._packed(config)
        self._progress = _pack_progress(progress)
        self._assets = {f"{layout.ASSET_PREFIX}{name}": data for name, data in (assets or {}).items()}
        carried = _carried(entries, self._stored)
        if carried:
            self._assets[layout.CARRIED_ASSET] = carried
        blobs = [OamEntry(name, (len(data),), "u8", "state") for name, data in self._assets.items()]
        self._slots: dict[str, _Slot] = {}
        self._lay_out([*entries, *blobs])
        self._output: AtomicFile | None = None
        self._flush: EarlyFlush | None = None
        #: The hash of the weights section up to ``_hashed`` in the file, as far as payloads came in order.
        self._sum: BackgroundFnv1a64 | None = None
        self._hashed = 0

    def _packed(self, config: OamConfig) -> bytes:
        return replace(config, payload=with_names(config.payload, self._stored)).pack()

    def _lay_out(self, entries: list[OamEntry]) -> None:
        """Place every section and tensor. ``_tables`` are the tensor tables, ``_sections`` (type, offset, size)."""
        self._tables: list[tuple[int, bytes]] = []
        self._sections: list[tuple[int, int, int]] = [(layout.CONFIG_SECTION, layout.PAGE, len(self._config))]
        end = layout.PAGE + len(self._config)
        for kind, name in ((layout.WEIGHTS, "weights"), (layout.STATE, "state")):
            chosen = [entry for entry in entries if entry.section == name]
            if not chosen and kind == layout.STATE:
                continue
            head = layout.COUNT.size + layout.ENTRY.size * len(chosen)
            # The section starts where its data, which follows the table, falls on an aligned offset.
            start = end + -(end + head) % layout.ALIGNMENT
            table, blob_size = self._place(chosen, start + head)
            self._tables.append((start, table))
            self._sections.append((kind, start, head + blob_size))
            # Padding to a multiple of the section's own length, as OA does.
            end = start + -(-(head + blob_size) // layout.PAGE) * layout.PAGE
        if self._optimizer is not None:
            size = layout.OPTIMIZER.size + sum(4 * moments.size for moments in self._optimizer.moments)
            self._sections.append((layout.OPTIMIZER_SECTION, end, size))
            self._optimizer_header = self._optimizer.pack_header()
            end += size
        self._sections.append((layout.PROGRESS_SECTION, end, len(self._progress)))
        self.size = end + len(self._progress)
        if self.size > encodings.MAX_SIZE:
            raise FormatError(f"{self.path}: the file would take more than 2^63 bytes")

    def _place(self, entries: list[OamEntry], blob: int) -> tuple[bytes, int]:
        """The tensor table of one section whose data starts at ``blob``, and the size of the data."""
        table = [layout.COUNT.pack(len(entries), 0)]
        position = end = filled = 0
        for entry in entries:
            if entry.name in self._slots:
                raise FormatError(f"{self.path}: tensor {quoted(entry.name)} comes twice")
            record, size = _pack_entry(entry, self._stored.get(entry.name, entry.name), position)
            table.append(record)
            self._slots[entry.name] = _Slot(blob + position, size, blob + filled, written=size == 0)
            end = position + size
            filled = end if size else filled
            position = -(-end // layout.ALIGNMENT) * layout.ALIGNMENT
            if position > encodings.MAX_SIZE:
                raise FormatError(f"{self.path}: the tensors together take more than 2^63 bytes")
        return b"".join(table), end

    def __enter__(self) -> Self:
        check_output(self.path, overwrite=self._overwrite)
        check_space(self.path, self.size)
        self._output = AtomicFile(self.path, overwrite=self._overwrite)
        try:
            file = self._output.file
            reserve(file, self.size)
            self._flush = EarlyFlush(file)
            for offset, table in self._tables:
                self._put(offset, table)
            self._follow()
            for name, data in self._assets.items():
                self.write(name, data)
        except BaseException as error:
            self._give_up()
            if isinstance(error, OSError):
                raise output_error(self.path, error) from error
            raise
        return self

    def replace_config(self, config: OamConfig) -> None:
        """Store another Config section of the same length, which is not known until the weights have been read.

        Raises:
            FormatError: its length differs.
        """
        packed = self._packed(config)
        if len(packed) != len(self._config):
            raise FormatError(
                f"{self.path}: the config has {len(packed)} bytes in place of {len(self._config)}, for which room was left"
            )
        self._config = packed

    def _follow(self) -> None:
        """Begin to hash the weights as they come."""
        start, table = self._tables[0]
        self._hashed = start + len(table)
        size = next(size for kind, _, size in self._sections if kind == layout.WEIGHTS)
        if size >= _WORTH_A_THREAD:
            self._sum = BackgroundFnv1a64(self._store if _STORES else None)
            self._sum.update(memoryview(table), start)

    def _drop_sum(self) -> None:
        if self._sum is not None:
            self._sum.close()
        self._sum = None

    def write(self, name: str, data: Any) -> None:
        """Store the payload of tensor ``name``.

        ``data`` is one buffer (bytes, NumPy array …), an iterable of buffers, or a :class:`Filling`.

        Raises:
            UsageError: no such entry, or written before.
            FormatError: the number of bytes is not that of the entry.
            OutputError: the disk is full, or another refusal of the system.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise UsageError(f"{self.path}: {quoted(name)} is not among the entries")
        if slot.written and slot.size:
            raise UsageError(f"{self.path}: {quoted(name)} has been written already")
        follows = self._sum is not None and slot.begin == self._hashed
        try:
            self._write(name, slot, data, follows)
        except BaseException:
            if follows:  # what has been hashed of it may be written anew
                self._drop_sum()
            raise
        slot.written = True

    def _write(self, name: str, slot: _Slot, data: Any, follows: bool) -> None:
        summed = self._sum if follows else None
        stores = summed is not None and _STORES
        if summed is not None and slot.size:
            self._add(summed, bytes(slot.offset - slot.begin), slot.begin)
        position = 0
        if isinstance(data, Filling) and stores:
            assert summed is not None
            position = self._fill(summed, slot, data)
            data = ()
        for piece in _buffers(data):
            if position + len(piece) > slot.size:
                raise FormatError(f"{self.path}: tensor {quoted(name)} takes {slot.size} bytes, got more")
            if summed is not None:
                self._add(summed, piece, slot.offset + position)
            if not stores:
                self._put(slot.offset + position, piece)
            position += len(piece)
        if position != slot.size:
            raise FormatError(f"{self.path}: tensor {quoted(name)} takes {slot.size} bytes, got {position}")
        if summed is not None and slot.size:
            self._hashed = slot.offset + slot.size

    def _fill(self, summed: BackgroundFnv1a64, slot: _Slot, data: Filling) -> int:
        """Let ``data`` fill the buffers of the threads themselves; returns how many bytes came."""
        for start in range(0, min(data.nbytes, slot.size), summed.PIECE):
            count = min(summed.PIECE, slot.size - start)
            try:
                piece = summed.take()
            except OSError as error:  # of an earlier piece
                raise output_error(self.path, error) from error
            try:
                data.fill(start, piece.data[:count])
            except BaseException:
                summed.give(piece, 0)
                raise
            summed.give(
                piece, count, slot.offset + start, None if data.seen is None else partial(data.seen, start)
            )
        return data.nbytes

    def _add(self, summed: BackgroundFnv1a64, data: bytes | memoryview, offset: int) -> None:
        """Hash bytes of the weights, and where the system can write at a position, store them: by threads, in time."""
        try:
            summed.update(memoryview(data), offset)
        except OSError as error:  # of an earlier piece
            raise output_error(self.path, error) from error

    def _put(self, offset: int, data: bytes | memoryview) -> None:
        if self._output is None:
            raise UsageError(f"{self.path}: an OamWriter is used in a with statement")
        try:
            self._store(memoryview(data), offset)
        except OSError as error:
            raise output_error(self.path, error) from error

    def _store(self, data: memoryview, offset: int) -> None:
        """Write bytes to their place. Any thread may, where the system can write at a position."""
        assert self._output is not None and self._flush is not None
        file, left = self._output.raw, data
        if not _STORES:
            file.seek(offset)
        while left:  # a full disk takes what fits, and says so at the next attempt
            done = os.pwrite(file.fileno(), left, offset) if _STORES else file.write(left)
            left, offset = left[done:], offset + done
        self._flush.wrote(len(data))

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._output is not None and self._flush is not None
        output = self._output
        try:
            if kind is None:
                self._finish()
                self._flush.close()
        except BaseException as error:
            self._give_up()
            if isinstance(error, OSError):
                raise output_error(self.path, error) from error
            raise
        if kind is None:
            output.commit()
        else:
            self._give_up()
        self._output = None

    def _give_up(self) -> None:
        """End the threads and remove the file."""
        assert self._output is not None
        self._drop_sum()
        if self._flush is not None:
            with suppress(OSError):  # the error that led here is the one to tell
                self._flush.close()
        self._output.abort()

    def _finish(self) -> None:
        """Write the small sections, then the checksums and headers."""
        missing = [name for name, slot in self._slots.items() if not slot.written]
        if missing:
            raise UsageError(
                f"{self.path}: {len(missing)} tensors were never written, the first is {quoted(missing[0])}"
            )
        assert self._output is not None
        places = {kind: offset for kind, offset, _ in self._sections}
        self._put(layout.PAGE, self._config)
        if self._optimizer is not None:
            position = places[layout.OPTIMIZER_SECTION]
            self._put(position, self._optimizer_header)
            position += len(self._optimizer_header)
            for moments in self._optimizer.moments:
                for piece in _buffers(moments.astype("<f4", copy=False)):
                    self._put(position, piece)
                    position += len(piece)
        self._put(places[layout.PROGRESS_SECTION], self._progress)
        table = b""
        for kind, offset, size in self._sections:
            digest, done = Fnv1a64(), 0
            if kind == layout.WEIGHTS and self._sum is not None:
                digest, done = self._sum.finish(), self._hashed - offset
                self._sum = None
            digest.update_from_file(self._output.raw, offset + done, size - done)
            table += layout.SECTION_HEADER.pack(kind, 0, b"", 0, offset, size, 0, digest.value, b"")
        header = [layout.MAGIC, layout.VERSION, len(self._sections), 0, self.size, 0, b""]
        header[5] = fnv1a64(layout.FILE_HEADER.pack(*header) + table)
        self._put(0, layout.FILE_HEADER.pack(*header) + table)


def _pack_entry(entry: OamEntry, stored: str, position: int) -> tuple[bytes, int]:
    what = f"{entry.section}: tensor {quoted(entry.name)}"
    name = layout.pack_text(stored, layout.MAX_NAME + 1, f"{entry.section}: tensor name")
    if not name:
        raise FormatError(f"{entry.section}: a tensor has an empty name")
    encoding = encodings.get(entry.encoding)
    try:
        size = encoding.bytes_for(entry.shape)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    shape = entry.shape
    dtype = code = block = 0
    if encoding.name in layout.DTYPES:
        dtype = layout.DTYPES.index(encoding.name)
    elif entry.section != "weights":
        raise FormatError(f"{what}: {encoding.name} is allowed in weights only")
    elif encoding.name in layout.CARRIED:
        dtype = layout.DTYPES.index("u8")
        shape = shape if size == encodings.numel(shape) else (size,)
    elif encoding.kind == "oam":
        code = next(number for number, known in layout.BLOCK_ENCODINGS.items() if known == encoding.name)
        block = layout.BLOCK_SIZE
        if size == 0:
            raise FormatError(f"{what}: {encoding.name} cannot hold a tensor of zero elements; keep it dense")
    else:
        raise FormatError(f"{what}: .oam cannot store {encoding.name}")
    if len(entry.shape) > layout.MAX_RANK:
        raise FormatError(f"{what}: rank {len(entry.shape)}; .oam allows {layout.MAX_RANK}")
    sizes = [*shape, *[0] * (layout.MAX_RANK - len(shape))]
    return layout.ENTRY.pack(name, position, size, dtype, len(shape), code, block, b"", *sizes), size


def _carried(entries: Sequence[OamEntry], stored: Mapping[str, str]) -> bytes:
    named = {
        stored.get(entry.name, entry.name): {"encoding": entry.encoding, "shape": list(entry.shape)}
        for entry in entries
        if entry.encoding in layout.CARRIED
    }
    return json.dumps(named, ensure_ascii=False, separators=(",", ":")).encode() if named else b""


def _pack_progress(progress: OamProgress | bytes | None) -> bytes:
    if isinstance(progress, bytes):
        OamProgress.unpack(progress)  # checks it
        return progress
    return (progress or OamProgress()).pack()


def _buffers(data: Any) -> Iterable[memoryview]:
    """``data`` as flat byte views: a buffer, a NumPy array of any type, a filling, or an iterable of these."""
    if isinstance(data, Filling):
        return data.pieces()
    if isinstance(data, np.ndarray):
        # Through uint8: types of ml_dtypes do not export the buffer protocol.
        return (np.ascontiguousarray(data).reshape(-1).view(np.uint8).data,)
    try:
        return (memoryview(data).cast("B"),)
    except TypeError:
        return (piece for item in data for piece in _buffers(item))
