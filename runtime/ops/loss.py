"""Losses: one number, and its gradient by the prediction."""

from __future__ import annotations

from typing import Any

from oazoo.runtime.ops.arithmetic import fill, scaled, total
from oazoo.runtime.ops.common import class_numbers, grid, lanes, require, require_dense
from oazoo.runtime.ops.scoring import divergence_rows, score_rows
from oazoo.runtime.tape import no_grad, no_gradient, taped
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
        targets: i32, u32 or u8 [rows].
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
    is_bytes = class_numbers(op, "targets", targets, rows)
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
        "bytes": is_bytes,
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


def divergence(
    p: Tensor,
    q: Tensor,
    *,
    mask: Tensor | None = None,
    count: float | None = None,
    variant: str | None = None,
) -> Tensor:
    """Mean over rows of the Kullback-Leibler divergence D(P‖Q) of the rows' softmaxes, in nats: for learning from a model.

    Args:
        p: f32 [rows, classes], logits of the reference; no gradient is taken with respect to it.
        q: f32 [rows, classes], logits of what learns.
        mask: f32 [rows] that each row's divergence is multiplied by, or None; rows of a zero do not count, whatever is in
            them.
        count: what the sum is divided by; the number of rows if None. With a mask the caller says how many rows count.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [1]. Where a row that counts is not finite it means nothing.
    """
    op = "divergence"
    require_dense(p, op, "p", "f32", -1, -1)
    rows, classes = p.shape
    require(rows > 0 and classes > 0, op, f"logits of shape {list(p.shape)} have no rows or no classes")
    require_dense(q, op, "q", "f32", rows, classes)
    divisor = float(rows if count is None else count)
    require(divisor > 0, op, f"the divergence cannot be divided by a count of {divisor:g}")
    no_gradient("the reference of divergence", p)
    device = q.device
    with no_grad():
        zeros = fill(Tensor.empty(device, (rows,)), 0.0)
        any_class = Tensor(device, (rows,), "i32", zeros.memory, zeros.offset)
        p_scores, q_scores = (score_rows(x, any_class, variant=variant) for x in (p, q))
        found = divergence_rows(p, q, p_scores, q_scores, mask=mask, variant=variant)
        result = scaled(total(found), 1 / divisor)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx, groups = Tensor.empty(device, q.shape), grid(rows)
        reads = {"p": p, "q": q, "p_score": p_scores, "q_score": q_scores, "mask": mask, "scale": dy}
        device.kernel("diverge_back").dispatch(
            groups,
            reads,
            {"dx": dx},
            width=classes,
            rows=rows,
            columns=groups[0],
            masked=int(mask is not None),
            share=1 / divisor,
        )
        return (dx,)

    return taped(result, (q,), back)


def mse(x: Tensor, target: Tensor) -> Tensor:
    """Mean of ``(x - target)²``; see :func:`l1` for arguments and result."""
    return _pair_loss("mse", x, target)


def l1(x: Tensor, target: Tensor) -> Tensor:
    """Mean of ``|x - target|``; the gradient where they are equal is 0.

    Args:
        x: f32 of any shape, the prediction.
        target: f32 of the same shape; no gradient is taken with respect to it.

    Returns:
        f32 [1].
    """
    return _pair_loss("l1", x, target)


def smooth_l1(x: Tensor, target: Tensor) -> Tensor:
    """Mean of ``d² / 2`` where ``d = |x - target|`` is less than 1, else of ``d - 1/2``; see :func:`l1`."""
    return _pair_loss("smooth_l1", x, target)


def binary_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Mean of ``-(target log p + (1 - target) log(1 - p))``, p being x held within 1e-7 of 0 and 1; see :func:`l1`.

    The gradient is taken at p, and is not cut where x lies outside.
    """
    return _pair_loss("binary_cross_entropy", x, target)


#: Elements that a workgroup of the forward kernel sums.
_SUMMED = 1024


def _pair_loss(op: str, x: Tensor, target: Tensor) -> Tensor:
    require_dense(x, op, "x", "f32", *x.shape)
    require_dense(target, op, "target", "f32", *x.shape)
    require(x.numel > 0, op, "there is nothing to take the mean of")
    no_gradient(f"the target of {op}", target)
    device, share = x.device, 1 / x.numel
    sums = Tensor.empty(device, (-(-x.numel // _SUMMED),))
    groups = grid(sums.numel)
    reads = {"x": x, "target": target, "scale": None}
    device.kernel(op).dispatch(groups, reads, {"y": sums}, count=x.numel, columns=groups[0], share=share)
    with no_grad():
        loss = scaled(total(sums), share)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx, groups = Tensor.empty(device, x.shape), grid(-(-x.numel // 256))
        reads = {"x": x, "target": target, "scale": dy}
        device.kernel(f"{op}_back").dispatch(
            groups, reads, {"y": dx}, count=x.numel, columns=groups[0], share=share
        )
        return (dx,)

    return taped(loss, (x,), back)
