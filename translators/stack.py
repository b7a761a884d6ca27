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
        raw = tensor.raw()
        first = start // quant.BLOCK * quant.BLOCK
        for at in range(first, stop, elements):
            values = quant.decode(
                raw, info.encoding, info.numel, at, min(at + elements, _up(stop, info.numel))
            )
            yield values[max(0, start - at) : stop - at]
        return
    rows = tensor.raw().reshape(transform.count, -1)
    yield from kind.chunks(rows[transform.index], size, elements)


def _up(stop: int, count: int) -> int:
    """The end of the block that holds the value before ``stop``."""
    return min(count, -(-stop // quant.BLOCK) * quant.BLOCK)
