"""Losses of steps and norms of their gradients, kept on the device and read later, so that nobody waits for each."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from oazoo.runtime import Device, Tensor
from oazoo.runtime.memory import Block
from oazoo.runtime.ops import optimizer as ops


class LossLog:
    """A ring of losses and norms in device memory that the host reads behind the device.

    Where the host cannot read device memory, each step copies the ring to memory that it can.

    Args:
        device: where the losses are made.
        size: how many fit before the host must look.
    """

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._ring = Tensor.from_numpy(device, np.zeros((size, 2), np.float32))
        self._place = Tensor.from_numpy(device, np.zeros(1, np.uint32))
        readable = self._ring.memory.host is not None and device.allocator.readable
        self._mirror: Block | None = None if readable else device.allocator.host_block(8 * size)
        #: Timeline values of the steps whose losses nobody has read, and the place of the first in the ring.
        self._unread: deque[int] = deque()
        self._first = 0
        self._read: list[npt.NDArray[np.float32]] = []

    def note(self, loss: Tensor | None, sums: Tensor | None = None, factor: Tensor | None = None) -> None:
        """Queue, or capture, the keeping of a step's loss: f32 [1], or the mean that ``sums`` gathered; with ``factor``, as
        :func:`oazoo.runtime.ops.optimizer.gradient_factor` gives it, of its gradient's norm too.
        """
        if sums is not None:
            ops.note_gathered(sums, self._place, self._ring, factor)
        elif loss is not None:
            ops.note_loss(loss, self._place, self._ring, factor)
        if self._mirror is not None:
            target = self._mirror.buffer, 0, self._mirror.address
            self._device.copy(self._ring.place(), target, self._ring.nbytes)

    def submitted(self, value: int) -> None:
        """A step was submitted, with this timeline value."""
        if (
            len(self._unread) == self._ring.shape[0] - 1
        ):  # the next but one would overwrite what nobody has read
            self._take(wait=True)
        self._unread.append(value)

    def read(self, *, wait: bool) -> npt.NDArray[np.float32]:
        """f32 [steps, 2], losses and norms since the last call, in order: of all steps, or without waiting of those done."""
        self._take(wait=wait)
        found, self._read = self._read, []
        return np.concatenate(found) if found else np.empty((0, 2), np.float32)

    def _take(self, *, wait: bool) -> None:
        if wait and self._unread:
            self._device.wait(self._unread[-1])
        done = 0
        for value in self._unread:
            if not self._device.done(value):
                break
            done += 1
        if not done:
            return
        view = self._ring.memory.host if self._mirror is None else self._mirror.view
        assert view is not None
        start = self._ring.offset if self._mirror is None else 0
        values = view[start : start + self._ring.nbytes].view(np.float32).reshape(-1, 2)
        size = self._ring.shape[0]
        self._read.append(values[np.arange(self._first, self._first + done) % size])
        self._first = (self._first + done) % size
        for _ in range(done):
            self._unread.popleft()

    def __del__(self) -> None:
        if self._mirror is not None:
            self._device.allocator.give_back(self._mirror)
