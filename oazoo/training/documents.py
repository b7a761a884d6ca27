"""Token ids of documents, one after another, in a file of their own: training data of any size in little memory."""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError

Ids = npt.NDArray[np.int32]

_BUFFER_IDS = 1 << 18
_HASH_IDS = 1 << 22


class Documents:
    """Documents as token ids, with which ids are to be learned (*targets*) and where each document comes from.

    The ids lie in ``tokens``, an int32 array mapped from a file without a name. An id that is context only, such as a
    prompt's, is stored as its complement ``~id``, so it is negative. The first id of a document is never a target: nothing
    before it says what it should be.

    Attributes:
        tokens: int32 [ids of all documents].
        starts: int64 [documents + 1], where each begins, and the end.
        whole: bool [documents], whether a document must not be cut in two (an example with a prompt).
        continuous: whether all documents are running text.
    """

    def __init__(
        self,
        file: IO[bytes],
        starts: npt.NDArray[np.int64],
        whole: npt.NDArray[np.bool_],
        origins: Sequence[tuple[str, npt.NDArray[np.int32], npt.NDArray[np.int32]]],
        continuous: bool,
    ) -> None:
        self._file = file
        self.starts, self.whole, self.continuous = starts, whole, continuous
        self.tokens: Ids = np.memmap(file, np.int32, "r", shape=(int(starts[-1]),))
        self._names, self._lines = [name for name, _, _ in origins], origins

    def __len__(self) -> int:
        return len(self.starts) - 1

    def where(self, document: int) -> str:
        """Where a document comes from: ``book.txt``, ``chat.jsonl:7``."""
        for name, documents, lines in self._lines:
            if len(documents) and documents[0] <= document <= documents[-1]:
                line = int(lines[document - documents[0]])
                return f"{name}:{line}" if line else name
        raise IndexError(document)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Ids of each document."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """SHA-256 of everything that training sees."""
        state = hashlib.sha256(self.starts.tobytes() + self.whole.tobytes())
        for start in range(0, len(self.tokens), _HASH_IDS):
            state.update(np.ascontiguousarray(self.tokens[start : start + _HASH_IDS]).data)
        return state.hexdigest()

    def close(self) -> None:
        """Give the file back. Arrays taken from it stay valid."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class DocumentsWriter:
    """Takes documents in pieces; :meth:`finish` gives them as :class:`Documents`.

    Args:
        folder: where to put the file; by default where the system keeps temporary files.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # lives on in Documents
        self._buffer: list[Ids] = []
        self._buffered = 0
        self._starts = array("q", [0])
        self._whole = bytearray()
        self._origins: list[tuple[str, int, array[int]]] = []
        self._size = 0
        self._continuous = True
        self.targets = 0

    def begin_file(self, name: str, *, continuous: bool) -> None:
        """The documents that follow are of this file; ``continuous`` if it is running text."""
        self._origins.append((name, len(self._whole), array("i")))
        self._continuous &= continuous

    def extend(self, ids: Sequence[int], targets: Sequence[bool] | None = None) -> None:
        """More ids of the current document; ``targets`` says which are to be learned, None means all."""
        if not ids:
            return
        tokens = np.array(ids, np.int32)
        counts = np.ones(len(tokens), bool) if targets is None else np.array(targets, bool)
        if self._size == self._starts[-1]:
            counts[0] = False
        self._buffer.append(np.where(counts, tokens, ~tokens))
        self.targets += int(np.count_nonzero(counts))
        self._size += len(tokens)
        self._buffered += len(tokens)
        if self._buffered >= _BUFFER_IDS:
            self._flush()

    def end(self, *, line: int = 0, whole: bool = False) -> None:
        """The current document is complete; one without ids is forgotten."""
        if self._size == self._starts[-1]:
            return
        self._starts.append(self._size)
        self._whole.append(whole)
        self._origins[-1][2].append(line)

    def _flush(self) -> None:
        for piece in self._buffer:
            self._file.write(piece.tobytes())
        self._buffer, self._buffered = [], 0

    def finish(self) -> Documents:
        """The documents.

        Raises:
            UsageError: there is nothing to learn in them.
        """
        self._flush()
        self._file.flush()
        if not self.targets:
            self._file.close()
            names = [name for name, _, _ in self._origins]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UsageError(
                f"{', '.join(names[:3])}{more}: there is nothing to learn in the data: it is empty"
            )
        origins = [
            (name, np.arange(first, first + len(lines), dtype=np.int32), np.array(lines, np.int32))
            for name, first, lines in self._origins
        ]
        starts = np.array(self._starts, np.int64)
        whole = np.frombuffer(bytes(self._whole), np.uint8).astype(bool)
        return Documents(self._file, starts, whole, origins, self._continuous)

    def abandon(self) -> None:
        """Give the file back without a result."""
        self._file.close()
