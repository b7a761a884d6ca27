"""FNV-1a 64, the checksum of ``.oam``: a compiled loop, chained over pieces of any size.

The compiled function (package ``fnv-c``) always starts from the offset basis. Pieces are chained by two facts about the
hash h' = (h xor b) · p: its low 8 bits evolve on their own, and given those the whole is linear, so that for n bytes
end(h) = h · p^n + D(low byte of h, bytes). One byte put before a piece brings the low byte to where the previous piece
left it, and the linear part is corrected afterwards. Reading through one small buffer keeps memory constant however large
the file is, and the interpreter lock is released inside the loop, so that a thread can hash what another one writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread, get_native_id
from typing import Any

import numpy as np
from fnv_c.ext import _fnv

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3
_MASK = 2**64 - 1
_LOW_INVERSE = pow(PRIME & 0xFF, -1, 256)
_BUFFER = 1 << 22

#: Called with the number of bytes done since the last call.
Progress = Callable[[int], None]


class Piece:
    """A buffer of the background hash. ``data`` ([size] bytes) may be filled; one byte before it is the hash's own."""

    __slots__ = ("_whole", "data")
    _ALIGNED = 64

    def __init__(self, size: int) -> None:
        memory = np.empty(size + 2 * self._ALIGNED, np.uint8)
        start = self._ALIGNED - memory.ctypes.data % self._ALIGNED + self._ALIGNED
        # Numbers of any type lie in ``data`` as a processor wants them.
        self._whole = memory[start - 1 : start + size]
        self.data = self._whole[1:]


#: Given the bytes of a piece when everything else has been done with it.
Seen = Callable[[memoryview], None]
#: A piece, how many bytes of it are filled, where these belong, and who is to see them.
_Job = tuple[Piece, int, int, Seen | None]


class Fnv1a64:
    """An incremental FNV-1a 64. ``value`` is the hash of everything so far."""

    def __init__(self) -> None:
        self.value = OFFSET_BASIS
        self._scratch: bytearray | None = None

    def update(self, data: Any) -> None:
        """Add a contiguous buffer of any size."""
        view = memoryview(data).cast("B")
        scratch = self._scratch
        if scratch is None or len(scratch) < min(len(view), _BUFFER) + 1:
            scratch = self._scratch = bytearray(min(len(view), _BUFFER) + 1)
        room = len(scratch) - 1
        for start in range(0, len(view), room or 1):
            self._absorb(scratch, _fill(scratch, view[start : start + room]))

    def update_from_file(self, file: Any, offset: int, size: int, progress: Progress | None = None) -> None:
        """Add ``size`` bytes of an open binary file, from ``offset``. Raises EOFError if the file ends before."""
        scratch = bytearray(min(size, _BUFFER) + 1)
        view = memoryview(scratch)
        file.seek(offset)
        left = size
        while left:
            got = file.readinto(view[1 : 1 + min(left, _BUFFER)])
            if not got:
                raise EOFError(f"the file ends {left} bytes early")
            self._absorb(scratch, got)
            left -= got
            if progress is not None:
                progress(got)

    def _absorb(self, scratch: Any, count: int) -> None:
        """Add ``scratch[1 : 1 + count]``; ``scratch[0]`` is ours."""
        steer = ((self.value & 0xFF) * _LOW_INVERSE & 0xFF) ^ (OFFSET_BASIS & 0xFF)
        scratch[0] = steer
        after_steer = (OFFSET_BASIS ^ steer) * PRIME
        end = _fnv.lib.fnv1a_64(_fnv.ffi.from_buffer(scratch), count + 1)
        self.value = (end + (self.value - after_steer) * pow(PRIME, count, 2**64)) & _MASK


def _fill(scratch: bytearray, part: memoryview) -> int:
    """Copy a piece behind the byte that is ours; returns its length."""
    memoryview(scratch)[1 : 1 + len(part)] = part
    return len(part)


