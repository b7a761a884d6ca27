"""A tensor that is made while it is written: what a writer needs to lay it out, and its bytes on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats.source import TensorInfo


@dataclass(frozen=True, slots=True)
class StreamedTensor:
    """Name, shape and encoding of a tensor, and a function that yields its values or bytes in file order."""

    info: TensorInfo
    pieces: Callable[[], Iterator[npt.NDArray[Any]]]

    def stored(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The stored bytes, piece by piece.

        Raises:
            FormatError: the pieces do not add up to ``info.nbytes``.
        """
        total = 0
        for piece in self.pieces():
            data = as_bytes(piece)
            total += data.size
            yield data
        if total != self.info.nbytes:
            raise FormatError(
                f"tensor {self.info.name!r}: {total} bytes came, {self.info.nbytes} were announced"
            )


def as_bytes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The little-endian bytes of an array, without a copy where it already lies so."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
