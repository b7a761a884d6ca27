"""Schedules against OA's recorded rates and PyTorch's (tests/data/training/make_schedules.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oazoo.errors import UsageError
from oazoo.training import schedules as s

DATA = Path(__file__).parent.parent / "data"
TORCH = json.loads((DATA / "training" / "schedules.json").read_text("utf-8"))

OURS: dict[str, s.Schedule] = {
    "one_cycle": s.OneCycle(0.1, 30),
    "one_cycle_long": s.OneCycle(0.1, 30, 0.5, 10, 100),
    "cosine": s.Cosine(0.1, 40, 0.01),
    "cosine_restarts": s.CosineRestarts(0.1, 4, 2, 0.01),
    "cyclic_triangular": s.Cyclic(0.01, 0.1, 4),
    "cyclic_triangular2": s.Cyclic(0.01, 0.1, 4, "triangular2"),
    "cyclic_exp_range": s.Cyclic(0.01, 0.1, 4, "exp_range", 0.9),
    "warmup": s.Warmup(0.1, 6),
    "warmup_cosine": s.WarmupCosine(0.1, 5, 35, 0.01),
}
OAS: dict[str, s.Schedule] = {
    "cosine": s.Cosine(0.1, 20, 0.01),
    "cosine_restarts_m1": s.CosineRestarts(0.1, 8),
    "cosine_restarts_m2": s.CosineRestarts(0.1, 4, 2, 0.01),
    "cyclic_triangular": s.Cyclic(0.01, 0.1, 4),
    "cyclic_triangular2": s.Cyclic(0.01, 0.1, 4, "triangular2"),
    "cyclic_exprange": s.Cyclic(0.01, 0.1, 4, "exp_range", 0.9),
    "linear_warmup_cosine": s.WarmupCosine(0.1, 5, 20, 0.01, compat="oa"),
    "one_cycle": s.OneCycle(0.1, 20, compat="oa"),
    "warmup": s.Warmup(0.1, 6),
    "sequential": s.Sequential([s.Warmup(0.1, 6), s.Cosine(0.1, 20, 0.01), s.Cyclic(0.01, 0.1, 4)], [6, 18]),
}


@pytest.mark.parametrize("name", OURS)
def test_the_rates_of_pytorch(name: str) -> None:
    np.testing.assert_allclose([OURS[name](k) for k in range(30)], TORCH[name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OAS)
def test_the_rates_of_oa(name: str) -> None:
    with np.load(DATA / "oa" / "schedulers.npz") as data:
        np.testing.assert_allclose([OAS[name](k) for k in range(30)], data[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_plateau_of_oa(mode: str) -> None:
    schedule = s.ReduceOnPlateau(0.1, 0.5, 2, 1e-4, 0.001, "min" if mode == "min" else "max", compat="oa")
    with np.load(DATA / "oa" / "schedulers.npz") as data:
        found = [schedule(0), *(schedule.observe(float(m)) for m in data[f"plateau_metric_{mode}"])]
        np.testing.assert_allclose(found, data[f"plateau_{mode}"], rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "schedule", "start"),
    [
        ("plateau_min", lambda: s.ReduceOnPlateau(0.1, 0.5, 2, 1e-2, 0.02), 0),
        ("plateau_max", lambda: s.ReduceOnPlateau(0.1, 0.5, 1, 1e-2, mode="max"), 10),
        ("plateau_absolute", lambda: s.ReduceOnPlateau(0.1, 0.5, 2, 0.05, absolute=True), 0),
    ],
)
def test_the_plateau_of_pytorch(name: str, schedule: Callable[[], s.ReduceOnPlateau], start: int) -> None:
    metrics = [float("nan") if m is None else (10 - m if start else m) for m in TORCH["plateau_metrics"]]
    whole, first = schedule(), schedule()
    np.testing.assert_allclose([whole.observe(m) for m in metrics], TORCH[name], rtol=0, atol=1e-9)
    # One that is stopped and continued gives the same.
    for metric in metrics[:9]:
        first.observe(metric)
    second = schedule()
    second.load_state_dict(first.state_dict())
    np.testing.assert_allclose([second.observe(m) for m in metrics[9:]], TORCH[name][9:], rtol=0, atol=1e-9)


def test_rates_after_the_end_stay() -> None:
    assert s.Cosine(0.1, 10, 0.01)(25) == pytest.approx(0.01)
    assert s.OneCycle(0.1, 10)(25) == pytest.approx(0.1 / 25 / 1e4)
    assert s.WarmupCosine(0.1, 2, 10, 0.02)(25) == pytest.approx(0.02)
    assert s.Warmup(0.1, 3)(25) == s.Constant(0.1)(25) == 0.1
    assert s.OneCycle(0.1, 10, percent_up=0.0)(0) == pytest.approx(0.1, rel=0.05)
    assert s.OneCycle(0.1, 10, percent_up=1.0)(9) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: s.Warmup(0.1, 0),
        lambda: s.Cosine(0.1, 0),
        lambda: s.CosineRestarts(0.1, 3, 0),
        lambda: s.Cyclic(0.1, 0.2, 4, "square"),  # type: ignore[arg-type]
        lambda: s.OneCycle(0.1, 10, 1.5),
        lambda: s.WarmupCosine(0.1, 10, 10),
        lambda: s.Sequential([s.Constant(0.1)], [3]),
        lambda: s.ReduceOnPlateau(0.1, 1.5),
    ],
)
def test_schedules_that_make_no_sense_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match="schedule: "):
        build()
