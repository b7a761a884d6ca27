"""The products on the way back through a layer: of several weights at once, with the bias's sums, on every variant."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.common import eight_lanes
from oazoo.runtime.ops.embedding import table_gradient
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.product import input_gradient, layer_gradients
from oazoo.runtime.tape import GradientTape

RNG = np.random.default_rng(7)
VARIANTS = ["tile", "lanes"]
F32 = npt.NDArray[np.float32]


def normal(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(np.float32)


def on_device(array: npt.ArrayLike) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def choose(variant: str) -> str | None:
    return variant if variant == "tile" or eight_lanes(get_device()) else None


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 4, [4]), (9, 32, [8, 4]), (37, 132, [16, 8, 24]), (64, 256, [32, 32, 32]), (70, 72, [68])],
)
def test_gradients_through_several_weights(variant: str, rows: int, inputs: int, outputs: list[int]) -> None:
    dy, weights = normal(rows, sum(outputs)), [normal(n, inputs) for n in outputs]
    found = input_gradient(on_device(dy), [on_device(w) for w in weights], variant=choose(variant)).numpy()
    wanted = dy.astype(np.float64) @ np.concatenate(weights).astype(np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 4, 8), (7, 36, 13), (33, 128, 24), (130, 264, 3), (1024, 32, 60)]
)
def test_weights_and_biases(variant: str, rows: int, inputs: int, outputs: int) -> None:
    dy, x = normal(rows, outputs), normal(rows, inputs)
    weight, bias = layer_gradients(on_device(dy), on_device(x), variant=choose(variant))
    wide = dy.astype(np.float64)
    np.testing.assert_allclose(weight.numpy(), wide.T @ x, rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(bias.numpy(), wide.sum(0), rtol=1e-4, atol=1e-4)


def test_sizes_that_do_not_fit_are_refused() -> None:
    dy = on_device(normal(3, 12))
    with pytest.raises(DeviceError, match="dy must be"):
        input_gradient(dy, [on_device(normal(8, 4)), on_device(normal(8, 4))])
    with pytest.raises(DeviceError, match="different inputs"):
        input_gradient(dy, [on_device(normal(8, 4)), on_device(normal(4, 8))])


@pytest.mark.parametrize("learns", ["all", "weights", "biases", "second", "x"])
def test_a_projection_of_three_of_which_some_learn(learns: str) -> None:
    x, weights, biases = normal(40, 32), [normal(16, 32) for _ in range(3)], [normal(16) for _ in range(3)]
    c = normal(40, 48)
    tensors = [on_device(a) for a in (x, *weights, *biases)]
    chosen = {"all": range(7), "weights": (1, 2, 3), "biases": (4, 5, 6), "second": (2,), "x": (0,)}[learns]
    for index in chosen:
        tensors[index].requires_grad = True
    with GradientTape() as tape:
        y = linear(tensors[0], tensors[1:4], tensors[4:])
    tape.backward(y, on_device(c))
    wide = c.astype(np.float64)
    parts = [wide[:, 16 * i : 16 * i + 16] for i in range(3)]
    wanted = [wide @ np.concatenate(weights), *(p.T @ x for p in parts), *(p.sum(0) for p in parts)]
    for index, tensor in enumerate(tensors):
        if index not in chosen:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), wanted[index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "outputs"), [(32, [8, 16, 24]), (40, [64]), (33, [72, 8]), (100, [136])])
def test_many_rows_with_sizes_in_eights(rows: int, outputs: list[int]) -> None:
    x, weights, biases = normal(rows, 64), [normal(n, 64) for n in outputs], [normal(n) for n in outputs]
    some = [on_device(b) if i != 1 else None for i, b in enumerate(biases)]
    found = linear(on_device(x), [on_device(w) for w in weights], some).numpy()
    added = np.concatenate([b if i != 1 else np.zeros_like(b) for i, b in enumerate(biases)])
    wanted = x.astype(np.float64) @ np.concatenate(weights).T + added
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
@pytest.mark.parametrize("width", [3, 8, 170])
@pytest.mark.parametrize("variant", ["strips", "rows", "tokens"])
def test_gradients_of_a_table_that_some_ids_miss(dtype: type, width: int, variant: str) -> None:
    ids = RNG.integers(0, 12, 150).astype(dtype)  # of 9 rows: the rest belongs to none
    dy = normal(150, width)
    wanted = np.zeros((9, width))
    np.add.at(wanted, ids[ids < 9], 0.5 * dy.astype(np.float64)[ids < 9])
    found = table_gradient(on_device(ids), on_device(dy), 9, 0.5, variant=variant).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
