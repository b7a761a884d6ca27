"""Vector quantizers: codebooks that follow what they quantize, one level or several (arXiv:1711.00937, arXiv:2107.03312)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oazoo.errors import DeviceError, UsageError
from oazoo.nn.initial import Array, ones, uniform
from oazoo.nn.module import Buffer, Module, ModuleList
from oazoo.runtime import Tensor
from oazoo.runtime.ops.arithmetic import accumulate, copied, fill, reshaped, scaled
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.ops.quantizer import codes_of, follow_rows, nearest_codes
from oazoo.runtime.random import Generator, checkpointed
from oazoo.runtime.tape import no_grad, taped


class Quantized(NamedTuple):
    """What a quantizer makes of rows."""

    #: f32 of x's shape: its codes. Gradients pass straight through to x.
    values: Tensor
    #: u32 [rows]: their numbers; of several levels [levels, rows].
    ids: Tensor
    #: f32 [1]: ``beta · mean((x - codes)²)``, which pulls x towards its codes.
    commitment: Tensor


def _straight_through(x: Tensor, values: Tensor) -> Tensor:
    """``values``, with x's gradient."""
    return taped(values, (x,), lambda dy, want: (dy,))


def _rows_of(x: Tensor, width: int) -> Tensor:
    if len(x.shape) < 2 or x.shape[-1] != width or not x.numel:
        raise UsageError(f"rows of {width} are quantized: x must be [..., {width}], not {list(x.shape)}")
    return reshaped(x, x.numel // width, width)


class VectorQuantizer(Module):
    """Rows by the nearest of ``codes`` codes.

    While training, codes follow the rows each time a batch is quantized: a code is the mean of the rows that it stood for,
    those of a step weighing ``decay`` times what those of the next one do. One that stands for fewer than ``dead_threshold``
    rows a step becomes one of the rows, drawn from ``source``. This happens on the device, in captured steps as well. The
    codebook is a buffer: no optimizer touches it.

    Args:
        codes: how many.
        features: of a row.
        beta: weight of the commitment loss.
        decay: from 0 (a code is the mean of the last batch's rows) to 1.
        dead_threshold: 0 replaces nothing.
        normalized: scale codes to the norm ``sqrt(features)`` after each step.
        eps: least count that a code is divided by.
        source: of draws; the device's own stream if None.
    """

    def __init__(
        self,
        codes: int,
        features: int,
        *,
        beta: float = 0.25,
        decay: float = 0.99,
        dead_threshold: float = 1.0,
        normalized: bool = False,
        eps: float = 1e-5,
        source: Generator | None = None,
    ) -> None:
        if codes < 1 or features < 1 or not 0 <= decay <= 1:
            raise UsageError(f"{codes} codes of {features} features with decay {decay} are no quantizer")
        first: list[Array] = []

        def initial(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
            first[:] = [uniform(rng, shape, 1 / codes)]
            return first[0]

        self.codebook = Buffer(codes, features, initial=initial)
        # A code is its sum divided by its count, so what is assigned first is both.
        self.sums = Buffer(codes, features, initial=lambda rng, shape: first.pop())
        self.counts = Buffer(codes, initial=ones)
        self.beta, self.decay, self.dead_threshold = beta, decay, dead_threshold
        self.normalized, self.eps, self.source = normalized, eps, source

    def __call__(self, x: Tensor) -> Quantized:
        """f32 [..., features] to its codes, their numbers and the commitment loss; while training, codes then follow."""
        rows = _rows_of(x, self.codebook.shape[1])
        values, ids = self.quantize(rows)
        commitment = scaled(mse(rows, values), self.beta)
        if self.training:
            self.follow(rows, ids)
        return Quantized(_straight_through(x, values.view(*x.shape)), ids, commitment)

    def quantize(self, x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """f32 [rows, features] to its codes and their numbers (u32 [rows], ``out`` if given), without a gradient."""
        with no_grad():
            ids = nearest_codes(x, self.codebook.tensor, out=out)
            return codes_of(ids, self.codebook.tensor), ids

    def follow(self, x: Tensor, ids: Tensor) -> None:
        """Move the codes towards the rows x, f32 [rows, features], that they stand for by ``ids``, and replace dead ones.

        Raises:
            DeviceError: in a checkpointed block (:func:`oazoo.runtime.tape.checkpoint`), which finds other codes the second
                time.
        """
        if checkpointed():
            raise DeviceError(
                "a quantizer whose codes follow must stand outside of checkpointed blocks: they find other codes the "
                "second time"
            )
        follow_rows(
            x,
            ids,
            self.codebook.tensor,
            self.sums.tensor,
            self.counts.tensor,
            decay=self.decay,
            threshold=self.dead_threshold,
            normalised=self.normalized,
            eps=self.eps,
            source=self.source,
        )

    def lookup(self, ids: Tensor) -> Tensor:
        """The codes of numbers, i32 or u32 [rows], as f32 [rows, features]; a number that is none gives NaN."""
        return codes_of(ids, self.codebook.tensor)

    def seed(self, x: Tensor) -> None:
        """Take the rows of x, f32 [..., features], of the highest norms as codes, the highest first; codes beyond the rows
        that there are stay. Waits for the device.
        """
        found = _rows_of(x, self.codebook.shape[1]).numpy()
        if not np.isfinite(found).all():
            raise UsageError("codes are not taken from values that are not finite")
        order = np.argsort(-np.square(found, dtype=np.float64).sum(1), kind="stable")
        codes = self.codebook.values()
        some = min(len(codes), len(found))
        codes[:some] = found[order[:some]]
        self.codebook.assign(codes)
        self.sums.assign(codes)
        self.counts.assign(np.ones(len(codes), np.float32))


class ResidualVectorQuantizer(Module):
    """``levels`` quantizers one after the other, each of what those before it left over; their codes add up.

    There is one commitment term, on what is left over in the end (arXiv:2107.03312). The other arguments are those of
    :class:`VectorQuantizer`, for each level.
    """

    def __init__(
        self,
        levels: int,
        codes: int,
        features: int,
        *,
        beta: float = 0.25,
        decay: float = 0.99,
        dead_threshold: float = 1.0,
        normalized: bool = False,
        eps: float = 1e-5,
        source: Generator | None = None,
    ) -> None:
        if levels < 1:
            raise UsageError(f"a residual quantizer takes at least one level, not {levels}")
        self.levels = ModuleList(
            [
                VectorQuantizer(
                    codes,
                    features,
                    decay=decay,
                    dead_threshold=dead_threshold,
                    normalized=normalized,
                    eps=eps,
                    source=source,
                )
                for _ in range(levels)
            ]
        )
        self.features, self.beta = features, beta

    def __call__(self, x: Tensor) -> Quantized:
        """f32 [..., features] to the sum of its codes, their numbers [levels, rows] and the commitment loss."""
        rows = _rows_of(x, self.features)
        count = rows.shape[0]
        ids = Tensor.empty(x.device, (len(self.levels), count), "u32")
        with no_grad():
            left, values = copied(rows), fill(Tensor.empty(x.device, rows.shape), 0.0)
            for index, level in enumerate(self.levels):
                found, own = level.quantize(left, ids.rows(index, index + 1).view(count))
                accumulate(values, found)
                if self.training:
                    level.follow(left, own)
                accumulate(left, found, -1.0)
        commitment = scaled(mse(rows, values), self.beta)
        return Quantized(_straight_through(x, values.view(*x.shape)), ids, commitment)

    def lookup(self, ids: Tensor) -> Tensor:
        """The summed codes of numbers, i32 or u32 [levels, rows], as f32 [rows, features]; one that is none gives NaN."""
        if len(ids.shape) != 2 or ids.shape[0] != len(self.levels):
            raise UsageError(f"ids must be [{len(self.levels)}, rows], not {list(ids.shape)}")
        count = ids.shape[1]
        values = fill(Tensor.empty(ids.device, (count, self.features)), 0.0)
        for index, level in enumerate(self.levels):
            accumulate(values, level.lookup(ids.rows(index, index + 1).view(count)))
        return values

    def seed(self, x: Tensor) -> None:
        """:meth:`VectorQuantizer.seed` of each level with what those before it leave over. Waits for the device."""
        rows = _rows_of(x, self.features)
        with no_grad():
            left = copied(rows)
            for level in self.levels:
                level.seed(left)
                accumulate(left, level.quantize(left)[0], -1.0)
