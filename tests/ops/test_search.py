"""The search for the best Q4 block code, against float64 references of its objective."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.formats import quant
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.pack import Packer, pack

Doubles = npt.NDArray[np.float64]


def least_error(x: Doubles, w: Doubles) -> float:
    """The least sum of w (x - s q)² of one block over all scales and codes, from every set of codes that rounding can give.

    Any best code rounds x / s for its own s, and that changes only at |x| / s = m + 1/2: one scale out of every interval
    between such points, for both signs, is all there is.
    """
    a = np.abs(x[x != 0])
    if not a.size:
        return 0.0
    points = np.sort(np.unique((np.arange(8)[None, :] + 0.5) / a[:, None]))
    points = np.concatenate([points[:1] / 2, points, points[-1:] * 2])
    t = (points[1:] + points[:-1]) / 2
    best = float((w * x * x).sum())
    for sign in (1.0, -1.0):
        q = np.clip(np.rint(x[None, :] * t[:, None] * sign), -7, 8)
        power = (w * q * q).sum(1)
        ok = power > 0
        dot = (w * x * q).sum(1)
        s = dot[ok] / power[ok]
        best = min(best, float(((x - s[:, None] * q[ok]) ** 2 * w).sum(1).min(initial=best)))
    return best


def errors(values: npt.NDArray[Any], packed: Tensor, w: Doubles, encoding: str = "q4") -> Doubles:
    """The error of each block, in float64."""
    count = values.size
    back = quant.decode(packed.bytes(), encoding, count).astype(np.float64)
    difference = np.zeros(-(-count // 32) * 32)
    difference[:count] = values.astype(np.float64).reshape(-1) - back
    weights = np.zeros(difference.size)
    weights[:count] = np.resize(w, count)
    result: Doubles = (difference**2 * weights).reshape(-1, 32).sum(1)
    return result


def blocks(values: npt.NDArray[Any], w: Doubles) -> tuple[Doubles, Doubles]:
    """Values and weights by block, zeros after the end."""
    count = values.size
    x, weights = np.zeros(-(-count // 32) * 32), np.zeros(-(-count // 32) * 32)
    x[:count] = values.astype(np.float64).reshape(-1)
    weights[:count] = np.resize(w, count)
    return x.reshape(-1, 32), weights.reshape(-1, 32)


def bounds(values: npt.NDArray[Any], w: Doubles) -> Doubles:
    return np.array([least_error(a, b) for a, b in zip(*blocks(values, w), strict=True)])


def power(values: npt.NDArray[Any], w: Doubles) -> Doubles:
    x, weights = blocks(values, w)
    result: Doubles = (weights * x * x).sum(1)
    return result


def check(values: npt.NDArray[Any], w: npt.NDArray[np.float32] | None = None) -> None:
    device = get_device()
    weights = None if w is None else Tensor.from_numpy(device, w)
    packed = pack(Tensor.from_numpy(device, values), "q4", "search", weights)
    wide = np.ones(1) if w is None else w.astype(np.float64)
    got, bound = errors(values, packed, wide), bounds(values, wide)
    # Sums in float32 leave the scale off by up to some 2^-22 of itself, and the error by the square of that.
    floor = 2e-13 * power(values, wide)
    assert got.sum() <= bound.sum() * (1 + 1e-6) + floor.sum()
    # And codes whose errors differ by less than what float32 sums resolve may be taken for one another.
    assert (got <= bound + 1e-6 * power(values, wide)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 31), (3, 33), (64, 96)])
def test_best_of_all_codes(shape: tuple[int, ...], dtype: type) -> None:
    check(np.random.default_rng(1).normal(size=shape).astype(dtype))


@pytest.mark.parametrize("width", [1, 5, 31, 33, 64, 100])
def test_weighted_by_column(width: int) -> None:
    """Also where rows are no multiple of the block, so that blocks hold the end of one row and the start of the next."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(40, width)).astype(np.float32)
    check(x, rng.gamma(0.3, size=width).astype(np.float32) + np.float32(1e-3))
    check(x, rng.integers(0, 2, width).astype(np.float32))  # some columns count nothing


