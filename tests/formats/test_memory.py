"""Reading and mapping: address-space limits, lifetimes of views, files that shrink."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oazoo.errors import FormatError, OazooError
from oazoo.formats.detect import open_source
from oazoo.formats.safetensors import SafetensorsSource


def sparse(path: Path, entries: dict[str, tuple[str, list[int], int]]) -> None:
    """A SafeTensors file of holes: name → dtype, shape, bytes."""
    header, position = {}, 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


def test_views_outlive_the_source(tmp_path: Path) -> None:
    path = tmp_path / "x"
    sparse(path, {"w": ("F32", [1000], 4000), "v": ("U8", [3], 3)})
    with open_source(path) as source:
        tensor = source["w"]
        values, view = tensor.numpy(), tensor.mapped()
    path.unlink()
    assert values.sum() == 0 and not values.flags.writeable
    assert view.sum() == 0 and not view.flags.writeable and not view.flags.owndata
    for read in (tensor.raw, tensor.mapped):
        with pytest.raises(OazooError, match="closed"):
            read()


def test_a_file_that_shrinks_while_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    sparse(path, {"w": ("F32", [100_000], 400_000)})
    with open_source(path) as source:
        with path.open("r+b") as file:
            file.truncate(1000)
        for read in (source["w"].raw, source["w"].mapped, lambda: source["w"].part(0, 8)):
            with pytest.raises(FormatError, match="shorter than it was"):
                read()


def test_tensors_across_windows_are_whole(tmp_path: Path) -> None:
    # Windows are 32 MiB; odd sizes put tensors across their bounds.
    path = tmp_path / "x"
    size = 5_000_001
    sparse(path, {f"t{index}": ("U8", [size], size) for index in range(20)})
    base = path.stat().st_size - 20 * size
    with path.open("r+b") as file:
        for index in range(20):
            file.seek(base + index * size)
            file.write(bytes([index + 1]))
            file.seek(base + (index + 1) * size - 1)
            file.write(bytes([index + 101]))
    with SafetensorsSource(path) as source:
        views = [tensor.mapped() for tensor in source.values()]
        for index, view in enumerate(views):
            assert (view[0], view[-1], int(np.count_nonzero(view))) == (index + 1, index + 101, 2)


def test_converting_needs_little_address_space(tmp_path: Path) -> None:
    """A file twice the size of the limit is copied into an ``.oam``, hashed and verified."""
    path = tmp_path / "in.safetensors"
    sparse(path, {f"t{index}": ("F32", [2 << 20], 8 << 20) for index in range(32)})
    program = (
        "import resource, sys\n"
        "from oazoo.formats.detect import open_source\n"
        "from oazoo.formats.oam_writer import OamConfig, OamEntry, OamWriter\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (128 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "with open_source(sys.argv[1]) as source:\n"
        "    entries = [OamEntry(name, t.info.shape, t.info.encoding) for name, t in source.items()]\n"
        "    with OamWriter(sys.argv[2], config=OamConfig('t'), entries=entries) as writer:\n"
        "        for name, tensor in source.items(): writer.write(name, tensor.raw())\n"
        "with open_source(sys.argv[2]) as source:\n"
        "    source.verify()\n"
        "    print(len(source), sum(t.info.nbytes for t in source.values()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, tmp_path / "out.oam"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["32", str(256 << 20)]), done.stderr
