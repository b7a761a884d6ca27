"""The SHA-256 of source files, computed while their tensors are converted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
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
    """

    def __init__(self, files: Sequence[Path], known: Mapping[str, str]) -> None:
        self._files = tuple(files)
        self._known = known
        self.total = sum(path.stat().st_size for path in self._files)
        self.done = 0
        self._digests: dict[str, str] = {}
        self._failure: BaseException | None = None
        self._stop = Event()
        self._thread = Thread(target=self._run, name="oazoo-sha256", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def result(self, progress: Told | None = None) -> dict[str, str]:
        """The SHA-256 of every file by name, in hexadecimal, when all are known.

        Raises:
            FormatError: a file is not what it was when its hash became known.
        """
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
                self._digests[path.name] = self._hash(path)
        except BaseException as error:
            self._failure = error

    def _hash(self, path: Path) -> str:
        digest = hashlib.sha256()
        buffer = bytearray(_READ)
        view = memoryview(buffer)
        with open_regular(path) as file:
            # Unbuffered: straight into our buffer.
            while not self._stop.is_set() and (got := os.readv(file.fileno(), [buffer])):
                digest.update(view[:got])
                self.done += got
        return digest.hexdigest()
