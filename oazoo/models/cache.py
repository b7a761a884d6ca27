"""What a model remembers of one sequence, in device memory: keys and values of every token, or a state of fixed size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor
from oazoo.runtime.ops.arithmetic import accumulate, copied, fill

#: States that a sequence can go back to, beside its beginning; the oldest goes first.
_KEPT_STATES = 4
#: Each state begins at a multiple of so many values.
_ALIGNMENT = 64


class Cache(ABC):
    """The memory of one sequence.

    Attributes:
        capacity: tokens that it can be told of.
    """

    capacity: int

    @abstractmethod
    def begin_at(self, position: int) -> None:
        """What runs next begins at ``position``, which is where the sequence is; 0 is a fresh beginning."""

    @abstractmethod
    def keep(self, position: int) -> None:
        """Make it possible to go back to ``position``, where the sequence is now."""

    @abstractmethod
    def back_to(self, position: int) -> int:
        """Forget what came from ``position`` on; where the sequence is then, which may be earlier."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device memory that it takes."""


@dataclass(frozen=True)
class KVCache(Cache):
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

    def begin_at(self, position: int) -> None:
        self.start.write(np.array([position], np.int32))

    def keep(self, position: int) -> None:
        """Every position can be gone back to anyway."""

    def back_to(self, position: int) -> int:
        """``position``: cached rows beyond it are overwritten before they are read."""
        return position

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class StateCache(Cache):
    """A state of fixed size for every layer, which layers replace by what it is after their tokens.

    Attributes:
        layers: the tensors of each layer by name, f32; all zero at the beginning of a sequence.
    """

    def __init__(self, device: Device, layers: Sequence[Mapping[str, tuple[int, ...]]], capacity: int) -> None:
        """States of these shapes, for a sequence of any length.

        Raises:
            OutOfDeviceMemoryError: they do not fit.
        """
        self.capacity = capacity
        sizes = [-(-prod(shape) // _ALIGNMENT) * _ALIGNMENT for shapes in layers for shape in shapes.values()]
        # One piece of memory, so that all states are cleared, kept and put back at once.
        self._memory = fill(Tensor.empty(device, (sum(sizes),)), 0.0)
        self._kept: list[tuple[int, Tensor]] = []
        found, at = [], 0
        for shapes in layers:
            states = {}
            for name, shape in shapes.items():
                states[name] = self._memory.rows(at, at + prod(shape)).view(*shape)
                at += -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
            found.append(states)
        self.layers: tuple[Mapping[str, Tensor], ...] = tuple(found)

    def begin_at(self, position: int) -> None:
        if position == 0:
            fill(self._memory, 0.0)

    def keep(self, position: int) -> None:
        if not self._kept or self._kept[-1][0] != position:
            self._kept = [*self._kept[1 - _KEPT_STATES :], (position, copied(self._memory))]

    def back_to(self, position: int) -> int:
        """The last kept position that is not beyond ``position``, or 0: a state cannot be undone."""
        self._kept = [(at, state) for at, state in self._kept if at <= position]
        if not self._kept:
            return 0
        at, state = self._kept[-1]
        accumulate(self._memory, state, 1.0, 0.0)
        return at

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes


def on_device(device: Device, tables: Sequence[npt.NDArray[Any]] | None) -> tuple[Tensor, ...] | None:
    """Tables on the device, each once however often it occurs."""
    if tables is None:
        return None
    found: dict[int, Tensor] = {}
    for table in tables:
        if id(table) not in found:
            found[id(table)] = Tensor.from_numpy(device, table)
    return tuple(found[id(table)] for table in tables)
