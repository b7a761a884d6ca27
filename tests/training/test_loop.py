"""The training loop against a problem that NumPy solves: least squares by gradient descent, in float64."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam_layout import OamConfig, OamOptimizer
from oazoo.training.callbacks import Callback, EarlyStopping, ProgressReport
from oazoo.training.checkpoints import ModelFile, RunFolder, checkpoints, latest_checkpoint, read_checkpoint
from oazoo.training.control import TrainingControl
from oazoo.training.loop import Trainer, TrainingError
from oazoo.training.records import StepRecord, Summary, ValidationRecord

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """A batch: inputs, targets."""

    x: Array
    y: Array
    first: int
    counted: int = 4

    @property
    def samples(self) -> int:
        return len(self.x)

    @property
    def tokens(self) -> int:
        return self.counted

    @property
    def where(self) -> str:
        return f"row {self.first}"


class Data:
    """Batches of four rows, shuffled anew in each pass."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.x = rng.normal(size=(20, 3))
        self.y = self.x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=20)
        self.epoch, self._index = 0, 0
        self.counted = 4

    def next(self) -> Sequence[Rows]:
        order = np.random.default_rng(self.epoch).permutation(20)
        rows = order[self._index : self._index + 4]
        first = self._index
        self._index += 4
        if self._index == 20:
            self.epoch, self._index = self.epoch + 1, 0
        return [Rows(self.x[rows], self.y[rows], first, self.counted)]

    def state(self) -> Mapping[str, Any]:
        return {"epoch": self.epoch, "index": self._index}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._index = int(state["epoch"]), int(state["index"])


class Descent:
    """Gradient descent with momentum on the mean squared error."""

    capacity = 8

    def __init__(self) -> None:
        self.w, self.v = np.zeros(3, np.float32), np.zeros(3, np.float32)
        self.lr = 0.0
        self.decay = 0.0
        self.drained = 0
        self._losses: list[tuple[float, float | None]] = []

    def run(self, batches: Sequence[Rows]) -> None:
        (batch,) = batches
        error = batch.x @ self.w - batch.y
        gradient = 2 * batch.x.T @ error / len(error)
        self._losses.append((float((error**2).mean()), float(np.sqrt((gradient**2).sum()))))
        self.v = (0.9 * self.v + gradient).astype(np.float32)
        self.w = (self.w - self.lr * self.v - self.lr * self.decay * self.w).astype(np.float32)

    def drain(self) -> Sequence[tuple[float, float | None]]:
        self.drained += 1
        losses, self._losses = self._losses, []
        return losses

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def set_weight_decay(self, value: float) -> None:
        self.decay = value

    def state(self) -> Mapping[str, Any]:
        return {"decay": self.decay}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.decay = float(state["decay"])


