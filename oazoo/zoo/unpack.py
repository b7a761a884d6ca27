"""Unpacking: what is quantised becomes dense again. On the host, because it is little more than a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED_ASSET
from oazoo.formats.oam_writer import OamWriter
from oazoo.formats.source import SourceTensor
from oazoo.zoo.quantize_plan import TensorQuantization

if TYPE_CHECKING:
    from oazoo.zoo.progress import Progress

#: Values decoded at a time, and bytes copied at a time of what stays as it is.
_CHUNK, _PIECE = 1 << 20, 4 << 20


def unpack(
    steps: Sequence[TensorQuantization],
    target: str,
    source: OamSource,
    writer: OamWriter,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a file in which every quantised tensor is decoded and rounded to the dense type ``target``.

    Raises:
        FormatError: values that are not finite, or that the type cannot hold, unless they are allowed.
    """
    kind = encodings.get(target).dtype
    total = sum(step.bytes_before for step in steps if not step.reason)
    done = 0

    def values(tensor: SourceTensor) -> Iterator[npt.NDArray[Any]]:
        nonlocal done
        for chunk in tensor.chunks(_CHUNK):
            with np.errstate(over="ignore"):
                rounded = chunk.astype(kind)
            if not allow_nonfinite and not np.isfinite(rounded.astype(np.float32, copy=False)).all():
                raise FormatError(
                    f"{source.path}: {tensor.info.name!r} holds values that are not finite, or too large for "
                    f"{target}; --to f32 holds all that are finite (--allow-nonfinite lets them pass)"
                )
            done += chunk.size * tensor.info.nbytes // tensor.info.numel
            if progress is not None:
                progress("unpacking", done, total)
            yield rounded

    with writer:
        for step in steps:
            tensor = source[step.name]
            writer.write(step.name, tensor.pieces(_PIECE) if step.reason else values(tensor))
        for name, state in source.state.items():
            if name != CARRIED_ASSET:
                writer.write(name, state.pieces(_PIECE))
