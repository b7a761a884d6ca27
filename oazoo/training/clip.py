"""Gradient clipping by the norm of all gradients together (arXiv:1211.5063), without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

from oazoo.errors import UsageError
from oazoo.runtime import Tensor
from oazoo.runtime.ops.optimizer import Slot, SlotTable, gradient_factor, rescale
from oazoo.training.parameters import ParameterLike, named


def clip_grad_norm(parameters: Iterable[ParameterLike], max_norm: float) -> Tensor:
    """Multiply all gradients by ``min(1, max_norm / (norm + 1e-6))``, norm being the 2-norm of them all as one vector.

    Sums run in a fixed order, so the result is the same every time. Only queues work for the device.

    Args:
        parameters: tensors or modules' parameters, with or without names; those without a gradient are passed over.
        max_norm: positive.

    Returns:
        The norm before clipping, f32 [1].

    Raises:
        UsageError: ``max_norm`` is not positive, or no parameter has a gradient.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm must be positive, not {max_norm}")
    found = [p.tensor.grad for p in named(parameters) if p.tensor.grad is not None]
    slots = [Slot(gradient, gradient) for gradient in found]
    if not slots:
        raise UsageError("no parameter has a gradient to clip; go backward first")
    table = SlotTable(slots)
    factor = gradient_factor(table, max_norm)
    rescale(table, factor)
    return factor.rows(1, 2)
