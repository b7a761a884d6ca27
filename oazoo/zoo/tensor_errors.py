"""What quantising did to each tensor: errors, codes, scales, and the blocks that suffered most. On the host, streamed."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats.oam import OamSource
from oazoo.formats.quant import BLOCK, CODE_BYTES, planes
from oazoo.formats.source import SourceTensor
from oazoo.zoo.progress import Progress

#: Scales are counted by the logarithm of their size, four bins an octave, from 2^-40 to 2^24; what is beyond falls into the
#: outermost bins.
SCALE_BINS_PER_OCTAVE, SCALE_LOW, SCALE_HIGH = 4, -40, 24
#: Blocks kept of each tensor.
OUTLIERS = 5
_CHUNK = 1 << 20


@dataclass(frozen=True)
class OutlierBlock:
    """A block whose error stands out.

    Attributes:
        block: its number; ``position`` is the index of its first value in the tensor.
        largest: largest absolute value before.
        rms: root mean square of the values before, and ``error_rms`` of the error.
        ratio: ``error_rms`` over that of the whole tensor.
    """

    block: int
    position: tuple[int, ...]
    largest: float
    rms: float
    error_rms: float
    ratio: float


@dataclass(frozen=True)
class TensorError:
    """How a tensor's values differ from the original's, which are finite.

    Attributes:
        mse: mean squared error.
        max_abs: largest absolute error.
        relative: root of the squared errors' sum over the squared values' (0 where all values are 0 and kept).
        sqnr_db: signal to quantisation noise, 10 log10 of the sums of squares; None without error.
        cosine: of the angle between the two; None for a tensor of zeros.
        bytes_before, bytes_after: stored.
        codes: how often each code occurs, from the lowest (-7 for Q4, -128 for Q8); padding is not counted.
        scales: counts by size, see ``SCALE_LOW``; ``negative_scales`` of them are below zero.
        outliers: the blocks with the largest errors, worst first.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    bytes_before: int
    bytes_after: int
    mse: float
    max_abs: float
    relative: float
    sqnr_db: float | None
    cosine: float | None
    codes: tuple[int, ...]
    scales: tuple[int, ...]
    negative_scales: int
    outliers: tuple[OutlierBlock, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [{**block.__dict__, "position": list(block.position)} for block in self.outliers]
        plain = {"shape": list(self.shape), "codes": list(self.codes), "scales": list(self.scales)}
        return {**self.__dict__, **plain, "outliers": rows}


def tensor_errors(
    source: OamSource, packed: OamSource, progress: Progress | None = None
) -> Iterator[TensorError]:
    """The errors of every tensor whose encoding is a block encoding in ``packed`` and another one in ``source``.

    Raises:
        FormatError: a tensor is not in both, or not of one shape.
    """
    pairs = []
    for name, after in packed.items():
        before = source.get(name)
        if before is None or before.info.shape != after.info.shape:
            raise FormatError(f"{packed.path}: {name} is not a tensor of that shape in {source.path}")
        if after.info.encoding in CODE_BYTES and before.info.encoding != after.info.encoding:
            pairs.append((before, after))
    total = sum(after.info.numel for _, after in pairs)
    done = 0
    for before, after in pairs:
        yield _tensor_error(before, after)
        done += after.info.numel
        if progress is not None:
            progress("measuring tensors", done, total, "values")


def _tensor_error(before: SourceTensor, after: SourceTensor) -> TensorError:
    signal = noise = dot = other = 0.0
    largest = 0.0
    worst: list[tuple[float, int, float, float]] = []
    first = 0
    for x, y in zip(before.chunks(_CHUNK), after.chunks(_CHUNK), strict=True):
        if x.size != y.size:
            raise FormatError(f"{after.info.name}: the two files give it in pieces of different sizes")
        a, b = x.astype(np.float64), y.astype(np.float64)
        error = a - b
        signal += float(a @ a)
        noise += float(error @ error)
        dot += float(a @ b)
        other += float(b @ b)
        largest = max(largest, float(np.abs(error).max(initial=0.0)))
        blocks = -(-a.size // BLOCK)
        squares = np.add.reduceat(error * error, np.arange(0, a.size, BLOCK)) if a.size else np.empty(0)
        for index in np.argsort(squares)[: -OUTLIERS - 1 : -1]:
            values = a[index * BLOCK : (index + 1) * BLOCK]
            size = values.size
            rms = math.sqrt(float(values @ values) / size)
            entry = (
                math.sqrt(float(squares[index]) / size),
                first + int(index),
                float(np.abs(values).max()),
                rms,
            )
            (heapq.heappush if len(worst) < OUTLIERS else heapq.heappushpop)(worst, entry)
        first += blocks
    count = max(1, before.info.numel)
    typical = math.sqrt(noise / count)
    norm = math.sqrt(signal) * math.sqrt(other)
    codes, scales, negative = _histograms(after)
    return TensorError(
        name=before.info.name,
        shape=before.info.shape,
        source=before.info.encoding,
        target=after.info.encoding,
        bytes_before=before.info.nbytes,
        bytes_after=after.info.nbytes,
        mse=noise / count,
        max_abs=largest,
        relative=math.sqrt(noise / signal) if signal > 0 else math.sqrt(noise),
        sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else None,
        cosine=dot / norm if norm > 0 else None,
        codes=codes,
        scales=scales,
        negative_scales=negative,
        outliers=tuple(
            OutlierBlock(
                block=block,
                position=tuple(int(i) for i in np.unravel_index(block * BLOCK, before.info.shape)),
                largest=top,
                rms=rms,
                error_rms=error,
                ratio=error / typical,
            )
            for error, block, top, rms in sorted(worst, reverse=True)
            if error > 0
        ),
    )


def _histograms(tensor: SourceTensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Counts of codes and of scales, and how many scales are negative."""
    info = tensor.info
    bytes_seen = np.zeros(256, np.int64)
    bins = np.zeros((SCALE_HIGH - SCALE_LOW) * SCALE_BINS_PER_OCTAVE, np.int64)
    negative = 0
    for start in range(0, info.numel, _CHUNK):
        part = tensor.part(start, min(start + _CHUNK, info.numel))
        code_plane, scales = planes(part, info.encoding)
        bytes_seen += np.bincount(code_plane.reshape(-1), minlength=256)
        bins += _scale_counts(scales, bins.size)
        negative += int((scales < 0).sum())
    if info.encoding == "q4":
        table = bytes_seen.reshape(16, 16)  # [high nibble, low nibble]
        codes, zero = table.sum(0) + table.sum(1), 7
    else:
        codes, zero = np.roll(bytes_seen, 128), 128  # signed bytes, from -128 on
    codes[zero] -= -info.numel % BLOCK
    return tuple(int(n) for n in codes), tuple(int(n) for n in bins), negative


def _scale_counts(scales: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.int64]:
    wide = np.abs(scales.astype(np.float64))
    with np.errstate(divide="ignore"):
        place = (np.log2(wide[np.isfinite(wide)]) - SCALE_LOW) * SCALE_BINS_PER_OCTAVE
    return np.bincount(np.clip(place, 0, size - 1).astype(np.int64), minlength=size)
