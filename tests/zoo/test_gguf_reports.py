"""GGUF files that people had trouble with, through the commands: what they say, and their exit status."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_metadata, llama_tensors, write_gguf
from click.testing import CliRunner
from exported import oam_bytes

from oazoo.cli import main
from oazoo.formats.ggml_types import GGML_TYPES


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def llama(path: Path, kind: str = "F32", **options: Any) -> Path:
    """A tiny Llama whose rows are whole blocks."""
    metadata = llama_metadata() | {"llama.feed_forward_length": 64}
    return write_gguf(
        path, metadata, gguf_names(llama_tensors(LLAMA | {"intermediate_size": 64})), kind, **options
    )


def refused_everywhere(path: Path, *words: str) -> None:
    """Every command that reads a model says the same, with exit status 1, and leaves nothing."""
    before = sorted(path.parent.iterdir())
    for command in (
        ("inspect", path),
        ("convert", path, "-o", path.parent / "m.oam"),
        ("convert", path, "-o", path.parent / "m.oam", "--arch", "raw"),
        ("convert", path, "--dry-run"),
        ("diff", path, path),
        ("generate", path, "-p", "x"),
    ):
        status, out, said = run(*command)
        assert status == 1 and not out, (command, status, out)
        assert said.count("error: ") == 1 and all(word in said for word in words), (command, said)
        assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_big_endian(kind: str, version: int, tmp_path: Path) -> None:
    """Every number of the header is swapped: version, counts, lengths, types, dimensions, offsets."""
    path = llama(tmp_path / "big.gguf", kind, endianess=gguf.GGUFEndian.BIG)
    data = bytearray(path.read_bytes())
    assert data[4:8] == b"\0\0\0\3"
    data[4:8] = struct.pack(">I", version)
    path.write_bytes(data)
    refused_everywhere(path, "big-endian", f"version {version}", "little-endian", str(path))
    path.write_bytes(data[:9])  # cut short as well: what it is comes first
    assert "big-endian" in run("inspect", path)[2]


def test_a_big_endian_part(tmp_path: Path) -> None:
    names = [f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        order = gguf.GGUFEndian.BIG if number else gguf.GGUFEndian.LITTLE
        writer = gguf.GGUFWriter(tmp_path / name, "llama", endianess=order)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{number}", np.zeros(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    status, _, said = run("inspect", tmp_path / names[0])
    assert status == 1 and f"{names[1]}: big-endian" in said


def test_version_2_is_version_3(tmp_path: Path) -> None:
    """The two differ in nothing but the number, where the bytes are little-endian."""
    path = llama(tmp_path / "3.gguf", "Q8_0")
    data = bytearray(path.read_bytes())
    data[4] = 2
    (tmp_path / "2.gguf").write_bytes(data)
    for number in (2, 3):
        assert run("convert", tmp_path / f"{number}.gguf", "-o", tmp_path / f"{number}.oam")[0] == 0
    assert oam_bytes(tmp_path / "2.oam") == oam_bytes(tmp_path / "3.oam")


def with_type(path: Path, number: int) -> Path:
    """A file with a good tensor and one of 256 elements whose type is ``number``."""
    known = GGML_TYPES.get(number)
    size = 256 // known.block * known.block_bytes if known else 100
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("good", np.zeros(8, np.float32))
    writer.add_tensor("blk.0.ffn_down", np.zeros(size, np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    data = path.read_bytes()
    before = b"ffn_down" + struct.pack("<IQI", 1, size, gguf.GGMLQuantizationType.I8)
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, b"ffn_down" + struct.pack("<IQI", 1, 256, number)))
    return path


#: Types that the package knows are in translators/test_gguf_encodings.py; these are the removed, and the unpublished ones.
NUMBERS = [number for number, kind in GGML_TYPES.items() if kind.removed] + [42, 99, 200, 2**31, 2**32 - 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_types_that_nobody_decodes(number: int, tmp_path: Path) -> None:
    path = with_type(tmp_path / "m.gguf", number)
    status, shown, said = run("inspect", path, "--json")
    assert status == 0, said
    found = {tensor["name"]: tensor for tensor in json.loads(shown)["tensors"]}
    assert found["good"]["encoding"] == "f32" and found["blk.0.ffn_down"]["shape"] == [256]
    status, _, said = run("convert", path, "-o", tmp_path / "m.oam", "--arch", "raw")
    known = GGML_TYPES.get(number)
    named = f"{known.name} ({number}, removed from ggml)" if known else f"unknown ggml type {number}"
    assert status == 1 and named in said and "'blk.0.ffn_down'" in said
    assert "not supported; types that are: F32, F16, Q4_0" in said and "NVFP4" in said
    assert [item.name for item in tmp_path.iterdir()] == ["m.gguf"]


def test_the_exit_status_is_that_of_the_process(tmp_path: Path) -> None:
    path = with_type(tmp_path / "m.gguf", 4)
    for command, status in (
        (["inspect", path], 0),
        (["convert", path, "-o", tmp_path / "m.oam", "--arch", "raw"], 1),
    ):
        done = subprocess.run([sys.executable, "-m", "oazoo", *command], capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        assert ("Q4_2" in done.stderr) == (status == 1) and "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["missing", "renumbered", "joined"])
def test_split_files(what: str, tmp_path: Path) -> None:
    """Parts as llama.cpp writes them; what is wrong is named whichever part is opened."""
    whole = llama(tmp_path / "m.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3 and not whole.exists()
    for part in parts:
        assert run("convert", part, "-o", tmp_path / "m.oam", "--force")[0] == 0
    (tmp_path / "m.oam").unlink()
    if what == "missing":
        parts[1].unlink()
        opened, words = (parts[0], parts[2]), (parts[1].name, "not there")
    elif what == "renumbered":
        parts[1].rename(tmp_path / "x")
        shutil.move(parts[2], parts[1])
        shutil.move(tmp_path / "x", parts[2])
        opened, words = (parts[0], parts[1], parts[2]), ("is named as part", "but holds part")
    else:
        joined = tmp_path / "joined.gguf"
        joined.write_bytes(b"".join(part.read_bytes() for part in parts))
        opened, words = (joined,), ("joined end to end", "the parts of a split model stay as they are")
    before = sorted(tmp_path.iterdir())
    for path in opened:
        for command in (("inspect", path), ("convert", path, "-o", tmp_path / "m.oam")):
            status, _, said = run(*command)
            assert status == 1 and all(word in said for word in words), said
    assert sorted(tmp_path.iterdir()) == before
