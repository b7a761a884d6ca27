"""Rotary position embedding: the table that kernels read, computed on the host in float64 and rounded once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oazoo.nn.module import Module
from oazoo.runtime import Tensor
from oazoo.runtime.ops.sequences import rotate


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


class RoPE(Module):
    """Rotary positions (arXiv:2104.09864) of every head, half-split pairs, angles ``position · theta^(-2 j / head_dim)``.

    It has no parameters; its table of positions is made at the first use and grows with the longest sequence.
    """

    def __init__(self, heads: int, head_dim: int, theta: float = 10_000.0) -> None:
        self.heads, self.head_dim, self.theta = heads, head_dim, theta
        self._table: Tensor | None = None

    def __call__(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Turn f32 [batch · tokens, heads · head_dim]; row r stands at position r mod ``tokens`` (all rows if None)."""
        tokens = x.shape[0] if tokens is None else tokens
        if self._table is None or self._table.shape[0] < tokens:
            inverse = (self.theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)).astype(np.float32)
            with x.device.aside():
                self._table = Tensor.from_numpy(x.device, rotary_table(inverse, 1.0, tokens))
        return rotate(x, self._table, tokens, self.heads, self.head_dim)
