"""Routing and grouped products against NumPy in float64: every variant and encoding, any spread of tokens over experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.grouped import expert_mlp, grouped_gated, grouped_linear
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.routing import (
    Groups,
    add_loads,
    balance_bias,
    combine,
    expert_squares,
    group_chosen,
    group_tokens,
    route,
    router_loss,
    spread,
    weighted_rows,
)
from oazoo.runtime.tape import GradientTape

Ints = npt.NDArray[np.uint32]


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def on_device(array: npt.NDArray[Any]) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def probabilities(logits: F64) -> F64:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: F64 = p / p.sum(axis=1, keepdims=True)
    return result


def choose(logits: npt.NDArray[np.float32], top: int) -> npt.NDArray[np.intp]:
    """The largest first, of equal ones the first; NaN is the smallest."""
    scores = np.where(np.isnan(logits), -np.inf, logits)
    return np.argsort(-scores, axis=1, kind="stable")[:, :top]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("experts", "top"), [(1, 1), (4, 2), (9, 9), (37, 5)])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing(experts: int, top: int, normalize: bool) -> None:
    logits, bias = normal(13, experts) * 3, normal(experts)
    logits[1] = 0.25
    logits[2, experts // 2 :] = logits[2, 0]
    logits[3] += 80  # far from 0, where exp of the logits themselves would overflow
    for added in (None, bias):
        routing = route(
            on_device(logits), top, bias=None if added is None else on_device(added), normalize=normalize
        )
        chosen = choose(logits if added is None else logits + added, top)
        assert np.array_equal(routing.chosen.numpy(), chosen)
        weights = np.take_along_axis(probabilities(logits.astype(np.float64)), chosen, 1)
        weights /= weights.sum(axis=1, keepdims=True) if normalize else 1
        np.testing.assert_allclose(routing.weights.numpy(), weights, rtol=2e-5, atol=1e-7)


@pytest.mark.usefixtures("kernels")
def test_odd_logits_choose_experts_all_the_same() -> None:
    """NaN and infinities: numbers of different experts, and NaN comes through in the weights alone."""
    logits = np.array([[np.nan, 1, 2], [np.nan] * 3, [-np.inf] * 3, [np.inf, 0, np.nan]], np.float32)
    routing = route(on_device(logits), 2)
    assert routing.chosen.numpy().tolist() == [[2, 1], [0, 1], [0, 1], [0, 1]]
    assert np.isnan(routing.weights.numpy()[1]).all()


def test_what_cannot_be_routed() -> None:
    for top in (0, 5):
        with pytest.raises(DeviceError, match=f"route: {top} of 4 experts cannot be chosen"):
            route(on_device(normal(3, 4)), top)
    with pytest.raises(DeviceError, match="bias must be f32"):
        route(on_device(normal(3, 4)), 2, bias=on_device(normal(3)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_routing(normalize: bool) -> None:
    logits = normal(6, 5)
    chosen = choose(logits, 2)

    def wanted(x: F64) -> F64:
        weights = np.take_along_axis(probabilities(x), chosen, 1)
        result: F64 = weights / weights.sum(axis=1, keepdims=True) if normalize else weights
        return result

    check(lambda x: route(x, 2, normalize=normalize).weights, wanted, [logits])


@pytest.mark.usefixtures("kernels")
def test_losses_of_the_router() -> None:
    logits = normal(7, 5)
    chosen = choose(logits, 2)
    shares = np.bincount(chosen.reshape(-1), minlength=5) / chosen.size

    def form(x: Tensor) -> Tensor:
        routing = route(x, 2)
        return router_loss(routing, group_tokens(routing), balance=0.3, z=0.1)

    def wanted(x: F64) -> F64:
        lse = np.log(np.exp(x).sum(axis=1))
        found = 0.3 * 5 * (shares * probabilities(x).mean(axis=0)).sum() + 0.1 * (lse**2).mean()
        return np.array([found])

    check(form, wanted, [logits])


#: How tokens are spread: name → the experts of each of 21 tokens, two of seven.
def spreads() -> dict[str, Ints]:
    rng = np.random.default_rng(1)
    some = np.stack([rng.permutation(7)[:2] for _ in range(21)])
    return {
        "any": some.astype(np.uint32),
        "two have all": np.tile(np.array([5, 1], np.uint32), (21, 1)),
        "the last has few": np.where(np.arange(42).reshape(21, 2) == 3, 6, some % 3).astype(np.uint32),
    }


def slots_of(groups: Groups, chosen: Ints) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The token and the expert of each slot, by NumPy."""
    flat = chosen.reshape(-1)
    order = np.argsort(flat, kind="stable") if groups.sorted else np.arange(flat.size)
    return order // chosen.shape[1], flat[order].astype(np.intp)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", spreads())
