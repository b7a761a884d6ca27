"""Products with low-rank corrections: values and gradients against NumPy in float64, on every kind of base."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.common import eight_lanes
from oazoo.runtime.ops.low_rank import LowRank, corrected_linear
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.product import product, weight_gradient
from oazoo.runtime.tape import GradientTape

RNG = np.random.default_rng(11)
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def normal(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def on_device(array: npt.ArrayLike) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def learning(array: F32) -> Tensor:
    tensor = on_device(array)
    tensor.requires_grad = True
    return tensor


def choose(variant: str) -> str | None:
    return variant if variant == "tile" or eight_lanes(get_device()) else None


def base(encoding: str, outputs: int, inputs: int) -> tuple[Tensor, F64]:
    values = normal(outputs, inputs)
    if encoding == "f32":
        return on_device(values), values.astype(np.float64)
    packed = pack(on_device(values), encoding)
    return packed, decode(packed.bytes(), encoding, values.size).reshape(values.shape).astype(np.float64)


def grad(tensor: Tensor) -> F32:
    assert tensor.grad is not None
    return tensor.grad.numpy()


@pytest.mark.parametrize("encoding", ["f32", "q8", "q4"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "ranks"),
    [(5, 32, [12], [3]), (40, 64, [32, 16, 16], [8, 0, 4]), (70, 96, [36, 20], [2, 16]), (33, 32, [7], [1])],
)
def test_values_and_gradients(
    encoding: str, rows: int, inputs: int, outputs: list[int], ranks: list[int]
) -> None:
    x, bias, dy = normal(rows, inputs), normal(outputs[0]), normal(rows, sum(outputs))
    bases = [base(encoding, n, inputs) for n in outputs]
    pairs = [(normal(r, inputs), normal(n, r)) if r else None for n, r in zip(outputs, ranks, strict=True)]
    given = [None if p is None else LowRank(learning(p[0]), learning(p[1]), 0.5) for p in pairs]
    x_tensor = learning(x)
    biases = [on_device(bias), *[None] * (len(outputs) - 1)]
    with GradientTape() as tape:
        y = corrected_linear(x_tensor, [tensor for tensor, _ in bases], biases, given)
    tape.backward(y, on_device(dy))

    merged = [
        w if p is None else w + 0.5 * p[1].astype(np.float64) @ p[0]
        for (_, w), p in zip(bases, pairs, strict=True)
    ]
    wanted = x @ np.concatenate(merged).T
    wanted[:, : outputs[0]] += bias
    np.testing.assert_allclose(y.numpy(), wanted, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(grad(x_tensor), dy @ np.concatenate(merged), rtol=2e-5, atol=3e-4)
    parts = np.split(dy.astype(np.float64), np.cumsum(outputs)[:-1], axis=1)
    for part, pair, found in zip(parts, pairs, given, strict=True):
        if pair is None or found is None:
            continue
        np.testing.assert_allclose(grad(found.a), 0.5 * (part @ pair[1]).T @ x, rtol=2e-5, atol=2e-3)
        np.testing.assert_allclose(grad(found.b), 0.5 * part.T @ (x @ pair[0].T), rtol=2e-5, atol=2e-3)


def test_only_what_learns_gets_a_gradient() -> None:
    x, w = on_device(normal(40, 32)), on_device(normal(16, 32))
    pair = LowRank(learning(normal(8, 32)), on_device(normal(16, 8)), 1.0)
    with GradientTape() as tape:
        y = corrected_linear(x, [w], [None], [pair])
    tape.backward(y, on_device(normal(40, 16)))
    assert x.grad is None and w.grad is None and pair.b.grad is None
    assert np.any(grad(pair.a))


def test_weights_under_corrections_are_frozen_and_fit() -> None:
    x, w = on_device(normal(8, 32)), learning(normal(16, 32))
    pair = LowRank(learning(normal(8, 32)), learning(normal(16, 8)), 1.0)
    with GradientTape(), pytest.raises(DeviceError, match="no gradient"):
        corrected_linear(x, [w], [None], [pair])
    w.requires_grad = False
    with pytest.raises(DeviceError, match="b must be"):
        corrected_linear(x, [w], [None], [LowRank(pair.a, learning(normal(8, 8)), 1.0)])


@pytest.mark.parametrize("variant", ["tile", "lanes"])
@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(3, 4, 8), (37, 12, 68), (64, 8, 128), (33, 20, 136), (130, 64, 8)]
)
def test_products_of_some_columns(variant: str, rows: int, width: int, columns: int) -> None:
    a, b, before = normal(rows, width + 12), normal(width, columns), normal(rows, columns)
    own = (8, 8 + width)
    wanted = a[:, own[0] : own[1]].astype(np.float64) @ b
    found = product(on_device(a), on_device(b), columns=own, variant=choose(variant))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-4)
    out = on_device(before)
    product(on_device(a), on_device(b), columns=own, out=out, variant=choose(variant))
    np.testing.assert_allclose(out.numpy(), before + wanted, rtol=1e-5, atol=1e-4)
    # Rows of the result in numbers that no tile divides, columns from the middle of a wider matrix.
    few = normal(rows, 5)
    found = weight_gradient(on_device(few), on_device(a), columns=own, variant=choose(variant))
    np.testing.assert_allclose(
        found.numpy(), few.astype(np.float64).T @ a[:, own[0] : own[1]], rtol=1e-5, atol=1e-4
    )
