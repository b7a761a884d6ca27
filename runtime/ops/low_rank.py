"""Linear layers with low-rank corrections beside them (LoRA), computed as one product with corrected weights.

``x Wᵀ + scale · (x Aᵀ) Bᵀ`` is ``x (W + scale · B A)ᵀ``. Over as many rows as training has, making the corrected weights
anew for each run costs less than going through A and B with every row; frozen weights in any encoding are decoded on the
way anyway. They are made again for the way back, so that no layer's stay in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oazoo.runtime.ops.arithmetic import copied, scaled, swap_axes
from oazoo.runtime.ops.common import require, require_dense
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.product import input_gradient, product, weight_gradient
from oazoo.runtime.ops.scales import learned
from oazoo.runtime.tape import no_grad, no_gradient, taped
from oazoo.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """A correction ``scale · B A`` of a weight: a is f32 [rank, inputs], b f32 [outputs, rank]."""

    a: Tensor
    b: Tensor
    scale: float


def corrected_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    corrections: Sequence[LowRank | None],
) -> Tensor:
    """``x · (weight + scale · B A)ᵀ + bias`` for several weights, their outputs side by side.

    Gradients flow to x and to every A and B; weights and biases must need none.

    Args:
        x: f32 [rows, inputs].
        weights: [outputs, inputs] in any encoding that :func:`~oazoo.runtime.ops.linear.linear` takes.
        biases: f32 [outputs] or None for each.
        corrections: of each weight, or None.

    Returns:
        f32 [rows, outputs of all weights].
    """
    op = "corrected_linear"
    require(
        len(weights) == len(biases) == len(corrections),
        op,
        "weights, biases and corrections differ in number",
    )
    no_gradient("the weight under a correction", *map(learned, weights), *biases)
    for w, c in zip(weights, corrections, strict=True):
        if c is not None:
            require_dense(c.a, op, "a", "f32", -1, w.shape[1])
            require_dense(c.b, op, "b", "f32", w.shape[0], c.a.shape[0])

    def corrected() -> list[Tensor]:
        return [w if c is None else _corrected(w, c) for w, c in zip(weights, corrections, strict=True)]

    with no_grad():
        y = linear(x, corrected(), biases)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        found: list[Tensor | None] = [input_gradient(dy, corrected()) if want[0] else None]
        column = 0
        for w, c, of_a, of_b in zip(weights, corrections, want[1::2], want[2::2], strict=True):
            own = (column, column + w.shape[0])
            column += w.shape[0]
            if c is None:
                found += [None, None]
                continue
            da = db = None
            if of_a:
                low = product(dy, scaled(c.b, c.scale), columns=own)
                da = weight_gradient(low, x)
            if of_b:
                # The long axis lies along the lanes of the kernel, so the gradient comes turned over.
                low = scaled(product(x, _turned(c.a)), c.scale)
                db = _turned(weight_gradient(low, dy, columns=own))
            found += [da, db]
        return found

    inputs: list[Tensor | None] = [x]
    for c in corrections:
        inputs += [None, None] if c is None else [c.a, c.b]
    return taped(y, inputs, back)


def _corrected(weight: Tensor, correction: LowRank) -> Tensor:
    """f32 of the weight's shape."""
    y = copied(weight) if weight.dtype == "f32" else dequantize(weight)
    return product(scaled(correction.b, correction.scale), correction.a, out=y)


def _turned(x: Tensor) -> Tensor:
    return swap_axes(x.view(1, *x.shape)).view(x.shape[1], x.shape[0])
