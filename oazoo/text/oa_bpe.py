"""OA's byte-pair tokenizer ``oa_bpe_v1``: merges over raw bytes, without any splitting into words before.

The vocabulary file is ASCII text: ``oa_bpe_v1``, the number of merges, then one ``left right`` pair of ids a line. Ids
0 to 255 are the bytes; merge *i* makes id 256 + *i* of two ids below it. A text is encoded by applying the merges in
order, each from left to right.
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Self

import numpy as np
import numpy.typing as npt

from oazoo.errors import TokenizerError, UsageError
from oazoo.text.base import BaseTokenizer
from oazoo.text.byte_alphabet import SPELLING
from oazoo.text.streaming import ByteStreamDecoder, StreamDecoder

HEADER = "oa_bpe_v1"
#: The name under which a model file carries a vocabulary.
ASSET = "oa_bpe_v1.txt"
#: Ids fit 20 bits, so that a pair is one small integer.
_ID_BITS = 20
MAX_MERGES = (1 << _ID_BITS) - 256
#: Fifteen characters a merge.
MAX_FILE_BYTES = 16 << 20
#: What all tokens may spell out together; merges that double each time would otherwise pass any memory.
MAX_TOKEN_BYTES = 256 << 20
#: Text that merges are learned from: it takes about 25 times its size in memory.
MAX_TRAINING_BYTES = 64 << 20

_PAIR = re.compile(rb"([0-9]{1,7}) ([0-9]{1,7})")
_END = -1

Merge = tuple[int, int]


class OaBpeTokenizer(BaseTokenizer):
    """Bytes, and merges of two ids into a new one; no control tokens, nothing added around a text.

    ``merges`` are pairs of ids; pair *i* makes id 256 + *i*. Raises :class:`TokenizerError` for a pair that uses an id
    not made before it, for one that comes twice, and for tokens too long in sum.
    """

    def __init__(self, merges: Sequence[Merge]) -> None:
        if len(merges) > MAX_MERGES:
            raise TokenizerError(f"the vocabulary has {len(merges)} merges; at most {MAX_MERGES} are read")
        self._merges = tuple((int(left), int(right)) for left, right in merges)
        self._ranks: dict[int, int] = {}
        lengths = [1] * 256
        total = 0
        for rank, (left, right) in enumerate(self._merges):
            made = 256 + rank
            for side in (left, right):
                if not 0 <= side < made:
                    raise TokenizerError(
                        f"merge {rank} uses id {side}, but only ids below {made} exist before it"
                    )
            first = self._ranks.setdefault(_key(left, right), rank)
            if first != rank:
                raise TokenizerError(f"merge {rank} ({left} {right}) is the same as merge {first}")
            lengths.append(lengths[left] + lengths[right])
            total += lengths[made]
            if total > MAX_TOKEN_BYTES:
                raise TokenizerError(
                    f"the tokens up to merge {rank} spell out more than {MAX_TOKEN_BYTES >> 20} MiB together"
                )
        self._bytes: dict[int, bytes] = {i: bytes([i]) for i in range(256)}

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read a vocabulary file; :class:`TokenizerError` says which line is wrong."""
        if len(data) > MAX_FILE_BYTES:
            raise TokenizerError(
                f"the vocabulary file has {len(data)} bytes; at most {MAX_FILE_BYTES} are read"
            )
        lines = bytes(data).replace(b"\r\n", b"\n").split(b"\n")
        if lines[-1] == b"":
            lines.pop()
        if not lines or lines[0] != HEADER.encode():
            raise TokenizerError(f"is no {HEADER} vocabulary: its first line is not {HEADER!r}")
        if len(lines) < 2 or not re.fullmatch(rb"[0-9]{1,7}", lines[1]):
            raise TokenizerError("line 2 of the vocabulary file is not the number of merges")
        count = int(lines[1])
        if count != len(lines) - 2:
            raise TokenizerError(
                f"the vocabulary file says that it has {count} merges, but {len(lines) - 2} lines follow"
            )
        merges = []
        for number, line in enumerate(lines[2:], 3):
            found = _PAIR.fullmatch(line)
            if found is None:
                raise TokenizerError(f"line {number} of the vocabulary file is not two ids: {line[:40]!r}")
            merges.append((int(found[1]), int(found[2])))
        return cls(merges)

    def to_bytes(self) -> bytes:
        """The vocabulary file, as OA writes it."""
        lines = [HEADER, str(len(self._merges)), *(f"{left} {right}" for left, right in self._merges)]
        return ("\n".join(lines) + "\n").encode("ascii")

    @classmethod
    def train(cls, texts: Iterable[str | bytes], vocab_size: int, *, max_merges: int | None = None) -> Self:
        """Learn the merges from texts; see :func:`learn_merges`.

        Args:
            texts: each is a text of its own: no pair is counted across two of them.
            vocab_size: ids that there may be, the 256 bytes included. Fewer result when no pair occurs twice any more.
            max_merges: how many merges at most.

        Raises:
            UsageError: a vocabulary below 256 ids or above the largest; too much text.
        """
        if not 256 <= vocab_size <= 256 + MAX_MERGES:
            raise UsageError(
                f"a vocabulary of {vocab_size} ids cannot be: the 256 bytes are part of it, and at most "
                f"{256 + MAX_MERGES} ids are possible"
            )
        count = vocab_size - 256 if max_merges is None else min(vocab_size - 256, max_merges)
        return cls(learn_merges(texts, count))

    # ------------------------------------------------------------------------------------------- vocabulary

    @property
    def merges(self) -> tuple[Merge, ...]:
        """The pairs, in order."""
        return self._merges

    @property
    def vocab_size(self) -> int:
        return 256 + len(self._merges)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return MappingProxyType({})

    def token_bytes(self, token_id: int) -> bytes | None:
        """What an id spells out, or None for one that does not exist."""
        if not 0 <= token_id < self.vocab_size:
            return None
        # Not recursive: a chain of merges can be as long as the vocabulary.
        wanted = [token_id]
        while wanted:
            this = wanted[-1]
            if this in self._bytes:
                wanted.pop()
                continue
            left, right = self._merges[this - 256]
            missing = [part for part in (left, right) if part not in self._bytes]
            if missing:
                wanted += missing
            else:
                self._bytes[this] = self._bytes[left] + self._bytes[right]
        return self._bytes[token_id]

    def token(self, token_id: int) -> str | None:
        data = self.token_bytes(token_id)
        return None if data is None else "".join(SPELLING[byte] for byte in data)

    @cached_property
    def _ids(self) -> dict[str, int]:
        # Two merges can spell the same text; the first has the name.
        ids: dict[str, int] = {}
        for i in range(self.vocab_size):
            ids.setdefault(self.token(i) or "", i)
        return ids

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    # --------------------------------------------------------------------------------------------- encoding

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes, UTF-8 or not."""
        size = len(data)
        ids = list(data)
        if size < 2 or not self._merges:
            return ids
        after = list(range(1, size + 1))
        before = list(range(-1, size - 1))
        ranks = self._ranks
        # Places of each merge that can happen. A merge makes pairs of later ranks only, so each rank is done once.
        waiting = self._first_places(data)
        order = list(waiting)
        heapq.heapify(order)
        while order:
            rank = heapq.heappop(order)
            left, right = self._merges[rank]
            made = 256 + rank
            for place in sorted(waiting.pop(rank)):
                follower = after[place]
                if ids[place] != left or follower >= size or ids[follower] != right:
                    continue  # another merge has taken one of the two
                ids[place] = made
                ids[follower] = _END
                beyond = after[place] = after[follower]
                previous = before[place]
                pairs = []
                if beyond < size:
                    before[beyond] = place
                    pairs.append((place, made << _ID_BITS | ids[beyond]))
                if previous >= 0:
                    pairs.append((previous, ids[previous] << _ID_BITS | made))
                for start, pair in pairs:
                    later = ranks.get(pair)
                    if later is None:
                        continue
                    if later not in waiting:
                        waiting[later] = []
                        heapq.heappush(order, later)
                    waiting[later].append(start)
        return [i for i in ids if i >= 0]

    def _first_places(self, data: bytes) -> dict[int, list[int]]:
        """Where in raw bytes each merge of two bytes could happen: rank → places."""
        table = np.full(1 << 16, -1, np.int32)
        for rank, (left, right) in enumerate(self._merges):
            if left < 256 and right < 256:
                table[left << 8 | right] = rank
        values = np.frombuffer(data, np.uint8).astype(np.int32)
        ranks = table[values[:-1] << 8 | values[1:]]
        places = np.flatnonzero(ranks >= 0)
        return dict(_grouped(ranks[places], places))

    def encode_window(self, text: str, context_length: int) -> list[int]:
        """The last ``context_length`` ids of ``text``, with zeros in front if there are fewer: OA's ``encode_prompt``."""
        if context_length < 1:
            raise UsageError(f"a context must have at least one token, not {context_length}")
        ids = self.encode(text)[-context_length:]
        return [0] * (context_length - len(ids)) + ids

    def _encode_plain(self, text: str, allow_special: bool) -> list[int]:
        return self.encode_bytes(text.encode("utf-8"))

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> StreamDecoder:
        return ByteStreamDecoder(lambda token_id, _: self.token_bytes(token_id))


