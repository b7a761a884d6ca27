"""Softmax and its logarithm over the last axis."""

from __future__ import annotations

from oazoo.runtime.ops.common import grid, lanes, require, require_dense
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor


def softmax(x: Tensor, *, variant: str | None = None) -> Tensor:
    """``exp(x) / Σ exp(x)`` over the last axis.

    Args:
        x: f32 [..., width], width at least 1.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 of the same shape.
    """
    return _softmax("softmax", x, False, variant)


def log_softmax(x: Tensor, *, variant: str | None = None) -> Tensor:
    """``x - log Σ exp(x)`` over the last axis; arguments and result as of :func:`softmax`."""
    return _softmax("log_softmax", x, True, variant)


def _softmax(op: str, x: Tensor, logs: bool, variant: str | None) -> Tensor:
    require_dense(x, op, "x", "f32", *x.shape)
    require(len(x.shape) > 0 and x.shape[-1] > 0, op, f"rows of shape {list(x.shape)} have no values")
    width = x.shape[-1]
    rows = x.numel // width
    groups = grid(rows)
    name = variant or lanes(x.device)

    def run(kernel: str, values: Tensor, dy: Tensor | None) -> Tensor:
        y = Tensor.empty(x.device, x.shape)
        if rows:
            x.device.kernel(f"{kernel}_{name}").dispatch(
                groups,
                {"x": values, "dy": dy},
                {"y": y},
                rows=rows,
                width=width,
                columns=groups[0],
                logs=int(logs),
            )
        return y

    y = run("softmax", x, None)
    return taped(y, (x,), lambda dy, want: (run("softmax_back", y, dy),))
