"""Rows of fixed length from documents: windows of running text, or whole documents packed beside each other.

A row holds ``length`` inputs and, for each, the id that follows it as target. A target counts if it is one in its document
and its document's earlier ids are in the row before it: the first id of a document counts nowhere.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.training.data import Part
from oazoo.training.documents import Ids
from oazoo.training.order import permutation, random_below

MAX_ROW = 1 << 20
#: Rows that are kept open while documents are packed.
_OPEN_ROWS = 256


@dataclass(frozen=True)
class RowsReport:
    """What became of a part of the data.

    Attributes:
        rows: of ``length`` tokens each.
        documents, tokens: in the part.
        targets: tokens that are learned in a pass.
        cut: examples too long for a row, whose ends are left out; ``cut_tokens`` of them.
        dropped: examples of which nothing to be learned was left.
        longest: tokens of the longest document.
    """

    rows: int
    length: int
    documents: int
    tokens: int
    targets: int
    cut: int = 0
    cut_tokens: int = 0
    dropped: int = 0
    longest: int = 0

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold a target, 0 to 1."""
        return self.targets / max(self.rows * self.length, 1)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self) | {"fill": self.fill}

    def warnings(self) -> list[str]:
        """What a user should know before training."""
        lines = []
        if self.cut:
            share = self.cut_tokens / max(self.tokens, 1)
            lines.append(
                f"{self.cut} of {self.documents} examples are longer than {self.length} tokens and are cut: {share:.1%} of "
                f"all tokens are left out (the longest has {self.longest})"
            )
        if self.dropped:
            lines.append(
                f"{self.dropped} of them are left out: nothing to be learned is in their first {self.length} tokens"
            )
        return lines


