"""FNV-1a 64, the checksum of ``.oam``: a compiled loop, chained over pieces of any size.

The compiled function (package ``fnv-c``) always starts from the offset basis. Pieces are chained by two facts about the
hash h' = (h xor b) · p: its low 8 bits evolve on their own, and given those the whole is linear, so that for n bytes
end(h) = h · p^n + D(low byte of h, bytes). One byte put before a piece brings the low byte to where the previous piece
left it, and the linear part is corrected afterwards. Reading through one small buffer keeps memory constant however large
the file is, and the interpreter lock is released inside the loop, so that a thread can hash what another one writes.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

from fnv_c.ext import _fnv

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3
_MASK = 2**64 - 1
_LOW_INVERSE = pow(PRIME & 0xFF, -1, 256)
_BUFFER = 1 << 22

#: Called with the number of bytes done since the last call.
Progress = Callable[[int], None]
#: A buffer whose first byte is ours, how many bytes of a piece follow it, and where these belong.
_Job = tuple[bytearray, int, int]


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

    def _absorb(self, scratch: bytearray, count: int) -> None:
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

    Pieces are copied, so the caller may reuse its buffers. When the threads fall behind by six pieces of 1 MiB,
    :meth:`update` waits for them.

    Args:
        then: called by a second thread with every piece that has been hashed and with where it belongs: what else takes
            time, such as writing, goes on beside. Its failure is raised by the next :meth:`update` or :meth:`finish`.
    """

    _PIECE = 1 << 20
    _PIECES = 6

    def __init__(self, then: Callable[[memoryview, int], None] | None = None) -> None:
        self._hash = Fnv1a64()
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._failure: BaseException | None = None
        for _ in range(self._PIECES):
            self._free.put(bytearray(self._PIECE + 1))

        def absorb(scratch: bytearray, count: int, _: int) -> None:
            self._hash._absorb(scratch, count)

        def pass_on(scratch: bytearray, count: int, position: int) -> None:
            assert then is not None
            then(memoryview(scratch)[1 : 1 + count], position)

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
        for start in range(0, len(data), self._PIECE):
            scratch = self._free.get()
            if self._failure is not None:
                self._free.put(scratch)
                raise self._failure
            self._queues[0].put(
                (scratch, _fill(scratch, data[start : start + self._PIECE]), position + start)
            )

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

    def _run(self, index: int, work: Callable[[bytearray, int, int], None]) -> None:
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
