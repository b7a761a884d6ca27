"""Recording of commands: one command buffer, and the barriers that its dispatches need.

Barriers come from what each command declares it reads and writes, as address ranges: a command that touches what an earlier
one wrote, or writes what an earlier one read, waits for everything before it; commands that share nothing run side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.runtime.timer import Timer
from oazoo.runtime.vk import check, load, struct

Span = tuple[int, int]

#: Largest write that goes within the commands (Vulkan allows 65,536 bytes; drivers copy them about).
INLINE_BYTES = 4096


class Hazards:
    """The spans touched since the last barrier."""

    def __init__(self) -> None:
        self._reads: list[Span] = []
        self._writes: list[Span] = []

    def conflict(self, reads: list[Span], writes: list[Span]) -> bool:
        """Whether a command with these spans must wait for an earlier one; if so, earlier spans are forgotten.

        The command's own spans are remembered either way.
        """
        found = (
            _overlap(reads, self._writes) or _overlap(writes, self._writes) or _overlap(writes, self._reads)
        )
        if found:
            self._reads, self._writes = list(reads), list(writes)
        else:
            self._reads += reads
            self._writes += writes
        return found

    def clear(self) -> None:
        self._reads, self._writes = [], []


def _overlap(left: list[Span], right: list[Span]) -> bool:
    for start, end in left:
        for other_start, other_end in right:
            if start < other_end and other_start < end:
                return True
    return False


class Recording:
    """A command buffer being recorded, or recorded.

    Args:
        device: the VkDevice.
        pool: the VkCommandPool to take the command buffer from.
        layout: the pipeline layout that all kernels share.
        reusable: whether the commands will be submitted more than once, possibly while still running.
        timer: notes the device's clock at the first and after the last command; None for no such thing.
    """

    def __init__(
        self, device: Any, pool: Any, layout: Any, *, reusable: bool, timer: Timer | None = None
    ) -> None:
        vk = load()
        ffi = vk.ffi
        self._lib, self._ffi, self._device, self._layout = vk.lib, ffi, device, layout
        info = struct(
            "VkCommandBufferAllocateInfo",
            vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO,
            commandPool=pool,
            commandBufferCount=1,
        )
        self._pool = pool
        self._handles = ffi.new("VkCommandBuffer[1]")
        check(vk.lib.vkAllocateCommandBuffers(device, info, self._handles), "vkAllocateCommandBuffers")
        self.handle = self._handles[0]
        self._begin = struct(
            "VkCommandBufferBeginInfo",
            vk.VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
            flags=0x4 if reusable else 0x1,  # simultaneous use, or one-time submit
        )
        # One barrier serves every hazard: compute and transfer wait for compute and transfer, all access made visible.
        access = 0x20 | 0x40 | 0x800 | 0x1000
        self._barrier = struct(
            "VkMemoryBarrier",
            vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER,
            srcAccessMask=access,
            dstAccessMask=access,
        )
        self._to_host = struct(
            "VkMemoryBarrier",
            vk.VK_STRUCTURE_TYPE_MEMORY_BARRIER,
            srcAccessMask=0x40 | 0x1000,
            dstAccessMask=0x2000,
        )
        self._null = ffi.NULL
        self._push = ffi.new("uint8_t[128]")
        self._push_view = ffi.buffer(self._push, 128)
        self._copy = ffi.new("VkBufferCopy *")
        self._pipeline: Any = None
        self._timer = timer
        self._hazards = Hazards()
        #: Multiply-adds of the kernel runs, as far as their callers told them.
        self.work = 0
        self.commands = 0
        self.barriers = 0

    def begin(self) -> None:
        """Start recording from empty. The first barrier orders everything after all that was submitted before."""
        check(self._lib.vkBeginCommandBuffer(self.handle, self._begin), "vkBeginCommandBuffer")
        self._pipeline = None
        self._hazards.clear()
        self.work = 0
        self.commands = 0
        self.barriers = 0
        self._wait()
        if self._timer is not None:
            self._timer.start(self.handle)

    def _wait(self) -> None:
        stages = 0x800 | 0x1000  # compute shader, transfer
        self._lib.vkCmdPipelineBarrier(
            self.handle, stages, stages, 0, 1, self._barrier, 0, self._null, 0, self._null
        )
        self.barriers += 1

    def dispatch(
        self,
        pipeline: Any,
        push: bytes | bytearray,
        groups: tuple[int, int, int],
        reads: list[Span],
        writes: list[Span],
        work: int = 0,
    ) -> None:
        """Append one kernel run over ``groups`` workgroups."""
        if self._hazards.conflict(reads, writes):
            self._wait()
        lib, handle = self._lib, self.handle
        if pipeline is not self._pipeline:
            lib.vkCmdBindPipeline(handle, 1, pipeline)
            self._pipeline = pipeline
        size = len(push)
        self._push_view[:size] = push
        lib.vkCmdPushConstants(handle, self._layout, 0x20, 0, size, self._push)
        lib.vkCmdDispatch(handle, *groups)
        self.work += work
        self.commands += 1

    def copy(self, source: tuple[Any, int, int], target: tuple[Any, int, int], size: int) -> None:
        """Append a copy of ``size`` bytes; source and target are (VkBuffer, offset, device address)."""
        if self._hazards.conflict([(source[2], source[2] + size)], [(target[2], target[2] + size)]):
            self._wait()
        self._copy.srcOffset, self._copy.dstOffset, self._copy.size = source[1], target[1], size
        self._lib.vkCmdCopyBuffer(self.handle, source[0], target[0], 1, self._copy)
        self.commands += 1

    def update(self, target: tuple[Any, int, int], data: npt.NDArray[np.uint8]) -> None:
        """Append a write of ``data``, which lies within the commands: at most ``INLINE_BYTES``, a multiple of 4."""
        if self._hazards.conflict([], [(target[2], target[2] + data.nbytes)]):
            self._wait()
        source = self._ffi.from_buffer(data)
        self._lib.vkCmdUpdateBuffer(self.handle, target[0], target[1], data.nbytes, source)
        self.commands += 1

    def end(self) -> None:
        """Finish: what was written becomes visible to the host once the submission is done."""
        self._lib.vkCmdPipelineBarrier(
            self.handle, 0x800 | 0x1000, 0x4000, 0, 1, self._to_host, 0, self._null, 0, self._null
        )
        if self._timer is not None:
            self._timer.stop(self.handle)
        check(self._lib.vkEndCommandBuffer(self.handle), "vkEndCommandBuffer")

    def free(self) -> None:
        """Return the command buffer to its pool; it must not be running."""
        self._lib.vkFreeCommandBuffers(self._device, self._pool, 1, self._handles)
        if self._timer is not None:
            self._timer.destroy()
