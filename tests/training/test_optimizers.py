"""Optimizers against OA's recorded steps and float64 NumPy forms of the papers' definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import UsageError
from oazoo.runtime import Tensor, get_device
from oazoo.training import SGD, Adam, AdamW, Muon, NoOp, Optimizer, clip_grad_norm

DATA = Path(__file__).parent.parent / "data" / "oa"
F64 = npt.NDArray[np.float64]
SHAPES = [(4, 6), (4,), (6, 3), (3, 2, 4), (2000,), (1,), ()]


def parameter(values: npt.ArrayLike) -> Tensor:
    tensor = Tensor.from_numpy(get_device(), np.array(values, np.float32))
    tensor.requires_grad = True
    return tensor


def give(tensors: list[Tensor], gradients: list[npt.NDArray[np.float32]]) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = Tensor.from_numpy(get_device(), np.asarray(gradient, np.float32))


def from_golden(config: dict[str, Any]) -> Callable[[list[Tensor]], Optimizer]:
    kinds: dict[str, Callable[[list[Tensor]], Optimizer]] = {
        "SGD": lambda p: SGD(
            p,
            config["lr"],
            momentum=config.get("momentum", 0.0),
            weight_decay=config.get("weight_decay", 0.0),
            compat="oa",
        ),
        "Adam": lambda p: Adam(
            p, config["lr"], betas=(config["beta1"], config["beta2"]), eps=config["eps"], compat="oa"
        ),
        "AdamW": lambda p: AdamW(
            p,
            config["lr"],
            betas=(config["beta1"], config["beta2"]),
            eps=config["eps"],
            weight_decay=config["weight_decay"],
            compat="oa",
        ),
        "Muon": lambda p: Muon(
            p,
            config["lr"],
            momentum=config["beta"],
            weight_decay=config["weight_decay"],
            eps=config["eps"],
            iterations=config["ns5_iterations"],
            compat="oa",
        ),
    }
    return kinds[config["type"]]


@pytest.mark.parametrize("path", sorted(DATA.glob("optim_*.npz")), ids=lambda path: path.stem)
def test_the_steps_that_oa_recorded(path: Path) -> None:
    with np.load(path) as data:
        config = json.loads(str(data["config"]))
        count = len(config["shapes"])
        tensors = [parameter(data[f"param_{i}"]) for i in range(count)]
        optimizer = from_golden(config)(tensors)
        for step in range(1, config["step_count"] + 1):
            give(tensors, [data[f"grad_step{step}_{i}"] for i in range(count)])
            optimizer.step()
            if f"param_0_after{step}" not in data:
                continue
            for i, tensor in enumerate(tensors):
                wanted = data[f"param_{i}_after{step}"]
                np.testing.assert_allclose(
                    tensor.numpy(), wanted, rtol=1e-5, atol=1e-5, err_msg=f"{step}, {i}"
                )
        assert optimizer.steps_taken == config["step_count"]


def newton_schulz(g: F64, steps: int = 5) -> F64:
    """The reference implementation's iterations, in float64."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Reference:
    """Float64 forms of the definitions, one parameter at a time."""

    def __init__(self, p: npt.NDArray[np.float32]) -> None:
        self.p = p.astype(np.float64)
        self.m, self.v, self.t = np.zeros_like(self.p), np.zeros_like(self.p), 0

    def sgd(self, g: F64, momentum: float, decay: float, dampening: float, nesterov: bool) -> None:
        g = g + decay * self.p
        if momentum:
            self.m = g if self.t == 1 else momentum * self.m + (1 - dampening) * g
            g = g + momentum * self.m if nesterov else self.m
        self.p = self.p - 0.1 * g

    def adam(self, g: F64, decay: float, decoupled: bool) -> None:
        if decoupled:
            self.p = self.p * (1 - 0.01 * decay)
        else:
            g = g + decay * self.p
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        self.p = self.p - 0.01 * m / (np.sqrt(v) + 1e-8)

    def muon(self, g: F64, nesterov: bool, scale: str) -> None:
        self.m = 0.95 * self.m + 0.05 * g
        u = 0.95 * self.m + 0.05 * g if nesterov else self.m
        self.p = self.p * (1 - 0.02 * 0.1)
        if self.p.ndim == 2:
            rows, columns = self.p.shape
            u = newton_schulz(u)
            u = u * (
                max(1, rows / columns) ** 0.5 if scale == "original" else 0.2 * max(rows, columns) ** 0.5
            )
        self.p = self.p - 0.02 * u


