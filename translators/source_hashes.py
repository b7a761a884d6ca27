"""The SHA-256 of source files, computed while their tensors are converted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

from oazoo.errors import FormatError
from oazoo.formats.mapped import open_regular

_READ = 1 << 20

#: Told how many bytes are done, of how many.
Told = Callable[[int, int], None]


class SourceHashes:
    """Hash files by a thread of its own while the block goes on::

        with SourceHashes(files, known) as hashes:
            ...
            digests = hashes.result()

    Args:
        files: the files.
        known: file name → SHA-256 that the file must have, as far as they are known.
        followed: those of the files that are read from begin to end anyway, so that the thread leaves them alone: who reads
            them hands what was read to :meth:`follow`.
    """

    def __init__(
        self, files: Sequence[Path], known: Mapping[str, str], followed: Collection[Path] = ()
    ) -> None:
        self._files = tuple(files)
        self._known = known
        self._following = {path: _Hashing(path) for path in self._files if path in followed}
        self.total = sum(path.stat().st_size for path in self._files)
        self._done = 0
        self._digests: dict[str, str] = {}
        self._failure: BaseException | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, name="oazoo-sha256", daemon=True)

    @property
    def done(self) -> int:
        """Bytes that have been hashed."""
        return self._done + sum(hashing.done for hashing in self._following.values())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for hashing in self._following.values():
            hashing.close()

    def follow(self, path: Path, offset: int, data: memoryview) -> None:
        """Bytes of a followed file, from ``offset`` on. One thread at a time calls this.

        In whatever order they come, every byte is hashed once: those that were passed over are read here.
        """
        self._following[path].take(offset, data)

    def result(self, progress: Told | None = None) -> dict[str, str]:
        """The SHA-256 of every file by name, in hexadecimal, when all are known.

        Raises:
            FormatError: a file is not what it was when its hash became known.
        """
        for path, hashing in self._following.items():
            while hashing.read_on():
                if progress is not None:
                    progress(self.done, self.total)
            self._digests[path.name] = hashing.digest()
        while self._thread.is_alive():
            self._thread.join(0.1)
            if progress is not None:
                progress(self.done, self.total)
        if self._failure is not None:
            raise self._failure
        if progress is not None:
            progress(self.total, self.total)
        for path in self._files:
            found = self._digests[path.name]
            wanted = self._known.get(path.name, found)
            if wanted != found:
                raise FormatError(
                    f"{path}: has changed since it was fetched: its SHA-256 was {wanted} and is {found}. Remove "
                    f"{path.parent} and fetch the model again"
                )
        return dict(self._digests)

    def _run(self) -> None:
        try:
            for path in self._files:
                if path not in self._following:
                    self._digests[path.name] = self._hash(path)
        except BaseException as error:
            self._failure = error

    def _hash(self, path: Path) -> str:
        hashing = _Hashing(path)
        try:
            while not self._stop.is_set() and (got := hashing.read_on()):
                self._done += got
            return hashing.digest()
        finally:
            hashing.close()


class _Hashing:
    """The SHA-256 of one file; ``done`` bytes of it from the start have been taken."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha = hashlib.sha256()
        # Now: what becomes of the name later does not matter.
        self._file = open_regular(path)
        self._buffer = bytearray(_READ)
        self.done = 0

    def take(self, offset: int, data: memoryview) -> None:
        """Bytes of the file from ``offset`` on, which are hashed once all before them are."""
        while self.done < offset:
            if not self.read_on(offset - self.done):
                raise FormatError(f"{self._path}: changed while it was read: the file is shorter than it was")
        left = data[self.done - offset :]
        self._sha.update(left)
        self.done += len(left)

    def read_on(self, most: int = _READ) -> int:
        """Hash the next bytes from the file itself; returns how many there were, 0 at its end."""
        self._file.seek(self.done)
        view = memoryview(self._buffer)[: min(most, _READ)]
        got = self._file.readinto(view)
        self._sha.update(view[:got])
        self.done += got
        return got

    def digest(self) -> str:
        """In hexadecimal."""
        return self._sha.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
