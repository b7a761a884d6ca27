"""Scales of packed weights that learn while codes stay: gradients of every op that has them against float64 NumPy forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from gradient_checks import F64

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.nn import Linear
from oazoo.nn.lora import LoRA
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.loss import divergence, mse
from oazoo.runtime.ops.low_rank import LowRank, corrected_linear
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.scales import scale_gradient
from oazoo.runtime.tape import GradientTape
from oazoo.training import Adam, TrainingStep

ENCODINGS = ("q4", "q8")
RNG = [np.random.default_rng(0)]


@pytest.fixture(autouse=True)
def the_same_numbers_whatever_ran_before() -> None:
    RNG[0] = np.random.default_rng(41)


def normal(*shape: int) -> npt.NDArray[np.float32]:
    return RNG[0].standard_normal(shape).astype(np.float32)


def on_device(array: npt.ArrayLike) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


class Packed:
    """A packed weight whose scales learn, and NumPy's view of it: codes in blocks, and values for given scales."""

    def __init__(self, encoding: str, *shape: int, like: npt.NDArray[np.float32] | None = None) -> None:
        self.weight = pack(on_device(normal(*shape) if like is None else like), encoding)
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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gated(encoding: str) -> None:
    gate, up = Packed(encoding, 9, 37), Packed(encoding, 9, 37)
    x, norm, bias = normal(6, 37), normal(37), normal(9)

    def wanted(s: Sequence[F64]) -> F64:
        h = rms(x.astype(np.float64), norm)
        a = h @ gate.values(s[0]).T + bias
        return np.asarray(a / (1 + np.exp(-a)) * (h @ up.values(s[1]).T))

    check(
        lambda: gated(on_device(x), gate.weight, up.weight, on_device(bias), norm=on_device(norm), eps=1e-5),
        wanted,
        [gate, up],
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("period", [None, 3])
def test_embedding(encoding: str, period: int | None) -> None:
    """Ids that come twice, positions shorter than their table."""
    table, places = Packed(encoding, 11, 37), Packed(encoding, 8, 37)
    ids = np.array([4, 0, 10, 4, 7, 4], np.int32)
    at = np.arange(6) % (period or 6)
    check(
        lambda: embedding(on_device(ids), table.weight, places.weight, period=period, scale=1.5),
        lambda s: 1.5 * table.values(s[0])[ids] + places.values(s[1])[at],
        [table, places],
    )


def test_a_table_that_is_also_the_head_gets_both_gradients() -> None:
    table, ids = Packed("q4", 13, 20), np.array([3, 12, 3, 0], np.int32)

    def wanted(s: Sequence[F64]) -> F64:
        values = table.values(s[0])
        return np.asarray(values[ids] @ values.T)

    check(lambda: linear(embedding(on_device(ids), table.weight), table.weight), wanted, [table])


def test_layers_with_adapters_and_scales_that_learn_get_both() -> None:
    device, x, dy = get_device(), normal(70, 33), normal(70, 12)
    packed = Packed("q8", 12, 33)
    layer = Linear(33, 12, bias=False).initialize(device)
    layer.weight.shards = (packed.weight,)
    layer.adapter = LoRA(33, 12, rank=2, alpha=4).initialize(device, 3)
    with GradientTape() as tape:
        y = layer(on_device(x))
    tape.backward(y, on_device(dy))
    assert packed.scales.grad is not None
    np.testing.assert_allclose(
        packed.scales.grad.numpy(), packed.reduced(dy.T.astype(np.float64) @ x), rtol=1e-4, atol=1e-2
    )
    assert all(p.tensor.grad is not None for p in layer.adapter.parameters())
    low = LowRank(on_device(normal(2, 33)), on_device(normal(12, 2)), 1.0)
    with GradientTape(), pytest.raises(DeviceError, match="has no gradient"):
        corrected_linear(on_device(x), [packed.weight], [None], [low])


def net(weights: Sequence[Packed]) -> Callable[[Tensor, Tensor], Tensor]:
    """A small network's loss from ids and targets: every op whose weights may have scales that learn."""
    table, gate, up, down = (w.weight for w in weights)

    def loss(ids: Tensor, targets: Tensor) -> Tensor:
        x = embedding(ids, table)
        return mse(linear(add(x, linear(gated(x, gate, up), down)), table), targets)

    return loss


def numpy_net(values: Sequence[F64], ids: npt.NDArray[np.int32], targets: npt.NDArray[np.float32]) -> float:
    table, gate, up, down = values
    x = table[ids]
    a = x @ gate.T
    return float((((x + (a / (1 + np.exp(-a)) * (x @ up.T)) @ down.T) @ table.T - targets) ** 2).mean())


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_steps_change_scales_and_no_code(encoding: str) -> None:
    """What an optimizer makes of the scales is what the packed weights then stand for; captured as well as eager."""
    ids, targets = np.array([1, 5, 2, 5], np.int32), normal(4, 7)
    dense = [normal(*shape) / 4 for shape in ((7, 20), (10, 20), (10, 20), (20, 10))]
    found = []
    for captured in (True, False):
        weights = [Packed(encoding, *values.shape, like=values) for values in dense]
        codes = [w.weight.planes()[0].numpy() for w in weights]
        step = TrainingStep(net(weights), Adam([w.scales for w in weights], 0.01), captured=captured)
        for _ in range(6):
            step(ids, targets)
        losses = step.losses()
        assert losses[-1] < 0.95 * losses[0]
        for one, before in zip(weights, codes, strict=True):
            np.testing.assert_array_equal(one.weight.planes()[0].numpy(), before)
        # The loss of a run without a tape, by the fused kernels, and of the decoded bytes.
        after = float(net(weights)(on_device(ids), on_device(targets)).numpy()[0])
        values = [w.values(w.scales.numpy().astype(np.float64)) for w in weights]
        for one, wanted in zip(weights, values, strict=True):
            flat = decode(one.weight.bytes(), encoding, wanted.size)
            np.testing.assert_allclose(flat, wanted.reshape(-1), rtol=1e-6)
        assert after == pytest.approx(numpy_net(values, ids, targets), rel=1e-4)
        found.append([losses, *(w.scales.numpy() for w in weights)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def numpy_divergence(p: F64, q: F64) -> tuple[F64, F64]:
    """D(P‖Q) of each row, and its gradient by the logits of Q."""
    a, b = (x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) for x in (p, q))
    a, b = a - p.max(1, keepdims=True), b - q.max(1, keepdims=True)
    return (np.exp(a) * (a - b)).sum(1), np.exp(b) - np.exp(a)


@pytest.mark.parametrize("variant", [None, "group32"])
@pytest.mark.parametrize(("rows", "classes"), [(5, 7), (3, 301), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_divergence(rows: int, classes: int, masked: bool, variant: str | None) -> None:
    p, q = normal(rows, classes) * 4, normal(rows, classes) * 4
    mask = np.array([1, 0, 0.5, 1, 2], np.float32)[:rows]
    each, gradient = numpy_divergence(p.astype(np.float64), q.astype(np.float64))
    weights = mask if masked else np.ones(rows)
    if masked:
        p[mask == 0] = np.nan
        q[mask == 0] = np.inf
    reference, student = on_device(p), on_device(q)
    student.requires_grad = True
    with GradientTape() as tape:
        loss = divergence(
            reference,
            student,
            mask=on_device(mask) if masked else None,
            count=3.5 if masked else None,
            variant=variant,
        )
    tape.backward(loss, on_device(np.array([-0.7], np.float32)))
    count = 3.5 if masked else rows
    np.testing.assert_allclose(loss.numpy(), [(each * weights).sum() / count], rtol=1e-5, atol=1e-6)
    assert student.grad is not None and reference.grad is None
    wanted = -0.7 * gradient * weights[:, None] / count
    np.testing.assert_allclose(student.grad.numpy(), wanted, rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DeviceError, match="no code and scale planes"):
        on_device(normal(3, 4)).learn_scales()
    packed, other = Packed("q4", 4, 8), Packed("q4", 4, 8)
    with pytest.raises(DeviceError, match="gradient must be"):
        scale_gradient(on_device(normal(4, 9)), packed.weight)
    with pytest.raises(DeviceError, match="a f32 weight has no scales"):
        scale_gradient(on_device(normal(4, 8)), on_device(normal(4, 8)))
    ids = on_device(np.array([1, 5], np.int32))
    with GradientTape(), pytest.raises(DeviceError, match="in several parts has no gradient"):
        embedding(ids, [packed.weight, other.weight])
    p, q = on_device(normal(2, 5)), on_device(normal(2, 5))
    with pytest.raises(DeviceError, match="q must be"):
        divergence(p, on_device(normal(2, 6)))
    with pytest.raises(DeviceError, match="mask must be"):
        divergence(p, q, mask=on_device(normal(3)))
    with pytest.raises(DeviceError, match="count of 0"):
        divergence(p, q, count=0)
    p.requires_grad = True
    with GradientTape(), pytest.raises(DeviceError, match="the reference of divergence has no gradient"):
        divergence(p, q)