CASES: dict[str, tuple[Callable[[list[Tensor]], Optimizer], Callable[[Reference, F64], None]]] = {
    "sgd": (lambda p: SGD(p, 0.1), lambda r, g: r.sgd(g, 0, 0, 0, False)),
    "sgd momentum decay": (
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.05),
        lambda r, g: r.sgd(g, 0.9, 0.05, 0, False),
    ),
    "sgd dampening": (
        lambda p: SGD(p, 0.1, momentum=0.8, dampening=0.3),
        lambda r, g: r.sgd(g, 0.8, 0, 0.3, False),
    ),
    "sgd nesterov": (
        lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda r, g: r.sgd(g, 0.9, 0.01, 0, True),
    ),
    "adam": (lambda p: Adam(p, 0.01), lambda r, g: r.adam(g, 0, False)),
    "adam decay": (lambda p: Adam(p, 0.01, weight_decay=0.1), lambda r, g: r.adam(g, 0.1, False)),
    "adamw": (lambda p: AdamW(p, 0.01, weight_decay=0.1), lambda r, g: r.adam(g, 0.1, True)),
    "muon": (lambda p: Muon(p, 0.02), lambda r, g: r.muon(g, True, "original")),
    "muon plain": (
        lambda p: Muon(p, 0.02, nesterov=False, scale="match_rms_adamw"),
        lambda r, g: r.muon(g, False, "match_rms_adamw"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_definitions_of_the_papers(case: str) -> None:
    build, reference = CASES[case]
    rng = np.random.default_rng(5)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    tensors, wanted = [parameter(p) for p in start], [Reference(p) for p in start]
    optimizer = build(tensors)
    for t in range(1, 6):
        gradients = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
        give(tensors, gradients)
        optimizer.step()
        for one, g in zip(wanted, gradients, strict=True):
            one.t = t
            reference(one, g.astype(np.float64))
    for tensor, one in zip(tensors, wanted, strict=True):
        np.testing.assert_allclose(tensor.numpy(), one.p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 40, 900, 5000, 100_000])
def test_bias_correction_is_exact_however_many_steps_were_taken(steps: int) -> None:
    p = parameter([0.0])
    optimizer = Adam([p], 1.0, betas=(0.9, 0.999))
    optimizer.set_steps(steps - 1)
    give([p], [np.array([2.0], np.float32)])
    optimizer.step()
    m, v = 0.2, 0.004
    wanted = -(m / (1 - 0.9**steps)) / (math.sqrt(v / (1 - 0.999**steps)) + 1e-8)
    assert p.numpy()[0] == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize(
    "shape", [(1, 7), (7, 1), (5, 5), (33, 17), (16, 100), (130, 31), (64, 96), (96, 64)]
)
def test_muon_is_right_for_every_shape(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(shape))
    g = rng.standard_normal(shape).astype(np.float32)
    p = parameter(np.zeros(shape))
    optimizer = Muon([p], 1.0, momentum=0.0, weight_decay=0.0)
    give([p], [g])
    optimizer.step()
    rows, columns = shape
    wanted = -newton_schulz(g.astype(np.float64)) * max(1, rows / columns) ** 0.5
    np.testing.assert_allclose(p.numpy(), wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max())
    # What it is for: singular values near 1, whatever they were.
    values = np.linalg.svd(p.numpy(), compute_uv=False) / max(1, rows / columns) ** 0.5
    assert values.min() > 0.2 and values.max() < 1.3


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (100, 33)])
def test_muon_as_oa_defines_it_reaches_all_of_a_long_matrix(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    g = rng.standard_normal(shape).astype(np.float32)
    p = parameter(np.zeros(shape))
    give([p], [g])
    Muon([p], 0.5, momentum=0.0, weight_decay=0.0, compat="oa").step()
    wanted = -0.5 * 0.2 * math.sqrt(max(shape)) * newton_schulz(g.astype(np.float64))
    np.testing.assert_allclose(p.numpy(), wanted, rtol=1e-4, atol=1e-5)


def test_muon_leaves_matrices_alone_where_told() -> None:
    a, b = parameter(np.ones((3, 4))), parameter(np.ones((3, 4)))
    g = np.arange(12, dtype=np.float32).reshape(3, 4)
    give([a, b], [g, g])
    Muon([{"params": [("a", a)], "matrices": False}, {"params": [("b", b)]}], 0.1, weight_decay=0.0).step()
    np.testing.assert_allclose(a.numpy(), 1 - 0.1 * (0.95 * 0.05 + 0.05) * g, rtol=1e-6)
    assert np.abs(b.numpy() - a.numpy()).max() > 0.01


def test_groups_have_settings_of_their_own_and_rates_change_between_replays() -> None:
    a, b, frozen = parameter([1.0]), parameter([1.0]), parameter([1.0])
    frozen.requires_grad = False
    optimizer = SGD([{"params": [a, frozen], "lr": 0.5}, {"params": [("b", b)]}], 0.25)
    assert [p.name for p in optimizer.parameters] == ["p0", "b"]
    give([a, b], [np.ones(1, np.float32)] * 2)
    with get_device().capture() as program:
        optimizer.step()
    program.run()
    assert (a.numpy()[0], b.numpy()[0]) == (0.5, 0.75)
    optimizer.set_lr(1.0, group=1)
    program.run()
    assert (a.numpy()[0], b.numpy()[0]) == (0.0, -0.25)
    optimizer.set_lr(0.125)
    program.run()
    assert (a.numpy()[0], b.numpy()[0]) == (-0.125, -0.375)
    assert optimizer.steps_taken == 3
    optimizer.zero_grad()
    optimizer.step()
    assert a.numpy()[0] == -0.125  # without a gradient nothing moves


def test_noop_counts_and_changes_nothing() -> None:
    p = parameter([3.0, 4.0])
    give([p], [np.ones(2, np.float32)])
    optimizer = NoOp([p])
    optimizer.step()
    optimizer.step(clear=True)
    assert p.numpy().tolist() == [3.0, 4.0] and optimizer.steps_taken == 2
    assert p.grad is not None and not p.grad.numpy().any()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Muon])
