"""Pooling, resizing and batch norm against float64 forms, on odd sizes, with gradients by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError, OazooError
from oazoo.nn import BatchNorm2d, Conv2d, Module, Upsample
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.batch_norm import batch_norm
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.ops.pooling import adaptive_average_pool2d, average_pool2d, max_pool2d, resize
from oazoo.runtime.tape import GradientTape, checkpoint
from oazoo.training import SGD, TrainingStep


def both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def pooled(x: F64, kernel: Any, stride: Any, padding: Any, form: Callable[[F64, int], F64]) -> F64:
    """``form`` of every window's pixels and of how many places it has within the padded image."""
    (ky, kx), (sy, sx), (py, px) = both(kernel), both(kernel if stride is None else stride), both(padding)
    height, width = x.shape[2:]
    rows = []
    for top in range(-py, height + py - ky + 1, sy):
        row = []
        for left in range(-px, width + px - kx + 1, sx):
            seen = x[:, :, max(top, 0) : top + ky, max(left, 0) : left + kx]
            row.append(form(seen.reshape(*x.shape[:2], -1), ky * kx))
        rows.append(np.stack(row, -1))
    return np.stack(rows, -2)


#: Sizes of x, kernel, stride, padding.
WINDOWS = [
    ((2, 2, 5, 4), (3, 2), (2, 1), (1, 0)),
    ((1, 3, 4, 7), 3, 1, (2, 1)),
    ((2, 1, 5, 5), 2, None, 0),
    ((1, 1, 3, 8), (1, 3), (2, 5), (0, 2)),
]


@pytest.mark.parametrize("case", WINDOWS)
def test_pooling(case: tuple[Any, ...]) -> None:
    shape, kernel, stride, padding = case
    options = {"stride": stride, "padding": padding}
    # Values well apart, so that a difference does not change which is the largest.
    x = np.random.default_rng(1).permutation(np.prod(shape)).reshape(shape).astype(np.float32) / 8
    check(
        lambda x: max_pool2d(x, kernel, **options),
        lambda x: pooled(x, kernel, stride, padding, lambda seen, _: seen.max(-1)),
        [x],
    )
    check(
        lambda x: average_pool2d(x, kernel, **options),
        lambda x: pooled(x, kernel, stride, padding, lambda seen, places: seen.sum(-1) / places),
        [x],
    )
    check(
        lambda x: average_pool2d(x, kernel, count_include_pad=False, **options),
        lambda x: pooled(x, kernel, stride, padding, lambda seen, _: seen.mean(-1)),
        [x],
    )


def test_largest_of_equals_and_of_what_is_not_finite() -> None:
    x = np.array([[1, 1, np.nan, -np.inf], [1, 0, 5, -np.inf]], np.float32).reshape(1, 1, 2, 4)
    tensor = Tensor.from_numpy(get_device(), x)
    tensor.requires_grad = True
    with GradientTape() as tape:
        y = max_pool2d(tensor, (2, 1))
    assert np.array_equal(y.numpy().reshape(-1), [1, 1, np.nan, -np.inf], equal_nan=True)
    tape.backward(y, Tensor.from_numpy(get_device(), np.full((1, 1, 1, 4), 2, np.float32)))
    assert tensor.grad is not None
    assert np.array_equal(tensor.grad.numpy().reshape(2, 4), [[2, 2, 2, 2], [0, 0, 0, 0]])


def axis_means(size: int, results: int) -> F64:
    """Each result as a mean of pixels: floor(i m / n) up to ceil((i + 1) m / n)."""
    matrix = np.zeros((results, size))
    for i in range(results):
        first, last = i * size // results, -(-(i + 1) * size // results)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


