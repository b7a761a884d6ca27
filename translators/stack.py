"""Matrices of one shape as one tensor: the experts of a layer, [experts, out, in].

A stack is streamed one matrix after another, so memory does not grow with the number of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import TranslationError
from oazoo.formats import encodings, quant
from oazoo.formats.mapped import MappedTensor
from oazoo.formats.source import SourceTensor
from oazoo.translators.rules import Array, Rule, Shape, Transform


@dataclass(frozen=True, slots=True)
class Stack(Transform):
    """``count`` sources of one shape, along a new first axis."""

    count: int

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Stack({self.count})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[...] × count → [count, ...]."""
        if len(sources) != self.count or not sources:
            raise TranslationError(f"{self.name} takes {self.count} sources, got {len(sources)}")
        for shape in sources:
            if shape != sources[0]:
                raise TranslationError(f"{self.name}: shapes differ: {list(sources[0])} and {list(shape)}")
        return (self.count, *sources[0])

    def apply(self, sources: Sequence[Array]) -> Array:
        """A new array of all sources."""
        return np.stack(sources)

    def inverse(self, rule: Rule) -> list[Rule]:
        """Each source is its entry of the stack."""
        return [
            Rule(source, (rule.target,), Unstack(number, self.count))
            for number, source in enumerate(rule.sources)
        ]


@dataclass(frozen=True, slots=True)
class Unstack(Transform):
    """Entry ``index`` along the first axis of a source of ``count`` entries."""

    index: int
    count: int

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Unstack({self.count})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[count, ...] → [...]."""
        if len(sources) != 1 or len(sources[0]) < 2 or sources[0][0] != self.count:
            raise TranslationError(
                f"{self.name}: the source has the shape {[list(shape) for shape in sources]}"
            )
        return sources[0][1:]

    def apply(self, sources: Sequence[Array]) -> Array:
        """A view of the entry."""
        entry: Array = sources[0][self.index]
        return entry


def entry_values(tensor: SourceTensor, transform: Unstack, elements: int) -> Iterator[npt.NDArray[Any]]:
    """Values of one entry, flattened, in pieces; only what belongs to it is decoded."""
    info = tensor.info
    kind, size = encodings.get(info.encoding), math.prod(info.shape[1:])
    if kind.kind == "oam":
        # Blocks run over the flattened tensor: an entry may begin inside one.
        start, stop = transform.index * size, (transform.index + 1) * size
        first, step = start // quant.BLOCK * quant.BLOCK, max(1, elements // quant.BLOCK) * quant.BLOCK
        for at in range(first, stop, step):
            end = min(at + step, _up(stop, info.numel))
            values = quant.decode(tensor.part(at, end), info.encoding, end - at)
            yield values[max(0, start - at) : stop - at]
        return
    yield from slice_values(tensor, transform.index * size, (transform.index + 1) * size, elements)


def slice_values(tensor: SourceTensor, start: int, stop: int, elements: int) -> Iterator[npt.NDArray[Any]]:
    """Values of elements ``start`` to ``stop``, which fall on block bounds, in pieces of about ``elements``."""
    if stop - start == tensor.info.numel:
        yield from tensor.chunks(elements)
        return
    kind = encodings.get(tensor.info.encoding)
    for piece in slice_bytes(tensor, start, stop, max(1, elements // kind.block) * kind.block):
        count = piece.size // kind.block_bytes * kind.block
        yield from kind.chunks(piece, count, count)


def slice_bytes(tensor: SourceTensor, start: int, stop: int, step: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The stored bytes of elements ``start`` to ``stop``, of ``step`` elements at a time; all three on block bounds.

    Not for the encodings of .oam, whose scales lie behind all codes.
    """
    if not isinstance(tensor, MappedTensor):
        step = max(1, stop - start)  # computed as a whole whatever part of it is asked for
    for at in range(start, stop, step):
        yield tensor.part(at, min(at + step, stop))


def _up(stop: int, count: int) -> int:
    """The end of the block that holds the value before ``stop``."""
    return min(count, -(-stop // quant.BLOCK) * quant.BLOCK)
