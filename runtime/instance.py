"""The Vulkan instance and the physical devices it shows: enumeration, description, choice."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oazoo.errors import DeviceError, UsageError
from oazoo.runtime.vk import check, enumerate_all, load, struct

_KINDS = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
#: A discrete GPU is the better guess than an integrated one, and the processor is what remains.
_PREFERENCE = {"discrete": 0, "integrated": 1, "virtual": 2, "cpu": 3, "other": 4}
_MIN_API = (1, 2)
_PORTABILITY_SUBSET = "VK_KHR_portability_subset"

_messages: list[str] = []


def validation_messages() -> list[str]:
    """Warnings and errors that the validation layer reported so far (``OAZOO_VALIDATION=1``)."""
    return list(_messages)


def _record(message: str) -> None:
    """Keep a message, also in the file ``OAZOO_VALIDATION_LOG``, where whoever started several processes finds it."""
    _messages.append(message)
    log = os.environ.get("OAZOO_VALIDATION_LOG")
    if log:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")


@dataclass(frozen=True)
class DeviceInfo:
    """What is known of a physical device before it is opened.

    ``kind`` is discrete, integrated, virtual, cpu or other; ``problem`` says why the runtime cannot use it, or is None.
    ``subgroup_exchange`` is whether compute kernels may sum over a subgroup and read from its other lanes: kernels for CPU
    devices do, the portable ones talk through shared memory. Sizes are bytes.
    """

    index: int
    name: str
    kind: str
    uuid: str
    api_version: tuple[int, int, int]
    driver: str
    vendor_id: int
    device_id: int
    driver_version: int
    cache_uuid: str
    subgroup_size: int
    subgroup_exchange: bool
    max_buffer_bytes: int
    max_allocation_bytes: int
    max_allocations: int
    max_groups: tuple[int, int, int]
    max_invocations: int
    max_shared_bytes: int
    max_push_bytes: int
    max_storage_range: int
    heaps: tuple[tuple[int, bool], ...]
    features: frozenset[str]
    has_memory_budget: bool
    portability_subset: bool
    problem: str | None

    @property
    def is_software(self) -> bool:
        """True for a driver that computes on the processor, such as Mesa's llvmpipe."""
        return self.kind == "cpu"


