"""The pipeline cache on disk: kernels compiled by the driver once, not at every start.

One file for each device, driver and set of kernels. It starts with a hash of the rest, so a damaged file is ignored rather
than handed to the driver; it is replaced by renaming, so processes that start together do not disturb each other; a folder
that cannot be written just means no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from oazoo.runtime.instance import DeviceInfo
from oazoo.runtime.vk import check, load, struct


def cache_path(info: DeviceInfo, kernels_hash: str) -> Path:
    """The cache file of a device: under ``OAZOO_HOME`` when set, else the platform's cache folder."""
    home = os.environ.get("OAZOO_HOME")
    folder = Path(home) if home else Path(platformdirs.user_cache_dir("oazoo"))
    # Software drivers compile for the vector width they were told to use, and do not say so in the UUID.
    device = f"{info.vendor_id:x}-{info.device_id:x}-{info.driver_version:x}-{info.cache_uuid}"
    key = f"{device}-{info.subgroup_size}-{kernels_hash}"
    return folder / "pipelines" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.bin"


class PipelineCache:
    """A VkPipelineCache that begins with what the last run left."""

    def __init__(self, device: Any, path: Path) -> None:
        vk = load()
        self._device, self.path = device, path
        #: Set when a pipeline was created: only then is there anything new to save.
        self.touched = False
        data = self._read()
        self._loaded = data
        info = struct(
            "VkPipelineCacheCreateInfo",
            vk.VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO,
            initialDataSize=len(data),
            pInitialData=vk.ffi.from_buffer(data) if data else vk.ffi.NULL,
        )
        handle = vk.ffi.new("VkPipelineCache *")
        check(vk.lib.vkCreatePipelineCache(device, info, vk.ffi.NULL, handle), "vkCreatePipelineCache")
        self.handle = handle[0]

    def _read(self) -> bytes:
        try:
            content = self.path.read_bytes()
        except OSError:
            return b""
        digest, data = content[:32], content[32:]
        return data if hashlib.sha256(data).digest() == digest else b""

    def save(self) -> None:
        """Write the cache if it holds anything new; failures are ignored, the next start just compiles again."""
        if not self.touched:
            return
        vk = load()
        size = vk.ffi.new("size_t *")
        if vk.lib.vkGetPipelineCacheData(self._device, self.handle, size, vk.ffi.NULL) != 0 or not size[0]:
            return
        buffer = vk.ffi.new("uint8_t[]", size[0])
        if vk.lib.vkGetPipelineCacheData(self._device, self.handle, size, buffer) != 0:
            return
        data = bytes(vk.ffi.buffer(buffer, size[0]))
        if data == self._loaded:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".pipelines-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                Path(name).replace(self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)

    def close(self) -> None:
        vk = load()
        self.save()
        vk.lib.vkDestroyPipelineCache(self._device, self.handle, vk.ffi.NULL)