@pytest.mark.parametrize("kind", ["laplace", "cauchy", "uniform", "grid", "positive", "sparse"])
def test_shapes_of_distributions(kind: str) -> None:
    rng = np.random.default_rng(3)
    x = {
        "laplace": rng.laplace(size=(200, 32)),
        "cauchy": rng.standard_cauchy(size=(200, 32)),
        "uniform": rng.uniform(-1, 1, size=(200, 32)),
        "grid": rng.integers(-8, 8, size=(200, 32)) * 0.37,
        "positive": np.abs(rng.normal(size=(200, 32))),
        "sparse": rng.normal(size=(200, 32)) * (rng.uniform(size=(200, 32)) < 0.06),
    }[kind].astype(np.float32)
    check(x)


@pytest.mark.parametrize("size", [1e-28, 1e-10, 1e10, 1e30, 3e38])
def test_any_magnitude(size: float) -> None:
    x = np.random.default_rng(4).uniform(-1, 1, size=(50, 32)) * size
    check(x.astype(np.float32) * np.float32(1))


def test_outlier_constant_and_zero_blocks() -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(8, 32)) * 1e-3).astype(np.float32)
    x[0, 7] = 1e4
    x[1] = 0
    x[2] = -0.25
    x[3, :] = 0
    x[3, 31] = 5
    x[4] = -0.0
    check(x)
    packed = pack(Tensor.from_numpy(get_device(), x), "q4", "search")
    back = quant.decode(packed.bytes(), "q4", x.size).reshape(x.shape)
    for exact in (1, 2, 3, 4):
        np.testing.assert_array_equal(back[exact], x[exact])


def test_where_nothing_can_be_searched_the_format_rule_decides() -> None:
    """NaN, infinities, and magnitudes below 2^-100 down to subnormals: the same bits as absmax, and counted."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(6, 32)).astype(np.float32)
    x[0, 3], x[1, 5], x[2, 9] = np.nan, np.inf, -np.inf
    x[3] *= np.float32(1e-31)
    x[4] *= np.float32(1e-39)
    x[5] = 0
    tensor = Tensor.from_numpy(get_device(), x)
    assert pack(tensor, "q4", "search").bytes().tobytes() == pack(tensor, "q4").bytes().tobytes()
    _, _, odd = Packer(get_device(), "q4", x.size, "search")(x.reshape(-1))
    assert (odd.count, odd.first) == (3, 3)


def test_pieces_are_the_whole() -> None:
    """A tensor in pieces that begin within a row gets the codes that it gets at once."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(50, 72)).astype(np.float32)
    w = Tensor.from_numpy(get_device(), rng.uniform(0.1, 4, 72).astype(np.float32))
    whole = pack(Tensor.from_numpy(get_device(), x), "q4", "search", w).bytes()
    packer = Packer(get_device(), "q4", 640, "search")
    flat = x.reshape(-1)
    pieces = [packer(flat[at : at + 640], w, at) for at in range(0, flat.size, 640)]
    joined = b"".join(p[0].tobytes() for p in pieces) + b"".join(p[1].tobytes() for p in pieces)
    assert joined == whole.tobytes()


def least_error_q8(x: Doubles, w: Doubles) -> float:
    """The least sum of w (x - s q)² of one block over the scales under which nothing has a code beyond 127: one out of every
    interval between the points |x| / s = m + 1/2 at which codes change."""
    a = np.abs(x[(x != 0) & (w > 0)])
    if not a.size:
        return 0.0
    points = np.sort(np.unique((np.arange(127)[None, :] + 0.5) / a[:, None]))
    points = points[points <= 127.5 / a.max()]
    t = np.concatenate([(points[1:] + points[:-1]) / 2, points[-1:] * (1 - 1e-9)])
    q = np.clip(np.rint(x[None, :] * t[:, None]), -127, 127)
    dot, total = (w * x * q).sum(1), (w * q * q).sum(1)
    s = dot[total > 0] / total[total > 0]
    return float(((x - s[:, None] * q[total > 0]) ** 2 * w).sum(1).min())


