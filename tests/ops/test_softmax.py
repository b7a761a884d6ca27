"""Softmax over rows of any length, and losses of a prediction against a target of its shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.activation import swiglu
from oazoo.runtime.ops.loss import binary_cross_entropy, l1, mse, smooth_l1
from oazoo.runtime.ops.softmax import log_softmax, softmax
from oazoo.runtime.tape import GradientTape


def softmax64(x: F64) -> F64:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("variant", [None, "group32"])
@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 1), (1, 70), (4, 33)])
def test_softmax(shape: tuple[int, ...], variant: str | None) -> None:
    x = normal(*shape) * 3
    check(lambda x: softmax(x, variant=variant), softmax64, [x])
    check(lambda x: log_softmax(x, variant=variant), lambda x: np.log(softmax64(x)), [x])


@pytest.mark.parametrize("variant", [None, "group32"])
def test_softmax_of_long_and_extreme_rows(variant: str | None) -> None:
    x = normal(2, 50_000)
    x[1, :4] = [-3e38, 3e4, -1e30, 3e4]
    device_x = Tensor.from_numpy(get_device(), x)
    wanted = softmax64(x.astype(np.float64))
    found = softmax(device_x, variant=variant).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-9)
    assert found[1, 1] == 0.5
    logs = log_softmax(device_x, variant=variant).numpy()
    np.testing.assert_allclose(logs[0], np.log(wanted[0]), rtol=1e-5)


def bce64(x: F64, target: F64) -> F64:
    p = np.clip(x, 1e-7, 1 - 1e-7)
    return -(target * np.log(p) + (1 - target) * np.log(1 - p))


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[F64, F64], F64]]] = {
    "mse": (mse, lambda x, t: (x - t) ** 2),
    "l1": (l1, lambda x, t: np.abs(x - t)),
    "smooth_l1": (
        smooth_l1,
        lambda x, t: np.where(np.abs(x - t) < 1, (x - t) ** 2 / 2, np.abs(x - t) - 0.5),
    ),
    "binary_cross_entropy": (binary_cross_entropy, bce64),
}


@pytest.mark.parametrize("shape", [(3, 4), (7,), (9, 300)])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, shape: tuple[int, ...]) -> None:
    form, numpy_form = LOSSES[name]
    x, target = normal(*shape) * 2, normal(*shape)
    if name == "binary_cross_entropy":
        x, target = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(-target))
    device_target = Tensor.from_numpy(get_device(), target)
    if x.size > 100:  # differences for every element would take long
        found = form(Tensor.from_numpy(get_device(), x), device_target).numpy()
        np.testing.assert_allclose(found, numpy_form(x.astype(np.float64), target).mean(), rtol=1e-5)
        return
    wide = target.astype(np.float64)
    check(lambda x: form(x, device_target), lambda x: np.array([numpy_form(x, wide).mean()]), [x])


def test_losses_that_cannot_be() -> None:
    x, target = (Tensor.from_numpy(get_device(), normal(4)) for _ in range(2))
    with pytest.raises(DeviceError, match="mse: target must be f32"):
        mse(x, Tensor.from_numpy(get_device(), normal(2, 2)))
    target.requires_grad = True
    with GradientTape(), pytest.raises(DeviceError, match="the target of l1 has no gradient"):
        l1(x, target)
    nan = Tensor.from_numpy(get_device(), np.array([np.nan, 0.5, 0.5, 0.5], np.float32))
    assert np.isnan(binary_cross_entropy(nan, x).numpy()).all()


def test_swiglu() -> None:
    check(swiglu, lambda a, b: a / (1 + np.exp(-a)) * b, [normal(3, 6), normal(3, 6)])