def learn_merges(texts: Iterable[str | bytes], count: int) -> list[Merge]:
    """Up to ``count`` merges: each time the pair of adjacent ids that occurs most often, the smallest of equals.

    Overlapping occurrences count (three equal bytes have two pairs); a pair that occurs once is not merged. Counts are
    kept up to date at the places that change, so the work is about that of reading the text once for each token it is
    long, and not once a merge.

    Raises:
        UsageError: more than :data:`MAX_TRAINING_BYTES` of text.
    """
    ids = _joined(texts)
    size = len(ids)
    if size < 2 or count < 1:
        return []
    places, counts = _pairs_of_bytes(ids)
    symbols: list[int] = ids.tolist()
    after = list(range(1, size + 1))
    before = list(range(-1, size - 1))
    heap = [(-number, pair) for pair, number in counts.items() if number > 1]
    heapq.heapify(heap)
    merges: list[Merge] = []
    while heap and len(merges) < count:
        negative, pair = heapq.heappop(heap)
        number = counts.get(pair, 0)
        if number != -negative:  # merges of others have taken some of them
            if number > 1:
                heapq.heappush(heap, (-number, pair))
            continue
        left, right = pair >> _ID_BITS, pair & (1 << _ID_BITS) - 1
        made = 256 + len(merges)
        merges.append((left, right))
        fresh: defaultdict[int, list[int]] = defaultdict(list)
        # All places of a pair came about with the younger of its ids, in one pass: they are in order.
        for place in places.pop(pair):
            follower = after[place]
            if symbols[place] != left or follower >= size or symbols[follower] != right:
                continue
            previous, beyond = before[place], after[follower]
            if previous >= 0 and (neighbour := symbols[previous]) >= 0:
                counts[neighbour << _ID_BITS | left] -= 1
                joined = neighbour << _ID_BITS | made
                counts[joined] = counts.get(joined, 0) + 1
                fresh[joined].append(previous)
            if beyond < size:
                before[beyond] = place
                if (neighbour := symbols[beyond]) >= 0:
                    counts[right << _ID_BITS | neighbour] -= 1
                    joined = made << _ID_BITS | neighbour
                    counts[joined] = counts.get(joined, 0) + 1
                    fresh[joined].append(place)
            symbols[place] = made
            symbols[follower] = _END
            after[place] = beyond
        del counts[pair]
        for joined, where in fresh.items():
            if counts[joined] > 1:
                places[joined] = where
                heapq.heappush(heap, (-counts[joined], joined))
    return merges