def axis_nearest(size: int, results: int) -> F64:
    return np.eye(size)[np.arange(results) * size // results]


def axis_linear(size: int, results: int) -> F64:
    """Triangles of width 1 around the centres of pixels, the outermost ones held."""
    at = np.clip((np.arange(results) + 0.5) * size / results - 0.5, 0, size - 1)
    return np.maximum(1 - np.abs(at[:, None] - np.arange(size)[None]), 0)


@pytest.mark.parametrize("size", [(4, 9), (3, 2), (1, 5), (10, 10), (5, 1)])
@pytest.mark.parametrize("mode", ["adaptive", "nearest", "bilinear"])
def test_other_sizes(mode: str, size: tuple[int, int]) -> None:
    axis = {"adaptive": axis_means, "nearest": axis_nearest, "bilinear": axis_linear}[mode]
    down, across = axis(5, size[0]), axis(3, size[1])
    check(
        lambda x: adaptive_average_pool2d(x, size) if mode == "adaptive" else resize(x, size, mode),
        lambda x: np.einsum("ih,bchw,jw->bcij", down, x, across),
        [normal(2, 1, 5, 3)],
    )


def test_large_sides() -> None:
    """Products of sizes beyond 32 bits do not overflow."""
    x = np.arange(65535, dtype=np.float32).reshape(1, 1, 1, 65535)
    tensor = Tensor.from_numpy(get_device(), x)
    found = resize(tensor, (1, 65534)).numpy().reshape(-1)
    assert np.array_equal(found, np.arange(65534, dtype=np.int64) * 65535 // 65534)
    np.testing.assert_allclose(adaptive_average_pool2d(tensor, 1).numpy().reshape(-1), [32767], rtol=1e-5)


def normalised(x: F64, weight: F64, bias: F64) -> F64:
    axes = (0, *range(2, x.ndim))
    centred = x - x.mean(axes, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(axes, keepdims=True) + 1e-3)
    spread = (slice(None), *(None,) * (x.ndim - 2))
    return scaled * weight[spread] + bias[spread]


@pytest.mark.parametrize("variant", [None, "group32"])
@pytest.mark.parametrize("shape", [(3, 2, 3, 5), (5, 3), (2, 2, 37)])
def test_batch_norm_of_a_batch(shape: tuple[int, ...], variant: str | None) -> None:
    device, channels = get_device(), shape[1]
    start = normal(channels)
    mean, variance = Tensor.from_numpy(device, start), Tensor.from_numpy(device, start)
    x = normal(*shape) * 2 + 1
    check(
        lambda x, w, b: batch_norm(
            x, w, b, mean, variance, 1e-3, training=True, momentum=0.3, variant=variant
        ),
        normalised,
        [x, normal(channels), normal(channels)],
    )
    axes = (0, *range(2, len(shape)))
    np.testing.assert_allclose(mean.numpy(), 0.7 * start + 0.3 * x.mean(axes), rtol=1e-4, atol=1e-5)
    unbiased = x.astype(np.float64).var(axes, ddof=1)
    np.testing.assert_allclose(variance.numpy(), 0.7 * start + 0.3 * unbiased, rtol=1e-4, atol=1e-5)


def test_batch_norm_by_running_statistics() -> None:
    device = get_device()
    mean, variance = normal(2), np.array([0.5, 2], np.float32)
    kept = [Tensor.from_numpy(device, a) for a in (mean, variance)]
    spread = (slice(None), None, None)
    check(
        lambda x, w, b: batch_norm(x, w, b, *kept, 1e-3, training=False),
        lambda x, w, b: (
            (x - mean.astype(float)[spread])
            / np.sqrt(variance.astype(float) + 1e-3)[spread]
            * w[spread]
            + b[spread]
        ),
        [normal(2, 2, 3, 2), normal(2), normal(2)],
    )  # fmt: skip
    assert np.array_equal(kept[0].numpy(), mean) and np.array_equal(kept[1].numpy(), variance)


class Net(Module):
    """A convolution, batch norm and upsampling."""

    def __init__(self) -> None:
        self.conv = Conv2d(1, 3, 3, padding=1, stride=2)
        self.norm = BatchNorm2d(3)
        self.up = Upsample(2, "bilinear")
        self.out = Conv2d(3, 1, 1)

    def inner(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.conv(x)))

    def __call__(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


def test_captured_and_eager_steps_are_the_same_and_learn() -> None:
    x = np.random.default_rng(7).standard_normal((4, 1, 6, 6), np.float32)
    results = []
    for captured in (True, False):
        net = Net().initialize(get_device(), 3).train()
        step = TrainingStep(
            lambda x, y, net=net: mse(net(x), y), SGD(net.named_parameters(), 0.1), captured=captured
        )
        for _ in range(20):
            step(x, x)
        results.append([step.losses(), *net.state_dict().values()])
    assert results[0][0][-1] < 0.9 * results[0][0][0]
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


def test_statistics_move_once_where_a_block_is_computed_twice() -> None:
    x = Tensor.from_numpy(get_device(), normal(4, 1, 6, 6))
    found = []
    for again in (False, True):
        net = Net().initialize(get_device(), 3).train()
        with GradientTape() as tape:
            loss = mse(net.out(checkpoint(net.inner, x) if again else net.inner(x)), x)
        tape.backward(loss)
        grads = [p.tensor.grad for p in net.parameters()]
        found.append(
            [*(g.numpy() for g in grads if g is not None), *(b.values() for _, b in net.named_buffers())]
        )
    assert len(found[0]) == 8
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda x: max_pool2d(x, 0), "kernel must be at least 1"),
        (lambda x: max_pool2d(x, 5), "a kernel of 5 is larger than the image's 4"),
        (lambda x: max_pool2d(x, 2, padding=2), "padding of 2 must be less than the kernel's 2"),
        (lambda x: max_pool2d(x, 2, padding=-1), "padding must be at least 0"),
        (lambda x: average_pool2d(x, 2, stride=0), "stride must be at least 1"),
        (lambda x: average_pool2d(x, (2, -2)), "kernel must be at least 1"),
        (lambda x: average_pool2d(x.view(2, 2, 16), 2), "x must be f32"),
        (lambda x: adaptive_average_pool2d(x, 0), "size must be at least 1"),
        (lambda x: resize(x, (2, 70000)), "a side of 70,000 is more than"),
        (lambda x: resize(x, 2**20), "more than one run can address"),
        (lambda x: resize(x, 2, "bicubic"), "there is no mode 'bicubic'; there are nearest, bilinear"),
        (lambda x: resize(Tensor.empty(x.device, (1, 1, 0, 4)), 2), "have no values"),
        (lambda x: Upsample(0), "a whole number from 1 on"),
        (lambda x: BatchNorm2d(2, compat="torch"), "there is no compat 'torch'"),
        (lambda x: BatchNorm2d(3).initialize(x.device)(x), r"weight must be f32\[2\]"),
        (lambda x: BatchNorm2d(64).initialize(x.device).train()(x.view(1, 64, 1, 1)), "no unbiased variance"),
        (lambda x: BatchNorm2d(2, momentum=1.5).initialize(x.device)(x), "momentum 1.5 must be from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(form: Callable[[Tensor], object], message: str) -> None:
    x = Tensor.from_numpy(get_device(), np.zeros((2, 2, 4, 4), np.float32))
    with pytest.raises((DeviceError, OazooError), match=message) as error:
        form(x)
    assert "\n" not in str(error.value)
