"""The committed SPIR-V is what the sources say, and says itself what a launcher has to know."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from oazoo.shaders import SPIRV_DIR, manifest
from oazoo.shaders import compile as compiler
from oazoo.shaders.kernels import KERNELS

SIZES = {"ptr": 8, "u32": 4, "i32": 4, "f32": 4}
SPIRV_MAGIC = 0x07230203
OP_SOURCE, OP_CAPABILITY, OP_ENTRY_POINT, OP_EXECUTION_MODE, OP_VARIABLE = 3, 17, 15, 16, 59


def instructions(code: bytes) -> list[tuple[int, tuple[int, ...]]]:
    """Opcode and operands of each instruction, read from the words (SPIR-V specification, section 2.3)."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    assert words[0] == SPIRV_MAGIC
    found, at = [], 5
    while at < len(words):
        count, opcode = words[at] >> 16, words[at] & 0xFFFF
        assert count > 0
        found.append((opcode, words[at + 1 : at + count]))
        at += count
    assert at == len(words)
    return found


def test_every_declared_kernel_is_compiled_and_no_other() -> None:
    assert set(manifest()) == set(KERNELS)
    files = {path.name for path in SPIRV_DIR.iterdir()}
    assert files == {info.spv.name for info in manifest().values()} | {"manifest.json"}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_source_and_spirv_agree(name: str) -> None:
    info = manifest()[name]
    mend = "run make shaders and commit shaders/spirv"
    assert compiler.source_hash(KERNELS[name]) == info.source_sha256, (
        f"the source of {name} has changed: {mend}"
    )
    assert hashlib.sha256(info.code()).hexdigest() == info.spv_sha256, f"{info.spv.name} has changed: {mend}"


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in compiler.SHADER_DIR.glob("*.slang"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = sorted(KERNELS)[0]
    monkeypatch.setattr(compiler, "SHADER_DIR", tmp_path)
    assert compiler.source_hash(KERNELS[name]) == manifest()[name].source_sha256
    # In the last file that the module draws in: what is imported counts too.
    last = compiler.source_closure(KERNELS[name].module)[-1]
    last.write_text(last.read_text("utf-8") + "// changed\n", "utf-8")
    assert compiler.source_hash(KERNELS[name]) != manifest()[name].source_sha256


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_the_manifest_describes_the_module(name: str) -> None:
    info = manifest()[name]
    code = instructions(info.code())
    entries = [operands for opcode, operands in code if opcode == OP_ENTRY_POINT]
    assert len(entries) == 1 and entries[0][0] == 5  # GLCompute
    modes = [operands[2:] for opcode, operands in code if opcode == OP_EXECUTION_MODE and operands[1] == 17]
    assert modes == [info.workgroup]  # LocalSize
    assert not [opcode for opcode, _ in code if opcode == OP_SOURCE]  # older validators refuse Slang's
    capabilities = {operands[0] for opcode, operands in code if opcode == OP_CAPABILITY}
    # Neither narrow nor double arithmetic (Float16, Float64, Int16, Int8), nor narrow storage (16 and 8 bits).
    assert not capabilities & {9, 10, 22, 39, *range(4433, 4437), *range(4448, 4451)}
    storage = [operands[2] for opcode, operands in code if opcode == OP_VARIABLE]
    assert 2 not in storage and 12 not in storage  # no uniform or storage buffer, so no descriptor sets
    at = 0
    for arg in sorted(info.args, key=lambda a: a.offset):
        assert arg.offset >= at and arg.offset % SIZES[arg.kind] == 0
        at = arg.offset + SIZES[arg.kind]
    assert at <= info.push_constant_size <= 128


def test_the_manifest_holds_no_path() -> None:
    text = (SPIRV_DIR / "manifest.json").read_text("utf-8")
    assert all(item["spv"] == Path(item["spv"]).name for item in json.loads(text)["kernels"].values())
