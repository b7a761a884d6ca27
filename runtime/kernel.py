"""Kernels: compiled SPIR-V, its launcher made from the compiler's reflection, and the manifest that lists them."""

from __future__ import annotations

import json
import struct as packing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from oazoo.errors import DeviceError
from oazoo.runtime.memory import ALIGNMENT
from oazoo.runtime.recording import Span
from oazoo.runtime.vk import check, load, struct

if TYPE_CHECKING:
    from oazoo.runtime.device import Device
    from oazoo.runtime.tensor import Tensor

#: Push constants that every Vulkan device must offer.
PUSH_BYTES = 128
_FORMATS = {"ptr": ("Q", 8), "u32": ("I", 4), "i32": ("i", 4), "f32": ("f", 4)}


@dataclass(frozen=True)
class KernelSpec:
    """One row of the manifest: where the SPIR-V lies and how its argument struct is laid out."""

    name: str
    spv: str
    sha256: str
    entry: str
    workgroup_size: tuple[int, int, int]
    push_size: int
    args: tuple[tuple[str, str, int], ...]


@cache
def manifest() -> Mapping[str, KernelSpec]:
    """All compiled kernels by name, from ``oazoo.shaders``' manifest."""
    text = files("oazoo.shaders").joinpath("spirv", "manifest.json").read_text("utf-8")
    return {
        name: KernelSpec(
            name=name,
            spv=row["spv"],
            sha256=row["spv_sha256"],
            entry=row["entry"],
            workgroup_size=tuple(row["workgroup"]),
            push_size=row["push_constant_size"],
            args=tuple((a["name"], a["kind"], a["offset"]) for a in row["args"]),
        )
        for name, row in json.loads(text)["kernels"].items()
    }


def merged_spans(tensors: Iterable[Tensor]) -> list[Span]:
    """The spans of many tensors, widened to the units that memory is handed out in, neighbours made one."""
    merged: list[Span] = []
    for start, end in sorted(tensor.span for tensor in tensors):
        start, end = start // ALIGNMENT * ALIGNMENT, -(-end // ALIGNMENT) * ALIGNMENT
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


class Kernel:
    """A compute pipeline with a typed launcher. Get one from :meth:`oazoo.runtime.Device.kernel`."""

    def __init__(self, device: Device, spec: KernelSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._device = device
        if spec.push_size > PUSH_BYTES:
            raise DeviceError(
                f"kernel {spec.name} takes {spec.push_size} bytes of arguments; {PUSH_BYTES} are safe"
            )
        invocations = spec.workgroup_size[0] * spec.workgroup_size[1] * spec.workgroup_size[2]
        if invocations > device.info.max_invocations:
            raise DeviceError(
                f"kernel {spec.name} needs workgroups of {invocations}; {device.info.name} allows "
                f"{device.info.max_invocations}"
            )
        layout, at = "<", 0
        for name, kind, offset in sorted(spec.args, key=lambda a: a[2]):
            letter, size = _FORMATS[kind]
            if offset < at:
                raise DeviceError(f"kernel {spec.name}: argument {name} overlaps the one before it")
            layout += f"{offset - at}x{letter}"
            at = offset + size
        self._pack = packing.Struct(f"{layout}{spec.push_size - at}x").pack
        ordered = sorted(spec.args, key=lambda a: a[2])
        self._names = tuple(name for name, _, _ in ordered)
        self._pointers = frozenset(name for name, kind, _ in ordered if kind == "ptr")
        self.pipeline = self._create()

    def _create(self) -> Any:
        vk = load()
        ffi = vk.ffi
        code = files("oazoo.shaders").joinpath("spirv", self.spec.spv).read_bytes()
        words = ffi.from_buffer("uint32_t[]", code)
        info = struct(
            "VkShaderModuleCreateInfo",
            vk.VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO,
            codeSize=len(code),
            pCode=words,
        )
        module = ffi.new("VkShaderModule *")
        handle = self._device.handle
        check(vk.lib.vkCreateShaderModule(handle, info, ffi.NULL, module), f"shader module {self.name}")
        entry = ffi.new("char[]", self.spec.entry.encode())
        create = struct(
            "VkComputePipelineCreateInfo",
            vk.VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO,
            layout=self._device.layout,
        )
        create.stage.sType = vk.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        create.stage.stage = 0x20
        create.stage.module = module[0]
        create.stage.pName = entry
        pipeline = ffi.new("VkPipeline *")
        cache = self._device.pipeline_cache
        result = vk.lib.vkCreateComputePipelines(handle, cache.handle, 1, create, ffi.NULL, pipeline)
        vk.lib.vkDestroyShaderModule(handle, module[0], ffi.NULL)
        check(result, f"pipeline of kernel {self.name}")
        cache.touched = True
        return pipeline[0]

    def dispatch(
        self,
        groups: tuple[int, int, int],
        reads: Mapping[str, Tensor | None],
        writes: Mapping[str, Tensor],
        /,
        *,
        work: int = 0,
        also_reads: Sequence[Tensor] = (),
        also_writes: Sequence[Tensor] = (),
        **scalars: float,
    ) -> None:
        """Record one run.

        Args:
            groups: workgroups in x, y, z; a run with none of them does nothing.
            reads: pointer arguments that are only read; None passes a null pointer.
            writes: pointer arguments that are written (and perhaps read).
            work: about how many multiply-adds the run does, where that is many: long submissions are split by it.
            also_reads: what the kernel reads through addresses that lie in another tensor.
            also_writes: and what it writes through them (and perhaps reads).
            scalars: the other fields of the argument struct.

        Raises:
            DeviceError: more groups than the device allows, or arguments that are not the kernel's.
        """
        if not (groups[0] and groups[1] and groups[2]):
            return
        limit = self._device.info.max_groups
        if groups[0] > limit[0] or groups[1] > limit[1] or groups[2] > limit[2]:
            raise DeviceError(f"kernel {self.name}: {groups} workgroups are more than the device's {limit}")
        if len(reads) + len(writes) + len(scalars) != len(self._names):
            given = {*reads, *writes, *scalars}
            raise DeviceError(
                f"kernel {self.name}: arguments {sorted(given)} are not its {sorted(self._names)}"
            )
        values: list[float] = []
        for name in self._names:
            if name in self._pointers:
                tensor = writes[name] if name in writes else reads[name]
                values.append(0 if tensor is None else tensor.address)
            else:
                values.append(scalars[name])
        read_spans = [t.span for t in reads.values() if t is not None]
        write_spans = [t.span for t in writes.values()]
        tensors: tuple[Iterable[Tensor | None], ...] = (reads.values(), writes.values())
        if also_reads or also_writes:
            read_spans += merged_spans(also_reads)
            write_spans += merged_spans(also_writes)
            tensors = (*tensors, also_reads, also_writes)
        self._device.record(self, self._pack(*values), groups, read_spans, write_spans, tensors, work)

    def destroy(self) -> None:
        vk = load()
        vk.lib.vkDestroyPipeline(self._device.handle, self.pipeline, vk.ffi.NULL)
