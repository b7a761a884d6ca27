"""Sums and counts that stay on the device: what metrics are made of. Each only queues work."""

from __future__ import annotations

from oazoo.runtime.ops.common import class_numbers, require, require_dense
from oazoo.runtime.tensor import Tensor


def add_weighted(state: Tensor, value: Tensor, weight: float = 1.0) -> None:
    """Add ``weight · value`` to a sum, and ``weight`` to the sum of weights.

    Args:
        state: f32 [3]: the sum, what rounding has lost of it (compensated summation), and the sum of weights.
        value: f32 [1].
        weight: how much the value counts.
    """
    op = "add_weighted"
    require_dense(state, op, "state", "f32", 3)
    require_dense(value, op, "value", "f32", 1)
    kernel = state.device.kernel("tally_sum")
    kernel.dispatch((1, 1, 1), {"value": value}, {"state": state}, weight=weight)


def count_hits(state: Tensor, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
    """Add the number of rows whose prediction is the target, and the number of rows.

    Args:
        state: u32 [2]: rows that are right, rows that count.
        predictions: i32 [rows].
        targets: i32, u32 or u8 [rows].
        mask: f32 [rows]; rows with 0 do not count.
    """
    op = "count_hits"
    require_dense(state, op, "state", "u32", 2)
    require_dense(predictions, op, "predictions", "i32", -1)
    rows = predictions.shape[0]
    is_bytes = class_numbers(op, "targets", targets, rows)
    require(rows < 2**31, op, f"{rows:,} rows are more than one run can address")
    if mask is not None:
        require_dense(mask, op, "mask", "f32", rows)
    state.device.kernel("tally_hits").dispatch(
        (1, 1, 1),
        {"predictions": predictions, "targets": targets, "mask": mask},
        {"state": state},
        rows=rows,
        bytes=is_bytes,
        masked=int(mask is not None),
    )
