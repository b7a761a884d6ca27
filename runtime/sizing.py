"""How much device memory a piece of work would take, found by going through it without taking any.

Inside :func:`measuring` operations are neither run nor recorded, and their tensors get addresses that no memory lies at,
from an arena that is filled as that of a captured program is. So its size is that of the program, whatever the device holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from oazoo.errors import DeviceError
from oazoo.runtime.device import Device
from oazoo.runtime.memory import ALIGNMENT, Allocator, Arena, Block, FreeList, Range
from oazoo.runtime.program import Program
from oazoo.runtime.recording import Recording
from oazoo.runtime.vk import OutOfDeviceMemoryError

_FIRST_ADDRESS = 1 << 44


class _NoBlock:
    """Stands where a block of device memory would."""

    view = None
    buffer = None

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.free = FreeList(0, size)


class _NoMemory:
    """Hands out addresses as the device's allocator does memory."""

    def __init__(self, max_buffer_bytes: int) -> None:
        self.max_buffer_bytes = max_buffer_bytes
        self._next = _FIRST_ADDRESS

    def allocate(self, nbytes: int) -> Range:
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        if size > self.max_buffer_bytes:
            raise OutOfDeviceMemoryError(
                f"a tensor of {nbytes:,} bytes is larger than one buffer may be ({self.max_buffer_bytes:,} bytes)"
            )
        block = _NoBlock(self._next, size)
        self._next += size
        return Range(self, cast("Block", block), 0, size)

    def release(self, freed: Range) -> None:
        """Nothing was taken."""


class _NoRecording:
    """Takes commands and forgets them."""

    commands = 0

    def dispatch(self, *command: Any) -> None:
        self.commands += 1

    copy = update = dispatch

    def free(self) -> None:
        """Nothing was taken."""


@contextmanager
def measuring(device: Device) -> Iterator[Arena]:
    """Go through what is called inside as :meth:`Device.capture` would; the arena's ``nbytes`` is then the program's.

    Tensors made inside may be used in later measurements, and nowhere else.

    Raises:
        DeviceError: a capture is open.
        OutOfDeviceMemoryError: a tensor inside is larger than one buffer of the device may be.
    """
    if device.capturing:
        raise DeviceError("nothing can be measured while a program is captured")
    arena = Arena(cast("Allocator", _NoMemory(device.allocator.max_buffer_bytes)))
    program = Program(device, cast("Recording", _NoRecording()), arena)
    with device.capturing_into(program, arena):
        yield arena
