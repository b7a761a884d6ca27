"""Norms, activations, embedding, rotary cache and attention against float64 NumPy, every variant."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import DeviceError
from oazoo.formats.quant import decode
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.activation import activate, activate_gated, softcap
from oazoo.runtime.ops.attention import attention, rope_and_cache, rotary_attention
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.norm import layer_norm, query_key_norm, rms_norm
from oazoo.runtime.ops.pack import pack

F64 = npt.NDArray[np.float64]
#: The device's own, and the one that every device can run.
VARIANTS = [None, "group32"]


def device_array(array: npt.NDArray[np.generic]) -> Tensor:
    return Tensor.from_numpy(get_device(), array)


def close(got: npt.NDArray[np.float32], wanted: F64, tolerance: float = 2e-6) -> None:
    assert got.shape == wanted.shape
    scale = np.abs(wanted).max(initial=1e-30)
    assert np.abs(got - wanted).max(initial=0) <= tolerance * scale


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (5, 7), (300, 48), (2, 4096), (0, 8), (3, 33)])
def test_norms(shape: tuple[int, int], variant: str | None) -> None:
    rng = np.random.default_rng(1)
    x = (rng.normal(size=shape) * 3 + 100).astype(np.float32)
    weight, bias = rng.normal(size=(2, shape[1])).astype(np.float32)
    wide = x.astype(np.float64)
    rms = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    close(rms_norm(device_array(x), device_array(weight), 1e-5, variant=variant).numpy(), rms)
    centred = wide - wide.mean(1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight
    # The mean of values near 100 is only known to 100 * 2^-24, which is what remains of a row of one.
    got = layer_norm(device_array(x), device_array(weight), None, 1e-5, variant=variant).numpy()
    assert np.abs(got - layer).max(initial=0) < 5e-5
    got = layer_norm(device_array(x), device_array(weight), device_array(bias), 1e-5, variant=variant).numpy()
    assert np.abs(got - layer - bias).max(initial=0) < 5e-5
    residual = rng.normal(size=shape).astype(np.float32)
    held = device_array(residual)
    got = rms_norm(device_array(x), device_array(weight), 1e-5, residual=held, variant=variant).numpy()
    close(got, rms + residual)
    got = layer_norm(
        device_array(x), device_array(weight), device_array(bias), 1e-5, residual=held, variant=variant
    ).numpy()
    assert np.abs(got - layer - bias - residual).max(initial=0) < 5e-5


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "width"),
    [(1, 9, 3, 64), (37, 4, 2, 10), (3, 1, 1, 256), (5, 6, 1, 2), (0, 2, 2, 8)],
)
def test_query_key_norm(
    tokens: int, heads: int, kv_heads: int, width: int, whole: bool, variant: str | None
) -> None:
    rng = np.random.default_rng(9)
    qkv = (rng.normal(size=(tokens, heads + 2 * kv_heads, width)) * 5).astype(np.float32)
    q_weight = rng.normal(size=heads * width if whole else width).astype(np.float32)
    k_weight = rng.normal(size=kv_heads * width if whole else width).astype(np.float32)
    held = device_array(qkv.reshape(tokens, (heads + 2 * kv_heads) * width))
    query_key_norm(
        held, device_array(q_weight), device_array(k_weight), heads, kv_heads, 1e-5, variant=variant
    )
    got = held.numpy().reshape(qkv.shape)
    start = 0
    for count, weight in ((heads, q_weight), (kv_heads, k_weight)):
        part = qkv[:, start : start + count].astype(np.float64)
        axes = (1, 2) if whole else 2
        wanted = part / np.sqrt((part**2).mean(axes, keepdims=True) + 1e-5)
        wanted *= weight.reshape(count if whole else 1, width)
        close(got[:, start : start + count], wanted)
        start += count
    assert np.array_equal(got[:, start:], qkv[:, start:])


@pytest.mark.parametrize("shape", [(1, 2), (1, 3072), (7, 10), (130, 96), (0, 4)])
def test_gated_activations(shape: tuple[int, int]) -> None:
    x = (np.random.default_rng(2).normal(size=shape) * 8).astype(np.float32)
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    close(activate_gated(device_array(x)).numpy(), gate / (1 + np.exp(-gate)) * up)
    tanh = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    close(activate_gated(device_array(x), "gelu_tanh").numpy(), tanh * up)
    exact = 0.5 * gate * (1 + np.vectorize(math.erf, otypes=[np.float64])(gate / math.sqrt(2)))
    close(activate_gated(device_array(x), "gelu").numpy(), exact * up)


def test_activations_at_the_ends() -> None:
    x = np.array([-1e30, -1000, -90, -1, -0.0, 0, 1e-30, 1, 90, 1000], np.float32)
    with np.errstate(over="ignore"):
        wide = x.astype(np.float64)
        wanted = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    got = activate(device_array(x), "gelu_tanh").numpy()
    assert np.allclose(got, wanted, rtol=1e-5, atol=1e-7)
    many = (np.random.default_rng(3).normal(size=(77, 1001)) * 4).astype(np.float32)
    wide = many.astype(np.float64)
    wanted = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    close(activate(device_array(many), "gelu_tanh").numpy(), wanted)
    ends = x.astype(np.float64)
    wanted = np.where(ends < -700, 0, ends / (1 + np.exp(-np.maximum(ends, -700))))
    assert np.allclose(activate(device_array(x), "silu").numpy(), wanted, rtol=1e-6, atol=1e-35)
    close(activate(device_array(many), "silu").numpy(), wide / (1 + np.exp(-wide)))


def test_exact_gelu() -> None:
    """Against the error function of the C library, at the ends and densely between them."""
    ends = [-1e30, -1000, -90, -13.1, -0.0, 0, 1e-30, 90, 1000, 1e30]
    x = np.concatenate([ends, np.linspace(-14, 14, 69990)]).astype(np.float32).reshape(7, -1)
    wide = x.astype(np.float64)
    wanted = 0.5 * wide * (1 + np.vectorize(math.erf)(wide / math.sqrt(2)))
    got = activate(device_array(x), "gelu").numpy()
    assert got.shape == x.shape and np.abs(got - wanted)[np.abs(x) < 100].max() <= 1e-6
    assert np.allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert activate(device_array(np.zeros((0, 4), np.float32)), "gelu").numpy().shape == (0, 4)


@pytest.mark.parametrize("cap", [0.03, 1.0, 30.0, 1e9])
def test_softcap(cap: float) -> None:
    """From values that the cap hardly touches, over the bend, to those that it stops."""
    rng = np.random.default_rng(10)
    x = np.concatenate(
        [rng.normal(size=50_000) * cap, 10.0 ** rng.uniform(-30, 30, 20_000) * rng.choice([-1, 1], 20_000)]
    )
    x = np.append(x, [0, -0.0, 3e38, -3e38, np.inf, -np.inf]).astype(np.float32)
    wanted = cap * np.tanh(x.astype(np.float64) / cap)
    got = softcap(device_array(x.reshape(2, -1)), cap).numpy().reshape(-1)
    normal = np.abs(wanted) > 1e-37
    assert np.all(np.abs(got - wanted)[normal] <= 3e-6 * np.abs(wanted[normal]))
    assert np.abs(got - wanted)[~normal].max() <= 1e-37
    assert np.isnan(softcap(device_array(np.array([np.nan], np.float32)), cap).numpy()).all()


@pytest.mark.parametrize("encoding", ["f32", "f16", "bf16", "q8", "q4"])
@pytest.mark.parametrize("width", [1, 33, 576])
def test_embedding(encoding: str, width: int) -> None:
    rng = np.random.default_rng(4)
    table = rng.normal(size=(50, width)).astype(np.float32)
    places = rng.normal(size=(9, width)).astype(np.float32)
    ids = np.array([0, 49, 7, 7, 50, -1, 31], np.int32)

    def stored(values: npt.NDArray[np.float32]) -> tuple[Tensor, F64]:
        if encoding in ("q4", "q8"):
            packed = pack(device_array(values), encoding)
            flat = decode(packed.bytes(), encoding, values.size)
            return packed, flat.reshape(values.shape).astype(np.float64)
        tensor = Tensor.from_numpy(get_device(), values, dtype=encoding)
        return tensor, tensor.numpy().astype(np.float64)

    held, values = stored(table)
    got = embedding(device_array(ids), held).numpy()
    inside = [0, 1, 2, 3, 6]
    assert np.array_equal(got[inside], values[ids[inside]].astype(np.float32))
    assert np.isnan(got[[4, 5]]).all()
    # The same table in three parts, each starting where a row and a block of 32 begin together.
    parts = [stored(table[a:b]) for a, b in ((0, 32), (32, 32 + 16), (48, 50))]
    whole = np.concatenate([v for _, v in parts])
    split = embedding(device_array(ids), [t for t, _ in parts]).numpy()
    assert np.array_equal(split[inside], whole[ids[inside]].astype(np.float32))
    assert np.isnan(split[[4, 5]]).all()
    held_places, place_values = stored(places)
    start = device_array(np.array([4], np.int32))
    got = embedding(device_array(ids), held, held_places, start).numpy()
    wanted = values[ids[:4]] + place_values[4:8]
    close(got[:4], wanted, 1e-6)
    assert np.isnan(got[6]).all()  # position 10 of 9
    got = embedding(device_array(ids), held, scale=7.5).numpy()
    close(got[inside], values[ids[inside]] * 7.5, 1e-7)
    got = embedding(device_array(ids), held, held_places, start, scale=7.5).numpy()
    close(got[:4], values[ids[:4]] * 7.5 + place_values[4:8], 1e-6)


def attend(
    q: F64,
    k: F64,
    v: F64,
    start: int,
    window: int | None,
    scale: float | None = None,
    cap: float | None = None,
) -> F64:
    """Plain softmax attention: q [tokens, heads, dim] over k, v [kv_heads, positions, dim]."""
    tokens, heads, width = q.shape
    group = heads // k.shape[0]
    out = np.zeros_like(q)
    for t in range(tokens):
        own = start + t
        first = 0 if window is None else max(0, own - window + 1)
        for h in range(heads):
            scores = k[h // group, first : own + 1] @ q[t, h] * (width**-0.5 if scale is None else scale)
            scores = scores if cap is None else cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[h // group, first : own + 1]
    return out


@pytest.mark.parametrize("variant", [None, "group", "split"])
@pytest.mark.parametrize(
    ("tokens", "start", "heads", "kv_heads", "width", "window"),
    [
        (1, 0, 1, 1, 2, None),
        (1, 77, 9, 3, 64, None),
        (1, 300, 4, 2, 12, 5),
        (1, 40, 2, 1, 256, None),
        (1, 0, 2, 2, 64, 1),
        (1, 33, 10, 1, 32, 9),
        (1, 18, 4, 2, 128, None),
        (1, 40, 4, 4, 10, None),
        (37, 0, 4, 2, 16, None),
        (130, 5, 9, 3, 64, None),
        (33, 20, 4, 1, 8, 7),
        (64, 0, 2, 2, 10, 64),
        (9, 3, 2, 1, 128, 4),
        (1, 21, 4, 2, 96, None),
        (11, 6, 3, 3, 96, 8),
        (19, 2, 4, 1, 256, None),
        (6, 30, 1, 1, 250, None),
        # Caches that are shared out, where the last parts are short, or nothing is left for them.
        (1, 1000, 3, 1, 64, None),
        (2, 700, 4, 2, 20, 321),
        (3, 60, 2, 2, 30, None),
    ],
)
def test_rotation_cache_and_attention(
    tokens: int, start: int, heads: int, kv_heads: int, width: int, window: int | None, variant: str | None
) -> None:
    rng = np.random.default_rng(5)
    capacity = start + tokens + 3
    q = rng.normal(size=(tokens, heads, width)) * 2
    k = rng.normal(size=(capacity, kv_heads, width)) * 2
    v = rng.normal(size=(capacity, kv_heads, width))
    angles = np.arange(capacity)[:, None] * 10000.0 ** -(np.arange(width // 2) * 2 / width)
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)

    def turn(x: F64, positions: npt.NDArray[np.int64]) -> F64:
        a, b = np.split(x, 2, axis=-1)
        c, s = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    qkv = np.concatenate([q, k[start : start + tokens], v[start : start + tokens]], 1).astype(np.float32)
    keys = np.full((kv_heads, capacity, width), np.nan, np.float32)
    values = keys.copy()
    keys[:, :start] = turn(k[:start], np.arange(start)).transpose(1, 0, 2)
    values[:, :start] = v[:start].transpose(1, 0, 2)
    held = [device_array(a) for a in (qkv.reshape(tokens, -1), keys, values, np.array([start], np.int32))]
    rope_and_cache(held[0], device_array(table), held[3], held[1], held[2], heads)
    own = np.arange(start, start + tokens)
    new_keys = held[1].numpy()
    assert np.array_equal(new_keys[:, :start], keys[:, :start])
    assert np.isnan(new_keys[:, start + tokens :]).all()
    close(new_keys[:, own], turn(k[own], own).transpose(1, 0, 2))
    got = attention(held[0], held[1], held[2], held[3], heads, window=window, variant=variant)
    wanted = attend(
        turn(q, own), turn(k, np.arange(capacity)).transpose(1, 0, 2), v.transpose(1, 0, 2), start, window
    )
    close(got.numpy().reshape(wanted.shape), wanted, 5e-6)
    # The same in one call, which may be one run.
    again = [device_array(a) for a in (qkv.reshape(tokens, -1), keys, values)]
    got = rotary_attention(
        again[0], device_array(table), held[3], *again[1:], heads, window=window, variant=variant
    )
    close(got.numpy().reshape(wanted.shape), wanted, 5e-6)
    for cached, before in zip(again[1:], held[1:3]):
        after, expected = cached.numpy(), before.numpy()
        assert np.array_equal(np.isnan(after), np.isnan(expected))
        close(np.nan_to_num(after), np.nan_to_num(expected).astype(np.float64), 1e-6)


@pytest.mark.parametrize("variant", [None, "group", "split"])
@pytest.mark.parametrize("rotated", [2, 6, 24, 32])
@pytest.mark.parametrize(("tokens", "start"), [(1, 0), (1, 200), (13, 5)])
def test_partial_rotation_scale_and_softcap(
    tokens: int, start: int, rotated: int, variant: str | None
) -> None:
    """Only the first components of a head turn; scores have a scale of their own and a cap that bends most of them."""
    rng = np.random.default_rng(11)
    heads, kv_heads, width, capacity = 6, 2, 32, start + tokens + 2
    scale, cap = 0.7, 4.0
    q = rng.normal(size=(tokens, heads, width))
    k = rng.normal(size=(capacity, kv_heads, width))
    v = rng.normal(size=(capacity, kv_heads, width))
    angles = np.arange(capacity)[:, None] * 100.0 ** -(np.arange(rotated // 2) * 2 / rotated)
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)

    def turn(x: F64, positions: npt.NDArray[np.int64]) -> F64:
        a, b, rest = x[..., : rotated // 2], x[..., rotated // 2 : rotated], x[..., rotated:]
        c, s = np.cos(angles[positions])[:, None], np.sin(angles[positions])[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)

    own = np.arange(start, start + tokens)
    keys, values = (np.full((kv_heads, capacity, width), np.nan, np.float32) for _ in range(2))
    turned = turn(k, np.arange(capacity)).transpose(1, 0, 2)
    keys[:, :start], values[:, :start] = turned[:, :start], v[:start].transpose(1, 0, 2)
    qkv = np.concatenate([q, k[own], v[own]], 1).astype(np.float32).reshape(tokens, -1)
    held = [device_array(a) for a in (qkv, table, np.array([start], np.int32), keys, values)]
    got = rotary_attention(*held, heads, scale=scale, softcap=cap, variant=variant).numpy()
    wanted = attend(turn(q, own), turned, v.transpose(1, 0, 2), start, None, scale, cap)
    close(got.reshape(wanted.shape), wanted, 5e-6)
    close(held[3].numpy()[:, own], turned[:, own], 1e-6)
    assert np.array_equal(held[4].numpy()[:, own], v[own].transpose(1, 0, 2).astype(np.float32))
    # The cap matters, and so does where the turning ends.
    assert (
        np.abs(attend(turn(q, own), turned, v.transpose(1, 0, 2), start, None, scale) - wanted).max() > 1e-3
        or start + tokens == 1
    )


def test_no_rotation_without_a_table() -> None:
    rng = np.random.default_rng(6)
    qkv = rng.normal(size=(3, 3 * 2 * 6)).astype(np.float32)
    keys, values = (Tensor.empty(get_device(), (2, 5, 6)) for _ in range(2))
    held, start = device_array(qkv), device_array(np.array([1], np.int32))
    rope_and_cache(held, None, start, keys, values, 2)
    assert np.array_equal(held.numpy(), qkv)
    assert np.array_equal(keys.numpy()[:, 1:4], qkv[:, 12:24].reshape(3, 2, 6).transpose(1, 0, 2))
    assert np.array_equal(values.numpy()[:, 1:4], qkv[:, 24:].reshape(3, 2, 6).transpose(1, 0, 2))
    one = rng.normal(size=(1, 3 * 64)).astype(np.float32)
    keys, values = (Tensor.empty(get_device(), (1, 5, 64)) for _ in range(2))
    nothing = device_array(np.array([0], np.int32))
    got = rotary_attention(device_array(one), None, nothing, keys, values, 1).numpy()
    assert np.array_equal(got[0], one[0, 128:])  # a token alone sees itself
    assert np.array_equal(keys.numpy()[0, 0], one[0, 64:128])


def test_a_long_cache_that_is_hardly_filled_is_shared_out_too() -> None:
    """What a recorded decode step does at its first tokens: most parts of the cache see nothing, and read nothing."""
    rng = np.random.default_rng(7)
    keys, values = (np.full((2, 3000, 16), np.nan, np.float32) for _ in range(2))
    keys[:, :70], values[:, :70] = rng.normal(size=(2, 2, 70, 16)).astype(np.float32)
    held = [device_array(a) for a in (keys, values)]
    q = rng.normal(size=(1, 4 * 16)).astype(np.float32)
    for position in (0, 63, 64, 69):
        start = device_array(np.array([position], np.int32))
        got = attention(device_array(q), *held, start, 4, variant="split").numpy()
        wide = [a.astype(np.float64) for a in (q.reshape(1, 4, 16), keys, values)]
        close(got.reshape(1, 4, 16), attend(wide[0], wide[1], wide[2], position, None), 5e-6)


def test_many_rows_over_a_long_cache_are_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    q = rng.normal(size=(11, 4, 10)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 40, 10)).astype(np.float32)
    start = device_array(np.array([17], np.int32))
    held = [device_array(a) for a in (q.reshape(11, -1), keys, values)]
    whole = attention(*held, start, 4, window=9, variant="group").numpy()
    module = import_module("oazoo.runtime.ops.attention")  # the package has the op under that name
    monkeypatch.setattr(module, "_RUN_WORK", 3 * 2 * 4 * 10 * 9)  # three rows a run
    with get_device().capture() as program:
        got = attention(*held, start, 4, window=9, variant="group")
    assert program.commands == 4
    assert program.recording.barriers == 1  # they do not wait for each other
    program.run()
    assert np.array_equal(got.numpy(), whole)
    close(whole.reshape(q.shape), attend(*(a.astype(np.float64) for a in (q, keys, values)), 17, 9), 5e-6)


def test_large_scores_do_not_overflow() -> None:
    """Scores of ±20,000 are far outside exp's range and must still give a clean softmax."""
    q = np.full((2, 32), 50, np.float32)
    keys = np.zeros((1, 2, 32), np.float32)
    keys[0, 0], keys[0, 1] = 70, -70
    values = np.stack([np.full((1, 32), 1), np.full((1, 32), 5)], 1).astype(np.float32)
    start = device_array(np.array([0], np.int32))
    for variant in (None, "group", "split"):
        got = attention(*map(device_array, (q, keys, values)), start, 1, variant=variant).numpy()
        assert np.array_equal(got, np.ones((2, 32), np.float32))
        # A cap leaves the second query scores of 2 and -2.
        got = attention(*map(device_array, (q, keys, values)), start, 1, softcap=2.0, variant=variant).numpy()
        second = (1 + 5 * math.exp(-4)) / (1 + math.exp(-4))
        assert np.allclose(got, [[1] * 32, [second] * 32], rtol=1e-6)


