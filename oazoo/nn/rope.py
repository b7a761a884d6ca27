"""Rotary position embedding: the table that kernels read, computed on the host in float64 and rounded once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rotary_table(
    inverse: npt.NDArray[np.float32], magnitude: float, positions: int
) -> npt.NDArray[np.float32]:
    """Cosine and sine of position times inverse frequency: float32 [positions, width / 2, 2].

    A table, because devices may compute their own sines to no more than 2^-11, and worse for the angles of late positions.
    """
    angles = np.arange(positions, dtype=np.float64)[:, None] * inverse
    table = np.empty((*angles.shape, 2), np.float32)
    np.multiply(np.cos(angles), magnitude, out=table[..., 0], casting="same_kind")
    np.multiply(np.sin(angles), magnitude, out=table[..., 1], casting="same_kind")
    return table