def _joined(texts: Iterable[str | bytes]) -> npt.NDArray[np.int32]:
    """The bytes of all texts as ids, with an id that pairs with nothing between two texts."""
    parts: list[npt.NDArray[np.int32]] = []
    total = 0
    for text in texts:
        data = text.encode("utf-8") if isinstance(text, str) else text
        total += len(data)
        if total > MAX_TRAINING_BYTES:
            raise UsageError(
                f"more than {MAX_TRAINING_BYTES >> 20} MiB of text to learn merges from; a part of it gives the same "
                "tokens but for the rarest"
            )
        parts += [np.frombuffer(data, np.uint8).astype(np.int32), np.array([_END], np.int32)]
    return np.concatenate(parts[:-1]) if parts else np.zeros(0, np.int32)


def _pairs_of_bytes(ids: npt.NDArray[np.int32]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Places of each pair of adjacent bytes, in order, and how many."""
    places = np.flatnonzero((ids[:-1] >= 0) & (ids[1:] >= 0))
    pairs = ids[places].astype(np.int64) << _ID_BITS | ids[places + 1]
    grouped = dict(_grouped(pairs, places))
    return grouped, {pair: len(where) for pair, where in grouped.items()}


def _grouped(
    keys: npt.NDArray[np.integer[npt.NBitBase]], places: npt.NDArray[np.intp]
) -> Iterable[tuple[int, list[int]]]:
    """For each different key its places, in order."""
    order = np.argsort(keys, kind="stable")
    sorted_keys, sorted_places = keys[order], places[order]
    starts = np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1
    for piece, first in zip(np.split(sorted_places, starts), [0, *starts.tolist()], strict=True):
        if len(piece):
            yield int(sorted_keys[first]), piece.tolist()


def _key(left: int, right: int) -> int:
    return left << _ID_BITS | right