def test_arguments_are_checked() -> None:
    device = get_device()
    x = Tensor.empty(device, (2, 8))
    with pytest.raises(DeviceError, match=r"weight must be f32\[8\], not f32\[7\]"):
        rms_norm(x, Tensor.empty(device, (7,)), 1e-5)
    with pytest.raises(DeviceError, match="x must be f32"):
        layer_norm(Tensor.empty(device, (2, 8), "f16"), Tensor.empty(device, (8,)), None, 1e-5)
    with pytest.raises(DeviceError, match="not a multiple of 2"):
        cache = Tensor.empty(device, (2, 4, 4))
        attention(Tensor.empty(device, (1, 12)), cache, cache, Tensor.empty(device, (1,), "i32"), 3)
    with pytest.raises(DeviceError, match="is more than"):
        cache = Tensor.empty(device, (1, 4, 2048))
        attention(Tensor.empty(device, (1, 2048)), cache, cache, Tensor.empty(device, (1,), "i32"), 1)
    with pytest.raises(DeviceError, match="multiple of 4 bytes"):
        embedding(Tensor.empty(device, (1,), "i32"), Tensor.empty(device, (4, 3), "f16").rows(1, 4))
    with pytest.raises(DeviceError, match="softcap 0 must be positive"):
        cache = Tensor.empty(device, (1, 4, 4))
        attention(Tensor.empty(device, (1, 4)), cache, cache, Tensor.empty(device, (1,), "i32"), 1, softcap=0)
    with pytest.raises(DeviceError, match="a table for 6 components of heads of 4"):
        cache, table = Tensor.empty(device, (1, 5, 4)), Tensor.empty(device, (5, 3, 2))
        rope_and_cache(
            Tensor.empty(device, (1, 12)), table, Tensor.empty(device, (1,), "i32"), cache, cache, 1
        )
    with pytest.raises(DeviceError, match=r"k_weight must be f32\[8\], not f32\[4\]"):
        weights = [Tensor.empty(device, (n,)) for n in (16, 4)]
        query_key_norm(Tensor.empty(device, (1, 32)), *weights, 4, 2, 1e-5)
    with pytest.raises(DeviceError, match="no activation 'relu'; there are silu, gelu_tanh, gelu"):
        activate(x, "relu")
    with pytest.raises(DeviceError, match="the cap 0 must be positive"):
        softcap(x, 0)
    with pytest.raises(DeviceError, match="do not split"):
        activate_gated(Tensor.empty(device, (1, 3)))
