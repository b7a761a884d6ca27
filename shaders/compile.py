"""Compile the Slang modules to the committed SPIR-V and its manifest: `python -m oazoo.shaders.compile`.

The compiler is looked for in: the argument `--slangc`, the environment variable SLANGC, PATH, build/slang/
(left by an earlier run); failing those, the PyPI wheel `slangtorch` which carries it is downloaded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oazoo.errors import OazooError
from oazoo.shaders import SHADER_DIR, SPIRV_DIR
from oazoo.shaders.kernels import KERNELS, KernelSpec

# -O0: the wheel's slangc lacks Slang's SPIR-V optimiser, and drivers optimise anyway.
OPTIONS = ("-target", "spirv", "-emit-spirv-directly", "-O0", "-profile", "spirv_1_5")
# The profile is widened by the subgroup operations a kernel uses; that is intended, so the warning is off.
QUIET = ("-Wno-41012",)
MAX_PUSH_CONSTANT_BYTES = 128  # what every Vulkan device guarantees
ALLOWED_CAPABILITIES = {
    1: "Shader",
    5347: "PhysicalStorageBufferAddresses",
    11: "Int64",  # only in the kernels for CPU devices, which are chosen where the device has it
    61: "GroupNonUniform",
    63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot",
    65: "GroupNonUniformShuffle",
}
# Debug information; OpSource (3) carries a language number that older validators refuse.
DEBUG_OPCODES = {3, 4, 5, 6, 7}  # OpSource, OpSourceExtension, OpName, OpMemberName, OpString
OP_CAPABILITY = 17
SCALARS = {"uint32": "u32", "int32": "i32", "float32": "f32"}


class ShaderBuildError(OazooError):
    """A kernel did not compile, or its result breaks the rules for kernels."""


def source_closure(module: str) -> list[Path]:
    """The files that `module` is compiled from: itself and everything that it imports or includes, sorted."""
    found: set[Path] = set()
    todo = [SHADER_DIR / f"{module}.slang"]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        if not path.is_file():
            raise ShaderBuildError(
                f"{path.name} does not exist. Check the module names in shaders/kernels.py."
            )
        found.add(path)
        text = path.read_text(encoding="utf-8")
        todo += [
            SHADER_DIR / f"{m}.slang"
            for m in re.findall(r"^\s*(?:__exported\s+)?import\s+(\w+)\s*;", text, re.M)
        ]
        todo += [SHADER_DIR / f for f in re.findall(r'^\s*(?:#include|__include)\s+"([^"]+)"', text, re.M)]
    return sorted(found)


def source_hash(spec: KernelSpec) -> str:
    """sha256 over the source closure, the entry point and the compile options."""
    digest = hashlib.sha256()
    for path in source_closure(spec.module):
        text = path.read_bytes()
        digest.update(f"{path.name}\0{len(text)}\0".encode() + text)
    digest.update(json.dumps([spec.entry, spec.defines, spec.precise, OPTIONS]).encode())
    return digest.hexdigest()


def strip_debug(code: bytes) -> bytes:
    """Drop debug instructions from a SPIR-V module and check its capabilities."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    kept, at = list(words[:5]), 5
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if opcode == OP_CAPABILITY and words[at + 1] not in ALLOWED_CAPABILITIES:
            raise ShaderBuildError(f"SPIR-V capability {words[at + 1]} is not one that every device has.")
        if opcode not in DEBUG_OPCODES:
            kept += words[at : at + length]
        at += length
    return struct.pack(f"<{len(kept)}I", *kept)


def read_args(reflection: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], int, list[int]]:
    """The push-constant fields, their total size, and the workgroup size from slangc's reflection."""
    entry = reflection["entryPoints"][0]
    uniform = [p for p in entry["parameters"] if p.get("binding", {}).get("kind") == "uniform"]
    if len(uniform) != 1 or uniform[0]["type"]["kind"] != "struct":
        raise ShaderBuildError(f"{name}: a kernel takes exactly one uniform struct.")
    args: list[dict[str, Any]] = []
    end = 0
    for field in uniform[0]["type"]["fields"]:
        kind = field["type"]["kind"]
        if kind == "pointer":
            kind = "ptr"
        elif kind == "scalar" and field["type"]["scalarType"] in SCALARS:
            kind = SCALARS[field["type"]["scalarType"]]
        else:
            raise ShaderBuildError(
                f"{name}: field {field['name']} must be a pointer or a 32-bit scalar, not {kind}."
            )
        args.append({"name": field["name"], "kind": kind, "offset": field["binding"]["offset"]})
        end = max(end, field["binding"]["offset"] + field["binding"]["size"])
    if end > MAX_PUSH_CONSTANT_BYTES:
        raise ShaderBuildError(
            f"{name}: {end} bytes of arguments; devices guarantee {MAX_PUSH_CONSTANT_BYTES}."
        )
    return args, end, list(entry["threadGroupSize"])


