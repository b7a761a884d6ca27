"""Keeping the packing kernels busy: what comes next is read while pieces are packed, and what was packed is written.

The tensors of a file go through as one sequence of pieces. A few pieces are on their way at a time, of several tensors where
these are small; they come back in order. Memory is that of the packers' slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.formats.source import SourceTensor
from oazoo.zoo.quantize_plan import BLOCKS

if TYPE_CHECKING:
    from oazoo.runtime import Tensor
    from oazoo.runtime.ops.pack import NonFinite, Packer, PackSlot

#: Values that share a scale.
_BLOCK = 32
#: Pieces on their way to one encoding: one is read, one packed, one written.
SLOTS = 3


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A piece of a tensor, its values and what they became; valid until the next piece is asked for.

    ``start`` is the index of its first element. ``codes`` are u32 [blocks, 4 or 8], ``scales`` f32 [blocks].
    """

    start: int
    values: npt.NDArray[Any]
    codes: npt.NDArray[np.uint32]
    scales: npt.NDArray[np.float32]
    odd: NonFinite


@dataclass(frozen=True, slots=True)
class _Coming:
    name: str
    start: int
    values: npt.NDArray[Any]
    slot: PackSlot


@dataclass(frozen=True, slots=True)
class _Step:
    tensor: SourceTensor
    target: str
    start: int
    count: int
    weights: Tensor | None
    #: The values of a quantised tensor, in pieces as these.
    decoded: Iterator[npt.NDArray[Any]] | None


class PackStream:
    """Packs tensors in a fixed order::

        stream = PackStream(packers, [(tensor, "q4"), …], chunk, weights)
        for tensor, target in …:
            for piece in stream.pieces(tensor.info.name): …

    Args:
        packers: by encoding.
        tasks: the tensors, each with its encoding, in the order in which they will be asked for; dense of a type that is
            packed, or quantised, which are decoded first.
        chunk: elements of a piece: whole blocks, no more than the packers take.
        weights: called for a tensor when its turn comes; see :func:`oazoo.runtime.ops.pack.pack`.
    """

    def __init__(
        self,
        packers: Mapping[str, Packer],
        tasks: Sequence[tuple[SourceTensor, str]],
        chunk: int,
        weights: Callable[[SourceTensor, str], Tensor | None],
    ) -> None:
        self._free = {target: deque(packer.slots) for target, packer in packers.items()}
        self._weights = weights
        self._steps = self._in_order(tasks, chunk)
        #: The first step that has not been started.
        self._next = next(self._steps, None)
        self._coming: deque[_Coming] = deque()

    def _in_order(self, tasks: Sequence[tuple[SourceTensor, str]], chunk: int) -> Iterator[_Step]:
        for tensor, target in tasks:
            count = tensor.info.numel
            weights = self._weights(tensor, target)
            decoded = tensor.chunks(chunk) if tensor.info.encoding in BLOCKS else None
            if weights is not None and len(weights.shape) == 2:
                if decoded is None and count // weights.shape[0] % _BLOCK == 0:
                    yield from _by_expert(tensor, target, chunk, weights)
                    continue
                # Blocks that run from one expert to the next: what counts on the average.
                from oazoo.runtime import Tensor

                weights = Tensor.from_numpy(weights.device, weights.numpy().mean(axis=0))
            for start in range(0, count, chunk):
                yield _Step(tensor, target, start, min(chunk, count - start), weights, decoded)

    def _start_what_fits(self) -> None:
        """Start pieces as long as slots are free. The device works meanwhile."""
        while self._next is not None:
            step = self._next
            free = self._free[step.target]
            if not free:
                return
            slot = free.popleft()
            if step.decoded is None:
                values = slot.room(step.count, step.tensor.info.encoding)
                step.tensor.bytes_into(step.start * values.itemsize, values.view(np.uint8))
            else:
                values = slot.room(step.count, "f32")
                values[:] = next(step.decoded)
            slot.start(step.weights, step.start)
            self._coming.append(_Coming(step.tensor.info.name, step.start, values, slot))
            self._next = next(self._steps, None)

    def pieces(self, name: str) -> Iterator[PackedPiece]:
        """The pieces of a tensor, which is the next of the sequence.

        Raises:
            FormatError, OazooError: a source cannot be read.
            DeviceError: the device failed.
        """
        self._start_what_fits()
        while self._coming and self._coming[0].name == name:
            coming = self._coming.popleft()
            yield PackedPiece(coming.start, coming.values, *coming.slot.finish())
            target = coming.slot.encoding
            self._free[target].append(coming.slot)
            self._start_what_fits()


def _by_expert(tensor: SourceTensor, target: str, chunk: int, weights: Tensor) -> Iterator[_Step]:
    """The pieces of a stack, none of which has values of two experts: each has weights of its own."""
    experts, inputs = weights.shape
    size = tensor.info.numel // experts
    for number in range(experts):
        own = weights.rows(number, number + 1).view(inputs)
        for start in range(number * size, (number + 1) * size, chunk):
            yield _Step(tensor, target, start, min(chunk, (number + 1) * size - start), own, None)
