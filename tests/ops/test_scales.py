"""Scales of packed weights that learn while codes stay: gradients of every op that has them against float64 NumPy forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from gradient_checks import F64, normal

from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.scales import scale_gradient
from oazoo.runtime.tape import GradientTape

RNG = np.random.default_rng(41)
ENCODINGS = ("q4", "q8")


def on_device(array: npt.ArrayLike) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


class Packed:
    """A packed weight whose scales learn, and NumPy's view of it: codes in blocks, and values for given scales."""

    def __init__(self, encoding: str, *shape: int) -> None:
        self.weight = pack(on_device(normal(*shape)), encoding)
        self.scales = self.weight.learn_scales()
        self.shape = shape
        size = int(np.prod(shape))
        first = self.scales.numpy().astype(np.float64)
        flat = np.zeros(32 * first.size)
        flat[:size] = decode(self.weight.bytes(), encoding, size)
        #: f64 [blocks, 32], whole numbers; zeros where the last block is filled up.
        self.codes = np.round(flat.reshape(-1, 32) / first[:, None])
        self.first = first

    def values(self, scales: F64) -> F64:
        flat = (self.codes * scales[:, None]).reshape(-1)
        return flat[: int(np.prod(self.shape))].reshape(self.shape)

    def reduced(self, gradient: F64) -> F64:
        """What a gradient of the weight makes of the scales."""
        flat = np.zeros(self.codes.size)
        flat[: gradient.size] = gradient.reshape(-1)
        return np.asarray((flat.reshape(-1, 32) * self.codes).sum(axis=1))


def check(
    device_form: Callable[[], Tensor], numpy_form: Callable[[Sequence[F64]], F64], packed: Sequence[Packed]
) -> None:
    """Value of the form and gradients of ``sum(form · c)`` by the scales, against central differences in float64."""
    for one in packed:
        one.scales.grad = None
    with GradientTape() as tape:
        y = device_form()
    scales = [one.first.copy() for one in packed]
    wanted = numpy_form(scales)
    np.testing.assert_allclose(y.numpy(), wanted, rtol=1e-4, atol=1e-4)
    c = np.random.default_rng(3).standard_normal(wanted.shape).astype(np.float32)
    tape.backward(y, on_device(c))
    for one, mine in zip(packed, scales, strict=True):
        assert one.scales.grad is not None and one.weight.grad is None
        numeric = np.empty_like(mine)
        for i in range(mine.size):
            before, h = mine[i], 1e-5 * mine[i]
            mine[i] = before + h
            above = float((numpy_form(scales) * c).sum())
            mine[i] = before - h
            below = float((numpy_form(scales) * c).sum())
            mine[i] = before
            numeric[i] = (above - below) / (2 * h)
        found = one.scales.grad.numpy()
        assert np.abs(found - numeric).max() <= 2e-4 * np.abs(numeric).max()


def rms(x: F64, w: F64) -> F64:
    return np.asarray(x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w)


def gelu_tanh(x: F64) -> F64:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("variant", ["lanes", "group"])
@pytest.mark.parametrize("shape", [(1, 5), (3, 37), (64, 32), (7, 100), (33, 130)])
def test_a_gradient_is_reduced_over_blocks(encoding: str, variant: str, shape: tuple[int, int]) -> None:
    packed, dw = Packed(encoding, *shape), normal(*shape)
    found = scale_gradient(on_device(dw), packed.weight, variant=variant).numpy()
    np.testing.assert_allclose(found, packed.reduced(dw.astype(np.float64)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("variant", ["lanes", "group"])
def test_nothing_past_the_gradient_is_read_and_no_code_past_the_values_counts(variant: str) -> None:
    """Not where the memory goes on with NaN, and codes that fill up the last block are not 0."""
    packed = Packed("q8", 3, 11)
    codes, _ = packed.weight.planes()
    raw = codes.numpy().view(np.int8).reshape(-1)
    raw[33:] = 100
    codes.write(raw.view(np.uint32).reshape(codes.shape))
    memory = np.full((9, 11), np.nan, np.float32)
    memory[:3] = normal(3, 11)
    gradient = on_device(memory).rows(0, 3)
    found = scale_gradient(gradient, packed.weight, variant=variant).numpy()
    np.testing.assert_allclose(found, packed.reduced(memory[:3].astype(np.float64)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 37, 6), (40, 64, 24), (3, 100, 7)])
def test_linear(encoding: str, rows: int, inputs: int, outputs: int) -> None:
    w, x = Packed(encoding, outputs, inputs), normal(rows, inputs)
    norm, bias, residual = normal(inputs), normal(outputs), normal(rows, outputs)
    check(lambda: linear(on_device(x), w.weight), lambda s: x @ w.values(s[0]).T, [w])
    check(
        lambda: linear(
            on_device(x),
            w.weight,
            on_device(bias),
            norm=on_device(norm),
            eps=1e-5,
            gelu=True,
            residual=on_device(residual),
        ),
        lambda s: gelu_tanh(rms(x.astype(np.float64), norm) @ w.values(s[0]).T + bias) + residual,
        [w],
    )


@pytest.mark.parametrize("inputs", [37, 64])
def test_several_weights_together(inputs: int) -> None:
    """Of two encodings, one of them frozen, one dense that learns."""
    x = normal(6, inputs)
    a, b, c = Packed("q4", 8, inputs), Packed("q8", 5, inputs), Packed("q4", 3, inputs)
    check(
        lambda: linear(on_device(x), [a.weight, b.weight, c.weight]),
        lambda s: np.concatenate([x @ w.values(v).T for w, v in zip((a, b, c), s, strict=True)], axis=1),
        [a, b, c],
    )
    b.weight.scales, b.scales.grad = None, None
    dense, bias, dy = on_device(normal(4, inputs)), on_device(normal(8)), normal(6, 17)
    dense.requires_grad = bias.requires_grad = True
    a.scales.grad = None
    with GradientTape() as tape:
        y = linear(on_device(x), [a.weight, b.weight, dense], [bias, None, None])
    tape.backward(y, on_device(dy))
    assert b.scales.grad is None and b.weight.grad is None
    assert a.scales.grad is not None and dense.grad is not None and bias.grad is not None
    wide = dy.astype(np.float64)
    np.testing.assert_allclose(a.scales.grad.numpy(), a.reduced(wide[:, :8].T @ x), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(dense.grad.numpy(), wide[:, 13:].T @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(bias.grad.numpy(), wide[:, :8].sum(axis=0), rtol=1e-4, atol=1e-4)
