"""Products with the tensors of a source, read a bounded number of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import TranslationError
from oazoo.formats import encodings
from oazoo.formats.source import SourceTensor, WeightSource
from oazoo.translators.reference.maths import Array

#: Values of a matrix that are held at a time.
_STEP = 1 << 22


class Weights:
    """A source as float32.

    ``rounded`` maps the names of tensors to a dense encoding that their values are rounded to first: what a conversion does
    to them, without its map.
    """

    def __init__(self, source: WeightSource, rounded: Mapping[str, str] | None = None) -> None:
        self._source = source
        self._rounded = dict(rounded or {})

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def _tensor(self, name: str, rank: int) -> SourceTensor:
        if name not in self._source:
            raise TranslationError(f"{self._source.path}: the checkpoint lacks {name}")
        tensor = self._source[name]
        if len(tensor.info.shape) != rank:
            raise TranslationError(
                f"{self._source.path}: {name} has the shape {list(tensor.info.shape)}; {rank} dimensions were expected"
            )
        return tensor

    def _float(self, name: str, values: npt.NDArray[Any]) -> Array:
        if name in self._rounded:
            with np.errstate(all="ignore"):
                values = values.astype(encodings.get(self._rounded[name]).dtype)
        return values.astype(np.float32)

    def vector(self, name: str) -> Array:
        """A tensor of one dimension."""
        return self._float(name, self._tensor(name, 1).numpy())

    def optional(self, name: str) -> Array | None:
        """The same, or None if there is none of the name."""
        return self.vector(name) if name in self._source else None

    def rows(self, name: str) -> Iterator[tuple[int, Array]]:
        """A matrix in pieces of whole rows, each with the number of its first row."""
        tensor = self._tensor(name, 2)
        height, width = tensor.info.shape
        step = max(1, _STEP // max(1, width))
        start, left = 0, np.empty(0, np.float32)
        for chunk in tensor.chunks(step * width):
            values = self._float(name, chunk)
            values = np.concatenate([left, values]) if left.size else values
            whole = values.size // width
            yield start, values[: whole * width].reshape(whole, width)
            start, left = start + whole, values[whole * width :]
        if start != height or left.size:
            raise TranslationError(f"{self._source.path}: {name} ended at row {start} of {height}")

    def matrices(self, name: str, count: int) -> Iterator[Array]:
        """One matrix after another: those of a stack of ``count``, or of as many tensors where the name has ``{}``."""
        if "{}" in name:
            for number in range(count):
                one = name.format(number)
                height, width = self._tensor(one, 2).info.shape
                yield np.concatenate([block for _, block in self.rows(one)]).reshape(height, width)
            return
        tensor = self._tensor(name, 3)
        found, height, width = tensor.info.shape
        if found != count:
            raise TranslationError(f"{self._source.path}: {name} has {found} matrices; {count} were expected")
        left = np.empty(0, np.float32)
        for chunk in tensor.chunks(height * width):
            values = np.concatenate([left, self._float(name, chunk)])
            whole = values.size // (height * width)
            yield from values[: whole * height * width].reshape(whole, height, width)
            left = values[whole * height * width :]

    def gather(self, name: str, ids: npt.NDArray[np.int64]) -> Array:
        """Rows ``ids`` of a matrix, [ids, width]."""
        height, width = self._tensor(name, 2).info.shape
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < height:
            raise TranslationError(
                f"{self._source.path}: {name} has {height} rows, row {ids.max()} was asked for"
            )
        result = np.empty((len(ids), width), np.float32)
        for start, block in self.rows(name):
            here = (ids >= start) & (ids < start + len(block))
            result[here] = block[ids[here] - start]
        return result

    def product(self, name: str, x: Array, transposed: bool = False) -> Array:
        """x Wᵀ for W [out, in], or x W for W [in, out] if ``transposed``."""
        height, width = self._tensor(name, 2).info.shape
        if x.shape[1] != (height if transposed else width):
            raise TranslationError(
                f"{self._source.path}: {name} has the shape {[height, width]}, which does not take {x.shape[1]} values"
            )
        result = np.zeros((len(x), width if transposed else height), np.float32)
        for start, block in self.rows(name):
            if transposed:
                result += x[:, start : start + len(block)] @ block
            else:
                result[:, start : start + len(block)] = x @ block.T
        return result

    def linear(self, name: str, x: Array, transposed: bool = False) -> Array:
        """The product with ``name.weight``, and ``name.bias`` added if there is one."""
        y = self.product(f"{name}.weight", x, transposed)
        bias = self.optional(f"{name}.bias")
        return y if bias is None else y + bias
