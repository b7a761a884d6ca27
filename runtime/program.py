"""Captured programs: a fixed sequence of kernel runs, recorded once and replayed without Python in the loop."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from oazoo.errors import DeviceError
from oazoo.runtime.memory import Arena, Range
from oazoo.runtime.recording import Recording
from oazoo.runtime.timer import Timer
from oazoo.runtime.vk import DeviceLostError

if TYPE_CHECKING:
    from oazoo.runtime.device import Device
    from oazoo.runtime.tensor import Tensor


class Program:
    """What :meth:`Device.capture` recorded. It keeps every tensor alive that its commands touch."""

    def __init__(
        self, device: Device, recording: Recording, arena: Arena, timer: Timer | None = None
    ) -> None:
        self._device, self._timer = device, timer
        self.recording = recording
        self._arena = arena
        self._kept: dict[int, Range] = {}
        #: Set when the capture ended without an error; an unfinished program cannot run.
        self.complete = False
        self._last = 0

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Hold the memory of these tensors, except what belongs to the program's own arena anyway."""
        for tensor in tensors:
            if tensor is not None and tensor.memory.owner is not self._arena:
                self._kept[id(tensor.memory)] = tensor.memory

    @property
    def commands(self) -> int:
        """Number of kernel runs and copies in one replay."""
        return self.recording.commands

    @property
    def nbytes(self) -> int:
        """Device memory that the program's intermediates take, what it keeps from outside not counted."""
        return self._arena.nbytes

    def seconds(self) -> float | None:
        """Device time of a replay that is done, by the device's clock; None where it has none, or before the first.

        To be asked for when the last replay is known to be done: nobody waits here.
        """
        return None if self._timer is None or not self._last else self._timer.seconds()

    def run(self) -> None:
        """Queue one replay behind all work so far; reading a tensor waits for it."""
        if not self.complete:
            raise DeviceError("this program's capture did not finish; it cannot be run")
        self._device.flush()
        self._device.submit(self.recording)
        self._last = self._device.submitted

    def __del__(self) -> None:
        # The command buffer may still be running; the device outlives its programs except at interpreter exit.
        if not self._device.closed:
            # A lost device runs nothing any more, and whoever used it was told.
            with suppress(DeviceLostError):
                self._device.wait(self._last)
            self.recording.free()