def compile_kernel(slangc: str, name: str, spec: KernelSpec, out_dir: Path) -> dict[str, Any]:
    """Compile one kernel into `out_dir` and return its manifest entry."""
    with tempfile.TemporaryDirectory() as tmp:
        spv, reflection = Path(tmp) / "k.spv", Path(tmp) / "k.json"
        command = [slangc, str(SHADER_DIR / f"{spec.module}.slang"), "-I", str(SHADER_DIR), *OPTIONS, *QUIET]
        command += [f"-D{key}={value}" for key, value in spec.defines]
        command += ["-fp-mode", "precise"] if spec.precise else []
        command += ["-entry", spec.entry, "-reflection-json", str(reflection), "-o", str(spv)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not spv.is_file():
            raise ShaderBuildError(f"{name}: slangc failed.\n{done.stdout}{done.stderr}")
        if done.stderr.strip():
            print(f"{name}: {done.stderr.strip()}", file=sys.stderr)
        code = strip_debug(spv.read_bytes())
        args, size, workgroup = read_args(json.loads(reflection.read_text(encoding="utf-8")), name)
    target = out_dir / f"{name}.spv"
    target.write_bytes(code)
    if validator := shutil.which("spirv-val"):
        done = subprocess.run(
            [validator, "--target-env", "vulkan1.2", str(target)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ShaderBuildError(f"{name}: spirv-val refuses it.\n{done.stdout}{done.stderr}")
    return {
        "spv": target.name,
        "spv_sha256": hashlib.sha256(code).hexdigest(),
        "source_sha256": source_hash(spec),
        "entry": "main",
        "workgroup": workgroup,
        "push_constant_size": size,
        "args": args,
    }


def find_slangc(given: str | None, build_dir: Path) -> str:
    """The path of slangc; downloads the wheel that carries it when there is none."""
    for candidate in (given, os.environ.get("SLANGC"), shutil.which("slangc")):
        if candidate:
            if not Path(candidate).is_file():
                raise ShaderBuildError(
                    f"{candidate} is not a file. Point --slangc or SLANGC to the slangc program."
                )
            return candidate
    found = sorted(build_dir.glob("**/bin/slangc"))
    if not found:
        build_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(build_dir), "slangtorch"]
        subprocess.run(command, check=True)
        for wheel in build_dir.glob("slangtorch-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(build_dir)
        found = sorted(build_dir.glob("**/bin/slangc"))
    if not found:
        raise ShaderBuildError(
            "The slangtorch wheel holds no slangc for this system. Install Slang and set SLANGC."
        )
    found[0].chmod(0o755)
    return str(found[0])


def compile_all(slangc: str, out_dir: Path, only: list[str] | None = None) -> dict[str, Any]:
    """Compile every kernel of the table (or `only` those named) into `out_dir`; returns the manifest."""
    names = sorted(only or KERNELS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = list(pool.map(lambda n: compile_kernel(slangc, n, KERNELS[n], out_dir), names))
    version = subprocess.run([slangc, "-v"], capture_output=True, text=True, check=True)
    compiler = (version.stdout + version.stderr).strip()
    return {"compiler": f"slangc {compiler}", "kernels": dict(zip(names, entries, strict=True))}


def main(argv: list[str] | None = None) -> int:
    """Command line: compile what changed (or everything with --all) and write the manifest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slangc", help="path of the slangc program")
    parser.add_argument(
        "--all", action="store_true", help="recompile kernels whose source did not change, too"
    )
    options = parser.parse_args(argv)
    manifest_path = SPIRV_DIR / "manifest.json"
    old: dict[str, Any] = {}
    if manifest_path.is_file() and not options.all:
        old = json.loads(manifest_path.read_text(encoding="utf-8"))["kernels"]
    stale = [n for n, s in KERNELS.items() if n not in old or old[n]["source_sha256"] != source_hash(s)]
    stale += [n for n in KERNELS if n not in stale and not (SPIRV_DIR / f"{n}.spv").is_file()]
    manifest: dict[str, Any] = {"kernels": {}}
    if stale:
        slangc = find_slangc(options.slangc, SHADER_DIR.parent / "build" / "slang")
        manifest = compile_all(slangc, SPIRV_DIR, stale)
    elif manifest_path.is_file():
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    kernels = {n: manifest["kernels"].get(n) or old[n] for n in sorted(KERNELS)}
    for path in SPIRV_DIR.glob("*.spv"):
        if path.stem not in KERNELS:
            path.unlink()
    text = json.dumps({"compiler": manifest["compiler"], "kernels": kernels}, indent=1) + "\n"
    manifest_path.write_text(text, encoding="utf-8")
    print(f"{len(stale)} of {len(KERNELS)} kernels compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
