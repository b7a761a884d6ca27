"""Sampling against a straightforward reference, against the distribution it promises, and across processes."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from oazoo.errors import GenerationError, UsageError
from oazoo.generation.sampling import Sampler, SamplingSettings, candidates


def reference(logits: list[float], history: list[int], s: SamplingSettings) -> dict[int, float]:
    """The documented steps, one token at a time with Python floats: id → probability."""
    scores = list(logits)
    recent = history if s.repeat_window == -1 else (history[-s.repeat_window :] if s.repeat_window else [])
    for token in set(recent):
        scores[token] = (
            scores[token] / s.repeat_penalty if scores[token] > 0 else scores[token] * s.repeat_penalty
        )
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if s.temperature == 0:
        return {order[0]: 1.0}
    if s.top_k:
        order = order[: s.top_k]
    top = scores[order[0]]
    weights = {i: math.exp((scores[i] - top) / s.temperature) for i in order}
    total = math.fsum(weights.values())
    if s.top_p < 1:
        kept: dict[int, float] = {}
        for i in order:
            kept[i] = weights[i]
            if math.fsum(kept.values()) >= s.top_p * total:
                break
        weights = kept
    if s.min_p:
        best = max(weights.values())
        weights = {i: w for i, w in weights.items() if w >= s.min_p * best}
    total = math.fsum(weights.values())
    return {i: w / total for i, w in weights.items()}


def distribution(logits: np.ndarray[Any, Any], s: SamplingSettings) -> dict[int, float]:
    ids, weights = candidates(logits.astype(np.float64), s)
    return {int(i): float(w / weights.sum()) for i, w in zip(ids, weights, strict=True)}


@pytest.mark.parametrize("top_k", [0, 1, 7, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_candidates_are_the_references(top_k: int, top_p: float, min_p: float, temperature: float) -> None:
    s = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rng = np.random.default_rng(5)
    for size in (1, 2, 50, 1000):
        logits = rng.normal(size=size).astype(np.float32) * 3
        expected = reference([float(x) for x in logits], [], s)
        found = distribution(logits, s)
        assert set(found) == set(expected)
        assert all(found[i] == pytest.approx(expected[i], rel=1e-12) for i in expected)


def test_equal_logits_rank_by_id() -> None:
    logits = np.array([1, 3, 3, 2, 3, 2], np.float32)
    assert Sampler(SamplingSettings(temperature=0)).sample(logits) == 1
    assert set(distribution(logits, SamplingSettings(top_k=2, top_p=1))) == {1, 2}
    assert set(distribution(logits, SamplingSettings(top_k=4, top_p=1))) == {1, 2, 3, 4}
    assert set(distribution(np.zeros(8, np.float32), SamplingSettings(temperature=1, top_p=0.5))) == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.parametrize("window", [-1, 0, 2, 64])
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repeat_penalty_and_greedy(window: int, penalty: float) -> None:
    s = SamplingSettings(temperature=0, repeat_penalty=penalty, repeat_window=window)
    rng = np.random.default_rng(1)
    for _ in range(50):
        logits = rng.normal(size=9).astype(np.float32)
        history = [int(i) for i in rng.integers(0, 9, 6)]
        kept = logits.copy()
        expected = reference([float(x) for x in logits], history, s)
        assert Sampler(s).sample(logits, history) == next(iter(expected))
        assert np.array_equal(kept, logits)  # the caller's array is not touched


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.0, "top_p": 1.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1}],
)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    draws = 20_000
    s = SamplingSettings(seed=123, **settings)
    logits = np.random.default_rng(9).normal(size=12).astype(np.float32)
    expected = reference([float(x) for x in logits], [], s)
    sampler = Sampler(s)
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=12)
    assert set(np.flatnonzero(counts)) == set(expected)
    square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    degrees = len(expected) - 1
    # The chi-square distribution's 99.9 % point, by Wilson and Hilferty's approximation.
    assert square < degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


PROGRAM = """
import hashlib, numpy as np
from oazoo.generation.sampling import Sampler, SamplingSettings
sampler = Sampler(SamplingSettings(temperature=1.0, top_p=1.0, seed={seed}))
logits = np.sin(np.arange(500, dtype=np.float32))
print(hashlib.sha256(repr([sampler.sample(logits) for _ in range(200)]).encode()).hexdigest())
"""


def test_the_same_seed_gives_the_same_tokens_in_fresh_processes() -> None:
    def run(seed: int) -> str:
        call = [sys.executable, "-c", PROGRAM.format(seed=seed)]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout

    first = run(42)
    assert run(42) == first != run(43)
    sampler = Sampler(SamplingSettings(temperature=1.0, top_p=1.0, seed=42))
    logits = np.sin(np.arange(500, dtype=np.float32))
    tokens = [sampler.sample(logits) for _ in range(200)]
    assert hashlib.sha256(repr(tokens).encode()).hexdigest() == first.strip()


def test_random_numbers_are_those_of_pcg64() -> None:
    sampler = Sampler(SamplingSettings(temperature=1.0, top_p=1.0, seed=7))
    expected = np.random.Generator(np.random.PCG64(7)).random(100)
    logits = np.zeros(1000, np.float32)
    assert [sampler.sample(logits) for _ in range(100)] == [int(x * 1000) for x in expected]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_one_is_drawn_and_told(seed: int | None) -> None:
    first, second = Sampler(SamplingSettings(seed=seed)), Sampler(SamplingSettings(seed=seed))
    assert first.seed != second.seed
    again = Sampler(SamplingSettings(seed=first.seed))
    logits = np.zeros(100, np.float32)
    assert [first.sample(logits) for _ in range(20)] == [again.sample(logits) for _ in range(20)]


def test_extreme_but_valid_numbers() -> None:
    logits = np.array([-3e38, 3e38, 0, 3e38], np.float32)
    for temperature in (1e-300, 1e-5, 1.0, 1e300):
        s = SamplingSettings(temperature=temperature, seed=1)
        assert Sampler(s).sample(logits) in range(4)
    assert Sampler(SamplingSettings(temperature=1e-300, top_k=1)).sample(logits) == 1
    assert Sampler(SamplingSettings()).sample(np.array([5.0], np.float32)) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    logits = np.zeros(10, np.float32)
    logits[[4, 6]] = bad
    with pytest.raises(GenerationError, match=r"2 of 10 logits.*not finite.*token 4"):
        Sampler(SamplingSettings(temperature=temperature)).sample(logits)
    with pytest.raises(GenerationError, match="shape"):
        Sampler(SamplingSettings()).sample(np.zeros((2, 3), np.float32))


BAD: list[dict[str, Any]] = [
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
    {"temperature": True}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0}, {"top_p": 1.01}, {"top_p": math.nan},
    {"min_p": -0.1}, {"min_p": 1.1}, {"repeat_penalty": 0}, {"repeat_penalty": -1}, {"repeat_penalty": math.inf},
    {"repeat_window": -2}, {"seed": -2}, {"seed": 2**64}, {"seed": 1.0}, {"max_tokens": 0}, {"max_tokens": -5},
    {"max_tokens": True}, {"stop": ("",)}, {"stop": "x"}, {"stop": (1,)}, {"stop": ("x" * 2000,)},
    {"stop": ("x",) * 100}, {"ignore_eos": 1},
]  # fmt: skip


@pytest.mark.parametrize("settings", BAD, ids=repr)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings)).split("_")[0]):
        SamplingSettings(**settings)


def test_numbers_of_numpy_are_numbers() -> None:
    settings = SamplingSettings(temperature=np.float32(0.5), top_p=np.float64(1), top_k=np.int64(3))  # type: ignore[arg-type]
    assert settings.temperature == 0.5


@pytest.mark.parametrize("penalty", [1e-308, 1e308])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("error")
def test_an_extreme_penalty_gives_a_token(penalty: float, temperature: float) -> None:
    sampler = Sampler(SamplingSettings(repeat_penalty=penalty, temperature=temperature, seed=0))
    logits = np.array([-5.0, -3.0, 2.0, 4.0], np.float32)
    for history in ([0], [2, 3], [0, 1, 2, 3]):
        assert 0 <= sampler.sample(logits, history) < 4


def test_settings_from_a_models_defaults() -> None:
    own = {"temperature": 0.2, "top_k": 50, "bos_id": 1, "eos_ids": [2], "top_p": None}
    s = SamplingSettings.make(own, temperature=0.9, top_k=None, stop="END")
    assert (s.temperature, s.top_k, s.top_p, s.stop) == (0.9, 50, SamplingSettings.top_p, ("END",))
    with pytest.raises(UsageError, match="no setting tempreature"):
        SamplingSettings.make({}, tempreature=1)
    assert SamplingSettings.make({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingSettings.make({"do_sample": False}, temperature=0.6).temperature == 0.6
