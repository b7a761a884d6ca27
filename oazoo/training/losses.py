"""Losses by name: each is an op of a prediction and a target that gives one number, f32 [1].

Cross-entropies take logits f32 [rows, classes] and class numbers (i32, u32 or u8 [rows]); a class number outside the classes
gives NaN and reads nothing. The others take a prediction and a target of one shape. All are means.
"""

from __future__ import annotations

from collections.abc import Callable

from oazoo.errors import UsageError
from oazoo.runtime import Tensor
from oazoo.runtime.ops.loss import binary_cross_entropy, cross_entropy, l1, mse, smooth_l1

Loss = Callable[[Tensor, Tensor], Tensor]


def masked_cross_entropy(logits: Tensor, targets: Tensor, mask: Tensor, count: float) -> Tensor:
    """``Σ mask · cross-entropy / count``; rows with a mask of 0 do not count, whatever is in them.

    Args:
        logits: f32 [rows, classes].
        targets: i32, u32 or u8 [rows].
        mask: f32 [rows].
        count: what the sum is divided by: the number of rows that count.

    Returns:
        f32 [1].
    """
    return cross_entropy(logits, targets, mask=mask, count=count)


#: Losses of a prediction and a target.
LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "l1": l1,
    "mse": mse,
    "smooth_l1": smooth_l1,
}


def loss(name: str) -> Loss:
    """The loss of that name.

    Raises:
        UsageError: there is none; the message names those there are.
    """
    if name not in LOSSES:
        raise UsageError(f"there is no loss {name[:40]!r}; there are {', '.join(LOSSES)}")
    return LOSSES[name]


__all__ = [
    "LOSSES",
    "Loss",
    "binary_cross_entropy",
    "cross_entropy",
    "l1",
    "loss",
    "masked_cross_entropy",
    "mse",
    "smooth_l1",
]