def test_a_state_that_is_loaded_continues_exactly(kind: Callable[..., Optimizer]) -> None:
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    start = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    gradients = [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(4)]
    whole, first = [parameter(p) for p in start], [parameter(p) for p in start]
    one, two = kind(whole, 0.1, **options), kind(first, 0.1, **options)
    for g in gradients:
        give(whole, g)
        one.step()
    for g in gradients[:2]:
        give(first, g)
        two.step()
    second = [parameter(p.numpy()) for p in first]
    three = kind(second, 0.3, **options)
    three.load_state_dict(two.state_dict())
    for g in gradients[2:]:
        give(second, g)
        three.step()
    for a, b in zip(whole, second, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert three.steps_taken == 4 and three.groups[0].options["lr"] == 0.1


def test_states_that_do_not_fit_are_refused() -> None:
    p = parameter(np.ones((2, 2)))
    state = Adam([("w", p)]).state_dict()
    with pytest.raises(UsageError, match="not of AdamW"):
        AdamW([("w", p)]).load_state_dict(state)
    with pytest.raises(UsageError, match="other parameters"):
        Adam([("u", p)]).load_state_dict(state)
    state["moments"]["w"]["m"] = np.zeros(4, np.float32)
    with pytest.raises(UsageError, match="w: the state's moments"):
        Adam([("w", p)]).load_state_dict(state)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: SGD([]), "no parameter learns"),
        (lambda p: SGD([p, p]), "the same tensor"),
        (lambda p: SGD([("a", p), ("a", parameter([1.0]))]), "called 'a'"),
        (lambda p: SGD([p], -1.0), "lr must be"),
        (lambda p: SGD([p], float("nan")), "lr must be"),
        (lambda p: SGD([p], nesterov=True), "nesterov needs momentum"),
        (lambda p: Adam([p], betas=(0.9, 1.0)), "betas must be below 1"),
        (lambda p: Adam([{"params": [p], "momentum": 0.9}]), "no setting 'momentum'"),
        (lambda p: Muon([p], scale="other"), "scale is"),
        (lambda p: SGD([p], compat="old"), "compat is"),
        (lambda p: SGD([3]), "is no parameter"),
        (lambda p: Adam([p]).set_options(compat=1.0), "cannot change"),
        (lambda p: Adam([p]).set_lr(0.1, group=1), "no group 1"),
    ],
)
def test_misuse_is_told(build: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(parameter(np.ones(3)))


@pytest.mark.parametrize("name", ["clip_grad_norm_1", "clip_grad_norm_100"])
def test_clipping_as_oa_recorded_it(name: str) -> None:
    with np.load(DATA / f"{name}.npz") as data:
        most = json.loads(str(data["config"]))["max_norm"]
        tensors = [parameter(np.zeros_like(data[f"g_{i}"])) for i in range(2)]
        give(tensors, [data["g_0"], data["g_1"]])
        norm = clip_grad_norm(tensors, most)
        for i, tensor in enumerate(tensors):
            assert tensor.grad is not None
            np.testing.assert_allclose(tensor.grad.numpy(), data[f"clipped_{i}"], rtol=1e-5, atol=1e-7)
        whole = np.concatenate([data["g_0"].ravel(), data["g_1"].ravel()]).astype(np.float64)
        assert norm.numpy()[0] == pytest.approx(np.linalg.norm(whole), rel=1e-6)


def test_clipping_of_many_gradients_is_the_same_every_time() -> None:
    rng = np.random.default_rng(9)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in [(3000,), (70, 31), (5,), (1,)]]
    results = []
    for _ in range(2):
        tensors = [parameter(a) for a in arrays]
        give(tensors, arrays)
        norm = clip_grad_norm([("frozen", Tensor.from_numpy(get_device(), arrays[0])), *tensors], 3.0)
        results.append([norm.numpy(), *(t.grad.numpy() for t in tensors if t.grad is not None)])
    whole = np.concatenate([a.ravel() for a in arrays]).astype(np.float64)
    wanted = np.linalg.norm(whole)
    assert results[0][0][0] == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(results[0][1], arrays[0] * (3.0 / (wanted + 1e-6)), rtol=1e-5)
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UsageError, match="go backward first"):
        clip_grad_norm([parameter([1.0])], 1.0)
    with pytest.raises(UsageError, match="must be positive"):
        clip_grad_norm(tensors, 0.0)
