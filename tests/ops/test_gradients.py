"""Gradients of every op against central differences in float64 of independent NumPy forms, every variant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradient_checks import F64, check, normal
from philox import philox

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device, random
from oazoo.runtime.ops import arithmetic, unary
from oazoo.runtime.ops.activation import activate, activate_gated, softcap
from oazoo.runtime.ops.common import eight_lanes
from oazoo.runtime.ops.elementwise import add, dequantize
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.ops.norm import layer_norm, query_key_norm, rms_norm
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.product import input_gradient, weight_gradient
from oazoo.runtime.ops.sequences import attend, rotate
from oazoo.runtime.tape import GradientTape, detach, no_grad


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: F64) -> F64:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


UNARY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[F64], F64]]] = {
    "relu": (unary.relu, lambda x: np.maximum(x, 0)),
    "leaky": (lambda x: unary.leaky_relu(x, 0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "elu": (lambda x: unary.elu(x, 0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    "sigmoid": (unary.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (unary.tanh, np.tanh),
    "silu": (lambda x: activate(x, "silu"), silu),
    "softplus": (unary.softplus, lambda x: np.logaddexp(0, x)),
    "mish": (unary.mish, lambda x: x * np.tanh(np.logaddexp(0, x))),
    "softcap": (lambda x: softcap(x, 1.5), lambda x: 1.5 * np.tanh(x / 1.5)),
    "gelu_tanh": (lambda x: activate(x, "gelu_tanh"), gelu_tanh),
    "gelu_erf": (lambda x: activate(x, "gelu"), gelu_erf),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str) -> None:
    device_form, numpy_form = UNARY[name]
    # No point at a kink, where a difference means nothing.
    x = np.concatenate([np.linspace(-6, 6, 40) + 0.07, [-0.01, 0.003, 1e-4, -30.0, 30.0]]).astype(np.float32)
    check(device_form, numpy_form, [x])


@pytest.mark.parametrize("name", UNARY)
def test_functions_far_out_are_finite(name: str) -> None:
    x = Tensor.from_numpy(get_device(), np.array([-1e4, -200, 200, 1e4, -1e18, 1e18], np.float32))
    x.requires_grad = True
    with GradientTape() as tape:
        y = UNARY[name][0](x)
    tape.backward(y, Tensor.from_numpy(get_device(), np.ones(6, np.float32)))
    assert np.isfinite(y.numpy()).all() and x.grad is not None and np.isfinite(x.grad.numpy()).all()


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
def test_gates(activation: str) -> None:
    form = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu_erf}[activation]
    check(lambda x: activate_gated(x, activation), lambda x: form(x[:, :5]) * x[:, 5:], [normal(3, 10)])


def rms(x: F64, w: F64) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w


def layer(x: F64, w: F64, b: F64 | float = 0.0) -> F64:
    v = x - x.mean(-1, keepdims=True)
    return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * w + b


@pytest.mark.parametrize("variant", [None, "group32"])
@pytest.mark.parametrize("shape", [(4, 6), (3, 33), (19, 8)])
def test_norms(variant: str | None, shape: tuple[int, int]) -> None:
    x, w, b = normal(*shape), normal(shape[1]), normal(shape[1])
    check(lambda x, w: rms_norm(x, w, 1e-5, variant=variant), rms, [x, w])
    check(lambda x, w, b: layer_norm(x, w, b, 1e-5, variant=variant), layer, [x, w, b])
    check(
        lambda x, w, r: rms_norm(x, w, 1e-5, residual=r, variant=variant),
        lambda x, w, r: rms(x, w) + r,
        [x, w, normal(*shape)],
    )
    check(lambda x, w: layer_norm(x, w, None, 1e-5, variant=variant), layer, [x, w])


@pytest.mark.parametrize("whole", [False, True])
def test_query_key_norm(whole: bool) -> None:
    rows, heads, kv, dims = 3, 2, 1, 4

    def numpy_form(x: F64, q: F64, k: F64) -> F64:
        y = x.copy()
        for first, count, w in ((0, heads, q), (heads, kv, k)):
            columns = slice(first * dims, (first + count) * dims)
            part = y[:, columns] if whole else y[:, columns].reshape(rows, count, dims)
            y[:, columns] = rms(part, w).reshape(rows, count * dims)
        return y

    weights = [normal(heads * dims), normal(kv * dims)] if whole else [normal(dims), normal(dims)]
    check(
        lambda x, q, k: query_key_norm(x, q, k, heads, kv, 1e-5),
        numpy_form,
        [normal(rows, (heads + 2 * kv) * dims), *weights],
    )


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 7, 3), (9, 32, 16), (33, 32, 24)])
def test_linear(rows: int, inputs: int, outputs: int) -> None:
    x, w, b, r = normal(rows, inputs), normal(outputs, inputs), normal(outputs), normal(rows, outputs)
    check(lambda x, w, b: linear(x, w, b), lambda x, w, b: x @ w.T + b, [x, w, b])
    check(
        lambda x, w, r: linear(x, w, residual=r, gelu=True), lambda x, w, r: gelu_tanh(x @ w.T) + r, [x, w, r]
    )


def test_fused_projections_and_folded_norms() -> None:
    x, n, q, k, b = normal(6, 32), normal(32), normal(8, 32), normal(16, 32), normal(16)
    check(
        lambda x, n, q, k, b: linear(x, [q, k], [None, b], norm=n, eps=1e-5),
        lambda x, n, q, k, b: np.concatenate([rms(x, n) @ q.T, rms(x, n) @ k.T + b], axis=1),
        [x, n, q, k, b],
    )
    gate, up = normal(12, 32), normal(12, 32)
    check(
        lambda x, n, g, u: gated(x, g, u, norm=n, eps=1e-5, gelu=True),
        lambda x, n, g, u: gelu_tanh(rms(x, n) @ g.T) * (rms(x, n) @ u.T),
        [x, n, gate, up],
    )
    check(
        lambda x, n, g, u: gated(x, g, u, norm=n, eps=1e-5),
        lambda x, n, g, u: silu(rms(x, n) @ g.T) * (rms(x, n) @ u.T),
        [x, n, gate, up],
    )


def frozen(encoding: str, outputs: int, inputs: int) -> tuple[Tensor, F64]:
    """A weight that does not learn, and the values that it stands for."""
    device = get_device()
    w = normal(outputs, inputs)
    if encoding in ("q8", "q4"):
        weight = pack(Tensor.from_numpy(device, w), encoding)
        return weight, np.asarray(decode(raw(weight), encoding, w.size), np.float64).reshape(w.shape)
    weight = Tensor.from_numpy(device, w, dtype=encoding)
    return weight, weight.numpy().astype(np.float64)


@pytest.mark.parametrize("encoding", ["f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (7, 33), (1, 31)])
def test_gradients_pass_through_frozen_weights(encoding: str, rows: int, outputs: int, inputs: int) -> None:
    """Also where rows are no multiple of 32: blocks run across rows, and the last one is short."""
    device = get_device()
    weight, values = frozen(encoding, outputs, inputs)
    x, dy = Tensor.from_numpy(device, normal(rows, inputs)), normal(rows, outputs)
    x.requires_grad = True
    with GradientTape() as tape:
        y = linear(x, weight)
    tape.backward(y, Tensor.from_numpy(device, dy))
    assert x.grad is not None and weight.grad is None
    np.testing.assert_allclose(y.numpy(), x.numpy().astype(np.float64) @ values.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(x.grad.numpy(), dy.astype(np.float64) @ values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("encoding", ["q8", "q4"])
def test_a_frozen_feed_forward_with_an_adapter_beside_it(encoding: str) -> None:
    """Fine-tuning on a frozen base: embedding, gate, up and head packed, rows of odd length, a dense product that learns."""
    device = get_device()
    table, rows = frozen(encoding, 11, 35)
    gate, gate_values = frozen(encoding, 13, 35)
    up, up_values = frozen(encoding, 13, 35)
    down, down_values = frozen(encoding, 35, 13)
    ids = np.array([3, 0, 10, 3, 6], np.int32)

    def ours(a: Tensor, n: Tensor) -> Tensor:
        x = add(
            linear(embedding(Tensor.from_numpy(device, ids), table), a),
            embedding(Tensor.from_numpy(device, ids), table),
        )
        return linear(linear(gated(x, gate, up, norm=n, eps=1e-5), down, residual=x), table)

    def numpys(a: F64, n: F64) -> F64:
        x = rows[ids] @ a.T + rows[ids]
        y = silu(rms(x, n) @ gate_values.T) * (rms(x, n) @ up_values.T)
        result: F64 = (y @ down_values.T + x) @ rows.T
        return result

    check(ours, numpys, [normal(35, 35) / 6, normal(35)])


def raw(tensor: Tensor) -> Any:
    codes, scales = tensor.planes()
    return np.concatenate(
        [codes.numpy().view(np.uint8).reshape(-1), scales.numpy().view(np.uint8).reshape(-1)]
    )


@pytest.mark.parametrize("variant", [None, "tile"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(5, 8, 4), (33, 24, 40), (70, 64, 136), (1, 16, 260)]
)
def test_products(variant: str | None, rows: int, outputs: int, inputs: int) -> None:
    device = get_device()
    dy, w, x = normal(rows, outputs), normal(outputs, inputs), normal(rows, inputs)
    d, weight, inside = (Tensor.from_numpy(device, a) for a in (dy, w, x))
    wide = dy.astype(np.float64)
    np.testing.assert_allclose(
        input_gradient(d, weight, variant=variant).numpy(), wide @ w, rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        weight_gradient(d, inside, variant=variant).numpy(), wide.T @ x, rtol=1e-4, atol=1e-4
    )
    start = normal(outputs, inputs)
    out = Tensor.from_numpy(device, start)
    weight_gradient(d, inside, out=out, variant=variant)
    np.testing.assert_allclose(out.numpy(), start + wide.T @ x, rtol=1e-4, atol=1e-4)


def attention(
    qkv: F64,
    batch: int,
    heads: int,
    kv: int,
    allowed: Any,
    scale: float,
    cap: float,
    mask: Any,
    stays: Any = 1.0,
) -> F64:
    rows, width = qkv.shape
    dims, tokens = width // (heads + 2 * kv), rows // batch
    x = qkv.reshape(batch, tokens, heads + 2 * kv, dims)
    q, k, v = x[:, :, :heads], x[:, :, heads : heads + kv], x[:, :, heads + kv :]
    k, v = np.repeat(k, heads // kv, axis=2), np.repeat(v, heads // kv, axis=2)
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if cap:
        s = cap * np.tanh(s / cap)
    if mask is not None:
        s = s + mask.reshape(batch, heads, tokens, tokens)
    s = np.where(allowed, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p = p * stays
    return np.einsum("bhqk,bkhd->bqhd", p, v).reshape(rows, heads * dims)


@pytest.mark.parametrize("variant", [None, "group"])
@pytest.mark.parametrize("dims", [6, 16, 32])
@pytest.mark.parametrize("case", ["causal", "bidirectional", "window", "softcap", "mask", "keep"])
def test_attention(variant: str | None, dims: int, case: str) -> None:
    batch, tokens, heads, kv = 2, 11, 2, 1
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    causal = case in ("causal", "window", "softcap")
    allowed = (distance >= 0 if causal else np.ones_like(distance, bool))[None, None]
    options: dict[str, Any] = {"causal": causal, "variant": variant}
    cap, mask = 0.0, None
    if case == "window":
        options["window"] = 3
        allowed = allowed & (distance < 3)
    if case == "softcap":
        cap = 1.5
        options |= {"softcap": cap, "scale": 0.7}
    if case == "mask":
        mask = normal(batch * heads * tokens, tokens)
        options["mask"] = Tensor.from_numpy(get_device(), mask)
    if case == "keep":
        keep = np.ones((batch, tokens), np.float32)
        keep[0, 4:], keep[1, ::3] = 0, 0
        options["keep"] = Tensor.from_numpy(get_device(), keep)
        allowed = allowed & (keep[:, None, None, :] != 0)
    scale = 0.7 if case == "softcap" else dims**-0.5
    check(
        lambda qkv: attend(qkv, batch, heads, kv, **options),
        lambda qkv: attention(qkv, batch, heads, kv, allowed, scale, cap, mask),
        [normal(batch * tokens, (heads + 2 * kv) * dims)],
    )


@pytest.mark.parametrize(("variant", "dims"), [(None, 16), ("group", 6)])
def test_attention_with_dropout(variant: str | None, dims: int) -> None:
    batch, tokens, heads, kv, rate, seed = 2, 11, 2, 1, 0.4, 9
    words = [
        philox((key // 4, row, 0, 0), (seed, 0))[key % 4]
        for row in range(batch * heads * tokens)
        for key in range(tokens)
    ]
    stays = (np.array(words) >= round(rate * 2**32)).reshape(batch, heads, tokens, tokens) / (1 - rate)
    assert 0.2 < np.mean(stays == 0) < 0.6
    allowed = np.tril(np.ones((tokens, tokens), bool))

    def ours(qkv: Tensor) -> Tensor:
        random.seed(get_device(), seed)
        return attend(qkv, batch, heads, kv, dropout=rate, variant=variant)

    check(
        ours,
        lambda qkv: attention(qkv, batch, heads, kv, allowed, dims**-0.5, 0, None, stays),
        [normal(batch * tokens, (heads + 2 * kv) * dims)],
    )


@pytest.mark.parametrize("dims", [64, 256])
def test_attention_over_more_than_one_round(dims: int) -> None:
    # Longer than a workgroup's 64 rows: both variants must agree, value and gradient.
    device, tokens = get_device(), 150
    x = normal(tokens, 3 * dims)
    dy = normal(tokens, dims)
    results = []
    for variant in ("group", "lanes" if dims == 64 and eight_lanes(device) else "group"):
        t = Tensor.from_numpy(device, x)
        t.requires_grad = True
        with GradientTape() as tape:
            y = attend(t, 1, 1, variant=variant)
        tape.backward(y, Tensor.from_numpy(device, dy))
        assert t.grad is not None
        results.append((y.numpy(), t.grad.numpy()))
    causal = np.tril(np.ones((tokens, tokens), bool))
    wanted = attention(x.astype(np.float64), 1, 1, 1, causal, dims**-0.5, 0, None)
    for y, grad in results:
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(grad, results[0][1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rotated", [None, 4])
def test_rotary_positions(rotated: int | None) -> None:
    tokens, heads, dims = 5, 2, 8
    width = rotated or dims
    angle = np.arange(tokens)[:, None] * 0.3 ** np.arange(width // 2)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    device_table = Tensor.from_numpy(get_device(), table.astype(np.float32))

    def numpy_form(x: F64) -> F64:
        y = x.reshape(2, tokens, 3, dims).copy()
        a, b = y[:, :, :heads, : width // 2].copy(), y[:, :, :heads, width // 2 : width].copy()
        c, s = table[None, :, None, :, 0], table[None, :, None, :, 1]
        y[:, :, :heads, : width // 2], y[:, :, :heads, width // 2 : width] = a * c - b * s, b * c + a * s
        return y.reshape(x.shape)

    check(
        lambda x: rotate(x, device_table, tokens, heads, dims, rotated=rotated),
        numpy_form,
        [normal(2 * tokens, 3 * dims)],
    )


def test_embedding_adds_up_repeated_rows() -> None:
    ids = np.array([3, 0, 3, 3, 6, 1] * 25, np.int32)
    device_ids = Tensor.from_numpy(get_device(), ids)
    check(lambda table: embedding(device_ids, table), lambda table: table[ids], [normal(7, 5)])
    check(lambda t: embedding(device_ids, t, scale=2.5), lambda t: 2.5 * t[ids], [normal(7, 5)])
    wide = normal(60, 200)  # more rows than tokens, of more than a workgroup's columns
    few = Tensor.from_numpy(get_device(), ids[:9])
    weights = Tensor.from_numpy(get_device(), wide)
    weights.requires_grad = True
    with GradientTape() as tape:
        y = embedding(few, weights)
    dy = normal(9, 200)
    tape.backward(y, Tensor.from_numpy(get_device(), dy))
    wanted = np.zeros((60, 200))
    np.add.at(wanted, ids[:9], dy.astype(np.float64))
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad.numpy(), wanted, rtol=1e-5, atol=1e-6)
    for kind in ("u32", "u8"):
        others = Tensor.from_numpy(get_device(), ids[:-1], dtype=kind)
        check(lambda t, others=others: embedding(others, t), lambda t: t[ids[:-1]], [normal(7, 5)])


@pytest.mark.parametrize("rows", [4, 6])
def test_learned_positions(rows: int) -> None:
    ids = np.array([3, 0, 3, 2, 6, 1, 5, 5, 4, 3, 2, 1], np.int32)
    device_ids = Tensor.from_numpy(get_device(), ids)
    check(
        lambda table, places: embedding(device_ids, table, places, period=4, scale=0.5),
        lambda table, places: 0.5 * table[ids] + np.tile(places[:4], (3, 1)),
        [normal(7, 5), normal(rows, 5)],
    )


@pytest.mark.parametrize("variant", [None, "group32"])
@pytest.mark.parametrize("kind", ["i32", "u32", "u8"])
def test_cross_entropy(kind: str, variant: str | None) -> None:
    targets = np.array([0, 6, 2, 2, 5], np.int32)
    mask = np.array([1, 0, 1, 0.5, 1], np.float32)
    device_targets = Tensor.from_numpy(get_device(), targets, dtype=kind)
    device_mask = Tensor.from_numpy(get_device(), mask)

    def entropy(x: F64) -> F64:
        lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
        return lse - x[np.arange(5), targets]

    check(
        lambda x: cross_entropy(x, device_targets, variant=variant),
        lambda x: np.array([entropy(x).mean()]),
        [normal(5, 7) * 4],
    )
    check(
        lambda x: cross_entropy(x, device_targets, mask=device_mask, count=3, variant=variant),
        lambda x: np.array([(entropy(x) * mask).sum() / 3]),
        [normal(5, 7) * 4],
    )


@pytest.mark.parametrize(
    ("kind", "target"),
    [(np.int32, 7), (np.int32, -1), (np.int32, 2**31 - 1), (np.uint32, 2**32 - 1), (np.uint8, 7)],
)
def test_a_target_outside_the_classes_is_nan_unless_masked(kind: type[np.integer], target: int) -> None:
    device = get_device()
    logits = Tensor.from_numpy(device, normal(3, 7))
    targets = Tensor.from_numpy(device, np.array([1, target, 2], kind))
    mask = Tensor.from_numpy(device, np.array([1, 0, 1], np.float32))
    assert np.isnan(cross_entropy(logits, targets).numpy()).all()
    logits.requires_grad = True
    with GradientTape() as tape:
        loss = cross_entropy(logits, targets, mask=mask, count=2)
    tape.backward(loss)
    assert np.isfinite(loss.numpy()).all() and logits.grad is not None
    grad = logits.grad.numpy()
    assert np.isfinite(grad).all() and (grad[1] == 0).all() and (grad[0] != 0).all()


def test_sums_means_views_and_columns() -> None:
    check(arithmetic.total, lambda x: np.array([x.sum()]), [normal(3, 50)])
    check(arithmetic.mean, lambda x: np.array([x.mean()]), [normal(7)])
    check(lambda x: arithmetic.scaled(x, -2.5), lambda x: -2.5 * x, [normal(4, 3)])
    check(lambda x: arithmetic.reshaped(x, 6, 2), lambda x: x.reshape(6, 2), [normal(3, 4)])
    check(lambda a, b: add(a, b), lambda a, b: a + b, [normal(3, 4), normal(3, 4)])
    check(arithmetic.multiply, lambda a, b: a * b, [normal(3, 4), normal(3, 4)])
    check(lambda x: arithmetic.multiply(x, x), lambda x: x * x, [normal(70)])
    check(arithmetic.swap_axes, lambda x: x.swapaxes(1, 2), [normal(2, 3, 40)])
    check(
        lambda x: arithmetic.join_columns(arithmetic.split_columns(x, [3, 1, 2])[::-1]),
        lambda x: np.concatenate([x[:, 4:], x[:, 3:4], x[:, :3]], axis=1),
        [normal(4, 6)],
    )


def test_a_tensor_used_twice_gets_both_gradients() -> None:
    check(lambda x: add(x, add(x, x)), lambda x: 3 * x, [normal(5)])
    check(lambda x: linear(x, x), lambda x: x @ x.T, [normal(4, 6)])
    check(lambda x, w: add(linear(x, w), x), lambda x, w: x @ w.T + x, [normal(3, 6), normal(6, 6)])
    check(
        lambda x: add(unary.relu(add(x, x)), activate(x, "silu")),
        lambda x: np.maximum(2 * x, 0) + silu(x),
        [normal(9)],
    )


def test_what_stops_a_gradient() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, normal(3))
    x.requires_grad = True
    with GradientTape() as tape:
        with no_grad():
            y = add(x, x)
        z = add(x, detach(y))
    tape.backward(z, Tensor.from_numpy(device, np.ones(3, np.float32)))
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.ones(3))


def test_gradients_accumulate_until_they_are_taken_away() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, normal(4))
    x.requires_grad = True
    for _ in range(3):
        with GradientTape() as tape:
            loss = arithmetic.total(arithmetic.scaled(x, 2.0))
        tape.backward(loss)
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.full(4, 6.0))


def test_an_op_without_a_gradient_fails_at_once() -> None:
    x = Tensor.from_numpy(get_device(), normal(4))
    x.requires_grad = True
    with GradientTape():
        with pytest.raises(DeviceError, match="dequantize has no gradient"):
            dequantize(x)
        with no_grad():
            dequantize(x)


def test_misuse_of_a_tape() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, normal(4))
    with GradientTape() as tape:
        y = add(x, x)
    with pytest.raises(DeviceError, match="requires a gradient"):
        tape.backward(y)
    x.requires_grad = True
    with GradientTape() as tape:
        y = add(x, x)
    with pytest.raises(DeviceError, match="one number"):
        tape.backward(y)
    with GradientTape() as tape:
        y = arithmetic.total(x)
    tape.backward(y)
    with pytest.raises(DeviceError, match="already"):
        tape.backward(y)
