"""The folder of a training run: resumable checkpoints that rotate, and the best model so far.

A checkpoint is one `.oam` file: the weights, the optimizer's section, the tokenizer and other assets, and what the loop
needs to go on (`asset/training.json`, which other readers ignore). It is written beside its name, flushed and renamed: a
run that is killed at any moment leaves whole files only; older ones are removed after the new one has its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, OazooError, OutputError, UsageError
from oazoo.formats.atomic import output_error
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer, OamProgress
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.strict_json import decode_utf8, load_object
from oazoo.runtime.tensor import DTYPES
from oazoo.training.records import TrainingError

if TYPE_CHECKING:
    from oazoo.training.loop import Trainer

TRAINING_ASSET = "training.json"
BEST, LOCK = "best.oam", ".lock"
_NAME = re.compile(r"checkpoint-(\d{8})\.oam")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ModelFile:
    """What a checkpoint says of its model besides the weights: the Config section and the files that travel with it."""

    config: OamConfig
    assets: Mapping[str, bytes] = field(default_factory=dict)


class RunFolder:
    """Saves a run into a folder and finds its checkpoints again.

    Args:
        folder: made if it is missing; its parent must exist.
        model: what goes into every file.
        weights: the parameters by name, in order, as files have them.
        optimizer: the optimizer's section.
        encodings: types of weights that the best model does not have as f32, by name. Checkpoints have all as f32.
        run: identifies the run in its checkpoints: JSON values that must be equal for it to go on (data, model, settings).
        keep: resumable checkpoints that are kept.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        model: ModelFile,
        weights: Callable[[], Mapping[str, Floats]],
        optimizer: Callable[[], OamOptimizer | None],
        run: Mapping[str, Any],
        keep: int = 2,
        encodings: Mapping[str, str] | None = None,
    ) -> None:
        if keep < 1:
            raise UsageError(f"at least one checkpoint must be kept, not {keep}")
        self.folder = Path(folder)
        self._model, self._weights, self._optimizer = model, weights, optimizer
        self._run, self._keep, self._encodings = dict(run), keep, dict(encodings or {})
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise output_error(self.folder, error) from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder, in this process and in others; a process that ends lets go of it.

        Raises:
            UsageError: another run is in it.
            OutputError: the folder cannot be written.
        """
        import filelock  # here: slow to load

        lock = filelock.FileLock(self.folder / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise UsageError(
                f"{self.folder}: another run is at work in it; wait for its end, or name another folder"
            ) from None
        except OSError as error:
            raise output_error(self.folder, error) from error
        try:
            yield
        finally:
            lock.release()

    def save(self, trainer: Trainer, *, best: bool) -> str:
        """Save the run as it stands: as the best model, without what resuming needs, or as a checkpoint.

        Raises:
            TrainingError: a weight is not finite.
            OutputError: the file cannot be written.
        """
        state = trainer.state
        path = self.folder / (BEST if best else f"checkpoint-{state.step:08d}.oam")
        weights = self._weights()
        for name, values in weights.items():
            if not np.isfinite(values).all():
                raise TrainingError(
                    f"after step {state.step}: {name} has values that are not finite (learning rate {trainer.lr:.3g}), so "
                    "nothing is saved; what was saved before is kept. Try a lower learning rate or a longer warm-up, or "
                    "clip the gradient"
                )
        assets = dict(self._model.assets)
        if not best:
            document = {"run": self._run, "training": trainer.snapshot()}
            assets[TRAINING_ASSET] = json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
        optimizer = None if best else self._optimizer()
        progress = OamProgress(
            phase=1,
            step=state.step,
            lr=float(trainer.lr),
            best_metric=0.0 if state.best_loss is None else state.best_loss,
            lower_is_better=True,
            metric_name="validation loss",
        )
        kept = self._encodings if best else {}
        entries = [OamEntry(name, values.shape, kept.get(name, "f32")) for name, values in weights.items()]
        with OamWriter(
            path,
            config=self._model.config,
            entries=entries,
            assets=assets,
            progress=progress,
            optimizer=optimizer,
            overwrite=True,
        ) as writer:
            for name, values in weights.items():
                writer.write(name, values.astype(DTYPES[kept.get(name, "f32")], copy=False))
        if not best:
            self._rotate()
        return str(path)

    def _rotate(self) -> None:
        for path in checkpoints(self.folder)[: -self._keep]:
            path.unlink(missing_ok=True)


def checkpoints(folder: Path | str) -> list[Path]:
    """The resumable checkpoints of a run's folder, oldest first."""
    root = Path(folder)
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name) and path.is_file())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read: weights by name, the optimizer's section, and the loop's snapshot."""

    path: Path
    weights: dict[str, Floats]
    optimizer: OamOptimizer | None
    snapshot: Mapping[str, Any]


def read_checkpoint(path: Path | str, run: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint of this very run.

    Raises:
        FormatError: the file is damaged or no checkpoint.
        UsageError: it is of another model, other data, or other settings; the message says which.
    """
    where = Path(path)
    with OamSource(where) as source:
        source.verify()
        found = source.state.get(f"asset/{TRAINING_ASSET}")
        if found is None:
            raise FormatError(f"{where}: holds a model but no training state, so a run cannot go on from it")
        what = f"{where}: training state"
        document = load_object(decode_utf8(found.raw().tobytes(), what), what)
        if not all(isinstance(document.get(key), dict) for key in ("run", "training")):
            raise FormatError(f"{where}: the training state is damaged: run and training are missing")
        before = document["run"]
        found_difference = _difference(before, run)
        if found_difference is not None:
            name, was, now = found_difference
            raise UsageError(
                f"{where}: is a checkpoint of another run: {name} was {_short(was)}, now it is {_short(now)}. Resume with "
                "what the run was begun with, or begin another in another folder"
            )
        weights = {name: np.array(tensor.numpy(), np.float32) for name, tensor in source.items()}
        return Checkpoint(where, weights, own_copy(source.optimizer), document["training"])


def own_copy(section: OamOptimizer | None) -> OamOptimizer | None:
    """An optimizer's section that stays when its file is closed."""
    if section is None:
        return None
    second = None if section.second is None else section.second.copy()
    return replace(section, first=section.first.copy(), second=second)


def latest_checkpoint(
    folder: Path | str, run: Mapping[str, Any], notify: Callable[[str], None]
) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole; None if the folder has none. ``notify`` hears of damaged ones.

    Raises:
        UsageError: the checkpoints are of another run.
        OutputError: the folder cannot be read.
    """
    try:
        paths = checkpoints(folder)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error.strerror or error}") from error
    for path in reversed(paths):
        try:
            return read_checkpoint(path, run)
        except UsageError:
            raise
        except OazooError as error:
            notify(f"{error}; the checkpoint before it is taken")
    return None


def _difference(
    before: Mapping[str, Any], now: Mapping[str, Any], within: str = ""
) -> tuple[str, Any, Any] | None:
    """The first value that is not the same in both: its name, and what it was and is."""
    for key in {**now, **before}:
        was, is_ = before.get(key), now.get(key)
        if was == is_:
            continue
        name = f"{within}{key}"
        if isinstance(was, dict) and isinstance(is_, dict):
            return _difference(was, is_, f"{name}.")
        return name, was, is_
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
