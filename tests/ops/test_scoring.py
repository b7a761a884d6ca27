"""Scores of logits against float64 NumPy: likelihoods, the largest, and divergences of every size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.scoring import ARGMAX, LARGEST, SUM, TARGET, divergence_rows, score_rows

F32 = npt.NDArray[np.float32]
VARIANTS = [None, "group32"]


def on_device(array: npt.NDArray[np.generic]) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def log_softmax(x: F32) -> npt.NDArray[np.float64]:
    wide = x.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    return result


def scores(x: F32, targets: npt.NDArray[np.int32], variant: str | None) -> F32:
    got: F32 = score_rows(on_device(x), on_device(targets), variant=variant).numpy()
    return got


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 33), (70, 1000), (4, 49152)])
@pytest.mark.parametrize("spread", [0.0, 3.0, 300.0])
def test_likelihoods(shape: tuple[int, int], spread: float, variant: str | None) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * spread - 40).astype(np.float32)
    targets = rng.integers(0, shape[1], shape[0]).astype(np.int32)
    got = scores(x, targets, variant).astype(np.float64)
    nll = got[:, LARGEST] - got[:, TARGET] + np.log(got[:, SUM])
    wanted = -np.take_along_axis(log_softmax(x), targets[:, None].astype(np.int64), 1)[:, 0]
    assert np.abs(nll - wanted).max() <= 2e-6 * max(1, spread)
    assert np.array_equal(got[:, ARGMAX], x.argmax(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_of_equal_logits_is_the_largest_and_rows_that_are_not_finite_are_told(
    variant: str | None,
) -> None:
    x = np.zeros((6, 100), np.float32)
    x[1, [70, 97]] = 2
    x[2, 5] = np.nan
    x[3, 99] = np.inf
    x[4, 0] = -np.inf
    x[5] = 3.4e38
    got = scores(x, np.zeros(6, np.int32), variant)
    assert got[:, ARGMAX].tolist() == [0, 70, -1, -1, -1, 0]
    assert got[5, SUM] == 100


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-2, 0.3, 3.0, 60.0])
def test_divergences(noise: float, variant: str | None) -> None:
    """From nothing to worlds apart: the second order of small differences is not lost.

    What remains is the rounding of the logits' own differences, about 4e-7 of their size.
    """
    rng = np.random.default_rng(1)
    p = (rng.normal(size=(9, 5003)) * 4).astype(np.float32)
    p[0, 17] = 90  # all but certain
    p[1] = 1.0
    q = (p + rng.normal(size=p.shape) * noise).astype(np.float32)
    zeros = on_device(np.zeros(9, np.int32))
    left, right = on_device(p), on_device(q)
    got = divergence_rows(
        left,
        right,
        score_rows(left, zeros, variant=variant),
        score_rows(right, zeros, variant=variant),
        variant=variant,
    ).numpy()
    a, b = log_softmax(p), log_softmax(q)
    ratio = b - a
    wanted = (np.exp(a) * (np.expm1(ratio) - ratio)).sum(1)
    assert np.all(got >= 0)
    if noise == 0:
        assert np.all(got == 0)
    else:
        assert np.all(np.abs(got - wanted) <= (1e-5 + 2e-6 / noise) * wanted + 1e-12)


def test_a_logit_shift_is_no_divergence() -> None:
    p = np.random.default_rng(2).normal(size=(3, 777)).astype(np.float32)
    left, right = on_device(p), on_device(p + 8)
    zeros = on_device(np.zeros(3, np.int32))
    got = divergence_rows(left, right, score_rows(left, zeros), score_rows(right, zeros)).numpy()
    assert np.all(got < 1e-12)


def test_what_does_not_fit_is_refused() -> None:
    x, targets = on_device(np.zeros((2, 4), np.float32)), on_device(np.zeros(2, np.int32))
    with pytest.raises(DeviceError, match=r"score_rows: targets must be i32\[2\]"):
        score_rows(x, on_device(np.zeros(3, np.int32)))
    with pytest.raises(DeviceError, match="rows of 0 logits"):
        score_rows(on_device(np.zeros((2, 0), np.float32)), targets)
    s = score_rows(x, targets)
    with pytest.raises(DeviceError, match=r"divergence_rows: q must be f32\[2, 4\]"):
        divergence_rows(x, on_device(np.zeros((2, 5), np.float32)), s, s)
    empty = on_device(np.zeros((0, 4), np.float32))
    assert score_rows(empty, on_device(np.zeros(0, np.int32))).numpy().shape == (0, 4)
