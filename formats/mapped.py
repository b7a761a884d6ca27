"""Tensors in files: positioned reads, and views of the page cache for those who ask for them.

A file that changes while it is open is told by its size and its time of change, whenever bytes of it are asked for. Bytes
are read and not mapped, because the system ends a process that touches a mapped page which a file has lost. Only
:meth:`MappedTensor.mapped` hands out such views, and nothing in this package uses it.

A file is mapped in windows, on demand, and a window is unmapped when the last view of it is gone. Address space in use is
so about what is in use, not the size of the file, which matters under a limit on virtual memory.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats import encodings
from oazoo.formats.messages import quoted
from oazoo.formats.source import SourceTensor, TensorInfo

_SMALLEST_WINDOW = 32 << 20
_MOST_WINDOWS = 16


class MappedFile:
    """A file open for reading: positioned reads, and read-only mapped byte ranges.

    Raises:
        UsageError: there is no such file, or it is not a regular file.
        OazooError: the system refuses to open it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        self._stamp = _stamp(os.fstat(self._file.fileno()))
        self.size = self._stamp[0]
        grain = mmap.ALLOCATIONGRANULARITY
        self._window = -(-max(_SMALLEST_WINDOW, self.size // _MOST_WINDOWS) // grain) * grain
        self._position = threading.Lock()
        self._windows: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()

    @contextmanager
    def reading_head(self) -> Iterator[None]:
        """While a reader opens the file: a failure closes it, and a FormatError names it."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, FormatError) and not str(error).startswith(str(self.path)):
                raise FormatError(f"{self.path}: {error}") from error
            raise

    def read(self, offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``offset``; FormatError if the file has fewer. Allocates no more than it reads."""
        self._check_inside(offset, size)
        self._check_usable()
        try:
            data = self._read(offset, size)
        except OSError as error:
            raise OazooError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise self._shorter()
        return data

    def array(self, *ranges: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """The bytes of (offset, size) ranges of the file, one after another, read-only; errors as :meth:`read`."""
        if not hasattr(os, "preadv"):
            joined = b"".join(self.read(offset, size) for offset, size in ranges)
            return np.frombuffer(joined, np.uint8)
        for offset, size in ranges:
            self._check_inside(offset, size)
        self._check_usable()
        data = np.empty(sum(size for _, size in ranges), np.uint8)
        at = 0
        for offset, size in ranges:
            self._fill(data[at : at + size].data, offset)
            at += size
        data.flags.writeable = False
        return data

    def _fill(self, target: memoryview, offset: int) -> None:
        while target:  # one call gives 2 GiB at most
            try:
                got = os.preadv(self._file.fileno(), [target], offset)
            except OSError as error:
                raise OazooError(f"{self.path}: cannot be read: {error.strerror}") from error
            if not got:
                raise self._shorter()
            target, offset = target[got:], offset + got

    def _shorter(self) -> FormatError:
        return FormatError(f"{self.path}: changed while it was read: the file is shorter than it was")

    def _check_inside(self, offset: int, size: int) -> None:
        if offset + size > self.size:
            raise FormatError(
                f"{self.path}: cut short: {size} bytes at offset {offset} lie outside the file of {self.size} bytes"
            )

    def _read(self, offset: int, size: int) -> bytes:
        if not hasattr(os, "pread"):  # Windows
            with self._position:
                self._file.seek(offset)
                return self._file.read(size)
        handle = self._file.fileno()
        data = os.pread(handle, size, offset)
        if len(data) == size or not data:
            return data
        pieces = [data]  # one call gives 2 GiB at most
        while data and (left := size - sum(map(len, pieces))):
            data = os.pread(handle, left, offset + size - left)
            pieces.append(data)
        return b"".join(pieces)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out``, flat bytes, from ``offset`` on; as :meth:`read`, but into memory of the caller's."""
        if not hasattr(os, "preadv"):  # Windows, macOS before 11
            out[:] = self.read(offset, len(out))
            return
        self._check_inside(offset, len(out))
        self._check_usable()
        self._fill(out, offset)

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """A read-only mapped view of ``[offset, offset + size)``, which lies inside the file."""
        self._check_usable()
        if size == 0:
            empty = np.empty(0, np.uint8)
            empty.flags.writeable = False
            return empty
        index = offset // self._window
        start, stop = index * self._window, min((index + 1) * self._window, self.size)
        if offset + size <= stop:
            window = self._windows.get(index)
            if window is None:
                window = self._windows[index] = self._map(start, stop - start)
        else:
            # Larger than a window, or across a bound: a mapping of its own.
            start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            window = self._map(start, offset + size - start)
        return np.frombuffer(window, np.uint8, size, offset - start)

    def close(self) -> None:
        """Give up the file. Views handed out stay valid."""
        self._file.close()

    def _check_usable(self) -> None:
        if self._file.closed:
            raise OazooError(f"{self.path}: has been closed; open it again to read more tensors")
        size, changed = _stamp(os.fstat(self._file.fileno()))
        if size != self.size:
            what = "shorter" if size < self.size else "longer"
            raise FormatError(f"{self.path}: changed while it was read: the file is {what} than it was")
        if changed != self._stamp[1]:
            raise FormatError(f"{self.path}: changed while it was read: somebody wrote to it; try again")

    def _map(self, start: int, size: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._file.fileno(), size, access=mmap.ACCESS_READ, offset=start)
        except ValueError as error:
            raise self._shorter() from error
        except OSError as error:
            raise OazooError(f"{self.path}: cannot map {size} bytes: {error.strerror}") from error


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """What shows that a file has changed: its size and its time of change."""
    return status.st_size, status.st_mtime_ns


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; never blocks on a pipe or device. See :class:`MappedFile` for errors."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{path}: is a folder, not a file")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path}: is not a regular file")
        return path.open("rb")
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"{str(path)!r}: cannot be a file name: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise UsageError(f"{path}: no such file") from error
        raise OazooError(f"{path}: cannot be read: {error.strerror}") from error


class MappedTensor(SourceTensor):
    """A tensor whose payload is one byte range of a file."""

    __slots__ = ("_file", "_offset", "info")

    def __init__(self, info: TensorInfo, file: MappedFile, offset: int) -> None:
        self.info = info
        self._file = file
        self._offset = offset

    @property
    def place(self) -> tuple[Path, int]:
        return self._file.path, self._offset

    def raw(self) -> npt.NDArray[np.uint8]:
        return self._file.array((self._offset, self.info.nbytes))

    def mapped(self) -> npt.NDArray[np.uint8]:
        return self._file.view(self._offset, self.info.nbytes)

    def part(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        ranges = encodings.get(self.info.encoding).ranges(self.info.numel, start, stop)
        return self._file.array(*((self._offset + at, size) for at, size in ranges))

    def numpy(self) -> npt.NDArray[Any]:
        encoding = encodings.get(self.info.encoding)
        try:
            encoding.require_decodable()
            if encoding.kind == "dense":
                return encoding.numpy(self.raw(), self.info.shape)
        except FormatError as error:
            raise self._named(error) from error
        values = np.empty(self.info.numel, encoding.dtype)
        position = 0
        for piece in self.chunks(encodings.DECODE_STEP):
            values[position : position + piece.size] = piece
            position += piece.size
        return values.reshape(self.info.shape)

    def chunks(self, elements: int) -> Iterator[npt.NDArray[Any]]:
        encoding, count = encodings.get(self.info.encoding), self.info.numel
        try:
            encoding.require_decodable()
            step = max(1, elements // encoding.block) * encoding.block
            for start in range(0, count, step):
                stop = min(start + step, count)
                yield from encoding.chunks(self.part(start, stop), stop - start, step)
        except FormatError as error:
            raise self._named(error) from error

    def pieces(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        for start in range(0, self.info.nbytes, size):
            data = self._file.read(self._offset + start, min(size, self.info.nbytes - start))
            yield np.frombuffer(data, np.uint8)

    def bytes_into(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        if start < 0 or start + out.size > self.info.nbytes:
            raise ValueError(f"{start} to {start + out.size} is not within {self.info.nbytes} bytes")
        self._file.read_into(self._offset + start, out.data)

    def with_type(self, encoding: str, shape: tuple[int, ...]) -> MappedTensor:
        """The same bytes under another encoding and shape, whose size the caller has checked."""
        return MappedTensor(
            TensorInfo(self.info.name, shape, encoding, self.info.nbytes), self._file, self._offset
        )

    def with_name(self, name: str) -> MappedTensor:
        """The same tensor under another name."""
        info = self.info
        return MappedTensor(
            TensorInfo(name, info.shape, info.encoding, info.nbytes), self._file, self._offset
        )

    def _named(self, error: FormatError) -> FormatError:
        what = str(error).removeprefix(f"{self._file.path}: ")
        return FormatError(f"{self._file.path}: tensor {quoted(self.info.name)}: {what}")
