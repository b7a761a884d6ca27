"""Compiled compute kernels: SPIR-V modules and the manifest that describes how to launch each of them.

The sources are the `*.slang` modules beside this file; `python -m oazoo.shaders.compile` turns them into
`spirv/NAME.spv` and `spirv/manifest.json`. Both are committed, so an installation needs no shader compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHADER_DIR = Path(__file__).resolve().parent
SPIRV_DIR = SHADER_DIR / "spirv"


@dataclass(frozen=True)
class ArgInfo:
    """One field of a kernel's `Args` struct: `kind` is "ptr" (8 bytes), "u32", "i32" or "f32" (4 bytes)."""

    name: str
    kind: str
    offset: int


@dataclass(frozen=True)
class KernelInfo:
    """How to launch one kernel: its SPIR-V file, entry point, workgroup size and push-constant fields."""

    name: str
    spv: Path
    spv_sha256: str
    source_sha256: str
    entry: str
    workgroup: tuple[int, int, int]
    push_constant_size: int
    args: tuple[ArgInfo, ...]

    def code(self) -> bytes:
        """The SPIR-V module."""
        return self.spv.read_bytes()


@cache
def manifest() -> dict[str, KernelInfo]:
    """Every compiled kernel by name."""
    raw = json.loads((SPIRV_DIR / "manifest.json").read_text(encoding="utf-8"))
    return {
        name: KernelInfo(
            name=name,
            spv=SPIRV_DIR / item["spv"],
            spv_sha256=item["spv_sha256"],
            source_sha256=item["source_sha256"],
            entry=item["entry"],
            workgroup=(item["workgroup"][0], item["workgroup"][1], item["workgroup"][2]),
            push_constant_size=item["push_constant_size"],
            args=tuple(ArgInfo(a["name"], a["kind"], a["offset"]) for a in item["args"]),
        )
        for name, item in raw["kernels"].items()
    }
