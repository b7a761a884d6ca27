"""The curves of a run, drawn from its log. matplotlib is optional: ``pip install oazoo[report]``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.formats.atomic import check_output, write_atomically
from oazoo.optional import require_matplotlib
from oazoo.training.csv_log import VALIDATION_COLUMNS, read_log, validation_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOUR, _SECOND = "#3a6ea5", "#c0562f"
#: The smooth line is a mean that forgets: of about this share of the run.
_SHARE = 0.02


def smooth(values: npt.NDArray[np.float64], span: float) -> npt.NDArray[np.float64]:
    """Exponential mean over about ``span`` values, without the pull towards zero at its start; NaN is passed over."""
    keep = 1 - 1 / max(span, 1.0)
    total = weight = 0.0
    result = np.full(len(values), np.nan)
    for number, value in enumerate(values.tolist()):
        if np.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        if weight:
            result[number] = total / weight
    return result


def draw_curves(log: Path | str, picture: Path | str, *, overwrite: bool = False) -> None:
    """Draw loss, validation loss, learning rate and gradient norm over the steps.

    Args:
        log: as :class:`oazoo.training.csv_log.CsvLog` writes it; its validations are drawn if they lie beside it.
        picture: the PNG to write.
        overwrite: replace an existing one.

    Raises:
        UsageError: matplotlib is missing, there is no log or no step in it, or the picture exists.
        FormatError: the log is damaged.
    """
    require_matplotlib("curves need matplotlib")
    check_output(picture, overwrite=overwrite)
    from matplotlib.figure import Figure

    steps = read_log(log)
    at = steps["step"]
    if not len(at):
        raise UsageError(f"{log}: holds no steps yet, so there is nothing to draw")
    norms = np.isfinite(steps["gradient_norm_nats_per_token"]).any()
    figure = Figure(figsize=(9, 7 if norms else 5.5), dpi=100, layout="constrained")
    heights = [3, 1, 1] if norms else [3, 1]
    loss, *below = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    loss.plot(at, steps["loss_nats_per_token"], color=_COLOUR, alpha=0.3, linewidth=0.8)
    smoothed = smooth(steps["loss_nats_per_token"], len(at) * _SHARE)
    loss.plot(at, smoothed, color=_COLOUR, linewidth=1.6, label="training")
    beside = validation_path(log)
    if beside.is_file():
        held = read_log(beside, VALIDATION_COLUMNS)
        loss.plot(
            held["step"], held["loss_nats_per_token"], ".-", color=_SECOND, linewidth=1.2, label="validation"
        )
        _mark_best(loss, held["step"], held["loss_nats_per_token"])
    loss.set_ylabel("loss, nats a token")
    loss.legend()
    below[0].plot(at, steps["learning_rate"], color=_COLOUR, linewidth=1.2)
    below[0].set_ylabel("learning rate")
    if norms:
        below[1].semilogy(at, steps["gradient_norm_nats_per_token"], color=_COLOUR, linewidth=0.8)
        below[1].set_ylabel("gradient norm")
    for axes in (loss, *below):
        axes.grid(alpha=0.3)
    below[-1].set_xlabel("step")
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    write_atomically(picture, data.getvalue(), overwrite=overwrite)


def _mark_best(axes: Axes, steps: npt.NDArray[np.float64], losses: npt.NDArray[np.float64]) -> None:
    if np.isfinite(losses).any():
        best = int(np.nanargmin(losses))
        axes.annotate(
            f"{losses[best]:.3f}", (steps[best], losses[best]), (0, -12), textcoords="offset points"
        )
