"""The device's own clock around the commands of a recording."""

from __future__ import annotations

from typing import Any

from oazoo.runtime.vk import check, load, struct

_COMPUTE_DONE, _ALL_DONE = 0x800, 0x2000
_WITH_AVAILABILITY, _64_BITS = 0x4, 0x1


class Timer:
    """Two timestamps: when the commands before have computed, and when all commands between have ended.

    Args:
        device: the VkDevice.
        period: nanoseconds a tick (``timestampPeriod``).
        bits: of a timestamp that mean something (``timestampValidBits``).
    """

    def __init__(self, device: Any, period: float, bits: int) -> None:
        vk = load()
        self._lib, self._device, self._period = vk.lib, device, period
        self._mask = (1 << bits) - 1
        self._null = vk.ffi.NULL
        info = struct(
            "VkQueryPoolCreateInfo",
            vk.VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO,
            queryType=2,  # timestamps
            queryCount=2,
        )
        pool = vk.ffi.new("VkQueryPool *")
        check(vk.lib.vkCreateQueryPool(device, info, vk.ffi.NULL, pool), "vkCreateQueryPool")
        self._pool = pool[0]
        self._found = vk.ffi.new("uint64_t[4]")

    def start(self, commands: Any) -> None:
        """Record: forget what was noted, note the time."""
        self._lib.vkCmdResetQueryPool(commands, self._pool, 0, 2)
        self._lib.vkCmdWriteTimestamp(commands, _COMPUTE_DONE, self._pool, 0)

    def stop(self, commands: Any) -> None:
        """Record: note the time once everything is done."""
        self._lib.vkCmdWriteTimestamp(commands, _ALL_DONE, self._pool, 1)

    def seconds(self) -> float | None:
        """Between the two, of the run that ended last; None if it is not known yet. Waits for nothing."""
        flags = _WITH_AVAILABILITY | _64_BITS
        result = self._lib.vkGetQueryPoolResults(self._device, self._pool, 0, 2, 32, self._found, 16, flags)
        check(result, "vkGetQueryPoolResults")
        first, first_known, last, last_known = self._found
        if not (first_known and last_known):
            return None
        return float((last - first) & self._mask) * self._period * 1e-9

    def destroy(self) -> None:
        """Give it back; the commands must not be running."""
        if self._pool is not None:
            self._lib.vkDestroyQueryPool(self._device, self._pool, self._null)
            self._pool = None