def test_sorting(name: str) -> None:
    chosen = spreads()[name]
    groups = group_chosen(on_device(chosen), 7)
    assert groups.order is not None and groups.places is not None and groups.rows is not None
    order = np.argsort(chosen.reshape(-1), kind="stable")
    assert np.array_equal(groups.order.numpy(), order) and np.array_equal(groups.rows.numpy(), order // 2)
    assert np.array_equal(groups.places.numpy()[order], np.arange(42))
    assert groups.offsets is not None
    wanted = np.concatenate([[0], np.cumsum(np.bincount(chosen.reshape(-1), minlength=7))])
    assert np.array_equal(groups.offsets.numpy(), wanted)


def test_many_tokens_are_sorted() -> None:
    chosen = np.random.default_rng(2).integers(0, 33, (1500, 3)).astype(np.uint32)
    for variant in ("wave8", "group32"):
        groups = group_chosen(on_device(chosen), 33, variant=variant)
        assert groups.order is not None
        assert np.array_equal(groups.order.numpy(), np.argsort(chosen.reshape(-1), kind="stable"))


def stack(encoding: str, *shape: int) -> tuple[Tensor, F64]:
    """A stack of weights in some encoding, and its values."""
    values = normal(*shape)
    if encoding in ("q8", "q4"):
        packed = pack(on_device(values), encoding)
        return packed, decode(packed.bytes(), encoding, values.size).reshape(shape).astype(np.float64)
    tensor = Tensor.from_numpy(get_device(), values, dtype=encoding)
    return tensor, tensor.numpy().astype(np.float64)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("inputs", [64, 48, 20])
def test_products(encoding: str, inputs: int) -> None:
    """Sorted and not; inputs of whole blocks, half blocks, and neither; outputs that fill no tile."""
    chosen = spreads()["any"]
    x, slots = normal(21, inputs), normal(42, inputs)
    (gate, g), (up, u) = stack(encoding, 7, 19, inputs), stack(encoding, 7, 19, inputs)
    biases = [normal(7, 19), normal(7, 19)]
    for sort in (True, False):
        groups = group_chosen(on_device(chosen), 7, sort=sort)
        tokens, experts = slots_of(groups, chosen)
        for by_token, rows in ((True, x[tokens]), (False, slots)):
            one, other = (
                np.einsum("sk,snk->sn", rows.astype(np.float64), w[experts]) + b[experts]
                for w, b in ((g, biases[0]), (u, biases[1]))
            )
            given = on_device(x if by_token else slots)
            both = [on_device(b) for b in biases]
            found = grouped_linear(given, groups, [gate, up], both, by_token=by_token).numpy()
            np.testing.assert_allclose(found, np.concatenate([one, other], axis=1), rtol=1e-4, atol=1e-4)
            wanted = one / (1 + np.exp(-one)) * other
            found = grouped_gated(given, groups, gate, up, *both, by_token=by_token).numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", spreads())
def test_gradients_of_an_mlp(name: str) -> None:
    """Through the weights of stacks, biases, the routing's weights, and a residual; experts without a token get zeros."""
    chosen = spreads()[name]
    arrays = [
        normal(21, 8),
        normal(7, 12, 8),
        normal(7, 12),
        normal(7, 8, 6),
        normal(7, 8),
        normal(21, 2),
        normal(21, 8),
    ]
    groups = group_chosen(on_device(chosen), 7)

    def form(
        x: Tensor, w: Tensor, b: Tensor, d: Tensor, c: Tensor, weights: Tensor, residual: Tensor
    ) -> Tensor:
        y = expert_mlp(x, groups, [[w]], [d], [b], c)
        return combine(y, groups, weights, residual=residual)

    def wanted(x: F64, w: F64, b: F64, d: F64, c: F64, weights: F64, residual: F64) -> F64:
        y = residual.copy()
        for rank in range(2):
            e = chosen[:, rank]
            gate, up = np.split(np.einsum("tk,tnk->tn", x, w[e]) + b[e], 2, axis=1)
            out = np.einsum("tk,tnk->tn", gate / (1 + np.exp(-gate)) * up, d[e]) + c[e]
            y = y + weights[:, rank : rank + 1] * out
        return y

    check(form, wanted, arrays, tolerance=5e-4)


@pytest.mark.parametrize("encoding", ["f16", "q8", "q4"])
@pytest.mark.parametrize("inputs", [64, 20])
def test_gradients_pass_through_frozen_stacks(encoding: str, inputs: int) -> None:
    chosen = spreads()["any"]
    groups = group_chosen(on_device(chosen), 7)
    tokens, experts = slots_of(groups, chosen)
    weight, values = stack(encoding, 7, 12, inputs)
    x, c = on_device(normal(21, inputs)), normal(42, 12)
    x.requires_grad = True
    with GradientTape() as tape:
        y = grouped_linear(x, groups, weight, by_token=True)
    tape.backward(y, on_device(c))
    wanted = np.zeros((21, inputs))
    np.add.at(wanted, tokens, np.einsum("sn,snk->sk", c.astype(np.float64), values[experts]))
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.numpy(), wanted, rtol=1e-4, atol=1e-4)


