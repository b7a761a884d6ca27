"""The training loop: steps, validations and checkpoints in order, with callbacks beside them.

Read :meth:`Trainer.fit` from the top; it is the whole life of a run. Nothing waits for the device at a step: losses stay
there and are read several at a time, so the device always has work queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from oazoo.errors import FormatError, UsageError
from oazoo.training.callbacks import Callback
from oazoo.training.control import TrainingControl
from oazoo.training.records import StepRecord, Summary, Tally, TrainingError, ValidationRecord
from oazoo.training.schedules import Constant, Schedule


class Batch(Protocol):
    """What a step learns from, as the loop sees it."""

    @property
    def samples(self) -> int:
        """Rows."""

    @property
    def tokens(self) -> int:
        """Tokens that count in the loss."""

    @property
    def where(self) -> str:
        """Where in the data it is from, for messages."""


class Batches(Protocol):
    """Training data without end, at a position that can be taken up again."""

    @property
    def epoch(self) -> int:
        """The pass over the data that the next batch is of, from 0."""

    def next(self) -> Sequence[Batch]:
        """The batches of one step: one, or several whose gradients are added up."""

    def state(self) -> Mapping[str, Any]:
        """The position, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class Stepper(Protocol):
    """What a step is: queued with :meth:`run`, its loss read with :meth:`drain`."""

    #: Steps whose losses are kept until they are read.
    capacity: int

    def run(self, batches: Sequence[Any]) -> None:
        """Queue forward, backward and update."""

    def drain(self) -> Sequence[tuple[float, float | None]]:
        """(loss, gradient norm or None) of every step since the last call, oldest first; waits for the device."""

    def set_lr(self, lr: float) -> None:
        """The learning rate of the steps that are queued from now on."""

    def set_weight_decay(self, value: float) -> None:
        """Their weight decay."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs besides weights and optimizer, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` gave."""


class Checkpoints(Protocol):
    """Where a run is saved."""

    def save(self, trainer: Trainer, *, best: bool) -> str:
        """Save the model, the optimizer and ``trainer.snapshot()``; returns the place."""