class Instance:
    """The process's VkInstance. One is enough: use :func:`get_instance`."""

    def __init__(self) -> None:
        vk = load()
        self._vk = vk
        ffi = vk.ffi
        version = ffi.new("uint32_t *", 1 << 22)
        check(vk.lib.vkEnumerateInstanceVersion(version), "vkEnumerateInstanceVersion")
        if (version[0] >> 22, version[0] >> 12 & 0x3FF) < _MIN_API:
            raise DeviceError("the Vulkan loader is older than 1.2; update it")
        available, count = enumerate_all(
            "vkEnumerateInstanceExtensionProperties", "VkExtensionProperties", ffi.NULL
        )
        names = {ffi.string(available[i].extensionName).decode() for i in range(count)}
        extensions, layers, flags = [], [], 0
        self.validating = os.environ.get("OAZOO_VALIDATION", "") not in ("", "0")
        if "VK_KHR_portability_enumeration" in names:
            extensions.append(b"VK_KHR_portability_enumeration")
            flags = 1
        if self.validating:
            present, layer_count = enumerate_all("vkEnumerateInstanceLayerProperties", "VkLayerProperties")
            if b"VK_LAYER_KHRONOS_validation" not in {
                ffi.string(present[i].layerName) for i in range(layer_count)
            }:
                raise DeviceError(
                    "OAZOO_VALIDATION is set but the Khronos validation layer is not installed "
                    "(Debian and Ubuntu: apt install vulkan-validationlayers)"
                )
            layers.append(b"VK_LAYER_KHRONOS_validation")
            extensions.append(b"VK_EXT_debug_utils")
        c_extensions = [ffi.new("char[]", name) for name in extensions]
        c_layers = [ffi.new("char[]", name) for name in layers]
        extension_array = ffi.new("char *[]", c_extensions)
        layer_array = ffi.new("char *[]", c_layers)
        app_name = ffi.new("char[]", b"oazoo")
        app = struct(
            "VkApplicationInfo",
            vk.VK_STRUCTURE_TYPE_APPLICATION_INFO,
            pApplicationName=app_name,
            pEngineName=app_name,
            apiVersion=(1 << 22) | (3 << 12),
        )
        info = struct(
            "VkInstanceCreateInfo",
            vk.VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO,
            flags=flags,
            pApplicationInfo=app,
            enabledExtensionCount=len(extensions),
            ppEnabledExtensionNames=extension_array,
            enabledLayerCount=len(layers),
            ppEnabledLayerNames=layer_array,
        )
        handle = ffi.new("VkInstance *")
        result = vk.lib.vkCreateInstance(info, ffi.NULL, handle)
        if result == vk.VK_ERROR_INCOMPATIBLE_DRIVER:
            raise DeviceError(f"no Vulkan driver works here; {_remedy()}. `oazoo doctor` says more")
        check(result, "vkCreateInstance")
        self.handle = handle[0]
        self._messenger = self._open_messenger() if self.validating else None

    def _open_messenger(self) -> Any:
        vk, ffi = self._vk, self._vk.ffi

        def report(severity: int, kind: int, data: Any, user: Any) -> int:
            _record(ffi.string(data.pMessage).decode("utf-8", "replace"))
            return 0

        # Kept for as long as the instance lives: the driver calls into it.
        self._report = ffi.callback(
            "VkBool32(VkDebugUtilsMessageSeverityFlagBitsEXT, VkFlags,"
            " VkDebugUtilsMessengerCallbackDataEXT *, void *)",
            report,
        )
        info = struct(
            "VkDebugUtilsMessengerCreateInfoEXT",
            vk.VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT,
            messageSeverity=0x1000 | 0x100,  # errors and warnings
            messageType=0x2 | 0x4,  # validation and performance
            pfnUserCallback=self._report,
        )
        create = ffi.cast(
            "PFN_vkCreateDebugUtilsMessengerEXT",
            vk.lib.vkGetInstanceProcAddr(self.handle, b"vkCreateDebugUtilsMessengerEXT"),
        )
        messenger = ffi.new("VkDebugUtilsMessengerEXT *")
        check(create(self.handle, info, ffi.NULL, messenger), "vkCreateDebugUtilsMessengerEXT")
        return messenger[0]

    def close(self) -> None:
        vk, ffi = self._vk, self._vk.ffi
        if self._messenger is not None:
            destroy = ffi.cast(
                "PFN_vkDestroyDebugUtilsMessengerEXT",
                vk.lib.vkGetInstanceProcAddr(self.handle, b"vkDestroyDebugUtilsMessengerEXT"),
            )
            destroy(self.handle, self._messenger, ffi.NULL)
            self._messenger = None
        vk.lib.vkDestroyInstance(self.handle, ffi.NULL)

    def physical_devices(self) -> list[tuple[Any, DeviceInfo]]:
        """Every physical device, with its description, in the loader's order."""
        array, count = enumerate_all("vkEnumeratePhysicalDevices", "VkPhysicalDevice", self.handle)
        return [(array[i], _describe(self._vk, array[i], i)) for i in range(count)]


