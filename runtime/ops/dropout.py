"""Dropout, and the random words that it rests on."""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.common import MAX_ELEMENTS, grid, require, require_dense
from oazoo.runtime.random import Generator, generator
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor


def dropout(x: Tensor, rate: float, source: Generator | None = None) -> Tensor:
    """Each value is 0 with probability ``rate``, else divided by ``1 - rate`` (arXiv:1207.0580).

    Args:
        x: f32 of any shape.
        rate: from 0 (nothing is dropped, nothing drawn) to less than 1.
        source: where draws come from; the device's own stream if None.

    Returns:
        f32 of the same shape.
    """
    op = "dropout"
    require_dense(x, op, "x", "f32", *x.shape)
    require(0 <= rate < 1, op, f"the rate {rate} must be at least 0 and less than 1")
    if rate == 0 or x.numel == 0:
        return x
    draw = (source or generator(x.device)).draw()
    groups = grid(-(-x.numel // 256))

    def run(values: Tensor) -> Tensor:
        y = Tensor.empty(x.device, x.shape)
        x.device.kernel("dropout").dispatch(
            groups,
            {"draw": draw, "x": values},
            {"y": y},
            count=x.numel,
            columns=groups[0],
            below=words_below(rate),
            scale=1 / (1 - rate),
        )
        return y

    return taped(run(x), (x,), lambda dy, want: (run(dy),))


def words_below(rate: float) -> int:
    """Of the 2^32 random words, those below it are the share ``rate``."""
    return min(round(rate * 2**32), 2**32 - 1)


def random_bits(source: Generator, shape: Sequence[int]) -> Tensor:
    """Random words, u32 of a shape: word i of draw n is word i mod 4 of the Philox 4x32-10 block (i / 4, 0, n)."""
    y = Tensor.empty(source.state.device, shape, "u32")
    require(y.numel <= MAX_ELEMENTS, "random_bits", f"{y.numel:,} words are more than one run can address")
    groups = grid(-(-y.numel // 256))
    if y.numel:
        kernel = y.device.kernel("bits")
        kernel.dispatch(groups, {"draw": source.draw()}, {"y": y}, count=y.numel, columns=groups[0])
    return y
