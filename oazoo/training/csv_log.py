"""A run's figures as CSV: one exact row a step, units in the header, whole again after a kill at any moment.

Numbers are written so that reading them gives the same bits. Steps go into the file that is named, validations into
another beside it (``log.csv`` and ``log.validation.csv``), so that no row waits for what comes later.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.formats.atomic import output_error
from oazoo.training.callbacks import Callback
from oazoo.training.records import StepRecord, Summary, ValidationRecord

if TYPE_CHECKING:
    from oazoo.training.loop import Trainer

#: Column → what of a :class:`StepRecord` it holds.
STEP_COLUMNS: Mapping[str, str] = {
    "step": "step",
    "epoch": "epoch",
    "loss_nats_per_token": "loss",
    "learning_rate": "lr",
    "gradient_norm_nats_per_token": "grad_norm",
    "samples_rows": "samples",
    "tokens_targets": "tokens",
    "wall_seconds": "seconds",
}
#: The same of a :class:`ValidationRecord`.
VALIDATION_COLUMNS: Mapping[str, str] = {
    "step": "step",
    "loss_nats_per_token": "loss",
    "tokens_targets": "tokens",
    "wall_seconds": "seconds",
    "best_so_far": "best",
}
_MAX_BYTES = 1 << 30

Columns = dict[str, npt.NDArray[np.float64]]


def validation_path(path: Path | str) -> Path:
    """The file of validations beside a log."""
    path = Path(path)
    return path.with_name(f"{path.stem}.validation{path.suffix}")


class CsvFile:
    """Rows of one kind, appended.

    Every call writes whole lines with one system call to the file's end, so what a kill can leave is at most one line that
    is not whole; :meth:`resume` takes it away, and every row of a step that the run will do again.

    Args:
        path: the file.
        columns: header → attribute of the records. The first column is the step.
    """

    def __init__(self, path: Path | str, columns: Mapping[str, str]) -> None:
        self.path, self._columns = Path(path), columns
        self._handle: int | None = None

    def create(self, *, overwrite: bool = False) -> None:
        """Begin an empty log.

        Raises:
            UsageError: there is one already, and ``overwrite`` is not set.
            OutputError: it cannot be written.
        """
        if self.path.exists() and self.path.stat().st_size and not overwrite:
            raise UsageError(f"{self.path}: exists already; go on with that run, or name another log")
        self._open(os.O_CREAT | os.O_TRUNC)
        self._append([",".join(self._columns)])

    def resume(self, step: int) -> None:
        """Go on after ``step``: rows of later steps and a line that is not whole are cut off. Begins one if there is none.

        Raises:
            FormatError: the file is no such log; it is left as it is.
            OutputError: it cannot be written.
        """
        if not self.path.exists():
            self.create()
            return
        keep = _keep(self.path, list(self._columns), step)
        self._open(os.O_CREAT)
        assert self._handle is not None
        try:
            os.ftruncate(self._handle, keep)
        except OSError as error:
            raise output_error(self.path, error) from error
        if keep == 0:
            self._append([",".join(self._columns)])

    def write(self, records: Iterable[object]) -> None:
        """Append a row for each record. Raises :class:`OutputError`, such as for a full disk."""
        self._append(
            ",".join(_text(getattr(record, name)) for name in self._columns.values()) for record in records
        )

    def flush(self) -> None:
        """Have everything on disk, as against in the system's memory (which only a crash of the machine loses)."""
        if self._handle is not None:
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self, how: int) -> None:
        self.close()
        try:
            self._handle = os.open(
                self.path, os.O_WRONLY | os.O_APPEND | how | getattr(os, "O_BINARY", 0), 0o644
            )
        except OSError as error:
            raise output_error(self.path, error) from error

    def _append(self, lines: Iterable[str]) -> None:
        if self._handle is None:
            raise OutputError(f"{self.path}: the log is closed")
        data = "".join(f"{line}\n" for line in lines).encode("ascii")
        try:
            while data:  # a nearly full disk may take a part
                data = data[os.write(self._handle, data) :]
        except OSError as error:
            raise output_error(self.path, error) from error


class CsvLog(Callback):
    """Writes a run's steps and validations as CSV; a resumed run continues its log at the step that it resumes from.

    Args:
        path: of the steps; :func:`validation_path` of the validations.
        overwrite: replace the log of another run when this one starts from nothing.
        resumed: the run goes on from a checkpoint or, if it had none yet, from the start: its log is continued.
    """

    def __init__(self, path: Path | str, *, overwrite: bool = False, resumed: bool = False) -> None:
        self._files = (CsvFile(path, STEP_COLUMNS), CsvFile(validation_path(path), VALIDATION_COLUMNS))
        self._overwrite, self._resumed = overwrite, resumed

    def on_start(self, trainer: Trainer) -> None:
        for file in self._files:
            if trainer.state.step or self._resumed:
                file.resume(trainer.state.step)
            else:
                file.create(overwrite=self._overwrite)

    def on_steps(self, trainer: Trainer, records: Sequence[StepRecord]) -> None:
        self._files[0].write(records)

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        self._files[1].write([record])

    def on_checkpoint(self, trainer: Trainer, path: str) -> None:
        for file in self._files:
            file.flush()

    def on_end(self, trainer: Trainer, summary: Summary) -> None:
        self._close()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()


def read_log(path: Path | str, columns: Mapping[str, str] = STEP_COLUMNS) -> Columns:
    """A log's columns as float64 arrays, NaN where a row has no value; a last line that is not whole is left out.

    Raises:
        UsageError: there is no such file.
        FormatError: it is no such log; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such log")
    names = list(columns)
    rows = [values for _, values in _rows(path, names)]
    table = np.array(rows, np.float64).reshape(-1, len(names))
    return {name: table[:, number] for number, name in enumerate(names)}


def _keep(path: Path, names: list[str], step: int) -> int:
    """How many bytes of a log hold its header and the rows up to ``step``."""
    keep = 0
    for end, values in _rows(path, names, header=True):
        if values and values[0] > step:
            break
        keep = end
    return keep


def _rows(path: Path, names: list[str], *, header: bool = False) -> list[tuple[int, list[float]]]:
    """Each row's end in the file and its values; with ``header`` also that of the first line, without values."""
    if path.stat().st_size > _MAX_BYTES:
        raise FormatError(f"{path}: is larger than {_MAX_BYTES >> 20} MiB, which is no log of a run")
    *lines, rest = path.read_bytes().split(b"\n")
    head = ",".join(names).encode()
    if not lines:
        if head.startswith(rest.rstrip(b"\0")):  # torn within the header, or empty
            return []
        raise FormatError(f"{path}: is no log of this kind: its first line is not {head.decode()!r}")
    found: list[tuple[int, list[float]]] = []
    end = 0
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        if number == 1:
            if line.rstrip(b"\r") != head:
                raise FormatError(f"{path}: is no log of this kind: its first line is not {head.decode()!r}")
            if header:
                found.append((end, []))
            continue
        values = _values(line, len(names))
        if values is None:
            if not lines[number:] and b"\0" in line + rest:
                break  # a machine that lost power leaves zeros at the end
            raise FormatError(f"{path}:{number}: is no row of {len(names)} numbers")
        found.append((end, values))
    return found


def _values(line: bytes, count: int) -> list[float] | None:
    try:
        values = [math.nan if part == b"" else float(part) for part in line.rstrip(b"\r").split(b",")]
    except ValueError:
        return None
    return values if len(values) == count and math.isfinite(values[0]) else None


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return repr(float(value)) if isinstance(value, (float, np.floating)) else str(value)
