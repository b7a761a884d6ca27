"""The pictures of a quantisation report. matplotlib is optional: ``pip install oazoo[report]``.

Nothing that a file says of itself is drawn, only numbers; names stand in the page around the pictures.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from oazoo.zoo.tensor_errors import SCALE_BINS_PER_OCTAVE, SCALE_LOW, TensorError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR = "#3a6ea5"


def codes_and_scales(errors: Sequence[TensorError]) -> str:
    """The histograms of some tensors of one encoding together, as a ``data:`` address of a PNG."""
    from matplotlib.figure import Figure

    codes = np.sum([error.codes for error in errors], axis=0)
    scales = np.sum([error.scales for error in errors], axis=0)
    lowest = -7 if errors[0].target == "q4" else -128
    figure = Figure(figsize=(9, 2.4), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(np.arange(codes.size) + lowest, codes / max(1, codes.sum()), width=1.0, color=_COLOUR)
    left.set_xlabel("code")
    left.set_ylabel("share")
    used = np.flatnonzero(scales)
    low, high = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
    edges = SCALE_LOW + np.arange(low, high) / SCALE_BINS_PER_OCTAVE
    right.bar(
        edges,
        scales[low:high] / max(1, scales.sum()),
        width=1 / SCALE_BINS_PER_OCTAVE,
        align="edge",
        color=_COLOUR,
    )
    right.set_xlabel("log2 of the scale's size")
    return _address(figure)


def noise_of_tensors(errors: Sequence[TensorError]) -> str:
    """Signal to noise of every tensor in the order of the file, as a ``data:`` address of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.4), dpi=80, layout="constrained")
    axes = figure.subplots()
    known = [(index, error.sqnr_db) for index, error in enumerate(errors) if error.sqnr_db is not None]
    axes.plot([i for i, _ in known], [db for _, db in known], ".", color=_COLOUR)
    axes.set_xlabel("tensor, as numbered in the table")
    axes.set_ylabel("SQNR, dB")
    axes.grid(alpha=0.3)
    return _address(figure)


def _address(figure: Figure) -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png", metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
