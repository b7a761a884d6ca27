"""Losses: one number, and its gradient."""

from __future__ import annotations

from typing import Any

from oazoo.runtime.ops.arithmetic import scaled, total
from oazoo.runtime.ops.common import grid, lanes, require, require_dense
from oazoo.runtime.tape import no_grad, taped
from oazoo.runtime.tensor import Tensor


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    count: float | None = None,
    variant: str | None = None,
) -> Tensor:
    """Mean over rows of ``log Σ exp(logits) - logits[target]``, in nats.

    A target outside the classes reads nothing and makes the loss NaN, unless its row is masked out.

    Args:
        logits: f32 [rows, classes].
        targets: i32 [rows].
        mask: f32 [rows] that each row's loss is multiplied by, or None.
        count: what the sum is divided by; the number of rows if None. With a mask the caller says how many rows count.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [1].
    """
    op = "cross_entropy"
    require_dense(logits, op, "logits", "f32", -1, -1)
    rows, classes = logits.shape
    require(rows > 0 and classes > 0, op, f"logits of shape {list(logits.shape)} have no rows or no classes")
    require_dense(targets, op, "targets", "i32", rows)
    if mask is not None:
        require_dense(mask, op, "mask", "f32", rows)
    divisor = float(rows if count is None else count)
    require(divisor > 0, op, f"the loss cannot be divided by a count of {divisor:g}")
    device = logits.device
    losses, lse = Tensor.empty(device, (rows,)), Tensor.empty(device, (rows,))
    groups = grid(rows)
    name = variant or lanes(device)
    scalars: dict[str, Any] = {
        "classes": classes,
        "rows": rows,
        "columns": groups[0],
        "masked": int(mask is not None),
        "share": 1 / divisor,
    }
    device.kernel(f"cross_entropy_{name}").dispatch(
        groups,
        {"logits": logits, "targets": targets, "mask": mask, "scale": None, "dx": None},
        {"losses": losses, "lse": lse},
        **scalars,
    )
    with no_grad():
        loss = scaled(total(losses), 1 / divisor)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(device, logits.shape)
        device.kernel(f"cross_entropy_back_{name}").dispatch(
            groups,
            {"logits": logits, "targets": targets, "mask": mask, "losses": None, "lse": lse, "scale": dy},
            {"dx": dx},
            **scalars,
        )
        return (dx,)

    return taped(loss, (logits,), back)
