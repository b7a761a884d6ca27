"""An .oam with another config: everything else is the same bytes, also in files that others wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oazoo.errors import OutputError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CONFIG_SECTION, FILE_HEADER, SECTION_HEADER, OamConfig, OamOptimizer
from oazoo.formats.oam_rewrite import write_with_payload
from oazoo.formats.oam_writer import OamEntry, OamWriter

OA = sorted((Path(__file__).parent.parent / "data" / "oa").glob("*.oam"))


def independent(path: Path) -> dict[str, Any]:
    """What the independent strict reader says, checksums checked."""
    spec = importlib.util.spec_from_file_location(
        "oamref", Path(__file__).parent.parent / "data" / "oamref.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result: dict[str, Any] = module.load(path)
    return result


def contents(source: OamSource) -> dict[int, bytes]:
    return {
        kind: bytes(source.section_bytes(kind, 0, section.size))
        for kind, section in source.sections.items()
        if kind != CONFIG_SECTION
    }


@pytest.mark.parametrize("path", OA, ids=lambda p: p.stem)
@pytest.mark.parametrize("size", [0, 1, 5000, 100_000])
def test_files_of_oa_keep_every_section(path: Path, size: int, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    with OamSource(path) as before:
        write_with_payload(before, out, b"x" * size)
        with OamSource(out) as after:
            after.verify()
            assert contents(after) == contents(before)
            assert after.config.payload == b"x" * size and after.version == before.version
            assert after.weights_checksum == before.weights_checksum
            for kind, section in after.sections.items():
                assert (section.offset - before.sections[kind].offset) % 4096 == 0
    assert len(independent(out)["weights"]) == len(independent(path)["weights"])


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours.oam"
    entries = [
        OamEntry("a", (3, 33), "q4"),
        OamEntry("b", (5,), "f32"),
        OamEntry("s", (2,), "f32", "state"),
    ]
    with OamWriter(
        path,
        config=OamConfig("test", payload=b'{"oazoo":1}'),
        entries=entries,
        assets={"tokenizer.json": b"{}"},
        optimizer=OamOptimizer("AdamW", first=np.ones(4, np.float32), second=np.zeros(4, np.float32)),
    ) as writer:
        writer.write("a", np.arange(80, dtype=np.uint8))
        writer.write("b", np.ones(5, np.float32))
        writer.write("s", np.ones(2, np.float32))
    return path


def test_in_place_again_and_again(ours: Path) -> None:
    before = independent(ours)
    with OamSource(ours) as source:
        kept = contents(source)
    for size in (10, 4000, 9000, 3, 0):
        with OamSource(ours) as source:
            write_with_payload(source, ours, b" " * size, overwrite=True)
        with OamSource(ours) as source:
            source.verify()
            assert contents(source) == kept and source.config.payload == b" " * size
    after = independent(ours)
    assert after["weights"] == before["weights"] and list(ours.parent.iterdir()) == [ours]


def test_version_1_keeps_its_kind_of_checksum(ours: Path, tmp_path: Path) -> None:
    """The same file with the header of wire version 1, whose checksum is the XOR of the sections'."""
    dense = tmp_path / "dense.oam"
    with OamWriter(dense, config=OamConfig("t"), entries=[OamEntry("b", (5,), "f32")]) as writer:
        writer.write("b", np.ones(5, np.float32))
    data = bytearray(dense.read_bytes())
    magic, _, count, flags, size, _, reserved = FILE_HEADER.unpack_from(data)
    checks = 0
    for row in SECTION_HEADER.iter_unpack(data[64 : 64 + 64 * count]):
        checks ^= row[7]
    FILE_HEADER.pack_into(data, 0, magic, 1, count, flags, size, checks, reserved)
    dense.write_bytes(data)
    with OamSource(dense) as source:
        write_with_payload(source, tmp_path / "out.oam", b"more" * 3000)
    with OamSource(tmp_path / "out.oam") as source:
        source.verify()
        assert source.version == 1 and source["b"].numpy().tolist() == [1] * 5


def test_refusals_leave_everything_as_it_was(ours: Path, tmp_path: Path) -> None:
    data = ours.read_bytes()
    with OamSource(ours) as source:
        with pytest.raises(UsageError, match="exists already"):
            write_with_payload(source, ours, b"x")
        with pytest.raises(OutputError, match="no such folder"):
            write_with_payload(source, tmp_path / "none" / "x.oam", b"x")
    assert ours.read_bytes() == data and list(tmp_path.iterdir()) == [ours]
