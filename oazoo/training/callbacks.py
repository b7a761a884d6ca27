"""Callbacks: what happens beside a training run, told at its steps, validations, checkpoints, and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oazoo.training.records import StepRecord, Summary, ValidationRecord

if TYPE_CHECKING:
    from oazoo.training.loop import Trainer


class Callback:
    """Told of what happens in a run; every method may be left as it is.

    Steps are told in groups, because reading a loss waits for the device: the loop reads several at once.
    """

    def on_start(self, trainer: Trainer) -> None:
        """The run begins, or goes on from a checkpoint (``trainer.state.step`` > 0)."""

    def on_steps(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        """These steps are done, in order."""

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """A validation is done."""

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        """A checkpoint has been saved."""

    def on_pause(self, trainer: Trainer, paused: bool) -> None:
        """The run is held, or goes on."""

    def on_end(self, trainer: Trainer, summary: Summary) -> None:
        """The run has ended without an error."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends by an error or is interrupted; release what is held."""

    def state(self) -> Mapping[str, Any]:
        """What a resumed run needs to know, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` gave."""


class EarlyStopping(Callback):
    """End the run when the validation loss has not fallen for ``patience`` validations.

    Args:
        patience: validations without improvement that are borne; the next one ends the run.
        min_delta: how far the loss must fall below the best to count, nats a token.
    """

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        from oazoo.errors import UsageError

        if patience < 0 or not 0 <= min_delta < float("inf"):
            raise UsageError(
                f"early stopping with a patience of {patience} and a least change of {min_delta} makes no sense"
            )
        self.patience, self.min_delta = patience, min_delta
        self._best: float | None = None
        self._bad = 0

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        if self._best is None or record.loss < self._best - self.min_delta:
            self._best, self._bad = record.loss, 0
            return
        self._bad += 1
        if self._bad > self.patience:
            trainer.end("early stop")

    def state(self) -> Mapping[str, Any]:
        return {"best": self._best, "bad": self._bad}

    def restore(self, state: Mapping[str, Any]) -> None:
        best = state.get("best")
        self._best = float(best) if isinstance(best, (int, float)) else None
        self._bad = int(state.get("bad", 0))


class ProgressReport(Callback):
    """Tells a progress function (label, done, total, unit) of every step, with rolling loss and throughput in the label.

    Args:
        progress: such as the command line's bar.
        window: steps that the rolling figures are over.
    """

    def __init__(self, progress: Any, window: int = 20) -> None:
        self._progress, self._window = progress, window
        self._recent: list[StepRecord] = []
        self._validation = ""

    def on_steps(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        self._recent = [*self._recent, *records][-self._window :]
        recent = self._recent
        seconds = sum(r.seconds for r in recent)
        loss = sum(r.loss for r in recent) / len(recent)
        label = f"loss {loss:.3f}{self._validation}"
        if recent[-1].grad_norm is not None:
            label += f", gradient {recent[-1].grad_norm:.2g}"
        if seconds > 0:
            tokens, samples = sum(r.tokens for r in recent), sum(r.samples for r in recent)
            label += f", {tokens / seconds:,.0f} tokens/s, {samples / seconds:,.1f} samples/s"
        self._progress(label, trainer.state.step, trainer.steps, "steps")

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        self._validation = f", validation {record.loss:.3f}"
