"""The Mamba-3 scan: the reference's kernels' numbers, and a float64 recurrence with differences over odd shapes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mamba3_goldens import (
    STATES,
    WEIGHTS,
    check_states,
    form_of,
    golden,
    pieces_of,
    rows_of,
    states_of,
    tensor,
    weights_of,
)
from mamba3_reference import F64, block, circular
from oa_goldens import close, on_device

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.arithmetic import join_columns, multiply, reshaped, total
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.mamba3 import (
    Mamba3Form,
    Mamba3States,
    Mamba3Weights,
    mamba3,
    mamba3_step,
    new_states,
    state_shapes,
)
from oazoo.runtime.tape import GradientTape


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


GOLDENS = (
    "siso_k02",
    "siso_k06_extreme",
    "siso_k07_finalgrad",
    "siso_k08_step",
    "siso_k09_varlen",
    "mimo_k01",
    "mimo_k02_norm",
    "mimo_k03_step",
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, None) for name in GOLDENS), ("siso_k06_extreme", 16), ("mimo_k01", 16)]
)
def test_goldens(name: str, chunk: int | None) -> None:
    """Result, final states, and the gradient of every input."""
    arrays = golden(name)
    form = form_of(arrays)
    lengths = np.diff(arrays["cu_seqlens"]).tolist() if "cu_seqlens" in arrays else None
    batch = lengths or arrays["V"].shape[0]
    p, weights = on_device(rows_of(arrays), grad=True), weights_of(arrays)
    states = states_of(arrays, form, len(lengths) if lengths else arrays["V"].shape[0])
    with GradientTape() as tape:
        y, final = mamba3(p, form, weights, batch, states=states, return_states=True, chunk=chunk)
        loss = total(multiply(y, tensor(arrays["w_out"], y)))
        if "w_final_ssm" in arrays:
            for part, found in zip(STATES, final, strict=True):
                loss = add(loss, total(multiply(found, tensor(arrays[f"w_final_{part}"], found))))
    close(y, arrays["out"])
    check_states(final, arrays, "final")
    tape.backward(loss)
    assert p.grad is not None
    gradients: dict[str, Any] = pieces_of(p.grad.numpy(), form, arrays)
    gradients |= {theirs: getattr(weights, ours) for ours, theirs in WEIGHTS.items()}
    gradients |= {f"in_{part}": t for part, t in zip(STATES, states or (), strict=False)}
    checked = [key for key in arrays if key.startswith("d_")]
    assert len(checked) >= 8
    for key in checked:
        found = gradients[key[2:]]
        close(found.grad if isinstance(found, Tensor) else found, arrays[key], 1e-3)


FORMS: dict[str, dict[str, Any]] = {
    "siso": {"heads": 2, "head_dim": 3, "state_size": 6, "num_angles": 1},
    "groups": {
        "heads": 4,
        "head_dim": 2,
        "state_size": 5,
        "num_groups": 2,
        "num_angles": 2,
        "output_norm": True,
    },
    "softplus": {
        "heads": 1,
        "head_dim": 16,
        "state_size": 16,
        "num_angles": 8,
        "softplus_a": True,
        "a_floor": 0.6,
    },
    "mimo": {"heads": 2, "head_dim": 4, "state_size": 8, "num_angles": 2, "rank": 2, "half_pairs": True},
    "mimo_norm": {
        "heads": 2,
        "head_dim": 3,
        "state_size": 4,
        "num_groups": 2,
        "num_angles": 2,
        "rank": 4,
        "half_pairs": True,
        "output_norm": True,
    },
    "oa": {
        "heads": 3,
        "head_dim": 2,
        "state_size": 4,
        "num_angles": 2,
        "rank": 2,
        "clamp_dt": True,
        "raw_angle": True,
        "dt_min": 0.3,
        "dt_max": 1.2,
    },
    "still": {"heads": 2, "head_dim": 2, "state_size": 3, "num_angles": 0, "output_norm": True},
}


def parameters(form: Mamba3Form, oa: bool) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    keys, spread = (form.heads, form.rank, form.state_size), (form.heads, form.rank, form.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "b_bias": keys,
        "c_bias": keys,
        "dt_bias": (form.heads,),
        "d": (form.heads,),
    }
    if not oa:
        shapes |= {"b_norm": (form.state_size,), "c_norm": (form.state_size,)}
    if form.rank > 1:
        shapes |= {"mimo_x": spread, "mimo_z": spread, "mimo_o": spread}
    if form.output_norm:
        shapes["norm"] = (form.heads, form.head_dim)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


Parts = list[npt.NDArray[np.float32]]


@cache
def case(name: str, resumed: bool) -> tuple[Mamba3Form, list[str], Parts, F64, list[tuple[int, F64, float]]]:
    """A form, its weights' names, all inputs, the float64 result, and slopes of its weighted sum: input, direction, slope.

    Each piece of the input rows has directions of its own, so that none hides in the sum of the others.
    """
    form = Mamba3Form(**FORMS[name])
    weights = parameters(form, name == "oa")
    rng = np.random.default_rng(7)
    batch, tokens = (2, 5) if resumed else (1, 3)
    inputs: Parts = [rng.standard_normal((batch * tokens, form.width)).astype(np.float32), *weights.values()]
    if resumed:
        inputs += [rng.standard_normal(shape).astype(np.float32) for shape in state_shapes(form, batch)]
        inputs[-4] = np.abs(inputs[-4])
    count = 1 + len(weights)

    def value(parts: list[F64]) -> F64:
        w = dict(zip(weights, parts[1:], strict=False))
        y, final = block(parts[0], form, batch, w, tuple(parts[count:]) if resumed else None)
        return np.concatenate([v.reshape(-1) for v in (y, *(final if resumed else ()))])

    exact = [part.astype(np.float64) for part in inputs]
    wanted = value(exact)
    directions = []
    for index, part in enumerate(exact):
        widths = form.widths if index == 0 else (part.shape[-1],)
        for start, width in zip(np.cumsum([0, *widths]), widths, strict=False):
            if part.size and width:
                v = np.zeros_like(part)
                v[..., start : start + width] = rng.standard_normal((*part.shape[:-1], width))
                directions += [(index, v), (index, np.where(rng.random(v.shape) < 0.2, v, 0.0))]
    c = seed(wanted.size).astype(np.float64)
    slopes = []
    for index, v in directions:
        ends = [
            c @ value([x + h * v if i == index else x for i, x in enumerate(exact)]) for h in (1e-5, -1e-5)
        ]
        slopes.append((index, v, float(ends[0] - ends[1]) / 2e-5))
    return form, list(weights), inputs, wanted, slopes


def seed(size: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal(size).astype(np.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("resumed", "chunk"), [(True, 2), (False, None)])
@pytest.mark.parametrize("name", FORMS)
def test_against_the_recurrence(name: str, resumed: bool, chunk: int | None) -> None:
    """Result, final states and gradients of everything, also where stretches end within a sequence."""
    form, names, inputs, wanted, slopes = case(name, resumed)
    tensors = [on_device(part, grad=True) for part in inputs]
    weights = Mamba3Weights(**dict(zip(names, tensors[1:], strict=False)))
    before = Mamba3States(*tensors[1 + len(names) :]) if resumed else None
    batch = 2 if resumed else 1
    with GradientTape() as tape:
        if resumed:
            y, final = mamba3(
                tensors[0], form, weights, batch, states=before, return_states=True, chunk=chunk
            )
            parts = [y, *final]
        else:
            parts = [mamba3(tensors[0], form, weights, batch, chunk=chunk)]
        whole = join_columns([reshaped(t, 1, t.numel) for t in parts if t.numel])
    close(whole, wanted)
    tape.backward(whole, on_device(seed(wanted.size).reshape(1, -1)))
    for index, v, slope in slopes:
        grad = tensors[index].grad
        assert grad is not None
        share = grad.numpy().astype(np.float64) * (v != 0)
        assert abs((share * v).sum() - slope) <= 1e-3 * np.linalg.norm(share) + 1e-6, (index, slope)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", FORMS)
def test_single_steps(name: str) -> None:
    """Token by token, states changing in place, is what the recurrence gives for all of them."""
    form, names, inputs, _, _ = case(name, True)
    weights = dict(zip(names, inputs[1:], strict=False))
    states = inputs[1 + len(names) :]
    given = Mamba3Weights(**{n: on_device(v) for n, v in weights.items()})
    held = Mamba3States(*(on_device(state) for state in states))
    rows = inputs[0].reshape(2, 5, -1)
    found = [mamba3_step(on_device(np.ascontiguousarray(rows[:, t])), form, given, held) for t in range(5)]
    exact = {n: v.astype(np.float64) for n, v in weights.items()}
    before = tuple(state.astype(np.float64) for state in states)
    wanted, final = block(inputs[0].astype(np.float64), form, 2, exact, before)
    close(np.stack([y.numpy() for y in found], axis=1), wanted)
    assert circular(held.angle.numpy(), final[0]) <= 1e-4
    for mine, theirs in zip(held[1:], final[1:], strict=True):
        close(mine, theirs)


def wide(tokens: int) -> tuple[Mamba3Form, Mamba3Weights, np.ndarray[Any, np.dtype[np.float32]]]:
    form = Mamba3Form(heads=2, head_dim=32, state_size=48, num_groups=1, num_angles=12)
    rng = np.random.default_rng(11)
    weights = {name: on_device(v, grad=True) for name, v in parameters(form, False).items()}
    return form, Mamba3Weights(**weights), rng.standard_normal((tokens, form.width)).astype(np.float32)


@pytest.mark.usefixtures("kernels")
def test_stretches_and_packing_change_nothing() -> None:
    """One long walk, stretches of any length, two halves with the state between them, and packed sequences agree."""
    form, weights, p = wide(150)
    device = get_device()
    y, final = mamba3(on_device(p), form, weights, return_states=True, chunk=150)
    wanted, ends = y.numpy(), [t.numpy() for t in final]
    reference, _ = block(
        p.astype(np.float64),
        form,
        1,
        {n: t.numpy().astype(np.float64) for n, t in vars(weights).items() if t is not None},
    )
    close(wanted, reference)
    for chunk in (64, 37):
        y, final = mamba3(on_device(p), form, weights, return_states=True, chunk=chunk)
        close(y, wanted, 2e-5)
        close(final.ssm, ends[1], 2e-5)
    first, between = mamba3(on_device(p[:61]), form, weights, return_states=True)
    second, final = mamba3(on_device(p[61:]), form, weights, states=between, return_states=True)
    close(np.concatenate([first.numpy(), second.numpy()]), wanted, 2e-5)
    for found, end in zip(final[1:], ends[1:], strict=True):
        close(found, end, 2e-5)
    packed = np.concatenate([p[:61], p, p[:1]])
    y = mamba3(on_device(packed), form, weights, [61, 150, 1])
    close(y, np.concatenate([wanted[:61], wanted, wanted[:1]]), 2e-5)
    states = new_states(device, form, 1)
    assert states.nbytes == 4 * (24 + 2 * 32 * 48 + 2 * 48 + 64) and not states.ssm.numpy().any()


def test_gradients_of_stretches_agree() -> None:
    form, weights, p = wide(70)
    dy = on_device(np.random.default_rng(3).standard_normal((70, 64)).astype(np.float32))
    found = []
    for chunk, variant in ((70, None), (16, None), (70, "group")):
        x = on_device(p, grad=True)
        tensors = [t for t in weights.all() if t is not None]
        for t in tensors:
            t.grad = None
        with GradientTape() as tape:
            y = mamba3(x, form, weights, chunk=chunk, variant=variant)
        tape.backward(y, dy)
        assert x.grad is not None
        found.append([x.grad.numpy(), *(t.grad.numpy() for t in tensors if t.grad is not None)])
    assert len(found[0]) == 7
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            close(theirs, mine, 1e-4)


def test_decay_of_any_strength_is_finite() -> None:
    """Where α is 0, or 1, or a step turns the keys many times over: no infinity, no NaN, in result or gradient."""
    form = Mamba3Form(heads=2, head_dim=4, state_size=8, num_angles=4)
    weights = Mamba3Weights(**{n: on_device(v, grad=True) for n, v in parameters(form, False).items()})
    rng = np.random.default_rng(2)
    p = rng.standard_normal((40, form.width)).astype(np.float32)
    at = form.width - form.num_angles - 3 * form.heads
    p[:, at:] *= rng.choice([1e-3, 1, 30, 300], (40, form.width - at))
    x = on_device(p, grad=True)
    with GradientTape() as tape:
        y = mamba3(x, form, weights, 4)
    tape.backward(y, on_device(np.ones((40, 8), np.float32)))
    assert x.grad is not None and np.isfinite(y.numpy()).all() and np.isfinite(x.grad.numpy()).all()
    reference, _ = block(
        p.astype(np.float64),
        form,
        4,
        {n: t.numpy().astype(np.float64) for n, t in vars(weights).items() if t is not None},
    )
    close(y, reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 7}, "are not 7 equal sequences"),
        ({"batch": [3, 0]}, "at least one token"),
        ({"batch": [3, 4]}, "packed sequences of 7 tokens"),
        ({"chunk": 0}, "a stretch of 0"),
        ({"p": np.zeros((6, 5), np.float32)}, "p must be f32"),
        ({"states": 2}, "states.angle must be"),
        ({"variant": "fast"}, "there is no variant"),
        ({"d": np.zeros(3, np.float32)}, "d must be f32 with 2 elements"),
        ({"mimo_x": np.zeros(8, np.float32)}, "all are given, or none"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    form = Mamba3Form(heads=2, head_dim=4, state_size=8, num_angles=2)
    given: dict[str, Any] = dict(parameters(form, False)) | {
        k: v for k, v in change.items() if k in ("d", "mimo_x")
    }
    weights = Mamba3Weights(**{name: on_device(v) for name, v in given.items()})
    p = on_device(change.get("p", np.zeros((6, form.width), np.float32)))
    states = new_states(get_device(), form, change["states"]) if "states" in change else None
    options = {key: change[key] for key in ("chunk", "variant") if key in change}
    with pytest.raises(DeviceError, match=message):
        mamba3(p, form, weights, change.get("batch", 1), states=states, **options)


def test_a_step_has_no_gradient() -> None:
    form = Mamba3Form(heads=2, head_dim=4, state_size=8, num_angles=2)
    weights = Mamba3Weights(**{n: on_device(v, grad=True) for n, v in parameters(form, False).items()})
    p = on_device(np.zeros((3, form.width), np.float32))
    with GradientTape(), pytest.raises(DeviceError, match="mamba3_step has no gradient"):
        mamba3_step(p, form, weights, new_states(get_device(), form, 3))


def test_forms_that_do_not_fit() -> None:
    for sizes, message in (
        ({"heads": 3, "num_groups": 2}, "do not divide"),
        ({"num_angles": 5}, "5 angles for a state of 8"),
        ({"state_size": 7, "half_pairs": True}, "an even state size"),
        ({"heads": 0}, "must be positive"),
    ):
        with pytest.raises(DeviceError, match=message):
            Mamba3Form(**{"heads": 2, "head_dim": 4, "state_size": 8, **sizes})  # type: ignore[arg-type]