class Rows(ABC):
    """Rows by number, for each pass over the data."""

    report: RowsReport
    length: int
    count: int

    @abstractmethod
    def fill(self, numbers: npt.NDArray[np.int64], epoch: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Ids int32 [rows, length + 1] and which count as targets, bool of the same shape; 0 where a row has ended."""

    @abstractmethod
    def where(self, number: int, epoch: int) -> str:
        """Where a row is from, for messages."""

    @abstractmethod
    def facts(self) -> list[Any]:
        """What else decides what a row is, as JSON values."""


class Windows(Rows):
    """Windows of running text, each beginning with the last token of the one before: every token is a target once.

    With ``shift`` each pass begins at another place, so that windows are not cut alike each time; the less than a row's
    tokens before the first and after the last window are left out of the pass.
    """

    def __init__(self, part: Part, length: int, *, shift: bool = False, seed: int = 0) -> None:
        self.length = _checked_length(length)
        self._tokens = part.documents.tokens[part.start : part.stop]
        self._part, self._seed = part, seed
        targets = len(self._tokens) - 1
        full = (targets - (length - 1)) // length
        self.shift = shift and full > 0
        self.count = full if self.shift else max(-(-targets // length), 0)
        counted = int(np.count_nonzero(self._tokens[1:] >= 0))
        if not counted:
            raise UsageError(f"{part.documents.where(0)}: there is nothing to learn in this part of the data")
        inside = (part.documents.starts[:-1] >= part.start) & (part.documents.starts[:-1] < part.stop)
        self.report = RowsReport(self.count, length, max(int(inside.sum()), 1), len(self._tokens), counted)

    def _starts(self, numbers: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        offset = random_below(self.length, self._seed, epoch) if self.shift else 0
        return numbers * self.length + offset

    def fill(self, numbers: npt.NDArray[np.int64], epoch: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        places = self._starts(numbers, epoch)[:, None] + np.arange(self.length + 1)
        there = places < len(self._tokens)
        found = self._tokens[np.where(there, places, 0)]
        counts = (found >= 0) & there
        return np.where(there, np.where(found < 0, ~found, found), 0).astype(np.int32), counts

    def where(self, number: int, epoch: int) -> str:
        start = int(self._starts(np.array([number]), epoch)[0]) + self._part.start
        documents = self._part.documents
        document = int(np.searchsorted(documents.starts, start, "right")) - 1
        first = start - int(documents.starts[document])
        return f"{documents.where(document)}, tokens {first} to {first + self.length}"

    def facts(self) -> list[Any]:
        return [
            "windows",
            self.length,
            self._part.start,
            self._part.stop,
            self.shift,
            self._seed if self.shift else 0,
        ]


class PackedRows(Rows):
    """Whole documents, several in a row where they fit, or one in each.

    A document of running text longer than a row is cut into windows as text is. An example longer than a row loses its end,
    its end token too, so that nothing learns to stop where it was merely cut; :attr:`report` counts them.
    """

    def __init__(self, part: Part, length: int, *, pack: bool = True, seed: int = 0) -> None:
        self.length = _checked_length(length)
        self._documents, self._seed, self._pack, self._chosen = part.documents, seed, pack, part.chosen
        chosen = part.chosen if part.chosen is not None else np.arange(len(part.documents), dtype=np.int64)
        pieces, facts = self._pieces(chosen)
        if not pieces:
            raise UsageError(
                f"{part.documents.where(int(chosen[0])) if len(chosen) else 'the data'}: there is nothing to learn in rows "
                f"of {length} tokens; use longer ones"
            )
        rows = self._packed(pieces) if pack else [[piece] for piece in pieces]
        self.count = len(rows)
        flat = np.array([piece for row in rows for piece in row], np.int64)
        self._first = np.cumsum([0, *map(len, rows)])
        self._starts, self._sizes, self._from = flat[:, 0], flat[:, 1], flat[:, 2]
        self.report = RowsReport(self.count, length, len(chosen), part.tokens, **facts)

    def _pieces(self, chosen: npt.NDArray[np.int64]) -> tuple[list[tuple[int, int, int]], dict[str, int]]:
        """(start, ids, document) of what goes into rows, and the figures of the report."""
        documents, room = self._documents, self.length + 1
        pieces: list[tuple[int, int, int]] = []
        facts = {"targets": 0, "cut": 0, "cut_tokens": 0, "dropped": 0, "longest": 0}
        for number in chosen.tolist():
            start, stop = int(documents.starts[number]), int(documents.starts[number + 1])
            facts["longest"] = max(facts["longest"], stop - start)
            if documents.whole[number] and stop - start > room:
                facts["cut"] += 1
                facts["cut_tokens"] += stop - start - room
                stop = start + room
            learned = 0
            for at in range(start, max(stop - 1, start + 1), self.length):
                size = min(room, stop - at)
                count = int(np.count_nonzero(documents.tokens[at + 1 : at + size] >= 0))
                if count:
                    pieces.append((at, size, number))
                    learned += count
            facts["targets"] += learned
            facts["dropped"] += not learned
        return pieces, facts

    def _packed(self, pieces: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
        """Pieces in rows: in an order drawn by the seed, each into the open row that it fills best."""
        rows: list[list[tuple[int, int, int]]] = []
        open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
        for index in permutation(len(pieces), self._seed, 0).tolist():
            piece = pieces[index]
            size = piece[1]
            place = bisect.bisect_left(open_rows, (size, -1))
            if place < len(open_rows):
                room, row = open_rows.pop(place)
                rows[row].append(piece)
            else:
                room, row = self.length + 1, len(rows)
                rows.append([piece])
            if room - size > 1:  # a single id would have no target
                bisect.insort(open_rows, (room - size, row))
                if len(open_rows) > _OPEN_ROWS:
                    open_rows.pop(0)
        return rows

    def fill(self, numbers: npt.NDArray[np.int64], epoch: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        ids = np.zeros((len(numbers), self.length + 1), np.int32)
        counts = np.zeros(ids.shape, bool)
        tokens = self._documents.tokens
        for row, number in enumerate(numbers.tolist()):
            at = 0
            for piece in range(self._first[number], self._first[number + 1]):
                start, size = int(self._starts[piece]), int(self._sizes[piece])
                found = tokens[start : start + size]
                ids[row, at : at + size] = np.where(found < 0, ~found, found)
                # The first id of a piece follows nothing of its own document.
                counts[row, at + 1 : at + size] = found[1:] >= 0
                at += size
        return ids, counts

    def where(self, number: int, epoch: int) -> str:
        inside = self._from[self._first[number] : self._first[number + 1]]
        first = self._documents.where(int(inside[0]))
        return first if len(inside) == 1 else f"{first} and {len(inside) - 1} more in its row"

    def facts(self) -> list[Any]:
        chosen = [] if self._chosen is None else self._chosen.tolist()
        return ["packed", self.length, self._pack, self._seed, chosen]


def make_rows(part: Part, length: int, *, pack: bool = True, shift: bool = False, seed: int = 0) -> Rows:
    """Rows of ``length`` inputs: :class:`Windows` of running text, :class:`PackedRows` of examples.

    Raises:
        UsageError: a length below 1 or above 2**20, or nothing to learn.
    """
    if part.documents.continuous:
        return Windows(part, length, shift=shift, seed=seed)
    return PackedRows(part, length, pack=pack, seed=seed)


def _checked_length(length: int) -> int:
    if not 1 <= length <= MAX_ROW:
        raise UsageError(f"rows of {length} tokens cannot be: 1 to {MAX_ROW} are possible")
    return length
