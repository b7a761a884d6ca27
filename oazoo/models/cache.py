"""The KV cache of one sequence: keys and values of every layer, in device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys and values, and the position of what comes next.

    Attributes:
        layers: a pair a layer, f32 [kv_heads, capacity, head_dim] each.
        start: i32 [1], position of the first token of the run that is recorded or replayed.
        capacity: tokens that fit.
        rotary: a table a layer, f32 [capacity, rotated / 2, 2] of cosine and sine by position; layers that rotate alike
            share one. None without rotary positions.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    start: Tensor
    capacity: int
    rotary: tuple[Tensor, ...] | None

    @classmethod
    def create(
        cls,
        device: Device,
        *,
        layers: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        rotary: Sequence[npt.NDArray[Any]] | None = None,
    ) -> KVCache:
        """Room for ``capacity`` tokens. Nothing is cleared: positions are written before they are read.

        ``rotary`` has a table a layer; one that several layers share goes to the device once.

        Raises:
            OutOfDeviceMemoryError: it does not fit; the message says how many tokens would.
        """
        row = layers * 2 * kv_heads * head_dim * 4
        free = device.allocator.available_bytes
        if row * capacity > free:
            raise OutOfDeviceMemoryError(
                f"the cache of {capacity:,} tokens takes {row * capacity:,} bytes, and {device.info.name} has "
                f"about {free:,} free: use a shorter context; {free // row:,} tokens would fit"
            )
        shape = (kv_heads, capacity, head_dim)
        pairs = tuple((Tensor.empty(device, shape), Tensor.empty(device, shape)) for _ in range(layers))
        start = Tensor.from_numpy(device, np.zeros(1, np.int32))
        return cls(pairs, start, capacity, on_device(device, rotary))

    @property
    def nbytes(self) -> int:
        """Device memory that the keys and values take."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


def on_device(device: Device, tables: Sequence[npt.NDArray[Any]] | None) -> tuple[Tensor, ...] | None:
    """Tables on the device, each once however often it occurs."""
    if tables is None:
        return None
    found: dict[int, Tensor] = {}
    for table in tables:
        if id(table) not in found:
            found[id(table)] = Tensor.from_numpy(device, table)
    return tuple(found[id(table)] for table in tables)
