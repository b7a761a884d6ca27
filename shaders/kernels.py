"""The table of compiled kernels: name → Slang module, entry point (with its generic arguments), macros."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """What to compile: `entry` of `module`.slang; `defines` are macros for what Slang cannot make generic."""

    module: str
    entry: str
    defines: tuple[tuple[str, int], ...] = ()


KERNELS: dict[str, KernelSpec] = {
    "add_f32": KernelSpec("elementwise", "add"),
    **{
        f"pack_{target}_{source}": KernelSpec("pack", f"pack{target.upper()}<{source.upper()}Source>")
        for target in ("q4", "q8")
        for source in ("f32", "f16", "bf16")
    },
}