class BackgroundFnv1a64:
    """FNV-1a 64 of pieces, computed by a thread of its own while the caller goes on; :meth:`close` ends it.

    Pieces are copied by :meth:`update`, so the caller may reuse its buffers; or the caller fills one of ours, which
    :meth:`take` gives and :meth:`give` takes. When the threads fall behind by six pieces, both wait for them.

    Args:
        then: called by a second thread with every piece that has been hashed and with where it belongs: what else takes
            time, such as writing, goes on beside. Its failure is raised by the next :meth:`update`, :meth:`take` or
            :meth:`finish`.
    """

    #: Bytes of a piece.
    PIECE = 1 << 20
    _PIECES = 6

    def __init__(self, then: Callable[[memoryview, int], None] | None = None) -> None:
        self._hash = Fnv1a64()
        self._free: SimpleQueue[Piece] = SimpleQueue()
        self._failure: BaseException | None = None
        for _ in range(self._PIECES):
            self._free.put(Piece(self.PIECE))

        def absorb(piece: Piece, count: int, _: int, seen: Seen | None) -> None:
            self._hash._absorb(piece._whole, count)
            if then is None and seen is not None:
                seen(piece.data[:count].data)

        def pass_on(piece: Piece, count: int, position: int, seen: Seen | None) -> None:
            assert then is not None
            then(piece.data[:count].data, position)
            if seen is not None:
                seen(piece.data[:count].data)

        stages = [absorb] if then is None else [absorb, pass_on]
        #: A queue before each stage, and what becomes of a piece after it.
        self._queues: list[SimpleQueue[_Job | None]] = [SimpleQueue() for _ in stages]
        # Daemons: whatever becomes of the caller, the process can end.
        self._threads = [
            Thread(target=self._run, args=(index, work), name=f"oazoo-fnv1a64-{index}", daemon=True)
            for index, work in enumerate(stages)
        ]
        for thread in self._threads:
            thread.start()

    def update(self, data: memoryview, position: int = 0) -> None:
        """Add a flat view of bytes; ``position`` is what ``then`` is told of where they begin."""
        for start in range(0, len(data), self.PIECE):
            part = data[start : start + self.PIECE]
            piece = self.take()
            piece.data[: len(part)].data[:] = part
            self.give(piece, len(part), position + start)

    def take(self) -> Piece:
        """A free piece; :meth:`give` it back, also when it stayed empty (a count of 0)."""
        piece = self._free.get()
        if self._failure is not None:
            self._free.put(piece)
            raise self._failure
        return piece

    def give(self, piece: Piece, count: int, position: int = 0, seen: Seen | None = None) -> None:
        """Add the first ``count`` bytes of a piece; ``position`` as for :meth:`update`.

        ``seen`` is given them last of all, by the last thread.
        """
        if count:
            self._queues[0].put((piece, count, position, seen))
        else:
            self._free.put(piece)

    def finish(self) -> Fnv1a64:
        """The hash of everything, once all of it has been added; ends the threads."""
        self.close()
        if self._failure is not None:
            raise self._failure
        return self._hash

    def close(self) -> None:
        """End the threads when they have done what they were given."""
        for queue, thread in zip(self._queues, self._threads, strict=True):
            queue.put(None)
            thread.join()

    def _run(self, index: int, work: Callable[[Piece, int, int, Seen | None], None]) -> None:
        if (
            index and hasattr(os, "setpriority") and sys.platform == "linux"
        ):  # elsewhere it would be that of the process
            # The checksum is the longest job, and cannot be divided: what is done beside gives way to it.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)
        after = self._queues[index + 1] if index + 1 < len(self._queues) else None
        while (job := self._queues[index].get()) is not None:
            try:
                if self._failure is None:
                    work(*job)
            except BaseException as error:
                self._failure = error
            if after is not None:
                after.put(job)
            else:
                self._free.put(job[0])  # also after a failure, or the caller would wait for ever


def fnv1a64(data: Any) -> int:
    """FNV-1a 64 of one contiguous buffer (bytes, mmap, NumPy array), without copying it."""
    view = memoryview(data).cast("B")
    if not len(view):
        return OFFSET_BASIS
    return int(_fnv.lib.fnv1a_64(_fnv.ffi.from_buffer(view), len(view)))
