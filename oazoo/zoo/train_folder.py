"""The folder of a run, of whatever kind of model: what is in it, who may train in it, and what is left there at the end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from oazoo.errors import UsageError
from oazoo.training.checkpoints import BEST, RunFolder, checkpoints
from oazoo.training.curves import draw_curves
from oazoo.training.loop import Trainer
from oazoo.training.records import Summary

LOG, CURVES = "log.csv", "curves.png"
#: Settings of a run that may differ when it goes on; a step may be divided into batches in another way.
MAY_CHANGE = (
    "minutes",
    "validate_every",
    "checkpoint_every",
    "patience",
    "batch_size",
    "accumulate",
    "auto_batch",
    "checkpointing",
)


def check_folder(output: Path, resume: bool) -> None:
    """Refuse to begin where something is that would be lost, and to go on where nothing is."""
    found = checkpoints(output)
    if resume and not found:
        raise UsageError(
            f"{output}: holds no checkpoint to go on from; to begin there, leave --resume out"
            if output.is_dir()
            else f"{output}: there is no such folder to go on in"
        )
    if not resume and (found or (output / BEST).exists()):
        raise UsageError(f"{output}: holds a run already; go on with it (--resume), or name another folder")


class FolderRun:
    """A run whose trainer is ready, in a folder of its own; ``output`` and ``_folder`` are None where it is only planned."""

    output: Path | None
    trainer: Trainer
    _folder: RunFolder | None
    #: The newest checkpoint when the run was made, or ended.
    _from: Path | None

    def fit(self) -> Summary:
        """Train; what was best is in the run's folder afterwards.

        Raises:
            UsageError: another run is, or has been, in the folder.
            OazooError: see :meth:`oazoo.training.loop.Trainer.fit`.
        """
        output, folder = self.output, self._folder
        if output is None or folder is None:
            return self.trainer.fit()
        with folder.held():
            if max(checkpoints(output), default=None) != self._from:
                raise UsageError(
                    f"{output}: another run has been here meanwhile; go on with it (--resume), or name another folder"
                )
            summary = self.trainer.fit()
            self._from = max(checkpoints(output), default=None)
            if self.trainer.validate is None:
                # Without validation the last step is the best there is.
                folder.save(self.trainer, best=True)
            self._finish(output)
            if summary.steps and find_spec("matplotlib") is not None:
                draw_curves(output / LOG, output / CURVES, overwrite=True)
            return summary

    def _finish(self, output: Path) -> None:
        """What else is left in the folder."""
