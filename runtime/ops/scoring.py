"""Scores of rows of logits: how probable given tokens are, and how far one model's distribution is from another's."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, lanes, require, require_dense
from oazoo.runtime.tensor import Tensor

#: Columns of what :func:`score_rows` gives.
LARGEST, SUM, TARGET, ARGMAX, FIELDS = 0, 1, 2, 3, 4
#: Indices travel as float32.
_MAX_WIDTH = 1 << 24


def score_rows(logits: Tensor, targets: Tensor, *, variant: str | None = None) -> Tensor:
    """What the negative log-likelihood of a token a row is made of: ``LARGEST + log(SUM) - TARGET``.

    Args:
        logits: f32 [rows, width], 1 ≤ width ≤ 2^24.
        targets: i32 [rows], each from 0 to width - 1 (not checked here).
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows, 4]: the largest logit, the sum of exp(logit - largest), the target's logit, and the index of the largest
        (the first among equals; -1 if the row has a NaN or an infinity, and then the other columns mean nothing).
    """
    op = "score_rows"
    require_dense(logits, op, "logits", "f32", -1, -1)
    rows, width = logits.shape
    require(0 < width <= _MAX_WIDTH, op, f"rows of {width:,} logits; 1 to {_MAX_WIDTH:,} are possible")
    require_dense(targets, op, "targets", "i32", rows)
    y = Tensor.empty(logits.device, (rows, FIELDS))
    groups = grid(rows)
    if rows:
        logits.device.kernel(f"score_{variant or lanes(logits.device)}").dispatch(
            groups,
            {"x": logits, "targets": targets},
            {"y": y},
            width=width,
            rows=rows,
            columns=groups[0],
        )
    return y


def divergence_rows(
    p: Tensor,
    q: Tensor,
    p_scores: Tensor,
    q_scores: Tensor,
    *,
    mask: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """The Kullback-Leibler divergence D(P‖Q) of each row's softmax, in nats: what is lost by taking Q for P.

    Args:
        p: f32 [rows, width], logits of the reference.
        q: f32 [rows, width], logits of what is compared with it.
        p_scores: f32 [rows, 4] of p, from :func:`score_rows`.
        q_scores: f32 [rows, 4] of q.
        mask: f32 [rows] that each row's divergence is multiplied by, or None; rows of a zero give 0, whatever is in them.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [rows], never negative without a mask that is; meaningless where a row is not finite.
    """
    op = "divergence_rows"
    require_dense(p, op, "p", "f32", -1, -1)
    rows, width = p.shape
    require_dense(q, op, "q", "f32", rows, width)
    for name, scores in (("p_scores", p_scores), ("q_scores", q_scores)):
        require_dense(scores, op, name, "f32", rows, FIELDS)
    if mask is not None:
        require_dense(mask, op, "mask", "f32", rows)
    y = Tensor.empty(p.device, (rows,))
    groups = grid(rows)
    if rows:
        p.device.kernel(f"diverge_{variant or lanes(p.device)}").dispatch(
            groups,
            {"p": p, "q": q, "p_score": p_scores, "q_score": q_scores, "mask": mask},
            {"y": y},
            width=width,
            rows=rows,
            columns=groups[0],
            masked=int(mask is not None),
        )
    return y
