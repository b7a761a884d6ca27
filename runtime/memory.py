"""Device memory: blocks from the driver, ranges of them for tensors, arenas for captured programs, staging.

Every block is one VkBuffer over one VkDeviceMemory with a device address; tensors are ranges of it. All commands of a device
run in order on one queue and barriers follow address ranges, so a range can be handed out again as soon as its tensor is
gone, even while commands that use it are still queued: later commands wait for them. Only the host must wait before it
writes, which :class:`oazoo.runtime.tensor.Tensor` does.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError, UsageError
from oazoo.runtime.instance import DeviceInfo
from oazoo.runtime.vk import OutOfDeviceMemoryError, check, load, struct

#: Ranges start and end on this many bytes: no smaller than any vector load, any cache line and any copy alignment.
ALIGNMENT = 256
_BLOCK_BYTES = 32 << 20
#: Allocations of at least this size get a block to themselves, returned to the driver when freed.
_DEDICATED_BYTES = 8 << 20
#: Drivers exist that report 4 GiB and return zeros past 2 GiB of one buffer; nothing here needs more in one piece.
_SAFE_BUFFER_BYTES = 2 << 30

_HOST_VISIBLE, _HOST_COHERENT, _HOST_CACHED, _DEVICE_LOCAL = 0x2, 0x4, 0x8, 0x1
_HOST = _HOST_VISIBLE | _HOST_COHERENT


@dataclass(frozen=True)
class MemoryChoice:
    """The memory types that tensors and the staging block are allocated from.

    ``unified``: the host can read and write tensors where they lie. ``readable``: and read them at full speed; memory that
    the processor does not cache is written well but read at a crawl.
    """

    tensors: int
    staging: int
    unified: bool
    readable: bool


def choose_memory(
    types: Sequence[tuple[int, int]], heaps: Sequence[int], allowed: int, kind: str, *, staged: bool = False
) -> MemoryChoice | None:
    """Choose memory types, or None when there is no fitting one.

    Args:
        types: property flags and heap of each memory type.
        heaps: their sizes.
        allowed: bit i is set if buffers can lie in type i (``memoryTypeBits``).
        kind: of the device; see :class:`DeviceInfo`.
        staged: never unified.
    """
    # Types with further properties are out: protected memory, memory for attachments only, memory without caches.
    plain = _DEVICE_LOCAL | _HOST | _HOST_CACHED
    usable = [i for i, (have, _) in enumerate(types) if allowed >> i & 1 and not have & ~plain]

    def size(i: int) -> int:
        return heaps[types[i][1]]

    def find(flags: int) -> int | None:
        matches = [i for i in usable if types[i][0] & flags == flags]
        # A type with nothing beyond what is asked for keeps scarce kinds (a small host-visible window) free.
        return min(matches, key=lambda i: (types[i][0].bit_count(), -size(i), i), default=None)

    unified: int | None = None
    if kind in ("cpu", "integrated"):
        # All memory is the same memory here, but a heap may be a small part that was set aside for the device.
        most = max((size(i) for i in usable), default=0)
        shared = [i for i in usable if types[i][0] & _HOST == _HOST and size(i) * 2 >= most]
        unified = min(
            shared,
            key=lambda i: (not types[i][0] & _DEVICE_LOCAL, not types[i][0] & _HOST_CACHED, i),
            default=None,
        )
    elif kind != "discrete":
        unified = find(_DEVICE_LOCAL | _HOST | _HOST_CACHED)
    if staged:
        unified = None
    tensors = unified if unified is not None else find(_DEVICE_LOCAL)
    cached = find(_HOST | _HOST_CACHED)
    staging = cached if cached is not None else find(_HOST)
    if tensors is None or staging is None:
        return None
    readable = unified is not None and bool(types[unified][0] & _HOST_CACHED or cached is None)
    return MemoryChoice(tensors, staging, unified is not None, readable)


def size_from_environment(name: str) -> int | None:
    """A byte count from an environment variable (plain digits), or None when unset."""
    text = os.environ.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) <= 0:
        raise UsageError(f"{name} must be a positive number of bytes, not {text!r}")
    return int(text)


class FreeList:
    """The free part of one stretch of memory, as sorted (offset, size) with neighbours merged."""

    def __init__(self, offset: int, size: int) -> None:
        self.whole = (offset, size)
        self.ranges = [self.whole]

    def take(self, size: int) -> int | None:
        """Cut ``size`` bytes from the tightest free range; returns the offset, or None when nothing fits."""
        best = min((r for r in self.ranges if r[1] >= size), key=lambda r: r[1], default=None)
        if best is None:
            return None
        self.ranges.remove(best)
        if best[1] > size:
            insort(self.ranges, (best[0] + size, best[1] - size))
        return best[0]

    def give(self, offset: int, size: int) -> None:
        """Return a range, merged with its free neighbours."""
        at = bisect_left(self.ranges, (offset, 0))
        if at < len(self.ranges) and self.ranges[at][0] == offset + size:
            size += self.ranges.pop(at)[1]
        if at > 0 and sum(self.ranges[at - 1]) == offset:
            at -= 1
            previous = self.ranges.pop(at)
            offset, size = previous[0], previous[1] + size
        self.ranges.insert(at, (offset, size))

    @property
    def is_whole(self) -> bool:
        """True when nothing is taken."""
        return self.ranges == [self.whole]


def _create_buffer(device: Any, size: int) -> Any:
    vk = load()
    usage = 0x1 | 0x2 | 0x20 | 0x20000  # transfer source and destination, storage, device address
    info = struct("VkBufferCreateInfo", vk.VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, size=size, usage=usage)
    buffer = vk.ffi.new("VkBuffer *")
    check(vk.lib.vkCreateBuffer(device, info, vk.ffi.NULL, buffer), "vkCreateBuffer")
    return buffer[0]


class Block:
    """One driver allocation and the buffer over it. ``view`` is its bytes on the host, or None if not mapped."""

    def __init__(self, allocator: Allocator, size: int, memory_type: int, mapped: bool) -> None:
        vk = load()
        ffi, device = vk.ffi, allocator.device
        self.size = size
        self._device = device
        self.buffer = _create_buffer(device, size)
        needs = ffi.new("VkMemoryRequirements *")
        vk.lib.vkGetBufferMemoryRequirements(device, self.buffer, needs)
        flags = struct(
            "VkMemoryAllocateFlagsInfo", vk.VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO, flags=0x2
        )
        request = struct(
            "VkMemoryAllocateInfo",
            vk.VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO,
            pNext=flags,
            allocationSize=needs.size,
            memoryTypeIndex=memory_type,
        )
        memory = ffi.new("VkDeviceMemory *")
        result = vk.lib.vkAllocateMemory(device, request, ffi.NULL, memory)
        if result < 0:
            vk.lib.vkDestroyBuffer(device, self.buffer, ffi.NULL)
            check(result, "vkAllocateMemory")
        self.memory = memory[0]
        check(vk.lib.vkBindBufferMemory(device, self.buffer, self.memory, 0), "vkBindBufferMemory")
        address = struct(
            "VkBufferDeviceAddressInfo", vk.VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO, buffer=self.buffer
        )
        self.address = int(vk.lib.vkGetBufferDeviceAddress(device, address))
        self.view: npt.NDArray[np.uint8] | None = None
        if mapped:
            pointer = ffi.new("void **")
            check(vk.lib.vkMapMemory(device, self.memory, 0, size, 0, pointer), "vkMapMemory")
            self.view = np.frombuffer(ffi.buffer(pointer[0], size), np.uint8)
        self.free = FreeList(0, size)
        #: Whether it is for one range only, and goes with it.
        self.dedicated = False

    def destroy(self) -> None:
        vk = load()
        self.view = None
        vk.lib.vkDestroyBuffer(self._device, self.buffer, vk.ffi.NULL)
        vk.lib.vkFreeMemory(self._device, self.memory, vk.ffi.NULL)


class Range:
    """A range of a block, freed when the last tensor over it goes."""

    __slots__ = ("__weakref__", "address", "block", "offset", "owner", "size")

    def __init__(self, owner: RangeOwner, block: Block, offset: int, size: int) -> None:
        self.owner, self.block, self.offset, self.size = owner, block, offset, size
        self.address = block.address + offset

    @property
    def host(self) -> npt.NDArray[np.uint8] | None:
        """The bytes on the host, or None when this memory is not mapped."""
        view = self.block.view
        return None if view is None else view[self.offset : self.offset + self.size]

    def __del__(self) -> None:
        self.owner.release(self)


class RangeOwner(Protocol):
    """What hands out ranges: the device's allocator, or the arena of a capture."""

    def allocate(self, nbytes: int) -> Range: ...

    def release(self, freed: Range) -> None: ...