def _describe(vk: Any, handle: Any, index: int) -> DeviceInfo:
    ffi = vk.ffi
    plain = ffi.new("VkPhysicalDeviceProperties *")
    vk.lib.vkGetPhysicalDeviceProperties(handle, plain)
    api = (plain.apiVersion >> 22, plain.apiVersion >> 12 & 0x3FF, plain.apiVersion & 0xFFF)
    maintenance4 = struct(
        "VkPhysicalDeviceMaintenance4Properties",
        vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_4_PROPERTIES,
    )
    v12 = struct(
        "VkPhysicalDeviceVulkan12Properties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_PROPERTIES
    )
    v11 = struct(
        "VkPhysicalDeviceVulkan11Properties", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_PROPERTIES
    )
    v11.pNext = v12
    if api >= (1, 3, 0):
        v12.pNext = maintenance4
    properties = struct(
        "VkPhysicalDeviceProperties2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2, pNext=v11
    )
    f12 = struct("VkPhysicalDeviceVulkan12Features", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES)
    f11 = struct(
        "VkPhysicalDeviceVulkan11Features",
        vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES,
        pNext=f12,
    )
    features = struct("VkPhysicalDeviceFeatures2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, pNext=f11)
    present: set[str] = set()
    if api >= (1, 2, 0):
        vk.lib.vkGetPhysicalDeviceProperties2(handle, properties)
        vk.lib.vkGetPhysicalDeviceFeatures2(handle, features)
        for ctype, group in (
            ("VkPhysicalDeviceVulkan12Features", f12),
            ("VkPhysicalDeviceVulkan11Features", f11),
            ("VkPhysicalDeviceFeatures", features.features),
        ):
            names = [name for name, _ in ffi.typeof(ctype).fields]
            present |= {name for name in names if name not in ("sType", "pNext") and getattr(group, name)}
    memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
    vk.lib.vkGetPhysicalDeviceMemoryProperties(handle, memory)
    rows, count = enumerate_all(
        "vkEnumerateDeviceExtensionProperties", "VkExtensionProperties", handle, ffi.NULL
    )
    extensions = {ffi.string(rows[i].extensionName).decode("utf-8", "replace") for i in range(count)}
    limits = plain.limits
    allocation = v11.maxMemoryAllocationSize or 2**30
    exchange = 0x1 | 0x4 | 0x10  # basic, arithmetic, shuffle
    problems = []
    if api < (1, 2, 0):
        problems.append(f"Vulkan {api[0]}.{api[1]} is older than 1.2")
    else:
        problems += [f"no {name}" for name in REQUIRED_FEATURES if name not in present]
    if compute_queue_family(vk, handle) is None:
        problems.append("no compute queue")
    return DeviceInfo(
        index=index,
        name=ffi.string(plain.deviceName).decode("utf-8", "replace"),
        kind=_KINDS.get(plain.deviceType, "other"),
        uuid=bytes(v11.deviceUUID).hex(),
        api_version=api,
        driver=f"{ffi.string(v12.driverName).decode('utf-8', 'replace')} "
        f"{ffi.string(v12.driverInfo).decode('utf-8', 'replace')}".strip(),
        vendor_id=plain.vendorID,
        device_id=plain.deviceID,
        driver_version=plain.driverVersion,
        cache_uuid=bytes(plain.pipelineCacheUUID).hex(),
        subgroup_size=v11.subgroupSize or 1,
        subgroup_exchange=v11.subgroupSupportedOperations & exchange == exchange
        and bool(v11.subgroupSupportedStages & 0x20),
        max_buffer_bytes=maintenance4.maxBufferSize or allocation,
        max_allocation_bytes=allocation,
        max_allocations=limits.maxMemoryAllocationCount,
        max_groups=tuple(limits.maxComputeWorkGroupCount),
        max_invocations=limits.maxComputeWorkGroupInvocations,
        max_shared_bytes=limits.maxComputeSharedMemorySize,
        max_push_bytes=limits.maxPushConstantsSize,
        max_storage_range=limits.maxStorageBufferRange,
        heaps=tuple(
            (memory.memoryHeaps[i].size, bool(memory.memoryHeaps[i].flags & 1))
            for i in range(memory.memoryHeapCount)
        ),
        features=frozenset(present),
        has_memory_budget=api >= (1, 1, 0) and "VK_EXT_memory_budget" in extensions,
        portability_subset=_PORTABILITY_SUBSET in extensions,
        problem="; ".join(problems) or None,
    )


#: What the kernels and the recorder are built on; all of it is in Vulkan 1.2's common set.
REQUIRED_FEATURES = ("bufferDeviceAddress", "timelineSemaphore")


def compute_queue_family(vk: Any, handle: Any) -> int | None:
    """Index of a queue family for compute: one without graphics when there is one, so a desktop stays responsive."""
    count = vk.ffi.new("uint32_t *")
    vk.lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, vk.ffi.NULL)
    families = vk.ffi.new("VkQueueFamilyProperties[]", max(1, count[0]))
    vk.lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, families)
    candidates = [i for i in range(count[0]) if families[i].queueFlags & 2 and families[i].queueCount]
    candidates.sort(key=lambda i: (families[i].queueFlags & 1, i))
    return candidates[0] if candidates else None


def timestamps(vk: Any, handle: Any, family: int) -> tuple[float, int] | None:
    """Nanoseconds a tick and valid bits of the clock that queues of a family write timestamps of; None without one."""
    count = vk.ffi.new("uint32_t *")
    vk.lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, vk.ffi.NULL)
    families = vk.ffi.new("VkQueueFamilyProperties[]", max(1, count[0]))
    vk.lib.vkGetPhysicalDeviceQueueFamilyProperties(handle, count, families)
    properties = vk.ffi.new("VkPhysicalDeviceProperties *")
    vk.lib.vkGetPhysicalDeviceProperties(handle, properties)
    bits, period = int(families[family].timestampValidBits), float(properties.limits.timestampPeriod)
    return (period, bits) if bits and period > 0 else None


