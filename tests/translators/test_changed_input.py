"""Input that changes while it is read: told, never a killed process, never an output made of two versions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from oazoo.errors import FormatError
from oazoo.formats.oam import OamSource
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.translators import convert

#: Large enough that a tensor is streamed in several pieces, and that its end is on pages of its own.
COUNT = 3 << 20

#: Converts or verifies a file and does something to it once the first bytes were handled.
PROGRAM = """
import os, sys
from pathlib import Path
from oazoo.errors import OazooError
from oazoo.formats.detect import open_source
from oazoo.translators import convert

path, out, how, label = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
done = False

def change(*told):
    global done
    if done or told and told[0] != label and label != "any":
        return
    done = True
    if how == "shrink":
        os.truncate(path, 4096)
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "grow":
        os.truncate(path, path.stat().st_size + 1)
    elif how == "write":
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        os.utime(path, ns=(1, 1))
    elif how == "replace":
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.replace(path)
    elif how == "remove":
        path.unlink()

try:
    if label == "verify":
        label = "any"
        with open_source(path) as source:
            source.verify(change)
    elif label == "pieces":
        label = "any"
        with open_source(path) as source:
            for tensor in source.values():
                for piece in tensor.chunks(1 << 16):
                    piece.sum()
                    change()
    else:
        convert(path, out, arch="raw", progress=change)
except OazooError as error:
    print(type(error).__name__, error)
    sys.exit(1)
"""


def outcome(path: Path, out: Path, how: str, label: str) -> str:
    """What the program says; it must end by itself, with an error of ours."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, out, how, label], capture_output=True, text=True, timeout=120
    )
    assert run.returncode != -signal.SIGBUS, "killed by the system for a page that the file has lost"
    assert run.returncode == 1, (run.returncode, run.stdout, run.stderr)
    assert run.stdout.startswith("FormatError") and str(path) in run.stdout, run.stdout
    assert not out.exists() and not list(out.parent.glob(".oazoo-*")), "nothing may be left behind"
    return run.stdout


def safetensors(folder: Path) -> Path:
    path = folder / "a.safetensors"
    save_file({"w": np.zeros(COUNT, "f4"), "v": np.zeros((2, 3), "f2")}, path)
    return path


def gguf(folder: Path) -> Path:
    from gguf import GGMLQuantizationType, GGUFWriter

    path = folder / "a.gguf"
    writer = GGUFWriter(path, "none")
    blocks = np.zeros((COUNT // 1024, 34 * 32), np.uint8)
    writer.add_tensor("w", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("make", [safetensors, gguf])
@pytest.mark.parametrize("how", ["shrink", "empty", "grow", "write", "replace", "remove"])
def test_during_a_conversion(make: Callable[[Path], Path], how: str, tmp_path: Path) -> None:
    said = outcome(make(tmp_path), tmp_path / "m.oam", how, "convert")
    assert "changed while it was" in said


@pytest.mark.parametrize("how", ["shrink", "write"])
def test_between_its_hash_and_its_use(how: str, tmp_path: Path) -> None:
    assert "changed while it was" in outcome(safetensors(tmp_path), tmp_path / "m.oam", how, "hash")


@pytest.mark.parametrize("how", ["shrink", "empty", "grow", "write"])
def test_while_checksums_are_verified(how: str, tmp_path: Path) -> None:
    convert(safetensors(tmp_path), tmp_path / "in.oam", arch="raw")
    assert "changed while it was read" in outcome(tmp_path / "in.oam", tmp_path / "m.oam", how, "verify")


@pytest.mark.parametrize("how", ["shrink", "empty", "write"])
def test_while_values_are_read_in_pieces(how: str, tmp_path: Path) -> None:
    assert "changed while it was read" in outcome(safetensors(tmp_path), tmp_path / "m.oam", how, "pieces")


def test_views_are_refused_after_a_change(tmp_path: Path) -> None:
    """Also of parts that are mapped already and are still there."""
    path = safetensors(tmp_path)
    with SafetensorsSource(path) as source:
        before = source["v"].numpy()
        os.utime(path, ns=(5, 5))
        for read in (source["v"].raw, source["v"].numpy, lambda: next(source["w"].chunks(8))):
            with pytest.raises(FormatError, match="somebody wrote to it"):
                read()
        assert before.sum() == 0


def test_a_file_that_is_only_looked_at_is_not_a_changed_one(tmp_path: Path) -> None:
    path = safetensors(tmp_path)
    with SafetensorsSource(path) as source:
        path.read_bytes()
        path.chmod(0o444)
        path.rename(tmp_path / "moved")
        assert source["v"].numpy().shape == (2, 3)
    convert(tmp_path / "moved", tmp_path / "m.oam", arch="raw")
    with OamSource(tmp_path / "m.oam") as source:
        source.verify()
