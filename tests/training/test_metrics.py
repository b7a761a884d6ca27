"""Losses by name, and metrics that gather on the device."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oa_goldens import golden

from oazoo.errors import DeviceError, UsageError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.training.losses import LOSSES, loss, masked_cross_entropy
from oazoo.training.metrics import Accuracy, MeanLoss, Metric


def on(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def test_the_mean_of_losses_keeps_its_digits() -> None:
    """Twenty thousand small numbers on top of a large one, which a plain float32 sum would lose."""
    metric = MeanLoss(get_device())
    assert math.isnan(metric.result())
    metric.update(on(np.array([3e5], np.float32)), 1.0)
    small = on(np.array([1e-3], np.float32))
    with get_device().capture() as program:
        for _ in range(100):
            metric.update(small)
    for _ in range(200):
        program.run()
    wanted = (3e5 + 20_000 * float(np.float32(1e-3))) / 20_001
    assert abs(metric.result() / wanted - 1) < 1e-7
    metric.reset()
    for value, weight in ((2.0, 3.0), (4.0, 1.0)):
        metric.update(on(np.array([value], np.float32)), weight)
    assert metric.result() == 2.5


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.uint8])
def test_accuracy(kind: type[np.integer]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (1001, 5)).astype(np.float32)  # with ties
    targets = rng.integers(0, 5, 1001).astype(kind)
    mask = (rng.random(1001) < 0.7).astype(np.float32)
    hits = logits.argmax(1) == targets
    metric: Metric = Accuracy(get_device())
    assert isinstance(metric, Accuracy) and math.isnan(metric.result())
    metric.update(on(logits), on(targets))
    assert metric.result() == hits.mean()
    metric.update(on(logits), on(targets), on(mask))
    assert metric.result() == (hits.sum() + hits[mask > 0].sum()) / (1001 + mask.sum())
    metric.reset()
    assert math.isnan(metric.result())
    arrays, _ = golden("loss_cross_entropy")
    metric.update(on(arrays["logits"]), on(arrays["targets"]))
    assert metric.result() == arrays["accuracy"]


def test_losses_by_name() -> None:
    assert loss("mse") is LOSSES["mse"]
    with pytest.raises(UsageError, match="there is no loss 'hinge'; there are cross_entropy, "):
        loss("hinge")
    rng = np.random.default_rng(1)
    logits, targets = on(rng.standard_normal((4, 3)).astype(np.float32)), on(np.array([0, 1, 2, 0], np.uint8))
    mask = on(np.array([0, 1, 1, 0], np.float32))
    rows = [cross_entropy(logits.rows(i, i + 1), on(np.array([i], np.uint8))).numpy()[0] for i in (1, 2)]
    found = masked_cross_entropy(logits, targets, mask, 2).numpy()[0]
    assert abs(found - np.mean(rows)) < 1e-6
    with pytest.raises(DeviceError, match="targets must be i32, u32 or u8, not f32"):
        cross_entropy(logits, mask)
