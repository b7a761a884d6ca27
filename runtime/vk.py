"""The raw Vulkan API: the `vulkan` package's cffi library, loaded once, with error checks and nothing else.

The package's friendly wrappers cost 12–17 µs a recorded dispatch; the raw calls with prepared structs cost 2–3 µs, so the
runtime uses the raw ones throughout. Importing the package opens the loader library, which a machine without Vulkan lacks:
hence :func:`load`, called when a device is first wanted and never at import.
"""

from __future__ import annotations

from typing import Any

from oazoo.errors import DeviceError

VK_WHOLE_SIZE = 2**64 - 1

#: VkResult values that a user can act on, in words.
_RESULTS = {
    -1: "out of host memory",
    -2: "out of device memory",
    -3: "initialization failed",
    -4: "device lost",
    -5: "memory map failed",
    -6: "layer not present",
    -7: "extension not present",
    -8: "feature not present",
    -9: "incompatible driver",
    -10: "too many objects",
    -1000072003: "invalid device address",
}


class DeviceLostError(DeviceError):
    """The driver gave up on the device (often a watchdog); everything on it is gone, a new process can start afresh."""


class OutOfDeviceMemoryError(DeviceError):
    """A device allocation failed or would pass the limit in force."""


class VulkanUnavailableError(DeviceError):
    """The Vulkan loader library is missing or cannot be used."""


_loaded: Any = None


def load() -> Any:
    """Return the raw module: ``.lib`` (functions), ``.ffi``, and the ``VK_*`` constants.

    Raises:
        VulkanUnavailableError: no Vulkan loader on this machine.
    """
    global _loaded
    if _loaded is None:
        try:
            from vulkan import _vulkan
        except (ImportError, OSError) as error:
            raise VulkanUnavailableError(
                "the Vulkan loader library cannot be opened; install it and a driver (Debian and Ubuntu: "
                "apt install libvulkan1 mesa-vulkan-drivers), then run `oazoo doctor`"
            ) from error
        _loaded = _vulkan
    return _loaded


def check(result: int, what: str) -> None:
    """Raise the error of a negative VkResult; ``what`` names the call for the message."""
    if result >= 0:
        return
    reason = _RESULTS.get(result, f"VkResult {result}")
    if result == -4:
        raise DeviceLostError(
            f"{what}: the Vulkan device was lost; results still on it are gone. Start again, with a smaller batch or "
            "another device (OAZOO_DEVICE) if it happens twice"
        )
    if result in (-1, -2):
        raise OutOfDeviceMemoryError(f"{what}: {reason}")
    raise DeviceError(f"{what}: {reason}")


def enumerate_all(name: str, ctype: str, *arguments: Any) -> tuple[Any, int]:
    """Vulkan's two-call idiom: ask for the count, then for the array.

    Returns:
        ``(array, count)``; elements that are structs live as long as the array does, so keep it.
    """
    vk = load()
    function = getattr(vk.lib, name)
    count = vk.ffi.new("uint32_t *")
    result = function(*arguments, count, vk.ffi.NULL)
    check(result or 0, name)
    array = vk.ffi.new(f"{ctype}[]", max(1, count[0]))
    result = function(*arguments, count, array)
    check(result or 0, name)
    return array, count[0]


def struct(ctype: str, s_type: int | None = None, **fields: Any) -> Any:
    """Allocate a zeroed struct and set its fields; what they point to must be kept alive by the caller."""
    vk = load()
    value = vk.ffi.new(f"{ctype} *")
    if s_type is not None:
        value.sType = s_type
    for name, field in fields.items():
        setattr(value, name, field)
    return value
