"""A Vulkan device opened for compute: its queue, memory, kernels, and what is recorded for it.

A device is used from one thread at a time. Work is recorded as operations are called, sent in batches, and finished when
somebody asks for values; a fixed sequence can be captured once and replayed.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError, OazooError
from oazoo.runtime.instance import (
    DeviceInfo,
    choose,
    create_device,
    get_instance,
    timestamps,
)
from oazoo.runtime.kernel import PUSH_BYTES, Kernel, manifest
from oazoo.runtime.memory import Allocator, Arena, Range
from oazoo.runtime.pipeline_cache import PipelineCache, cache_path
from oazoo.runtime.program import Program
from oazoo.runtime.recording import Recording, Span
from oazoo.runtime.timer import Timer
from oazoo.runtime.vk import OutOfDeviceMemoryError, check, load, struct

if TYPE_CHECKING:
    from oazoo.runtime.tensor import Tensor

#: Commands recorded before they are sent without being asked for: the device works while the host records on.
_BATCH = 128
#: Multiply-adds recorded before they are sent, so that no submission grows long enough to look hung to a driver's watchdog
#: (two seconds on Windows, less on some integrated GPUs): a tenth of a second at 80 G/s, a millisecond on a large GPU.
_BATCH_WORK = 1 << 33
_WAIT_SLICE_NS = 100_000_000


class Device:
    """An open device. Get one from :func:`get_device`, or open a particular one with :meth:`open`."""

    def __init__(self, physical: Any, info: DeviceInfo) -> None:
        vk = load()
        ffi = vk.ffi
        self._vk, self.info = vk, info
        self.handle, family = create_device(vk, physical, info)
        self._clock = timestamps(vk, physical, family)
        self._timers: WeakSet[Timer] = WeakSet()
        queue = ffi.new("VkQueue *")
        vk.lib.vkGetDeviceQueue(self.handle, family, 0, queue)
        self._queue = queue[0]
        pool_info = struct(
            "VkCommandPoolCreateInfo",
            vk.VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO,
            flags=0x2,  # command buffers are reset one by one
            queueFamilyIndex=family,
        )
        pool = ffi.new("VkCommandPool *")
        check(vk.lib.vkCreateCommandPool(self.handle, pool_info, ffi.NULL, pool), "vkCreateCommandPool")
        self._pool = pool[0]
        self.layout = self._create_layout()
        self._create_timeline()
        self.allocator = Allocator(self.handle, physical, info)
        kernels_hash = hashlib.sha256(
            json.dumps([(s.name, s.sha256) for s in manifest().values()]).encode()
        ).hexdigest()
        self.pipeline_cache = PipelineCache(self.handle, cache_path(info, kernels_hash))
        self._kernels: dict[str, Kernel] = {}
        self._recording: Recording | None = None
        self._idle_recordings: list[Recording] = []
        self._running: list[tuple[int, Recording]] = []
        self._capturing: Program | None = None
        self._arena: Arena | None = None
        self._profile: dict[str, list[float]] | None = None
        self.closed = False
        # Before the instance goes, which was there first: drivers need not survive an instance destroyed under a device.
        atexit.register(self.close)

    @classmethod
    def open(cls, selector: str | None = None) -> Device:
        """Open the device that ``selector`` names (see :func:`oazoo.runtime.instance.choose`)."""
        devices = get_instance().physical_devices()
        info = choose([info for _, info in devices], selector)
        return cls(devices[info.index][0], info)

    def _create_layout(self) -> Any:
        """One pipeline layout for every kernel: a block of push constants, no descriptor sets."""
        vk = self._vk
        push = struct("VkPushConstantRange", stageFlags=0x20, offset=0, size=PUSH_BYTES)
        info = struct(
            "VkPipelineLayoutCreateInfo",
            vk.VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO,
            pushConstantRangeCount=1,
            pPushConstantRanges=push,
        )
        layout = vk.ffi.new("VkPipelineLayout *")
        check(vk.lib.vkCreatePipelineLayout(self.handle, info, vk.ffi.NULL, layout), "vkCreatePipelineLayout")
        return layout[0]

    def _create_timeline(self) -> None:
        vk, ffi = self._vk, self._vk.ffi
        kind = struct(
            "VkSemaphoreTypeCreateInfo", vk.VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO, semaphoreType=1
        )
        info = struct("VkSemaphoreCreateInfo", vk.VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO, pNext=kind)
        semaphore = ffi.new("VkSemaphore *")
        check(vk.lib.vkCreateSemaphore(self.handle, info, ffi.NULL, semaphore), "vkCreateSemaphore")
        self._semaphore = semaphore
        self._submitted = 0
        self._completed = 0
        self._value = ffi.new("uint64_t *")
        self._timeline = struct(
            "VkTimelineSemaphoreSubmitInfo",
            vk.VK_STRUCTURE_TYPE_TIMELINE_SEMAPHORE_SUBMIT_INFO,
            signalSemaphoreValueCount=1,
            pSignalSemaphoreValues=self._value,
        )
        self._commands = ffi.new("VkCommandBuffer[1]")
        self._submit = struct(
            "VkSubmitInfo",
            vk.VK_STRUCTURE_TYPE_SUBMIT_INFO,
            pNext=self._timeline,
            commandBufferCount=1,
            pCommandBuffers=self._commands,
            signalSemaphoreCount=1,
            pSignalSemaphores=semaphore,
        )
        self._wait_value = ffi.new("uint64_t *")
        self._wait = struct(
            "VkSemaphoreWaitInfo",
            vk.VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO,
            semaphoreCount=1,
            pSemaphores=semaphore,
            pValues=self._wait_value,
        )

    # Kernels and recording

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name, its pipeline created at the first use.

        Raises:
            DeviceError: the manifest has no such kernel.
        """
        kernel = self._kernels.get(name)
        if kernel is None:
            spec = manifest().get(name)
            if spec is None:
                raise DeviceError(f"there is no kernel {name!r}; compile the shaders again (make shaders)")
            kernel = self._kernels[name] = Kernel(self, spec)
        return kernel

    def record(
        self,
        kernel: Kernel,
        push: bytes,
        groups: tuple[int, int, int],
        reads: list[Span],
        writes: list[Span],
        tensors: Iterable[Iterable[Tensor | None]],
        work: int,
    ) -> None:
        """Append a dispatch to what is being recorded; called by :meth:`Kernel.dispatch`."""
        if self._capturing is not None:
            for group in tensors:
                self._capturing.keep(group)
            self._capturing.recording.dispatch(kernel.pipeline, push, groups, reads, writes, work)
            return
        self._current().dispatch(kernel.pipeline, push, groups, reads, writes, work)
        if self._profile is not None:
            start = time.perf_counter()
            self.synchronize()
            self._profile.setdefault(kernel.name, []).append(time.perf_counter() - start)
        else:
            self._send_when_full()

    def copy(self, source: tuple[Any, int, int], target: tuple[Any, int, int], size: int) -> None:
        """Append a copy between buffers; each side is (VkBuffer, offset, device address)."""
        if self._capturing is not None:
            self._capturing.recording.copy(source, target, size)
        else:
            self._current().copy(source, target, size)

    def update(self, target: tuple[Any, int, int], data: npt.NDArray[np.uint8]) -> None:
        """Append a write of at most ``INLINE_BYTES`` bytes, a multiple of 4, that lie within the commands themselves.

        A captured program writes the same bytes at every replay; what it writes to must be an argument of a kernel in it.
        """
        if self._capturing is not None:
            self._capturing.recording.update(target, data)
            return
        self._current().update(target, data)
        self._send_when_full()

    def _send_when_full(self) -> None:
        recording = self._recording
        if recording is not None and (recording.commands >= _BATCH or recording.work >= _BATCH_WORK):
            self.flush()

    def _current(self) -> Recording:
        if self.closed:
            raise DeviceError(f"the device {self.info.name} is closed")
        if self._recording is None:
            self._poll()
            self._recording = (
                self._idle_recordings.pop()
                if self._idle_recordings
                else Recording(self.handle, self._pool, self.layout, reusable=False)
            )
            self._recording.begin()
        return self._recording

    def allocate(self, nbytes: int) -> Range:
        """Device memory for a tensor: from the capture's arena while one is open, else from the device."""
        owner = self._arena or self.allocator
        try:
            return owner.allocate(nbytes)
        except OutOfDeviceMemoryError:
            # Blocks that are freed stay until the commands that may use them are done: finish those, and try again.
            self.synchronize()
            return owner.allocate(nbytes)

    @property
    def capturing(self) -> bool:
        """Whether operations are being captured rather than queued to run."""
        return self._capturing is not None

    @contextmanager
    def capture(self, *, timed: bool = False) -> Iterator[Program]:
        """Record what is called inside into a :class:`Program` instead of running it.

        Shapes and tensors are fixed at capture; values that change between replays belong in tensors that are written
        before :meth:`Program.run`. Inside, no tensor may be read or written by the host. With ``timed`` the program tells
        the device time of its replays (:meth:`Program.seconds`), where the device has a clock.
        """
        if self._capturing is not None:
            raise DeviceError("a capture is already open; captures do not nest")
        self.flush()
        timer = Timer(self.handle, *self._clock) if timed and self._clock is not None else None
        if timer is not None:
            self._timers.add(timer)
        recording = Recording(self.handle, self._pool, self.layout, reusable=True, timer=timer)
        arena = Arena(self.allocator)
        program = Program(self, recording, arena, timer)
        recording.begin()
        with self.capturing_into(program, arena):
            yield program
            recording.end()
            program.complete = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do what is called inside at once, also while a program is captured: for constants that its work needs."""
        with self.capturing_into(None, None):
            yield

    @contextmanager
    def capturing_into(self, program: Program | None, arena: Arena | None) -> Iterator[None]:
        """Record into ``program`` and allocate from ``arena`` what is called inside; None for the device itself."""
        before = self._capturing, self._arena
        self._capturing, self._arena = program, arena
        try:
            yield
        finally:
            self._capturing, self._arena = before

    @contextmanager
    def profile(self) -> Iterator[dict[str, list[float]]]:
        """Run every dispatch alone and collect its seconds by kernel name (submission and waiting included)."""
        self.synchronize()
        self._profile = {}
        try:
            yield self._profile
        finally:
            self._profile = None

    # Submission

    def flush(self) -> None:
        """Send what has been recorded; returns without waiting."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        if recording.commands == 0:
            recording.end()
            self._idle_recordings.append(recording)
            return
        recording.end()
        self.submit(recording)
        self._running.append((self._submitted, recording))

    def submit(self, recording: Recording) -> None:
        """Queue a finished recording behind everything submitted before."""
        if self.closed:
            raise DeviceError(f"the device {self.info.name} is closed")
        self._submitted += 1
        self._value[0] = self._submitted
        self._commands[0] = recording.handle
        result = self._vk.lib.vkQueueSubmit(self._queue, 1, self._submit, self._vk.ffi.NULL)
        if result < 0:
            self._submitted -= 1
            check(result, "vkQueueSubmit")
        self.allocator.next_value = self._submitted + 1

    @property
    def busy(self) -> bool:
        """Whether work is recorded, or was submitted and is not known to be done."""
        return self._recording is not None or self._submitted > self._completed

    def done(self, value: int) -> bool:
        """Whether the submission with that timeline value is done; does not wait."""
        if value > self._completed:
            self._poll()
        return value <= self._completed

    @property
    def submitted(self) -> int:
        """The timeline value of the latest submission."""
        return self._submitted

    def wait(self, value: int) -> None:
        """Wait until the submission with that timeline value is done. Ctrl-C is answered while waiting."""
        if value > self._completed:
            self._wait_value[0] = value
            while True:
                result = self._vk.lib.vkWaitSemaphores(self.handle, self._wait, _WAIT_SLICE_NS)
                check(result, "vkWaitSemaphores")
                if result == 0:
                    break
            self._completed = value
        self._retire()

    def synchronize(self) -> None:
        """Send what has been recorded and wait until the device has nothing left to do."""
        self.flush()
        self.wait(self._submitted)
        # Nothing is queued or being recorded, so nothing can use a dead block any more.
        self.allocator.collect(self.allocator.next_value)

    def _poll(self) -> None:
        value = self._vk.ffi.new("uint64_t *")
        check(
            self._vk.lib.vkGetSemaphoreCounterValue(self.handle, self._semaphore[0], value),
            "vkGetSemaphoreCounterValue",
        )
        self._completed = max(self._completed, value[0])
        self._retire()

    def _retire(self) -> None:
        while self._running and self._running[0][0] <= self._completed:
            self._idle_recordings.append(self._running.pop(0)[1])
        self.allocator.collect(self._completed)

    def close(self) -> None:
        """Finish all work and give the device back. Tensors and programs of it cannot be used afterwards."""
        if self.closed:
            return
        vk = self._vk
        self._recording = None
        vk.lib.vkDeviceWaitIdle(self.handle)
        self.closed = True
        atexit.unregister(self.close)
        self.pipeline_cache.close()
        for kernel in self._kernels.values():
            kernel.destroy()
        for timer in self._timers:
            timer.destroy()
        self.allocator.close()
        null = vk.ffi.NULL
        vk.lib.vkDestroySemaphore(self.handle, self._semaphore[0], null)
        vk.lib.vkDestroyPipelineLayout(self.handle, self.layout, null)
        vk.lib.vkDestroyCommandPool(self.handle, self._pool, null)
        vk.lib.vkDestroyDevice(self.handle, null)


_default: Device | None = None
_opening = threading.Lock()


def get_device() -> Device:
    """The process's device: chosen by ``OAZOO_DEVICE`` (index, name part, UUID or ``cpu``), opened at the first call.

    Raises:
        DeviceError: no usable Vulkan device; the message says what to install.
        UsageError: ``OAZOO_DEVICE`` names no device.
    """
    global _default
    with _opening:
        if _default is None or _default.closed:
            _default = Device.open(os.environ.get("OAZOO_DEVICE"))
        return _default


def open_ahead() -> None:
    """Begin to open the process's device while the caller does something else; drivers take a tenth of a second and more.

    :func:`get_device` waits for it, and tells what went wrong.
    """

    def opened() -> None:
        with suppress(OazooError):
            get_device()

    if _default is None:
        threading.Thread(target=opened, name="oazoo-device").start()