def test_the_same_bits_every_time() -> None:
    chosen = on_device(np.random.default_rng(3).integers(0, 5, (300, 2)).astype(np.uint32))
    x, w = on_device(normal(300, 32)), on_device(normal(5, 32, 32))
    seed, weights = on_device(normal(300, 32)), on_device(normal(300, 2))
    found = []
    for _ in range(3):
        x.requires_grad = w.requires_grad = True
        x.grad = w.grad = None
        with GradientTape() as tape:
            groups = group_chosen(chosen, 5)
            y = combine(grouped_linear(x, groups, w, by_token=True), groups, weights)
        tape.backward(y, seed)
        assert x.grad is not None and w.grad is not None
        found.append([t.bytes().tobytes() for t in (y, x.grad, w.grad)])
    assert found[0] == found[1] == found[2]


@pytest.mark.usefixtures("kernels")
def test_all_weights_spread_out() -> None:
    logits = normal(5, 4)
    chosen = choose(logits, 2)

    def wanted(weights: F64) -> F64:
        full = np.zeros((5, 4))
        np.put_along_axis(full, chosen, weights, 1)
        return full

    check(lambda w: spread(w, route(on_device(logits), 2)), wanted, [normal(5, 2)])
    check(lambda x, w: weighted_rows(x, w), lambda x, w: x * w, [normal(5, 7), normal(5, 1)])


def test_loads_balance_and_squares() -> None:
    chosen = spreads()["the last has few"]
    groups = group_chosen(on_device(chosen), 7)
    loads, bias = on_device(np.zeros(7, np.uint32)), on_device(np.zeros(7, np.float32))
    for _ in range(2):
        add_loads(loads, groups)
    counts = np.bincount(chosen.reshape(-1), minlength=7)
    assert np.array_equal(loads.numpy(), 2 * counts)
    balance_bias(bias, loads, 0.5)
    assert np.array_equal(bias.numpy(), 0.5 * np.sign(counts.mean() - counts)) and not loads.numpy().any()
    even = on_device(np.full(7, 3, np.uint32))
    balance_bias(bias, even, 0.5)
    assert np.array_equal(bias.numpy(), 0.5 * np.sign(counts.mean() - counts))
    x = normal(21, 70)
    sums = on_device(np.zeros((7, 70), np.float32))
    expert_squares(sums, on_device(x), groups, by_token=True)
    wanted = [(x[(chosen == e).any(axis=1)] ** 2).sum(axis=0) for e in range(7)]
    repeats = [(x[(chosen == e).all(axis=1)] ** 2).sum(axis=0) for e in range(7)]
    np.testing.assert_allclose(sums.numpy(), np.array(wanted) + np.array(repeats), rtol=1e-5)


def test_what_is_refused() -> None:
    groups = group_chosen(on_device(spreads()["any"]), 7)
    loose = group_chosen(on_device(spreads()["any"]), 7, sort=False)
    x = on_device(normal(21, 8))
    with pytest.raises(DeviceError, match=r"a weight of shape \[6, 4, 8\] for rows of 8 and 7 experts"):
        grouped_linear(x, groups, on_device(normal(6, 4, 8)), by_token=True)
    with pytest.raises(DeviceError, match="x must be f32"):
        grouped_linear(x, groups, on_device(normal(7, 4, 8)), by_token=False)
    with pytest.raises(DeviceError, match="tile variant suits neither"):
        grouped_linear(x, loose, on_device(normal(7, 4, 8)), by_token=True, variant="tile")
    w = on_device(normal(7, 4, 8))
    w.requires_grad = True
    with GradientTape(), pytest.raises(DeviceError, match="a gradient needs sorted groups"):
        grouped_linear(x, loose, w, by_token=True)
