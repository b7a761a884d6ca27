"""The linear kernels against float64 NumPy: every encoding, every variant, sizes that fit nothing."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.common import eight_lanes
from oazoo.runtime.ops.linear import ENCODINGS, gated, linear
from oazoo.runtime.ops.pack import pack

F64 = npt.NDArray[np.float64]
Rng = np.random.Generator


def variants(inputs: int, rows: int) -> list[str | None]:
    """The variants that this device has for a size; None is its own choice."""
    lanes = eight_lanes(get_device()) and inputs % 32 == 0
    return [None, "group", "tile", *(["lanes"] if lanes else [])]


def stored(values: npt.NDArray[Any], encoding: str) -> tuple[Tensor, F64]:
    """A weight on the device, and the values that it then holds."""
    values = values.astype(np.float32)
    if encoding in ("q4", "q8"):
        packed = pack(Tensor.from_numpy(get_device(), values), encoding)
        flat = decode(packed.bytes(), encoding, values.size)
        return packed, flat.reshape(values.shape).astype(np.float64)
    tensor = Tensor.from_numpy(get_device(), values, dtype=encoding)
    return tensor, tensor.numpy().astype(np.float64)


def activations(rng: Rng, *shape: int) -> tuple[Tensor, F64]:
    return stored(rng.normal(size=shape), "f32")


def close(got: npt.NDArray[np.float32], wanted: F64, magnitude: F64) -> None:
    """Within the rounding of a float32 sum of terms whose absolute values add up to ``magnitude``."""
    assert got.shape == wanted.shape
    assert np.all(np.abs(got - wanted) <= 3e-6 * magnitude + 1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 1, 1),
        (1, 5, 3),
        (1, 17, 32),
        (1, 100, 96),
        (2, 33, 64),
        (3, 40, 576),
        (8, 16, 32),
        (9, 7, 33),
        (13, 65, 50),
        (37, 50, 160),
        (70, 3, 24),
        (300, 20, 32),
        (5, 4, 1000),
    ],
)
def test_products(rows: int, outputs: int, inputs: int, encoding: str) -> None:
    rng = np.random.default_rng(rows * 1000 + inputs)
    x, xs = activations(rng, rows, inputs)
    w, ws = stored(rng.normal(size=(outputs, inputs)), encoding)
    for variant in variants(inputs, rows):
        close(linear(x, w, variant=variant).numpy(), xs @ ws.T, np.abs(xs) @ np.abs(ws.T))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (2, 37), (11, 64)])
def test_everything_folded_in(rows: int, inputs: int, encoding: str) -> None:
    """Three weights side by side, biases on some, norm before, GELU and residual after."""
    rng = np.random.default_rng(rows + inputs)
    x, xs = activations(rng, rows, inputs)
    norm, norms = activations(rng, inputs)
    weights = [stored(rng.normal(size=(n, inputs)), encoding) for n in (40, 9, 17)]
    biases = [activations(rng, 40), None, activations(rng, 17)]
    residual, residuals = activations(rng, rows, 66)
    normed = xs / np.sqrt((xs**2).mean(1, keepdims=True) + 1e-5) * norms
    z = normed @ np.concatenate([v for _, v in weights]).T
    z += np.concatenate([np.zeros(9) if b is None else b[1] for b in biases])
    wanted = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))) + residuals
    for variant in variants(inputs, rows):
        got = linear(
            x,
            [t for t, _ in weights],
            [None if b is None else b[0] for b in biases],
            norm=norm,
            eps=1e-5,
            gelu=True,
            residual=residual,
            variant=variant,
        )
        assert np.abs(got.numpy() - wanted).max() < 2e-4
    kept = Tensor.from_numpy(get_device(), residuals.astype(np.float32))
    linear(x, [t for t, _ in weights], residual=kept, out=kept)
    plain = xs @ np.concatenate([v for _, v in weights]).T
    assert np.abs(kept.numpy() - plain - residuals).max() < 2e-4


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 96, 50), (1, 41, 6), (2, 32, 8), (19, 64, 33), (33, 5, 40)]
)
def test_gated(rows: int, inputs: int, outputs: int, encoding: str) -> None:
    rng = np.random.default_rng(inputs)
    x, xs = activations(rng, rows, inputs)
    gate, gates = stored(rng.normal(size=(outputs, inputs)), encoding)
    up, ups = stored(rng.normal(size=(outputs, inputs)), encoding)
    norm, norms = activations(rng, inputs)
    gate_bias, gate_biases = activations(rng, outputs)
    up_bias, up_biases = activations(rng, outputs)
    normed = xs / np.sqrt((xs**2).mean(1, keepdims=True) + 1e-6) * norms
    for variant, biased, with_norm, gelu in itertools.product(
        variants(inputs, rows), (False, True), (False, True), (False, True)
    ):
        source = normed if with_norm else xs
        g = source @ gates.T + (gate_biases if biased else 0)
        if gelu:
            opened = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
        else:
            opened = g / (1 + np.exp(-g))
        wanted = opened * (source @ ups.T + (up_biases if biased else 0))
        got = gated(
            x,
            gate,
            up,
            gate_bias if biased else None,
            up_bias if biased else None,
            norm=norm if with_norm else None,
            eps=1e-6,
            gelu=gelu,
            variant=variant,
        )
        assert np.abs(got.numpy() - wanted).max() < 1e-5 * max(1.0, float(np.abs(wanted).max()))


def test_weights_of_several_encodings_and_many_parts() -> None:
    rng = np.random.default_rng(3)
    x, xs = activations(rng, 4, 64)
    parts = [
        stored(rng.normal(size=(n, 64)), e)
        for n, e in zip((8, 5, 32, 7, 16), ("f16", "q4", "q4", "q4", "q4"))
    ]
    wanted = xs @ np.concatenate([v for _, v in parts]).T
    for variant in variants(64, 4):
        got = linear(x, [t for t, _ in parts], variant=variant).numpy()
        assert np.abs(got - wanted).max() < 1e-4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sums_are_float32(encoding: str) -> None:
    """4096 products of 16 · 16 are 1,048,576, far beyond a half's range."""
    x = Tensor.from_numpy(get_device(), np.full((1, 4096), 16, np.float32))
    w, ws = stored(np.full((9, 4096), 16), encoding)
    for variant in variants(4096, 1):
        got = linear(x, w, variant=variant).numpy()
        assert np.allclose(got, 16 * ws.sum(1), rtol=1e-6)
    assert abs(float(ws.sum()) - 9 * 4096 * 16) < 9 * 4096 * 16 * 1e-2


