"""Packing with error feedback, against float64 arithmetic of its recursion and of what it minimises."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.formats import quant
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.feedback import Feedback, factor
from oazoo.runtime.ops.pack import pack

Doubles = npt.NDArray[np.float64]


def covariance(inputs: int, tokens: int, seed: int) -> Doubles:
    """Of inputs that vary together, some of them far more than others."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(inputs, inputs)) * rng.gamma(0.5, size=inputs)[:, None]
    x = rng.normal(size=(tokens, inputs)) @ mix / np.sqrt(inputs)
    result: Doubles = x.T @ x / tokens
    return result


def decoded(codes: npt.NDArray[np.uint32], scales: npt.NDArray[np.float32], shape: Any) -> Doubles:
    raw = np.concatenate([codes.reshape(-1).view(np.uint8), scales.view(np.uint8)])
    return quant.decode(raw, "q4", int(np.prod(shape))).reshape(shape).astype(np.float64)


def loss(error: Doubles, c: Doubles) -> float:
    """The mean square of what the error of weights does to outputs."""
    return float(((error @ c) * error).sum())


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (70, 96), (8, 256)])
def test_every_step_of_the_recursion(outputs: int, inputs: int) -> None:
    """Each code is the nearest to its column's value after what all columns before passed on, summed in float64 from the
    device's own codes and scales; and each scale does as well as the block's weighted search over those values."""
    rng = np.random.default_rng(1)
    w = rng.normal(size=(outputs, inputs)).astype(np.float32)
    c = covariance(inputs, 3 * inputs, 2)
    damping = 0.02
    upper = factor(c, damping)
    damped = c / c.diagonal().mean() + damping * np.eye(inputs)
    np.testing.assert_allclose(upper.T @ upper @ damped, np.eye(inputs), atol=1e-8)
    np.testing.assert_array_equal(np.tril(upper, -1), 0)

    codes, scales = Feedback(get_device(), c, damping, rounds=0).pack(w)
    got = decoded(codes, scales, w.shape)
    step = scales.reshape(outputs, inputs // 32).astype(np.float64)
    values = w.astype(np.float64)
    begin = np.empty_like(values)
    for column in range(inputs):
        if column % 32 == 0:
            begin[:, column : column + 32] = values[:, column : column + 32]
        s = step[:, column // 32]
        code = got[:, column] / s
        ideal = values[:, column] / s
        assert (np.abs(code - np.clip(ideal, -7, 8)) <= 0.5 + 1e-3).all()
        error = (values[:, column] - got[:, column]) / upper[column, column]
        values[:, column:] -= error[:, None] * upper[column, column:]

    weights = upper.diagonal() ** -2.0
    device = get_device()
    for block in range(inputs // 32):
        at = slice(32 * block, 32 * block + 32)
        some = np.ascontiguousarray(begin[:, at], np.float32)
        some_weights = Tensor.from_numpy(device, (weights / weights.mean())[at].astype(np.float32))
        searched = pack(Tensor.from_numpy(device, some), "q4", "search", some_weights)
        best = quant.decode(searched.bytes(), "q4", some.size).reshape(some.shape)
        rounded = np.clip(np.rint(begin[:, at] / step[:, block, None]), -7, 8) * step[:, block, None]
        mine = ((begin[:, at] - rounded) ** 2 * weights[at]).sum(1)
        theirs = ((begin[:, at] - best) ** 2 * weights[at]).sum(1)
        assert (mine <= theirs * 1.001 + 1e-6 * (begin[:, at] ** 2 * weights[at]).sum(1)).all()


def reference(w: Doubles, c: Doubles, damping: float) -> Doubles:
    """The method in float64: packed and unpacked again. Scales by trying 400 of either sign."""
    upper, values, result = factor(c, damping), w.copy(), np.empty_like(w)
    for start in range(0, w.shape[1], 32):
        at = slice(start, start + 32)
        x, weights = values[:, at], upper.diagonal()[at] ** -2.0
        t = np.concatenate([np.linspace(3.5, 16, 400), -np.linspace(3.5, 16, 400)])
        s = np.abs(x).max(1)[:, None] / t
        q = np.clip(np.rint(x[:, None, :] / s[:, :, None]), -7, 8)
        s = (q * x[:, None, :] * weights).sum(2) / (q * q * weights).sum(2)
        error = ((x[:, None, :] - q * s[:, :, None]) ** 2 * weights).sum(2)
        scale = s[np.arange(len(w)), error.argmin(1)]
        for column in range(start, start + 32):
            result[:, column] = np.clip(np.rint(values[:, column] / scale), -7, 8) * scale
            rest = (values[:, column] - result[:, column]) / upper[column, column]
            values[:, column:] -= rest[:, None] * upper[column, column:]
    return result


@pytest.mark.parametrize("damping", [0.01, 0.3])
def test_what_it_minimises(damping: float) -> None:
    """Its own objective is as low as float64's, within 2 %, and far below that of weighted search."""
    rng = np.random.default_rng(3)
    w = rng.normal(size=(96, 128)).astype(np.float32)
    c = covariance(128, 1000, 4)
    damped = c + damping * c.diagonal().mean() * np.eye(128)
    got = decoded(*Feedback(get_device(), c, damping, rounds=0).pack(w), w.shape)
    wide = w.astype(np.float64)
    device = get_device()
    columns = Tensor.from_numpy(device, damped.diagonal().astype(np.float32))
    searched = quant.decode(
        pack(Tensor.from_numpy(device, w), "q4", "search", columns).bytes(), "q4", w.size
    ).reshape(w.shape)
    mine, theirs = loss(wide - got, damped), loss(wide - reference(wide, c, damping), damped)
    assert abs(mine / theirs - 1) < 0.02
    assert mine < 0.75 * loss(wide - searched, damped)


def refined(w: Doubles, c: Doubles, codes: Doubles, scales: Doubles) -> tuple[Doubles, Doubles]:
    """One round over all columns in float64. Codes [outputs, blocks, 32], scales [outputs, blocks]."""
    codes, scales = codes.copy(), scales.copy()
    for block in range(scales.shape[1]):
        at = slice(32 * block, 32 * block + 32)
        error = (codes * scales[:, :, None]).reshape(w.shape) - w
        slopes = error @ c[:, at]
        for j in range(32):
            old, s = codes[:, block, j].copy(), scales[:, block]
            codes[:, block, j] = np.clip(np.rint(old - slopes[:, j] / (c[at, at][j, j] * s)), -7, 8)
            slopes += ((codes[:, block, j] - old) * s)[:, None] * c[at, at][j]
        q = codes[:, block]
        scales[:, block] -= (q * slopes).sum(1) / ((q @ c[at, at]) * q).sum(1)
    return codes, scales


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 96), (9, 32)])
def test_going_through_the_columns_again(outputs: int, inputs: int) -> None:
    """Each round does what it does in float64, and in the end no other code and no other scale of a block is better."""
    rng = np.random.default_rng(8)
    w = rng.normal(size=(outputs, inputs)).astype(np.float32)
    w[3] *= np.float32(1e-20)
    c = covariance(inputs, 4 * inputs, 9)
    damped = c / c.diagonal().mean() + 0.01 * np.eye(inputs)
    shape = (outputs, inputs // 32, 32)

    def parts(rounds: int) -> tuple[Doubles, Doubles]:
        codes, scales = Feedback(get_device(), c, 0.01, rounds).pack(w)
        s = scales.reshape(shape[:2]).astype(np.float64)
        return np.rint(decoded(codes, scales, shape) / s[:, :, None]), s

    def losses(codes: Doubles, s: Doubles) -> Doubles:
        error = (codes * s[:, :, None]).reshape(w.shape) - w
        result: Doubles = ((error @ damped) * error).sum(1)
        return result

    before, size = parts(0), losses(np.zeros(shape), np.ones(shape[:2]))
    for rounds in (1, 2):
        wide, mine = refined(w.astype(np.float64), damped, *before), parts(rounds)
        # A tie that float32 breaks otherwise changes what follows a little.
        np.testing.assert_allclose(losses(*mine).sum(), losses(*wide).sum(), rtol=5e-3)
        assert (losses(*mine) <= losses(*before) + 1e-5 * size).all()
        before = mine
    assert (losses(*before) < 0.95 * losses(*parts(0))).mean() > 0.8
    codes, s = parts(20)
    error = (codes * s[:, :, None]).reshape(w.shape) - w
    slopes = (error @ damped).reshape(shape)
    for step in (-1, 1):
        other = codes + step
        change = step * s[:, :, None] * 2 * slopes + s[:, :, None] ** 2 * damped.diagonal().reshape(-1, 32)
        assert (change[(other >= -7) & (other <= 8)].reshape(-1) > -1e-4 * size.max()).all()
    assert (np.abs((codes * slopes).sum(2) * s) < 1e-4 * size[:, None]).all()


def test_columns_that_vary_alone_are_searched_for() -> None:
    """Without products between inputs there is nothing to pass on, and the method is the weighted search."""
    rng = np.random.default_rng(5)
    w = rng.normal(size=(40, 64)).astype(np.float32)
    moments = rng.gamma(0.5, size=64) + 0.01
    got = decoded(*Feedback(get_device(), np.diag(moments), 1e-9).pack(w), w.shape)
    device = get_device()
    columns = Tensor.from_numpy(device, (moments / moments.mean()).astype(np.float32))
    packed = pack(Tensor.from_numpy(device, w), "q4", "search", columns)
    searched = quant.decode(packed.bytes(), "q4", w.size).reshape(w.shape)
    np.testing.assert_allclose(
        loss(w - got, np.diag(moments)), loss(w - searched, np.diag(moments)), rtol=1e-5
    )


def test_values_so_large_that_sums_overflow() -> None:
    """They are packed as the recursion leaves them, or better; nothing becomes what is no number."""
    w = np.random.default_rng(10).normal(size=(4, 64)).astype(np.float32)
    w[1] = np.sign(w[1]) * np.float32(3e38)
    codes, scales = Feedback(get_device(), covariance(64, 300, 11), 0.1).pack(w)
    got = decoded(codes, scales, w.shape)
    assert np.isfinite(scales).all() and np.isfinite(got[[0, 2, 3]]).all()
    assert np.abs(got[[0, 2, 3]] - w[[0, 2, 3]]).max() < 0.5


def test_rows_in_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from oazoo.runtime.ops import feedback

    w = np.random.default_rng(6).normal(size=(50, 64)).astype(np.float32)
    w[7] = 0
    packer = Feedback(get_device(), covariance(64, 300, 7), 0.1)
    codes, scales = packer.pack(w)
    monkeypatch.setattr(feedback, "_VALUES", 64 * 16)
    for mine, theirs in zip(packer.pack(w), (codes, scales), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not decoded(codes, scales, w.shape)[7].any()


def test_refused() -> None:
    device = get_device()
    for c, why in (
        (np.ones((32, 64)), "shape"),
        (np.eye(33), "multiple of 32"),
        (np.full((32, 32), np.nan), "not finite"),
        (np.zeros((32, 32)), "anything but 0"),
        (np.eye(32) - np.ones((32, 32)), "negative|anything but 0"),
        (np.eye(32) + 2 * (np.ones((32, 32)) - np.eye(32)), "negative variances"),
    ):
        with pytest.raises(DeviceError, match=why):
            Feedback(device, c, 0.01)
    with pytest.raises(DeviceError, match="64 inputs, a covariance of 32"):
        Feedback(device, np.eye(32), 0.01).pack(np.ones((2, 64), np.float32))
