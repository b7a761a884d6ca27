"""Batches for training steps: shuffled anew in each pass, without end, and continued exactly where they were left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.training.documents import Documents, Ids
from oazoo.training.order import permutation
from oazoo.training.rows import Rows


@dataclass(frozen=True)
class Batch:
    """Rows that are learned from together.

    Attributes:
        inputs: int32 [rows, length].
        targets: int32 [rows, length], the id that follows each input.
        mask: float32 [rows, length], 1 where the target counts. By position, not by id: an end token counts although
            rows are filled up with ids that may be the same.
        samples: rows that are real; those behind them are there to fill the batch, and count nothing.
        tokens: how many targets count.
    """

    inputs: Ids
    targets: Ids
    mask: npt.NDArray[np.float32]
    samples: int
    tokens: int
    _rows: Rows
    _first: int
    _epoch: int

    @property
    def where(self) -> str:
        """Where its first row is from, and how many follow; for messages."""
        more = f" and {self.samples - 1} more rows" if self.samples > 1 else ""
        return f"{self._rows.where(self._first, self._epoch)}{more}"


def make_batch(rows: Rows, chosen: list[tuple[int, int]], size: int) -> Batch:
    """The batch of rows given as (pass, number), filled up to ``size`` rows."""
    ids = np.zeros((size, rows.length + 1), np.int32)
    counts = np.zeros(ids.shape, bool)
    at = 0
    while at < len(chosen):
        epoch = chosen[at][0]
        numbers = [number for e, number in chosen[at:] if e == epoch]
        part = slice(at, at + len(numbers))
        ids[part], counts[part] = rows.fill(np.array(numbers, np.int64), epoch)
        at += len(numbers)
    mask = counts[:, 1:].astype(np.float32)
    inputs, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    first_epoch, first = chosen[0]
    return Batch(inputs, targets, mask, len(chosen), int(mask.sum()), rows, first, first_epoch)


class Batches:
    """Training batches without end.

    Every pass visits each row once, in an order of its own. A batch that a pass does not fill is completed by the next pass,
    so all batches are full.

    Args:
        rows: what to learn from.
        documents: that they are made of; their hash guards against going on with other data.
        batch_size: rows of a batch.
        accumulate: batches of a step, whose gradients are added up.
        seed: of the orders.
        shuffle: off, rows come as they are.
    """

    def __init__(
        self,
        rows: Rows,
        documents: Documents,
        batch_size: int,
        *,
        accumulate: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if batch_size < 1 or accumulate < 1:
            raise UsageError(
                f"a step of {accumulate} batches of {batch_size} rows cannot be: both must be 1 or more"
            )
        self._rows, self._documents = rows, documents
        self.batch_size, self.accumulate = batch_size, accumulate
        self._seed, self._shuffle = seed, shuffle
        self._epoch = self._index = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._rows.count, dtype=np.int64)
        return permutation(self._rows.count, self._seed, epoch + 1)

    @property
    def epoch(self) -> int:
        """The pass that the next batch begins in, from 0."""
        return self._epoch

    @property
    def rows_per_epoch(self) -> int:
        """Rows of a pass."""
        return self._rows.count

    @property
    def steps_per_epoch(self) -> float:
        """Steps of a pass; not a whole number where a pass ends inside a step."""
        return self._rows.count / (self.batch_size * self.accumulate)

    def next(self) -> list[Batch]:
        """The batches of the next step."""
        return [make_batch(self._rows, self._take(), self.batch_size) for _ in range(self.accumulate)]

    def _take(self) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        while len(chosen) < self.batch_size:
            stop = min(self._index + self.batch_size - len(chosen), len(self._order))
            chosen += [(self._epoch, number) for number in self._order[self._index : stop].tolist()]
            self._index = stop
            if stop == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
        return chosen

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the data and of how rows are made of them."""
        facts = json.dumps([self._documents.digest(), *self._rows.facts(), self._shuffle])
        return hashlib.sha256(facts.encode()).hexdigest()

    def state(self) -> dict[str, Any]:
        """The position, as JSON values."""
        return {"epoch": self._epoch, "index": self._index, "seed": self._seed, "data": self.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state` gave: the same batches follow.

        Raises:
            FormatError: it is no such position.
            UsageError: it is one in other data, or with other rows or another seed.
        """
        epoch, index, seed = (state.get(key) for key in ("epoch", "index", "seed"))
        for value in (epoch, index, seed):
            if not isinstance(value, int) or isinstance(value, bool):
                raise FormatError(f"the position in the data is damaged: {str(dict(state))[:200]}")
        assert isinstance(epoch, int) and isinstance(index, int)
        if state.get("data") != self.digest:
            raise UsageError(
                "the run was trained on other data, or with rows made differently; to go on exactly, the same data, row "
                "length and split are needed"
            )
        if seed != self._seed:
            raise UsageError(
                f"the run has the seed {seed}, not {self._seed}: its order of the data belongs to that"
            )
        if not (epoch >= 0 and 0 <= index < self._rows.count):
            raise FormatError(f"the position in the data is damaged: row {index} of {self._rows.count}")
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)


def one_pass(rows: Rows, batch_size: int, *, limit: int | None = None) -> Iterator[Batch]:
    """Each row once, in order, for validation; the last batch is filled up with rows that count nothing.

    Args:
        rows: to go through.
        batch_size: rows of a batch.
        limit: at most so many batches.
    """
    starts = range(0, rows.count, batch_size)[:limit]
    for start in starts:
        yield make_batch(
            rows, [(0, number) for number in range(start, min(start + batch_size, rows.count))], batch_size
        )