@dataclass
class State:
    """How far a run has come: steps done, tokens and samples learned from, the best validation, seconds since it began."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    validated: int = 0
    seconds: float = 0.0


class Trainer:
    """One run of training.

    Args:
        stepper: the step.
        batches: the data.
        steps: how many steps the whole run has, those before a resumption included.
        schedule: learning rate by step, or a fixed one.
        validate: computes the mean loss (nats a token) on held-out data, and over how many tokens.
        validate_every, checkpoint_every: steps between them; None for only at the end. ``checkpoints`` says where to.
        callbacks: told of what happens, in order.
        control: how others steer the run.
        read_every: steps whose losses are read together, at most; bounded by what the stepper keeps.
        read_seconds: when so much time has passed they are read, however few they are: slow steps are told of one by one.
        limit: seconds that the run may take, from the start of :meth:`fit` and before a resumption; validations and
            checkpoints count, pauses do not. The schedule and what is done every so many steps then follow the share of the
            time that has passed, where that is ahead of the share of the steps.
    """

    def __init__(
        self,
        stepper: Stepper,
        batches: Batches,
        *,
        steps: int,
        schedule: Schedule | float,
        validate: Callable[[], tuple[float, int]] | None = None,
        validate_every: int | None = None,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        control: TrainingControl | None = None,
        read_every: int = 16,
        read_seconds: float = 2.0,
        limit: float | None = None,
    ) -> None:
        for name, value in (
            ("steps", steps),
            ("validate_every", validate_every),
            ("checkpoint_every", checkpoint_every),
            ("read_every", read_every),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}")
        self.stepper, self.batches, self.steps = stepper, batches, steps
        self.schedule: Schedule = schedule if callable(schedule) else Constant(schedule)
        self.validate, self.validate_every = validate, validate_every
        self.checkpoints, self.checkpoint_every = checkpoints, checkpoint_every
        self.callbacks = list(callbacks)
        self.control = control or TrainingControl()
        self.state = State()
        self.limit = limit
        #: What the run is doing: "idle", "training", "validating", "saving", "paused", "ended".
        self.phase = "idle"
        self._read_every, self._read_seconds = min(read_every, stepper.capacity), read_seconds
        #: Whether a step takes so long that each is waited for: queued ahead, they would be told of, and given rates, too
        #: late. With a limit the first one is, too, which says how long a step takes.
        self._slow = limit is not None
        self._waiting: list[tuple[StepRecord, str]] = []
        self._clock = 0.0
        self._tally = Tally()
        self._ended = ""
        self._lr: float | None = None
        self._began = time.perf_counter()
        self._before = 0.0
        self._validation_seconds = 0.0
        self._paused = 0.0

    @property
    def place(self) -> int:
        """Where the run is in its schedule: at the steps done, or further on where the time that may be used is."""
        step = self.state.step
        if self.limit is None:
            return step
        return min(self.steps, max(step, int(self.steps * self.state.seconds / self.limit)))

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.schedule(self.place) if self._lr is None else self._lr

    def end(self, why: str) -> None:
        """End the run before its next step; called by callbacks."""
        self._ended = self._ended or why

    def fit(self) -> Summary:
        """Train until the last step, a stop, or an early stop; the end of it is validated and saved.

        Ctrl-C is not handled here: a half-queued step must not be saved. :func:`stop_on_signals` turns it into a stop.

        Raises:
            TrainingError: a loss is not finite. What was saved before stays; nothing is saved after.
            OazooError: as data, device and files have it.
        """
        try:
            self._began, self._before = time.perf_counter(), self.state.seconds
            self._tell("on_start")
            self._start_clock()
            while self._goes_on():
                before = self.place
                self._step()
                self._look_at_clock()
                after = self.place
                if after < self.steps and _due(before, after, self.validate_every):
                    self._validate()
                if after < self.steps and _due(before, after, self.checkpoint_every):
                    self._save()
                self._look_at_clock()
            self._read()
            if self.validate is not None and self.state.validated < self.state.step:
                self._validate()
            self._save()
            state = self.state
            summary = self._tally.summary(self._ended or "finished", state.best_loss, state.best_step)
            self._tell("on_end", summary)
            return summary
        except BaseException as error:
            self._tell("on_failure", error)
            raise
        finally:
            self.phase = "ended"

    def _look_at_clock(self) -> None:
        """Note how long the run has taken; end it while what comes after the last step still fits."""
        state = self.state
        state.seconds = self._before + time.perf_counter() - self._began
        if self.limit is not None:
            spent = self._tally.seconds
            step = sum(spent) / max(1, len(spent))
            if state.seconds + step + self._validation_seconds > self.limit:
                self.end("out of time")

    # ------------------------------------------------------------------------------------------------ the steps

    def _step(self) -> None:
        self.phase = "training"
        state = self.state
        lr = self.lr
        epoch = self.batches.epoch
        batches = self.batches.next()
        samples, tokens = sum(b.samples for b in batches), sum(b.tokens for b in batches)
        where = batches[0].where
        if tokens == 0:
            raise TrainingError(
                f"step {state.step + 1}: no token of the batch ({where}) counts in the loss: every target is masked"
            )
        self.stepper.set_lr(lr)
        self.stepper.run(batches)
        state.step += 1
        state.tokens += tokens
        state.samples += samples
        self._waiting.append((StepRecord(state.step, epoch, 0.0, lr, None, samples, tokens, 0.0), where))
        late = time.perf_counter() - self._clock > self._read_seconds
        if late or self._slow or len(self._waiting) >= self._read_every:
            self._read()

    def _read(self) -> None:
        """Wait for the steps that are queued, and tell of them."""
        if not self._waiting:
            return
        found = self.stepper.drain()
        now = time.perf_counter()
        each = (now - self._clock) / len(self._waiting)
        self._clock = now
        self._slow = each > self._read_seconds
        waiting, self._waiting = self._waiting, []
        records = []
        failure: TrainingError | None = None
        for (record, where), (loss, norm) in zip(waiting, found, strict=True):
            facts = asdict(record) | {"loss": loss, "grad_norm": norm, "seconds": each}
            records.append(StepRecord(**facts))
            if failure is None and not (math.isfinite(loss) and (norm is None or math.isfinite(norm))):
                failure = self._not_finite(records[-1], where)
        self._tally.add(records)
        device_seconds = getattr(self.stepper, "device_seconds", None)
        if device_seconds is not None:
            self._tally.add_device(device_seconds())
        self._tell("on_steps", records)
        if failure is not None:
            raise failure

    def _not_finite(self, record: StepRecord, where: str) -> TrainingError:
        what = (
            f"the loss is {record.loss}"
            if not math.isfinite(record.loss)
            else f"the gradient's norm is {record.grad_norm}"
        )
        return TrainingError(
            f"step {record.step}: {what} (batch: {where}, learning rate {record.lr:.3g}); training is stopped, and what was "
            "saved before is kept. Try a lower learning rate or a longer warm-up, clip the gradient, or look at that text"
        )

    def _validate(self) -> None:
        if self.validate is None:
            return
        self._read()
        self.phase = "validating"
        start = time.perf_counter()
        loss, tokens = self.validate()
        state = self.state
        if not math.isfinite(loss):
            raise TrainingError(f"after step {state.step}: the validation loss is {loss}")
        best = state.best_loss is None or loss < state.best_loss
        if best:
            state.best_loss, state.best_step = loss, state.step
        state.validated = state.step
        observe = getattr(self.schedule, "observe", None)
        if observe is not None:
            observe(loss)
        seconds = self._validation_seconds = time.perf_counter() - start
        self._tell("on_validation", ValidationRecord(state.step, loss, tokens, seconds, best))
        if best and self.checkpoints is not None:
            self._tell("on_checkpoint", self.checkpoints.save(self, best=True))
        self._start_clock()

    def _save(self) -> None:
        if self.checkpoints is None:
            return
        self._read()
        self.phase = "saving"
        self._tell("on_checkpoint", self.checkpoints.save(self, best=False))
        self._start_clock()

    def _goes_on(self) -> bool:
        """A safe point: what others ask for is done here. Whether there is another step."""
        while self.state.step < self.steps and not self._ended:
            if self.control.paused:
                self._read()
            requests = self.control.answer(self._held)
            for name, value in requests.changes.items():
                if name == "lr":
                    self._lr = value
                elif name == "weight_decay":
                    self.stepper.set_weight_decay(value)
                else:
                    setattr(self, name, int(value))
            if requests.checkpoint:
                self._save()
            if requests.stop:
                self.end("stopped")
            if not self._ended and not self.control.paused:
                return True
        return False

    def _held(self, paused: bool) -> None:
        self.phase = "paused" if paused else "training"
        self._tell("on_pause", paused)
        # A pause takes none of the time that the run may take.
        self._paused = time.perf_counter() if paused else self._paused
        self._began += 0.0 if paused else time.perf_counter() - self._paused
        self._start_clock()

    def _start_clock(self) -> None:
        """What came before is not time of steps. Called where no step is queued, or before the first."""
        self._clock = time.perf_counter()

    def _tell(self, event: str, *what: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *what)

    # ---------------------------------------------------------------------------------------- stopping and going on

    def snapshot(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides weights and optimizer, as JSON values."""
        schedule = getattr(self.schedule, "state_dict", None)
        return {
            "progress": asdict(self.state),
            "data": dict(self.batches.state()),
            "schedule": dict(schedule()) if schedule is not None else {},
            "stepper": dict(self.stepper.state()),
            "lr": self._lr,
            "callbacks": {type(c).__name__: dict(c.state()) for c in self.callbacks if c.state()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take up a run from what :meth:`snapshot` gave; weights and optimizer are loaded by the caller.

        Raises:
            FormatError: parts are missing or not of their types.
        """
        try:
            self.state = State(**snapshot["progress"])
            self.batches.restore(snapshot["data"])
            restore = getattr(self.schedule, "load_state_dict", None)
            if restore is not None:
                restore(snapshot["schedule"])
            self.stepper.restore(snapshot["stepper"])
            self._lr = None if snapshot["lr"] is None else float(snapshot["lr"])
            for callback in self.callbacks:
                found = snapshot["callbacks"].get(type(callback).__name__)
                if found:
                    callback.restore(found)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"the checkpoint's training state is damaged: {type(error).__name__}: {error}"
            ) from error


def _due(before: int, after: int, every: int | None) -> bool:
    return every is not None and after // every > before // every