@pytest.mark.parametrize("encoding", ["f16", "bf16", "f32"])
def test_small_weights_keep_their_values(encoding: str) -> None:
    """Subnormal halves are ordinary numbers once decoded."""
    values = np.array([[2**-24, 3 * 2**-24, -(2**-15), 6e-5] * 8] * 3)
    x = Tensor.from_numpy(get_device(), np.full((1, 32), 2.0**20, np.float32))
    w, ws = stored(values, encoding)
    for variant in variants(32, 1):
        assert np.allclose(linear(x, w, variant=variant).numpy(), ws.sum(1) * 2.0**20, rtol=1e-5)


def test_nothing_to_do() -> None:
    device = get_device()
    w = Tensor.from_numpy(device, np.ones((6, 32), np.float32))
    assert linear(Tensor.empty(device, (0, 32)), w).numpy().shape == (0, 6)
    assert linear(Tensor.empty(device, (2, 32)), Tensor.empty(device, (0, 32))).numpy().shape == (2, 0)


def test_same_result_at_every_run() -> None:
    rng = np.random.default_rng(9)
    x, _ = activations(rng, 1, 576)
    w, _ = stored(rng.normal(size=(192, 576)), "q4")
    first = linear(x, w).numpy()
    for _ in range(5):
        assert np.array_equal(linear(x, w).numpy(), first)


def test_arguments_are_checked() -> None:
    device = get_device()
    x = Tensor.empty(device, (2, 8))
    w = Tensor.empty(device, (3, 8), "f16")
    with pytest.raises(DeviceError, match=r"does not take rows of 8"):
        linear(x, Tensor.empty(device, (3, 7)))
    with pytest.raises(DeviceError, match="weights cannot be i32"):
        linear(x, Tensor.empty(device, (3, 8), "i32"))
    with pytest.raises(DeviceError, match=r"bias must be f32\[3\]"):
        linear(x, w, Tensor.empty(device, (4,)))
    with pytest.raises(DeviceError, match="2 biases for 1 weights"):
        linear(x, w, [None, None])
    with pytest.raises(DeviceError, match="residual must be"):
        linear(x, w, residual=Tensor.empty(device, (2, 4)))
    with pytest.raises(DeviceError, match="do not suit the lanes variant"):
        linear(x, w, variant="lanes")
    with pytest.raises(DeviceError, match="there is no variant"):
        linear(x, w, variant="fast")
    with pytest.raises(DeviceError, match="one encoding"):
        gated(x, w, Tensor.empty(device, (3, 8)))
    with pytest.raises(DeviceError, match="x must be f32"):
        linear(Tensor.empty(device, (2, 8), "f16"), w)
