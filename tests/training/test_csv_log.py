"""The log of a run: exact numbers, one row a step, whole again after a kill at any byte; and its curves."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.training.csv_log import (
    STEP_COLUMNS,
    VALIDATION_COLUMNS,
    CsvFile,
    CsvLog,
    read_log,
    validation_path,
)
from oazoo.training.curves import draw_curves, smooth
from oazoo.training.records import StepRecord, Summary, ValidationRecord

HEADER = (
    "step,epoch,loss_nats_per_token,learning_rate,gradient_norm_nats_per_token,samples_rows,tokens_targets,"
    "wall_seconds\n"
)


def record(step: int) -> StepRecord:
    """A step with figures that short decimals do not have."""
    loss = float(np.float32(np.log(step + 2) / 3))
    return StepRecord(
        step, step // 10, loss, 1e-3 / step, None if step % 3 else 0.1 * step, 4, 4 * step, 0.01 / step
    )


def validation(step: int, loss: float) -> ValidationRecord:
    return ValidationRecord(step, loss, 100, 0.25, step == 4)


def trainer(step: int = 0) -> Any:
    return SimpleNamespace(state=SimpleNamespace(step=step))


def whole(path: Path, steps: int) -> bytes:
    log = CsvLog(path, overwrite=True)
    log.on_start(trainer())
    log.on_steps(trainer(), [record(step) for step in range(1, steps + 1)])
    log.on_end(trainer(), Summary(0, 0, 0, 0.0, "finished", *[None] * 9))
    return path.read_bytes()


def test_one_exact_row_a_step(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    data = whole(path, 50)
    assert data.decode().startswith(HEADER)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    for step, row in enumerate(rows, 1):
        for column, name in STEP_COLUMNS.items():
            wanted = getattr(record(step), name)
            assert row[column] == "" if wanted is None else float(row[column]) == wanted
    read = read_log(path)
    assert read["step"].tolist() == list(range(1, 51))
    assert (
        np.isnan(read["gradient_norm_nats_per_token"][0])
        and read["gradient_norm_nats_per_token"][2] == 0.1 * 3
    )
    assert read["loss_nats_per_token"].tolist() == [record(step).loss for step in range(1, 51)]


def test_validations_have_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CsvLog(path)
    log.on_start(trainer())
    log.on_validation(trainer(), validation(2, 1.5))
    log.on_validation(trainer(), validation(4, 1.25))
    log.on_checkpoint(trainer(), "somewhere")
    log.on_failure(trainer(), KeyboardInterrupt())
    beside = validation_path(path)
    assert beside.name == "log.validation.csv"
    read = read_log(beside, VALIDATION_COLUMNS)
    assert read["step"].tolist() == [2, 4] and read["loss_nats_per_token"].tolist() == [1.5, 1.25]
    assert read["best_so_far"].tolist() == [0, 1]
    with pytest.raises(OutputError, match="is closed"):
        log.on_steps(trainer(), [record(1)])


@pytest.mark.parametrize("zeros", [0, 3])
def test_a_log_torn_at_any_byte_is_continued_as_if_nothing_had_been(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "log.csv"
    wanted = whole(path, 4)
    for size in range(len(wanted)):
        path.write_bytes(wanted[:size] + b"\0" * zeros)
        known = max(wanted[:size].count(b"\n") - 1, 0)
        assert read_log(path)["step"].tolist() == list(range(1, known + 1))
        step = min(known, 2)  # the checkpoint is of step 2, or of the last that was written
        log = CsvLog(path, resumed=True)
        log.on_start(trainer(step))
        log.on_steps(trainer(), [record(n) for n in range(step + 1, 5)])
        log.on_failure(trainer(), KeyboardInterrupt())
        assert path.read_bytes() == wanted


def test_a_killed_writer_loses_nothing_that_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    program = (
        "import sys, itertools\n"
        "from types import SimpleNamespace\n"
        "from oazoo.training.csv_log import CsvFile, STEP_COLUMNS\n"
        "file = CsvFile(sys.argv[1], STEP_COLUMNS)\nfile.create()\n"
        "for step in itertools.count(1):\n"
        "    file.write([SimpleNamespace(step=step, epoch=0, loss=1/step, lr=0.1, grad_norm=None, samples=1, tokens=2,"
        " seconds=0.5)])\n"
        "    print(step, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        while int(running.stdout.readline()) < 200:
            pass
        os.kill(running.pid, signal.SIGKILL)
    steps = read_log(path)["step"]
    assert len(steps) >= 200 and (steps == np.arange(1, len(steps) + 1)).all()
    file = CsvFile(path, STEP_COLUMNS)
    file.resume(150)
    file.close()
    assert len(read_log(path)["step"]) == 150


def test_another_runs_log_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    data = whole(path, 3)
    with pytest.raises(UsageError, match="exists already"):
        CsvLog(path).on_start(trainer())
    assert path.read_bytes() == data
    CsvLog(path, overwrite=True).on_start(trainer())
    assert path.read_bytes() == HEADER.encode()
    with pytest.raises(OutputError, match="cannot be written"):
        CsvLog(tmp_path / "nowhere" / "log.csv").on_start(trainer())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,b,c\n1,2,3\n", "no log of this kind"),
        (b"something else", "no log of this kind"),
        (HEADER.encode() + b"1,2,3\n4,0,1,1,1,1,1,1\n", ":2: is no row of 8 numbers"),
        (HEADER.encode() + b"1,0,x,1,1,1,1,1\n", ":2: is no row"),
        (HEADER.encode() + b"nan,0,1,1,1,1,1,1\n", ":2: is no row"),
    ],
)
def test_what_is_no_log_is_left_alone(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(data)
    for step in (0, 2):
        with pytest.raises(FormatError, match=message):
            CsvLog(path, resumed=True).on_start(trainer(step))
    with pytest.raises(FormatError, match=message):
        read_log(path)
    assert path.read_bytes() == data


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_says_so() -> None:
    file = CsvFile("/dev/full", STEP_COLUMNS)
    with pytest.raises(OutputError, match="no space left"):
        file.create()


def test_smoothing_is_a_mean_that_forgets() -> None:
    values = np.array([np.nan, 4.0, 2.0, np.nan, 8.0])
    found = smooth(values, 2)
    assert np.isnan(found[0]) and found[1] == 4.0
    assert found[2] == pytest.approx((4 * 0.25 + 2 * 0.5) / 0.75)
    assert found[3] == found[2]
    assert found[4] == pytest.approx((4 * 0.125 + 2 * 0.25 + 8 * 0.5) / 0.875)
    assert smooth(np.full(1000, 3.0), 20).tolist() == pytest.approx([3.0] * 1000)


def test_curves_are_a_picture(tmp_path: Path) -> None:
    path, picture = tmp_path / "log.csv", tmp_path / "curves.png"
    whole(path, 40)
    draw_curves(path, picture)
    alone = picture.read_bytes()
    assert alone.startswith(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UsageError, match="exists already"):
        draw_curves(path, picture)
    held = CsvFile(validation_path(path), VALIDATION_COLUMNS)
    held.create(overwrite=True)
    held.write([validation(10, 0.9), validation(20, 0.7), validation(30, 0.8)])
    held.close()
    draw_curves(path, picture, overwrite=True)
    assert picture.read_bytes() != alone
    path.write_text(HEADER)
    with pytest.raises(UsageError, match="no steps yet"):
        draw_curves(path, picture, overwrite=True)
    with pytest.raises(UsageError, match="no such log"):
        draw_curves(tmp_path / "no.csv", picture, overwrite=True)
