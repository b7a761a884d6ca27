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

    Pieces are copied, so the caller may reuse its buffers. When the thread falls behind by four pieces of 1 MiB,
    :meth:`update` waits for it.
    """

    _PIECE = 1 << 20

    def __init__(self) -> None:
        self._hash = Fnv1a64()
        self._free: SimpleQueue[bytearray] = SimpleQueue()
        self._work: SimpleQueue[tuple[bytearray, int] | None] = SimpleQueue()
        self._failure: BaseException | None = None
        for _ in range(4):
            self._free.put(bytearray(self._PIECE + 1))
        # A daemon: whatever becomes of the caller, the process can end.
        self._thread = Thread(target=self._run, name="oazoo-fnv1a64", daemon=True)
        self._thread.start()

    def update(self, data: memoryview) -> None:
        """Add a flat view of bytes."""
        for start in range(0, len(data), self._PIECE):
            scratch = self._free.get()
            self._work.put((scratch, _fill(scratch, data[start : start + self._PIECE])))

    def finish(self) -> Fnv1a64:
        """The hash of everything, once all of it has been added; ends the thread."""
        self.close()
        if self._failure is not None:
            raise self._failure
        return self._hash

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            scratch, count = item
            try:
                if self._failure is None:
                    self._hash._absorb(scratch, count)
            except BaseException as error:
                self._failure = error
            self._free.put(scratch)  # also after a failure, or the caller would wait for ever


def fnv1a64(data: Any) -> int:
    """FNV-1a 64 of one contiguous buffer (bytes, mmap, NumPy array), without copying it."""
    view = memoryview(data).cast("B")
    if not len(view):
        return OFFSET_BASIS
    return int(_fnv.lib.fnv1a_64(_fnv.ffi.from_buffer(view), len(view)))
