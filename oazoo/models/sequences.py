"""What layers are told about a batch of whole sequences, in place of a cache: training reads and writes none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from oazoo.models.cache import Cache, on_device
from oazoo.runtime import Device, Tensor


@dataclass(frozen=True)
class Sequences:
    """The shape of a batch, and what follows from it.

    Attributes:
        batch: number of sequences, one after the other in the rows of activations.
        tokens: length of each.
        rotary: a table a layer, f32 [tokens, rotated / 2, 2] of cosine and sine by position; None without rotary positions.
    """

    batch: int
    tokens: int
    rotary: tuple[Tensor, ...] | None

    @classmethod
    def create(
        cls,
        device: Device,
        batch: int,
        tokens: int,
        rotary: Sequence[npt.NDArray[Any]] | None = None,
    ) -> Sequences:
        """For a batch; ``rotary`` has a table a layer, of which one that several share goes to the device once."""
        return cls(batch, tokens, on_device(device, rotary))


#: What a layer runs in: the cache of one sequence, or a batch of whole ones.
Context = Cache | Sequences