def create_device(vk: Any, physical: Any, info: DeviceInfo) -> tuple[Any, int]:
    """Open a device with what the runtime needs and one queue; returns the VkDevice and the queue's family.

    Raises:
        DeviceError: the device lacks what is needed, or the driver refuses.
    """
    ffi = vk.ffi
    family = compute_queue_family(vk, physical)
    if info.problem is not None or family is None:
        raise DeviceError(f"the Vulkan device {info.name} cannot be used: {info.problem}")
    priority = ffi.new("float *", 1.0)
    queue = struct(
        "VkDeviceQueueCreateInfo",
        vk.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO,
        queueFamilyIndex=family,
        queueCount=1,
        pQueuePriorities=priority,
    )
    features = struct(
        "VkPhysicalDeviceVulkan12Features",
        vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES,
        **dict.fromkeys(REQUIRED_FEATURES, 1),
    )
    core = struct(
        "VkPhysicalDeviceFeatures2", vk.VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2, pNext=features
    )
    core.features.shaderInt64 = int("shaderInt64" in info.features)
    # Layered drivers (Vulkan on Metal) must be told that their gaps are known; the kernels need nothing they lack.
    names = [_PORTABILITY_SUBSET] if info.portability_subset else []
    c_names = [ffi.new("char[]", name.encode()) for name in names]
    name_array = ffi.new("char *[]", c_names)
    create = struct(
        "VkDeviceCreateInfo",
        vk.VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO,
        pNext=core,
        queueCreateInfoCount=1,
        pQueueCreateInfos=queue,
        enabledExtensionCount=len(names),
        ppEnabledExtensionNames=name_array,
    )
    handle = ffi.new("VkDevice *")
    check(vk.lib.vkCreateDevice(physical, create, ffi.NULL, handle), f"opening {info.name}")
    return handle[0], family


_instance: Instance | None = None


def get_instance() -> Instance:
    """The process's instance, created at the first call and destroyed at exit."""
    global _instance
    if _instance is None:
        _instance = Instance()
        atexit.register(_close_instance)
    return _instance


def _close_instance() -> None:
    global _instance
    if _instance is not None:
        _instance.close()
        _instance = None


def list_devices() -> list[DeviceInfo]:
    """Describe every Vulkan device of this machine, usable or not."""
    return [info for _, info in get_instance().physical_devices()]


def _remedy() -> str:
    """What to do where no driver answers: first lift a limit that somebody has set."""
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        if os.environ.get(name):
            return f"{name} limits the search to {os.environ[name]}: unset it to use the drivers that are installed"
    return (
        "without a GPU, install Mesa's software driver (Debian and Ubuntu: apt install mesa-vulkan-drivers)"
    )


def choose(devices: list[DeviceInfo], selector: str | None) -> DeviceInfo:
    """Pick a device.

    Args:
        devices: the candidates.
        selector: an index, ``cpu``, a UUID, or part of a name (case is ignored); None takes the best kind:
            discrete, integrated, virtual, then cpu.

    Raises:
        UsageError: the selector names no device, or more than one.
        DeviceError: there is no usable device.
    """
    if not devices:
        raise DeviceError(f"no Vulkan device answers; {_remedy()}. `oazoo doctor` says more")
    listing = ", ".join(f"{d.index}: {d.name} ({d.kind})" for d in devices)
    if selector is None or selector == "":
        usable = [d for d in devices if d.problem is None]
        if not usable:
            reasons = "; ".join(f"{d.name}: {d.problem}" for d in devices)
            raise DeviceError(f"no Vulkan device here can be used ({reasons}); a newer driver may help")
        return min(usable, key=lambda d: (_PREFERENCE[d.kind], d.index))
    wanted = selector.strip().lower()
    if wanted.isdecimal():
        found = [d for d in devices if d.index == int(wanted)]
    elif wanted == "cpu":
        found = [d for d in devices if d.kind == "cpu"][:1]
    else:
        compact = wanted.replace("-", "")
        found = [d for d in devices if d.uuid == compact] or [d for d in devices if wanted in d.name.lower()]
    if not found:
        raise UsageError(f"no Vulkan device matches {selector!r}; there are {listing}")
    if len(found) > 1:
        raise UsageError(f"{selector!r} matches more than one Vulkan device; there are {listing}")
    if found[0].problem is not None:
        raise DeviceError(f"the Vulkan device {found[0].name} cannot be used: {found[0].problem}")
    return found[0]
