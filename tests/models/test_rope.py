"""Rotary tables against the published formulas, written out again pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oazoo.configs import RopeScaling
from oazoo.configs.frequencies import inverse_frequencies
from oazoo.nn.rope import rotary_table


def plain(dim: int, theta: float) -> list[float]:
    return [1 / theta ** (2 * j / dim) for j in range(dim // 2)]


def test_plain_and_linear() -> None:
    table, magnitude = inverse_frequencies(64, 1e5)
    assert np.allclose(table, plain(64, 1e5), rtol=1e-7) and magnitude == 1
    table, _ = inverse_frequencies(64, 1e4, RopeScaling(kind="linear", factor=4.0))
    assert np.allclose(table, [f / 4 for f in plain(64, 1e4)], rtol=1e-7)
    factors = tuple(1.0 + j for j in range(32))
    table, _ = inverse_frequencies(64, 1e4, RopeScaling(kind="factors", factors=factors))
    assert np.allclose(table, [f / (1 + j) for j, f in enumerate(plain(64, 1e4))], rtol=1e-7)


def test_llama3() -> None:
    """Meta's rule, case by case: wavelengths short, long, and between."""
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    wanted = []
    for f in plain(128, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            wanted.append(f)
        elif wavelength > 8192 / 1:
            wanted.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - smooth) * f / 8 + smooth * f)
    table, magnitude = inverse_frequencies(128, 5e5, scaling)
    assert np.allclose(table, wanted, rtol=1e-7) and magnitude == 1
    assert any(w == f for w, f in zip(wanted, plain(128, 5e5)))
    assert any(math.isclose(w, f / 8) for w, f in zip(wanted, plain(128, 5e5)))


def test_dynamic() -> None:
    scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_positions=512)
    for length in (1, 512):
        assert np.allclose(inverse_frequencies(32, 1e4, scaling, length)[0], plain(32, 1e4), rtol=1e-7)
    theta = 1e4 * (2 * 2048 / 512 - 1) ** (32 / 30)
    assert np.allclose(inverse_frequencies(32, 1e4, scaling, 2048)[0], plain(32, theta), rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    """arXiv:2309.00071, section 3.2 and 3.4: a ramp over pairs by how often they turn in the original context."""
    dim, theta, factor, original = 64, 1e4, 4.0, 2048
    scaling = RopeScaling(kind="yarn", factor=factor, original_max_positions=original, truncate=truncate)

    def pair(turns: float) -> float:
        return dim * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(32), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    wanted = []
    for j, f in enumerate(plain(dim, theta)):
        ramp = min(max((j - low) / (high - low), 0), 1)
        wanted.append(f / factor * ramp + f * (1 - ramp))
    table, magnitude = inverse_frequencies(dim, theta, scaling)
    assert np.allclose(table, wanted, rtol=1e-6)
    assert math.isclose(magnitude, 0.1 * math.log(4) + 1)
    given = RopeScaling(kind="yarn", factor=factor, original_max_positions=original, attention_factor=1.5)
    assert inverse_frequencies(dim, theta, given)[1] == 1.5


def test_longrope() -> None:
    """arXiv:2402.13753: factors of each pair's own, by the length that is to be reached, and one for cos and sin."""
    short, long = (1.0, 1.5, 2.0, 4.0), (2.0, 5.0, 11.0, 32.0)
    scaling = RopeScaling(
        kind="longrope", factor=32.0, original_max_positions=4096, factors=short, long_factors=long
    )
    for length, factors in ((None, short), (1, short), (4096, short), (4097, long), (131072, long)):
        table, magnitude = inverse_frequencies(8, 1e4, scaling, length)
        assert np.allclose(table, [f / s for f, s in zip(plain(8, 1e4), factors)], rtol=1e-7)
        # Phi-3's own number for 128k: sqrt(1 + ln 32 / ln 4096).
        assert math.isclose(magnitude, 1.1902380714238083)
    given = RopeScaling(
        kind="longrope", original_max_positions=16, factors=short, long_factors=long, attention_factor=1.3
    )
    assert inverse_frequencies(8, 1e4, given)[1] == 1.3
    unscaled = RopeScaling(kind="longrope", original_max_positions=16, factors=short, long_factors=long)
    assert inverse_frequencies(8, 1e4, unscaled)[1] == 1


def test_the_table_is_exact_far_out() -> None:
    """Position 10^6 turns the fastest pair 159,155 times: a float32 angle would be off by 0.03."""
    inverse, _ = inverse_frequencies(8, 1e4)
    table = rotary_table(inverse, 2.0, 1_000_001)
    for pair in range(4):
        angle = math.fmod(1_000_000 * float(inverse[pair]), 2 * math.pi)
        assert abs(table[-1, pair, 0] - 2 * math.cos(angle)) < 1e-6
        assert abs(table[-1, pair, 1] - 2 * math.sin(angle)) < 1e-6
