"""oazoo.runtime: a small Vulkan compute runtime. Devices, memory, tensors, kernels, recording and captured programs.

It knows nothing of models. Importing it opens no driver; :func:`get_device` does.
"""

from __future__ import annotations

from oazoo.runtime.device import Device, get_device, open_ahead
from oazoo.runtime.instance import DeviceInfo, list_devices, validation_messages
from oazoo.runtime.program import Program
from oazoo.runtime.tensor import Tensor
from oazoo.runtime.vk import DeviceLostError, OutOfDeviceMemoryError, VulkanUnavailableError

__all__ = [
    "Device",
    "DeviceInfo",
    "DeviceLostError",
    "OutOfDeviceMemoryError",
    "Program",
    "Tensor",
    "VulkanUnavailableError",
    "get_device",
    "list_devices",
    "open_ahead",
    "validation_messages",
]
