"""What the ``.oam`` writer refuses, and that a refusal leaves nothing behind."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer, OamProgress
from oazoo.formats.oam_writer import OamEntry, OamWriter

ENTRY = OamEntry("w", (4,), "f32")


def writer(path: Path, overwrite: bool = False) -> OamWriter:
    return OamWriter(path, config=OamConfig("test"), entries=[ENTRY], overwrite=overwrite)


def test_an_unwritten_tensor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"never written.*'w'"), writer(tmp_path / "x"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [b"", bytes(15), bytes(17), [bytes(8), bytes(9)], [b""], np.zeros(5, "f4")])
def test_a_wrong_number_of_bytes(tmp_path: Path, data: object) -> None:
    with pytest.raises(FormatError, match="takes 16 bytes"), writer(tmp_path / "x") as output:
        output.write("w", data)
    assert not list(tmp_path.iterdir())


def test_unknown_and_repeated_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'v' is not among"), writer(tmp_path / "x") as output:
        output.write("v", b"")
    with pytest.raises(UsageError, match="written already"), writer(tmp_path / "x") as output:
        output.write("w", bytes(16))
        output.write("w", bytes(16))


def test_interruption(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "x", overwrite=True):
        raise KeyboardInterrupt
    assert (tmp_path / "x").read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "entry",
    [
        OamEntry("", (1,), "f32"),
        OamEntry("n" * 128, (1,), "f32"),
        OamEntry("é" * 64, (1,), "f32"),
        OamEntry("a\0", (1,), "f32"),
        OamEntry("\ud800", (1,), "f32"),
        OamEntry("w", (1,) * 9, "f32"),
        OamEntry("w", (2**40, 2**40), "f32"),
        OamEntry("w", (0,), "q4"),
        OamEntry("w", (32,), "gguf.q8_0"),
        OamEntry("w", (32,), "f33"),
        OamEntry("w", (32,), "q8", "state"),
        OamEntry("w", (32,), "f8_e4m3", "state"),
        OamEntry("w", (3,), "f4_e2m1"),
    ],
)
def test_what_the_format_cannot_hold(tmp_path: Path, entry: OamEntry) -> None:
    with pytest.raises(FormatError):
        OamWriter(tmp_path / "x", config=OamConfig("test"), entries=[entry])


def test_names_are_unique(tmp_path: Path) -> None:
    for entries in ([ENTRY, ENTRY], [ENTRY, OamEntry("w", (1,), "u8", "state")]):
        with pytest.raises(FormatError, match="twice"):
            OamWriter(tmp_path / "x", config=OamConfig("test"), entries=entries)


@pytest.mark.parametrize(
    "config",
    [
        OamConfig(""),
        OamConfig("a" * 32),
        OamConfig("a\0"),
        OamConfig("a", d_model=-1),
        OamConfig("a", vocab_size=2**32),
        OamConfig("a", weight_dtype="q4"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, config: OamConfig) -> None:
    with pytest.raises(FormatError, match="Config"):
        OamWriter(tmp_path / "x", config=config, entries=[])


@pytest.mark.parametrize(
    "progress", [OamProgress(step=2**63), OamProgress(phase=256), OamProgress(metric_name="m" * 32), b"x"]
)
def test_progress_that_does_not_fit(tmp_path: Path, progress: OamProgress | bytes) -> None:
    with pytest.raises(FormatError, match="Progress"):
        OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[], progress=progress)


def test_nothing_at_all(tmp_path: Path) -> None:
    with OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[]):
        pass
    with OamSource(tmp_path / "x") as source:
        source.verify()
        assert len(source) == 0 and source.progress == OamProgress() and source.optimizer is None


def test_only_in_a_with_statement(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with statement"):
        writer(tmp_path / "x").write("w", bytes(16))


def test_too_large_together(tmp_path: Path) -> None:
    entries = [OamEntry(str(number), (2**62,), "u8") for number in range(5)]
    with pytest.raises(FormatError, match="together"):
        OamWriter(tmp_path / "x", config=OamConfig("a"), entries=entries)


def test_more_than_the_disk_holds(tmp_path: Path) -> None:
    large = OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[OamEntry("w", (2**60,), "u8")])
    with pytest.raises(OutputError, match=f"takes {large.size} bytes, but only"), large:
        large.write("w", b"")
    assert not list(tmp_path.iterdir())


THREE = np.arange(3, dtype="f4")


@pytest.mark.parametrize(
    "optimizer",
    [
        OamOptimizer("Adam", first=THREE),
        OamOptimizer("Adam", first=THREE, second=THREE[:2]),
        OamOptimizer("Muon", first=THREE, second=THREE),
        OamOptimizer("Lion"),
        OamOptimizer("SGD", step=2**63, second=THREE[:0]),
    ],
)
def test_optimizers_that_do_not_fit(tmp_path: Path, optimizer: OamOptimizer) -> None:
    with pytest.raises(FormatError, match="Optimizer"):
        OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[], optimizer=optimizer)


def test_optimizers_come_back(tmp_path: Path) -> None:
    for kind, second in (("Adam", THREE * 2), ("Muon", None), ("SGD", THREE)):
        optimizer = OamOptimizer(kind, 0.5, 0.25, 0.125, 1.0, 2.0, 9, THREE, second)
        with OamWriter(
            tmp_path / "x", config=OamConfig("a"), entries=[], optimizer=optimizer, overwrite=True
        ):
            pass
        with OamSource(tmp_path / "x") as source:
            source.verify()
            read = source.optimizer
            assert read is not None
            assert (read.kind, read.lr, read.beta1, read.beta2) == (kind, 0.5, 0.25, 0.125)
            assert (read.eps, read.weight_decay, read.step) == (1.0, 2.0, 9)
            for ours, theirs in zip(read.moments, optimizer.moments, strict=True):
                np.testing.assert_array_equal(ours, theirs)


SIZES = [700_001, 3, 0, 1 << 21, 64, 5]


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 3, 1, 4, 2, 5]]
)
def test_checksums_whatever_the_order(tmp_path: Path, order: list[int]) -> None:
    """Those of weights large enough for a thread: in order, with empty ones left out, backwards, and mixed."""
    random = np.random.default_rng(0)
    tensors = {f"t{index}": random.integers(0, 256, size, np.uint8) for index, size in enumerate(SIZES)}
    entries = [OamEntry(name, value.shape, "u8") for name, value in tensors.items()]
    path = tmp_path / "x"
    with OamWriter(path, config=OamConfig("a"), entries=entries, assets={"b": bytes(99)}) as writer:
        for index in order:
            value = tensors[f"t{index}"]
            writer.write(f"t{index}", [value[:1000], value[1000:]])
    with OamSource(path) as source:
        source.verify()
        for name, value in tensors.items():
            np.testing.assert_array_equal(source[name].numpy(), value)


def test_a_payload_that_is_written_again_after_a_failure(tmp_path: Path) -> None:
    entries = [OamEntry(f"t{index}", (1 << 20,), "u8") for index in range(3)]
    values = [np.full(1 << 20, index + 1, np.uint8) for index in range(3)]
    with OamWriter(tmp_path / "x", config=OamConfig("a"), entries=entries) as writer:
        writer.write("t0", values[0])
        with pytest.raises(FormatError, match="takes 1048576 bytes, got 1000"):
            writer.write("t1", values[0][:1000])
        writer.write("t1", values[1])
        writer.write("t2", values[2])
    with OamSource(tmp_path / "x") as source:
        source.verify()
        assert [int(source[f"t{index}"].numpy().max()) for index in range(3)] == [1, 2, 3]


def test_a_failure_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with (
        pytest.raises(KeyboardInterrupt),
        OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[OamEntry("w", (1 << 21,), "u8")]),
    ):
        assert threading.active_count() > before
        raise KeyboardInterrupt
    assert threading.active_count() == before and not list(tmp_path.iterdir())


@pytest.mark.parametrize("after", [1 << 20, 40 << 20])
def test_a_disk_that_fills_up_behind_the_callers_back(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are written by a thread: its refusal is told by a later write, or at the end, and nothing is left."""
    size, before, write = 44 << 20, threading.active_count(), os.pwrite

    def full(handle: int, data: memoryview, offset: int) -> int:
        if offset >= after:
            raise OSError(errno.ENOSPC, "full")
        return write(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(OutputError, match=r"x: cannot be written: no space left on the disk"),
        OamWriter(tmp_path / "x", config=OamConfig("a"), entries=[OamEntry("w", (size,), "u8")]) as file,
    ):
        file.write("w", (bytes(1 << 20) for _ in range(size >> 20)))
    assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_the_config_may_come_last(tmp_path: Path) -> None:
    with OamWriter(tmp_path / "x", config=OamConfig("a", payload=b'{"oazoo": 1}'), entries=[]) as writer:
        with pytest.raises(FormatError, match="in place of"):
            writer.replace_config(OamConfig("a", payload=b'{"oazoo": 12}'))
        writer.replace_config(OamConfig("a", payload=b'{"oazoo": 2}'))
    with OamSource(tmp_path / "x") as source:
        source.verify()
        assert source.config.payload == b'{"oazoo": 2}'