@pytest.mark.parametrize("kind", ["normal", "laplace", "uniform", "weighted", "some columns", "half", "grid"])
def test_q8_against_every_scale(kind: str) -> None:
    """All blocks together come within 1 % of the least error of any scale, none is 8 % above, and absmax is far behind."""
    rng = np.random.default_rng(8)
    x = {
        "laplace": rng.laplace(size=(60, 33)),
        "uniform": rng.uniform(-1, 1, size=(60, 33)),
        # What four bits with an offset leave: 16 levels that no multiple of the largest hits.
        "grid": rng.integers(0, 16, size=(60, 33)) * 0.13 - 0.91,
    }.get(kind, rng.normal(size=(60, 33)))
    values = x.astype(np.float16 if kind == "half" else np.float32)
    columns = {"weighted": rng.gamma(0.4, size=33) + 1e-3, "some columns": rng.integers(0, 2, 33)}.get(
        kind, np.ones(33)
    )
    w = columns.astype(np.float32)
    tensor = Tensor.from_numpy(get_device(), values)
    packed = pack(tensor, "q8", "search", Tensor.from_numpy(get_device(), w))
    wide = w.astype(np.float64)
    got = errors(values, packed, wide, "q8")
    bound = np.array([least_error_q8(a, b) for a, b in zip(*blocks(values, wide), strict=True)])
    floor = 2e-13 * power(values, wide)
    assert got.sum() <= 1.01 * bound.sum() + floor.sum()
    assert (got <= 1.08 * bound + floor).all()
    assert got.sum() < 0.85 * errors(values, pack(tensor, "q8"), wide, "q8").sum()


@pytest.mark.parametrize("size", [1e-28, 1e30, 3e38])
def test_q8_any_magnitude_and_what_cannot_be_searched(size: float) -> None:
    rng = np.random.default_rng(9)
    x = (rng.uniform(-1, 1, size=(6, 32)) * size).astype(np.float32)
    x[0], x[1] = 0, -size
    tensor = Tensor.from_numpy(get_device(), x)
    got = errors(x / np.float32(size), pack_scaled(tensor, size), np.ones(1), "q8")
    assert (got[:2] <= 1e-11).all()
    assert got.sum() < 32 * 4 * 0.25 * (1 / 127) ** 2 / 3
    x[2, 3], x[3], x[4, 9] = np.nan, np.float32(1e-39), -np.inf
    special = Tensor.from_numpy(get_device(), x)
    by_rule, found = pack(special, "q8").planes(), pack(special, "q8", "search").planes()
    for mine, rule in zip(found, by_rule, strict=True):
        rows = [0, 2, 3, 4]
        np.testing.assert_array_equal(mine.numpy()[rows], rule.numpy()[rows])


def pack_scaled(x: Tensor, size: float) -> Tensor:
    """Packed to Q8 by search, then scales divided, so that errors can be squared."""
    codes, scales = pack(x, "q8", "search").planes()
    raw = codes.numpy().tobytes() + (scales.numpy() / np.float32(size)).astype(np.float32).tobytes()
    return Tensor.from_bytes(x.device, x.shape, "q8", raw)


def test_refused() -> None:
    x = Tensor.from_numpy(get_device(), np.ones(64, np.float32))
    with pytest.raises(DeviceError, match="no method"):
        pack(x, "q4", "magic")
    with pytest.raises(DeviceError, match="weights are for"):
        pack(x, "q4", weights=Tensor.from_numpy(get_device(), np.ones(32, np.float32)))
