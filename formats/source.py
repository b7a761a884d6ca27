"""WeightSource: what every container looks like to the rest of the package.

A source is an immutable mapping from tensor name to :class:`SourceTensor`. Opening one reads and checks the container's
structure only; tensor bytes stay in the file and are read when asked for. Names, shapes and byte ranges have been validated
against the file by the time a source exists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from oazoo.formats import encodings


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of a stored tensor.

    ``encoding`` is a name registered in :mod:`oazoo.formats.encodings`: a dense type (``f32 f16 bf16 f64 i8 u8 i16 u16 i32
    u32 i64 u64 bool c64 c128 f8_e4m3 f8_e5m2 …``), ``q4``/``q8`` (the ``.oam`` encodings), or ``gguf.q4_k`` and its like.
    ``shape`` is outermost first (row-major), also for GGUF, whose files list dimensions innermost first.
    ``nbytes`` is the exact number of stored bytes.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class SourceTensor(ABC):
    """One tensor of a source: its description and lazy access to its values."""

    info: TensorInfo

    @property
    def place(self) -> tuple[Path, int] | None:
        """The file in which the stored bytes lie in one piece, and where they begin; None where they do not."""
        return None

    @abstractmethod
    def raw(self) -> npt.NDArray[np.uint8]:
        """The stored bytes ([nbytes], read-only), in memory of their own."""

    def mapped(self) -> npt.NDArray[np.uint8]:
        """The stored bytes ([nbytes], read-only) without a copy: a view of the mapped file, where they lie in one.

        For files that nobody else changes: the system ends a process that touches a mapped page which its file has lost.
        """
        return self.raw()

    def pieces(self, size: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The stored bytes, as consecutive arrays of at most ``size`` each."""
        raw = self.raw()
        yield from (raw[start : start + size] for start in range(0, raw.size, size))

    def part(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The stored bytes of elements ``start`` to ``stop``, as those of a tensor of their own.

        Both fall on block bounds of the encoding, or ``stop`` is the end of the tensor.
        """
        raw = self.raw()
        ranges = encodings.get(self.info.encoding).ranges(self.info.numel, start, stop)
        return np.concatenate([raw[at : at + size] for at, size in ranges])

    def bytes_into(self, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy stored bytes from ``start`` on into ``out``, contiguous memory of the caller's, all of it."""
        out[:] = self.raw()[start : start + out.size]

    @abstractmethod
    def numpy(self) -> npt.NDArray[Any]:
        """The values, of ``info.shape``, in memory of their own.

        A dense tensor comes in its own dtype (``ml_dtypes`` for bf16 and f8); a quantised one is decoded to float32.
        """

    @abstractmethod
    def chunks(self, elements: int) -> Iterator[npt.NDArray[Any]]:
        """The values flattened row-major, as consecutive 1-D arrays of at most about ``elements`` each.

        Peak memory is that of one chunk. Chunk bounds fall on block bounds of the encoding.
        """


class WeightSource(ABC, Mapping[str, SourceTensor]):
    """An immutable container of tensors.

    ``format`` is ``"safetensors"``, ``"gguf"``, ``"oam"`` …; ``path`` is what the user named; ``files`` are all files that
    belong to it; ``metadata`` is the container's own metadata (GGUF key/values, safetensors ``__metadata__``, the typed
    config of an ``.oam``), already checked to be plain data. ``notes`` are findings that a user should see but that
    are no errors, such as files beside a model that were not read.
    """

    format: str
    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    #: What the mapping holds; every reader fills it when it opens.
    _tensors: Mapping[str, SourceTensor]

    def __getitem__(self, name: str) -> SourceTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @abstractmethod
    def close(self) -> None:
        """Close the files. What was handed out earlier stays valid; more cannot be had."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
