"""Batch norm: each channel by its statistics over all images, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oazoo.runtime.ops.common import MAX_GROUPS, grid, lanes, require, require_dense
from oazoo.runtime.random import replaying
from oazoo.runtime.tape import taped
from oazoo.runtime.tensor import Tensor


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    eps: float,
    *,
    training: bool,
    momentum: float = 0.1,
    unbiased: bool = True,
    variant: str | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` for each channel (arXiv:1502.03167).

    While training, mean and (biased) variance are those of the batch, and running ones move towards them:
    ``running ← (1 - momentum) running + momentum · batch``. Else they are the running ones. A second pass over what was not
    kept (:func:`oazoo.runtime.tape.checkpoint`) moves nothing.

    Args:
        x: f32 [batch, channels, …].
        weight: f32 [channels].
        bias: f32 [channels].
        running_mean: f32 [channels], changed in place while training.
        running_variance: f32 [channels], likewise.
        eps: added to the variance.
        training: which statistics.
        momentum: from 0 to 1: how far the running statistics move.
        unbiased: whether the variance that goes into the running one is divided by one less than the number of values, as
            PyTorch has it.
        variant: ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 of x's shape.
    """
    op = "batch_norm"
    require_dense(x, op, "x", "f32", *x.shape)
    require(len(x.shape) >= 2, op, f"x must be [batch, channels, …], not {list(x.shape)}")
    require(x.numel > 0, op, f"x of shape {list(x.shape)} has no values")
    require(0 <= momentum <= 1, op, f"the momentum {momentum} must be from 0 to 1")
    batch, channels = x.shape[:2]
    require(channels <= MAX_GROUPS, op, f"{channels:,} channels are more than {MAX_GROUPS:,}")
    kept = {
        "weight": weight,
        "bias": bias,
        "running_mean": running_mean,
        "running_variance": running_variance,
    }
    for name, tensor in kept.items():
        require_dense(tensor, op, name, "f32", channels)
    area = x.numel // (batch * channels)
    count = batch * area
    if training and unbiased:
        require(count > 1, op, "one value a channel has no unbiased variance: give more images, or eval()")
    device, name = x.device, variant or lanes(x.device)
    stats = Tensor.empty(device, (channels, 2))
    sizes: dict[str, Any] = {"batch": batch, "channels": channels, "area": area}
    if training:
        device.kernel(f"batch_stats_{name}").dispatch(
            (channels, 1, 1),
            {"x": x},
            {"stats": stats, "mean": running_mean, "variance": running_variance},
            **sizes,
            eps=eps,
            momentum=momentum,
            correction=count / (count - 1) if unbiased else 1.0,
            update=int(not replaying()),
        )
    else:
        device.kernel("kept_stats").dispatch(
            (-(-channels // 64), 1, 1),
            {"mean": running_mean, "variance": running_variance},
            {"stats": stats},
            channels=channels,
            eps=eps,
        )
    groups = grid(-(-x.numel // 256))

    def run(
        kernel: str, groups: tuple[int, int, int], reads: dict[str, Tensor | None], writes: dict[str, Tensor]
    ) -> None:
        names = ("x", "dy", "stats", "weight", "bias", "y", "sums", "scaled")
        reads = {n: reads.get(n) for n in names if n not in writes}
        device.kernel(kernel).dispatch(
            groups, reads, writes, **sizes, columns=groups[0], eps=eps, fixed=int(not training)
        )

    y = Tensor.empty(device, x.shape)
    run("batch_norm", groups, {"x": x, "stats": stats, "weight": weight, "bias": bias}, {"y": y})

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, Tensor, Tensor]:
        sums, scaled = Tensor.empty(device, (channels,)), Tensor.empty(device, (channels,))
        reads: dict[str, Tensor | None] = {"x": x, "dy": dy, "stats": stats}
        run(f"batch_norm_sums_{name}", (channels, 1, 1), reads, {"sums": sums, "scaled": scaled})
        dx = None
        if want[0]:
            dx = Tensor.empty(device, x.shape)
            run(
                "batch_norm_back",
                groups,
                {**reads, "weight": weight, "sums": sums, "scaled": scaled},
                {"y": dx},
            )
        return dx, scaled, sums

    return taped(y, (x, weight, bias), back)