class Log(Callback):
    """Everything that was told, in order."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.validations: list[ValidationRecord] = []
        self.events: list[str] = []

    def on_start(self, trainer: Trainer) -> None:
        self.events.append("start")

    def on_steps(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        self.steps += records
        self.events.append(f"steps {records[0].step}-{records[-1].step}")

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        self.validations.append(record)
        self.events.append(f"validation {record.step}")

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        self.events.append(f"saved {Path(path).name}")

    def on_pause(self, trainer: Trainer, paused: bool) -> None:
        self.events.append("paused" if paused else "goes on")

    def on_end(self, trainer: Trainer, summary: Summary) -> None:
        self.events.append(f"end: {summary.ended}")

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self.events.append(f"failure {type(error).__name__}")


RUN = {"data": "rows", "seed": 5}


class Run:
    """A trainer with all that belongs to it, saved in a folder."""

    def __init__(self, folder: Path | None, steps: int = 12, **options: Any) -> None:
        self.descent, self.data, self.log = Descent(), Data(), Log()
        self.folder = None
        if folder is not None:
            self.folder = RunFolder(
                folder,
                model=ModelFile(OamConfig("least-squares")),
                weights=lambda: {"w": self.descent.w},
                optimizer=lambda: OamOptimizer("Muon", self.descent.lr, 0.9, first=self.descent.v),
                run=RUN,
            )
        settings: dict[str, Any] = {
            "schedule": lambda step: 0.05 / (1 + step),
            "read_every": 5,
            "read_seconds": float("inf"),
        }
        callbacks = [self.log, *options.pop("callbacks", [])]
        self.trainer = Trainer(
            self.descent,
            self.data,
            steps=steps,
            checkpoints=self.folder,
            callbacks=callbacks,
            **settings | options,
        )

    def validate(self) -> tuple[float, int]:
        error = self.data.x @ self.descent.w - self.data.y
        return float((error**2).mean()), len(error)

    def resume(self, folder: Path) -> None:
        found = latest_checkpoint(folder, RUN, lambda line: None)
        assert found is not None and found.optimizer is not None
        self.descent.w, self.descent.v = found.weights["w"], found.optimizer.first
        self.trainer.restore(found.snapshot)


def test_order_of_a_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", validate_every=4, checkpoint_every=6)
    run.trainer.validate = run.validate
    summary = run.trainer.fit()
    assert run.log.events == [
        "start", "steps 1-4", "validation 4", "saved best.oam",
        "steps 5-6", "saved checkpoint-00000006.oam",
        "steps 7-8", "validation 8", "saved best.oam",
        "steps 9-12", "validation 12", "saved best.oam", "saved checkpoint-00000012.oam",
        "end: finished",
    ]  # fmt: skip
    losses = [record.loss for record in run.log.steps]
    assert [record.step for record in run.log.steps] == list(range(1, 13))
    assert [record.epoch for record in run.log.steps] == [0] * 5 + [1] * 5 + [2] * 2
    assert [record.lr for record in run.log.steps] == [0.05 / (1 + step) for step in range(12)]
    assert (summary.steps, summary.samples, summary.tokens) == (12, 48, 48)
    assert (summary.loss_first, summary.loss_last) == (losses[0], losses[-1])
    assert summary.loss_mean == pytest.approx(np.mean(losses))
    assert losses[-1] < losses[0]
    assert summary.best_loss == min(v.loss for v in run.log.validations)
    assert summary.step_p50 is not None and summary.step_p95 is not None
    assert 0 < summary.step_p50 <= summary.step_p95


def test_losses_are_read_in_groups() -> None:
    run = Run(None, steps=16, read_every=100)
    run.trainer.fit()
    # No more wait at the device than it keeps losses.
    assert [e for e in run.log.events if e.startswith("steps")] == ["steps 1-8", "steps 9-16"]
    assert run.descent.drained == 2


@pytest.mark.parametrize("at", [1, 5, 7])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, at: int) -> None:
    """FT-04: weights, optimizer, schedule, position in the data: bit for bit."""
    whole = Run(None)
    whole.trainer.fit()
    first = Run(tmp_path / "run", steps=at)
    first.trainer.fit()
    second = Run(tmp_path / "run")
    second.resume(tmp_path / "run")
    second.trainer.fit()
    assert np.array_equal(second.descent.w, whole.descent.w)
    both = [*first.log.steps, *second.log.steps]
    facts = [(r.step, r.epoch, r.loss, r.lr, r.tokens) for r in both]
    assert facts == [(r.step, r.epoch, r.loss, r.lr, r.tokens) for r in whole.log.steps]
    assert second.trainer.state.tokens == whole.trainer.state.tokens == 48


def test_another_run_is_refused(tmp_path: Path) -> None:
    Run(tmp_path / "run", steps=2).trainer.fit()
    with pytest.raises(UsageError, match=r"another run: data was \"rows\", now it is \"others\""):
        latest_checkpoint(tmp_path / "run", RUN | {"data": "others"}, print)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    Run(tmp_path / "run", steps=6, checkpoint_every=3).trainer.fit()
    older, newest = checkpoints(tmp_path / "run")
    content = bytearray(newest.read_bytes())
    content[content.index(read_checkpoint(newest, RUN).weights["w"].tobytes())] ^= 1
    newest.write_bytes(content)
    heard: list[str] = []
    found = latest_checkpoint(tmp_path / "run", RUN, heard.append)
    assert found is not None and found.path == older
    assert len(heard) == 1 and newest.name in heard[0]


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", steps=2, validate_every=1)
    run.trainer.validate = run.validate
    run.trainer.fit()
    with pytest.raises(FormatError, match="holds a model but no training state"):
        read_checkpoint(tmp_path / "run" / "best.oam", RUN)


def test_old_checkpoints_go(tmp_path: Path) -> None:
    Run(tmp_path / "run", checkpoint_every=2).trainer.fit()
    assert [path.name for path in checkpoints(tmp_path / "run")] == [
        "checkpoint-00000010.oam",
        "checkpoint-00000012.oam",
    ]


@pytest.mark.parametrize(
    "snapshot", [{}, {"progress": {"step": 1, "bogus": 2}}, {"progress": {}, "data": {}}]
)
def test_damaged_snapshots(snapshot: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="training state is damaged"):
        Run(None).trainer.restore(snapshot)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """FT-09: it stops there, names the batch, and what was saved before stays."""
    run = Run(tmp_path / "run", checkpoint_every=2, steps=10)
    run.data.x[np.random.default_rng(1).permutation(20)[4]] = np.inf  # in the second batch of the second pass
    saved = {}
    with pytest.raises(TrainingError, match=r"step \d+: the loss is (nan|inf) \(batch: row \d+"):
        run.trainer.fit()
    for path in checkpoints(tmp_path / "run"):
        saved[path.name] = read_checkpoint(path, RUN).weights["w"]
    assert saved and all(np.isfinite(w).all() for w in saved.values())
    assert run.log.events[-1] == "failure TrainingError"


def test_a_batch_without_targets_ends_the_run() -> None:
    run = Run(None)
    run.data.counted = 0
    with pytest.raises(TrainingError, match=r"step 1: no token of the batch \(row 0\) counts"):
        run.trainer.fit()


def test_early_stopping() -> None:
    run = Run(None, steps=100, validate_every=1, callbacks=[EarlyStopping(2, 0.1)])
    losses = iter([5.0, 4.0, 3.95, 3.93, 3.0, 2.95, 2.94, 2.93, 1.0])
    run.trainer.validate = lambda: (next(losses), 1)
    summary = run.trainer.fit()
    # Three in a row that are not 0.1 better than the best: 2.95, 2.94, 2.93. 3.0 began the count anew.
    assert (summary.ended, summary.steps, summary.best_loss) == ("early stop", 8, 2.93)


def test_early_stopping_goes_on_counting_after_resuming() -> None:
    first = EarlyStopping(1)
    run = Run(None, steps=2, validate_every=1, callbacks=[first])
    losses = iter([1.0, 2.0])
    run.trainer.validate = lambda: (next(losses), 1)
    run.trainer.fit()
    snapshot = json.loads(json.dumps(run.trainer.snapshot()))
    second = Run(None, steps=9, validate_every=1, callbacks=[EarlyStopping(1)])
    second.trainer.validate = lambda: (3.0, 1)
    second.trainer.restore(snapshot)
    assert second.trainer.fit().steps == 1


def test_a_run_ends_in_time_and_its_schedule_follows_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock on which every step takes a second and a validation two.
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run = Run(
        None,
        steps=100,
        limit=20.0,
        validate_every=25,
        read_every=1,
        schedule=lambda step: 1e-9 * (100 - step),
    )
    step, validate = run.descent.run, run.validate

    def timed(batches: Sequence[Rows]) -> None:
        step(batches)
        now[0] += 1

    def checked() -> tuple[float, int]:
        now[0] += 2
        return validate()

    monkeypatch.setattr(run.descent, "run", timed)
    run.trainer.validate = checked
    summary = run.trainer.fit()
    assert summary.ended == "out of time" and now[0] == 120.0
    # Of 20 seconds: five steps, a validation at a quarter, three steps, another at a half, and so on.
    assert [v.step for v in run.log.validations] == [5, 8, 11, 12]
    rates = [round(1e9 * s.lr) for s in run.log.steps]
    assert rates == [100, 95, 90, 85, 80, 65, 60, 55, 40, 35, 30, 15]


def test_seconds_before_a_resumption_count() -> None:
    run = Run(None, steps=1000, limit=60.0)
    run.trainer.fit()
    assert run.trainer.state.step == 1000 and 0 < run.trainer.state.seconds < 60
    again = Run(None, steps=1000, limit=60.0)
    snapshot = run.trainer.snapshot()
    again.trainer.restore(
        {**snapshot, "progress": {**snapshot["progress"], "step": 10, "seconds": 59.999999}}
    )
    assert again.trainer.fit().ended == "out of time" and again.trainer.state.step == 11


def test_slow_steps_are_told_of_one_by_one() -> None:
    run = Run(None, steps=3, read_seconds=0.0)
    run.trainer.fit()
    assert run.log.events[1:4] == ["steps 1-1", "steps 2-2", "steps 3-3"]


def test_control_from_another_thread(tmp_path: Path) -> None:
    control = TrainingControl()
    run = Run(tmp_path / "run", steps=100_000, control=control, read_every=1)
    thread = threading.Thread(target=run.trainer.fit)
    control.pause()
    thread.start()
    _until(lambda: run.trainer.phase == "paused")
    at = run.trainer.state.step
    control.checkpoint()
    _until(lambda: f"saved checkpoint-{at:08d}.oam" in run.log.events)
    control.change(lr=0.001, weight_decay=0.5)
    _until(lambda: run.descent.decay == 0.5 and run.trainer.phase == "paused")
    assert run.trainer.state.step == at
    control.resume()
    _until(lambda: len(run.log.steps) > at + 3)
    control.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert run.log.events[-1] == "end: stopped"
    assert run.log.events[-2] == f"saved checkpoint-{run.trainer.state.step:08d}.oam"
    assert {record.lr for record in run.log.steps[at:]} == {0.001}


def test_stopping_while_paused() -> None:
    control = TrainingControl()
    control.pause()
    run = Run(None, steps=100_000, control=control)
    thread = threading.Thread(target=run.trainer.fit)
    thread.start()
    _until(lambda: run.trainer.phase == "paused")
    control.stop()
    thread.join(30)
    assert run.log.events[-1] == "end: stopped" and run.trainer.state.step == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.5}, "cannot be changed"),
        ({"lr": -1.0}, "cannot be -1"),
        ({"lr": float("nan")}, "cannot be nan"),
        ({"validate_every": 2.5}, "number of steps"),
        ({"checkpoint_every": 0}, "cannot be 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingControl().change(**settings)


def test_progress() -> None:
    told: list[tuple[str, int, int, str]] = []
    run = Run(None, callbacks=[ProgressReport(lambda *facts: told.append(facts), window=3)])
    run.trainer.fit()
    assert [(done, total, unit) for _, done, total, unit in told] == [
        (5, 12, "steps"),
        (10, 12, "steps"),
        (12, 12, "steps"),
    ]
    last = np.mean([record.loss for record in run.log.steps[-3:]])
    assert told[-1][0].startswith(f"loss {last:.3f}, ") and "tokens/s" in told[-1][0]


def _until(what: Any) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "it did not happen within 30 s"
        time.sleep(0.002)
