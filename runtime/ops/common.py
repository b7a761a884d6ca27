"""What the ops share: checks that name the op, grids within device limits, and the choice of a kernel's variant."""

from __future__ import annotations

import os

from oazoo.errors import DeviceError
from oazoo.runtime.device import Device
from oazoo.runtime.tensor import Tensor

#: Elements that a run can address: kernels index pointers with signed 32 bits.
MAX_ELEMENTS = 2**31 - 1
#: Workgroups along one axis that every device allows.
MAX_GROUPS = 65535


def require(condition: bool, op: str, what: str) -> None:
    """Raise a DeviceError that names the op unless the condition holds."""
    if not condition:
        raise DeviceError(f"{op}: {what}")


def require_dense(tensor: Tensor, op: str, name: str, dtype: str, *shape: int) -> None:
    """Check an argument's type and shape; -1 stands for any size."""
    fits = len(tensor.shape) == len(shape) and all(
        w in (-1, n) for n, w in zip(tensor.shape, shape, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        wanted = [n if n >= 0 else "any" for n in shape]
        raise DeviceError(f"{op}: {name} must be {dtype}{wanted}, not {tensor.dtype}{list(tensor.shape)}")
    require(tensor.numel <= MAX_ELEMENTS, op, f"{name} has more elements than one run can address")


def class_numbers(op: str, name: str, ids: Tensor, count: int) -> int:
    """Check numbers of classes or tokens: i32, u32 or u8 [count], or of any count if -1; 1 if they are bytes, else 0."""
    if ids.dtype not in ("i32", "u32", "u8"):
        raise DeviceError(f"{op}: {name} must be i32, u32 or u8, not {ids.dtype}")
    require_dense(ids, op, name, ids.dtype, count)
    require(ids.address % 4 == 0, op, f"{name} must start at a multiple of 4 bytes")
    return int(ids.dtype == "u8")


def portable_only() -> bool:
    """Whether ``OAZOO_PORTABLE_KERNELS=1`` asks for the kernels that need nothing but what every device has.

    Results agree to rounding; it shows what a GPU would run, and is a way out if a driver miscompiles the others.
    """
    return os.environ.get("OAZOO_PORTABLE_KERNELS", "") not in ("", "0")


def eight_lanes(device: Device) -> bool:
    """Whether the kernels written for CPU devices fit: subgroups of exactly 8 lanes, and 64-bit integers to load with."""
    return lanes(device) == "wave8" and "shaderInt64" in device.info.features


def lanes(device: Device) -> str:
    """How workgroups reduce on this device: ``wave8`` within a subgroup, or ``group32`` through shared memory.

    Subgroups of the processor drivers have a fixed size; those of GPUs may vary between kernels, and only shared memory is
    right whatever it turns out to be.
    """
    info = device.info
    fits = info.is_software and info.subgroup_size == 8 and info.subgroup_exchange and not portable_only()
    return "wave8" if fits else "group32"


def grid(groups: int) -> tuple[int, int, int]:
    """``groups`` workgroups as rows of at most 65,535; the kernel multiplies the row number with the first entry."""
    columns = max(1, min(groups, MAX_GROUPS))
    return columns, -(-groups // columns), 1