class Allocator:
    """Device memory of one device.

    ``unified`` is true where tensors live in memory that the host can write (processors, integrated GPUs): then nothing is
    staged, except what is read where that memory is not cached (``readable`` is false). ``OAZOO_STAGING=1`` forces staging,
    ``OAZOO_MAX_BUFFER_BYTES`` and ``OAZOO_MEMORY_LIMIT`` lower the limits; results must not depend on any of them.
    """

    def __init__(self, handle: Any, physical: Any, info: DeviceInfo) -> None:
        vk = load()
        self.device = handle
        self.info = info
        self._physical = physical
        self.allocated_bytes = 0
        properties = vk.ffi.new("VkPhysicalDeviceMemoryProperties *")
        vk.lib.vkGetPhysicalDeviceMemoryProperties(physical, properties)
        self._types = [
            (properties.memoryTypes[i].propertyFlags, properties.memoryTypes[i].heapIndex)
            for i in range(properties.memoryTypeCount)
        ]
        limit = min(info.max_allocation_bytes, info.max_buffer_bytes, _SAFE_BUFFER_BYTES)
        self.max_buffer_bytes = min(limit, size_from_environment("OAZOO_MAX_BUFFER_BYTES") or limit)
        self.max_buffer_bytes = max(ALIGNMENT, self.max_buffer_bytes // ALIGNMENT * ALIGNMENT)
        self.memory_limit = size_from_environment("OAZOO_MEMORY_LIMIT")
        choice = choose_memory(
            self._types,
            [size for size, _ in info.heaps],
            self._types_for_buffers(),
            info.kind,
            staged=os.environ.get("OAZOO_STAGING", "") not in ("", "0"),
        )
        if choice is None:
            raise DeviceError(f"{info.name} has no memory that tensors or copies from the host can lie in")
        self._device_type, self._staging_type = choice.tensors, choice.staging
        self.unified, self.readable = choice.unified, choice.readable
        self._blocks: list[Block] = []
        self._graveyard: list[tuple[int, Block]] = []
        self._staging: Block | None = None
        self._host_blocks: list[Block] = []
        #: The timeline value that the next submission will signal; set by the recorder.
        self.next_value = 1

    @property
    def available_bytes(self) -> int:
        """An estimate of what can still be allocated: the driver's own budget where it tells one, else the heap's size less
        what is allocated here; never more than ``OAZOO_MEMORY_LIMIT`` leaves.
        """
        free = self._heap_budget(self._types[self._device_type][1])
        if self.memory_limit is not None:
            free = min(free, self.memory_limit - self.allocated_bytes)
        return max(0, free)

    @property
    def used_bytes(self) -> int:
        """What tensors and programs hold of the memory that is allocated here."""
        return self.allocated_bytes - self._unused

    @property
    def free_bytes(self) -> int:
        """What can still be allocated, in all, with what is free in the blocks that are here already."""
        return self.available_bytes + self._unused

    @property
    def _unused(self) -> int:
        return sum(size for block in self._blocks for _, size in block.free.ranges)

    def _heap_budget(self, heap: int) -> int:
        vk = load()
        size = self.info.heaps[heap][0]
        if not self.info.has_memory_budget:
            return size - self.allocated_bytes
        budget = struct(
            "VkPhysicalDeviceMemoryBudgetPropertiesEXT",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT,
        )
        properties = struct(
            "VkPhysicalDeviceMemoryProperties2",
            vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2,
            pNext=budget,
        )
        vk.lib.vkGetPhysicalDeviceMemoryProperties2(self._physical, properties)
        # The driver still counts dead blocks, which go before anything is refused.
        dead = sum(block.size for _, block in self._graveyard)
        return int(budget.heapBudget[heap]) - int(budget.heapUsage[heap]) + dead

    def _types_for_buffers(self) -> int:
        """The memory types that a buffer may lie in: the same for all buffers of one usage."""
        vk = load()
        buffer = _create_buffer(self.device, ALIGNMENT)
        needs = vk.ffi.new("VkMemoryRequirements *")
        vk.lib.vkGetBufferMemoryRequirements(self.device, buffer, needs)
        vk.lib.vkDestroyBuffer(self.device, buffer, vk.ffi.NULL)
        return int(needs.memoryTypeBits)

    def allocate(self, nbytes: int) -> Range:
        """Reserve ``nbytes`` (rounded up to the alignment; at least one unit).

        Raises:
            OutOfDeviceMemoryError: too large for one buffer, over the limit, or the driver has no more.
        """
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        if size > self.max_buffer_bytes:
            raise OutOfDeviceMemoryError(
                f"a tensor of {nbytes:,} bytes is larger than one buffer of {self.info.name} may be "
                f"({self.max_buffer_bytes:,} bytes); split it by rows"
            )
        dedicated = size >= min(_DEDICATED_BYTES, self.max_buffer_bytes)
        if not dedicated:
            for block in self._blocks:
                if not block.dedicated:
                    offset = block.free.take(size)
                    if offset is not None:
                        return Range(self, block, offset, size)
        block = self._new_block(size if dedicated else min(_BLOCK_BYTES, self.max_buffer_bytes))
        block.dedicated = dedicated
        offset = block.free.take(size)
        assert offset is not None
        return Range(self, block, offset, size)

    def allocate_host(self, nbytes: int) -> Range:
        """Memory that the host reads and writes at full speed, for copies from and to it; kernels do not touch it."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        block = self._new_block(size, host=True)
        block.dedicated = True
        block.free.take(size)
        return Range(self, block, 0, size)

    def _new_block(self, size: int, *, host: bool = False) -> Block:
        if self.memory_limit is not None and self.allocated_bytes + size > self.memory_limit:
            raise OutOfDeviceMemoryError(self._shortage(size, "OAZOO_MEMORY_LIMIT"))
        try:
            block = Block(self, size, self._staging_type if host else self._device_type, host or self.unified)
        except OutOfDeviceMemoryError:
            raise OutOfDeviceMemoryError(self._shortage(size, "the driver")) from None
        self.allocated_bytes += size
        self._blocks.append(block)
        return block

    def _shortage(self, size: int, refused_by: str) -> str:
        heap_index = self._types[self._device_type][1]
        heap = self.info.heaps[heap_index][0] if heap_index < len(self.info.heaps) else 0
        return (
            f"out of device memory on {self.info.name}: {refused_by} refused {size:,} bytes with {self.allocated_bytes:,} "
            f"already in use (heap {heap_index} holds {heap:,}); use a smaller context, a smaller encoding (q8, q4) or "
            "another device (OAZOO_DEVICE)"
        )

    def release(self, freed: Range) -> None:
        """Take a range back; a dedicated block goes to the driver once the commands that may use it are done."""
        block = freed.block
        block.free.give(freed.offset, freed.size)
        goes = block.dedicated or block.size != _BLOCK_BYTES
        if block.free.is_whole and goes and block in self._blocks:
            self._blocks.remove(block)
            self.allocated_bytes -= block.size
            self._graveyard.append((self.next_value, block))

    def collect(self, completed: int) -> None:
        """Destroy dead blocks whose last possible use lies at or before the ``completed`` timeline value."""
        for value, block in self._graveyard:
            if value <= completed:
                block.destroy()
        self._graveyard = [entry for entry in self._graveyard if entry[0] > completed]

    def staging(self) -> Block:
        """The host-visible block that copies pass through on devices whose memory the host cannot see."""
        if self._staging is None:
            self._staging = Block(
                self, min(_DEDICATED_BYTES, self.max_buffer_bytes), self._staging_type, True
            )
        return self._staging

    def host_block(self, nbytes: int) -> Block:
        """A block that the host reads at full speed, for copies that programs make; see :meth:`give_back`."""
        block = Block(self, max(ALIGNMENT, nbytes), self._staging_type, True)
        self._host_blocks.append(block)
        return block

    def give_back(self, block: Block) -> None:
        """Destroy a host block once the commands that may use it are done."""
        if block in self._host_blocks:
            self._host_blocks.remove(block)
            self._graveyard.append((self.next_value, block))

    def close(self) -> None:
        """Give everything back to the driver; the device must be idle."""
        for block in [
            *self._blocks,
            *(b for _, b in self._graveyard),
            *self._host_blocks,
            *([self._staging] if self._staging else []),
        ]:
            block.destroy()
        self._blocks, self._graveyard, self._host_blocks, self._staging = [], [], [], None


class Arena:
    """Memory of one captured program: ranges freed during the capture are reused inside it, and by nothing else.

    A replay writes its intermediates again, so their memory belongs to the program for as long as it, or a tensor that the
    capture produced, is alive.
    """

    def __init__(self, parent: Allocator, chunk_bytes: int = 4 << 20) -> None:
        self._parent = parent
        self._chunk_bytes = min(chunk_bytes, parent.max_buffer_bytes)
        self._chunks: list[tuple[Range, FreeList]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the arena has."""
        return sum(chunk.size for chunk, _ in self._chunks)

    def allocate(self, nbytes: int) -> Range:
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        for chunk, free in self._chunks:
            offset = free.take(size)
            if offset is not None:
                return Range(self, chunk.block, offset, size)
        chunk = self._parent.allocate(max(size, self._chunk_bytes))
        free = FreeList(chunk.offset, chunk.size)
        self._chunks.append((chunk, free))
        offset = free.take(size)
        assert offset is not None
        return Range(self, chunk.block, offset, size)

    def release(self, freed: Range) -> None:
        for chunk, free in self._chunks:
            if chunk.block is freed.block and chunk.offset <= freed.offset < chunk.offset + chunk.size:
                free.give(freed.offset, freed.size)
                return
