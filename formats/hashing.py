"""FNV-1a 64, the checksum of ``.oam``: a compiled loop, chained over pieces of any size.

The compiled function (package ``fnv-c``) always starts from the offset basis. Pieces are chained by two facts about the
hash h' = (h xor b) · p: its low 8 bits evolve on their own, and given those the whole is linear, so that for n bytes
end(h) = h · p^n + D(low byte of h, bytes). One byte put before a piece brings the low byte to where the previous piece
left it, and the linear part is corrected afterwards. Reading through one small buffer keeps memory constant however large
the file is, and the interpreter lock is released inside the loop.
"""

from __future__ import annotations

from collections.abc import Callable
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
            part = view[start : start + room]
            scratch[1 : 1 + len(part)] = part
            self._absorb(scratch, len(part))

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


def fnv1a64(data: Any) -> int:
    """FNV-1a 64 of one contiguous buffer (bytes, mmap, NumPy array), without copying it."""
    view = memoryview(data).cast("B")
    if not len(view):
        return OFFSET_BASIS
    return int(_fnv.lib.fnv1a_64(_fnv.ffi.from_buffer(view), len(view)))
