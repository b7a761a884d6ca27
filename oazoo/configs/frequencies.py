"""The inverse frequencies of a rotary embedding, with the published ways of stretching them.

Computed in float64 and rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from oazoo.configs.rope import RopeScaling


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScaling | None = None, length: int | None = None
) -> tuple[npt.NDArray[np.float32], float]:
    """Inverse frequencies of a rotary embedding.

    Args:
        width: rotated width of a head, even.
        theta: base of the geometric series.
        scaling: how the series is changed for long contexts.
        length: the longest sequence that will be seen; only ``dynamic`` and ``longrope`` scaling depend on it.

    Returns:
        ``(table, magnitude)``: float32 [width / 2], and the factor that cos and sin are multiplied by (1 except for
        YaRN, arXiv:2309.00071, and LongRoPE, arXiv:2402.13753).
    """
    half = width // 2
    exponents = np.arange(half, dtype=np.float64) * 2 / width
    table = theta**-exponents
    magnitude = 1.0
    if scaling is None:
        return table.astype(np.float32), magnitude
    if scaling.kind == "linear":
        table = table / scaling.factor
    elif scaling.kind == "factors":
        assert scaling.factors is not None
        table = table / np.asarray(scaling.factors, np.float64)
    elif scaling.kind == "dynamic":
        # NTK-aware: theta grows so that the slowest pair just spans the longer sequence; short ones are left alone.
        original = scaling.original_max_positions
        assert original is not None
        if length is not None and length > original and width > 2:
            growth = scaling.factor * length / original - (scaling.factor - 1)
            table = (theta * growth ** (width / (width - 2))) ** -exponents
    elif scaling.kind == "llama3":
        table = _llama3(table, scaling)
    elif scaling.kind == "longrope":
        table, magnitude = _longrope(table, scaling, length)
    else:
        table, magnitude = _yarn(table, width, theta, scaling)
    return table.astype(np.float32), magnitude


def _llama3(table: npt.NDArray[np.float64], scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """Llama 3.1: fast pairs stay, slow pairs are divided by the factor, those between are blended by wavelength."""
    original, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    assert original is not None and low is not None and high is not None
    turns = original * table / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0, 1)
    return table * blend + table / scaling.factor * (1 - blend)


def _longrope(
    table: npt.NDArray[np.float64], scaling: RopeScaling, length: int | None
) -> tuple[npt.NDArray[np.float64], float]:
    """LongRoPE: a factor for every pair, one set for sequences as long as in training and one for longer ones."""
    original, short, long = scaling.original_max_positions, scaling.factors, scaling.long_factors
    assert original is not None and short is not None and long is not None
    factors = long if length is not None and length > original else short
    magnitude = scaling.attention_factor
    if magnitude is None:
        longer = scaling.factor > 1 and original > 1
        magnitude = math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if longer else 1.0
    return table / np.asarray(factors, np.float64), magnitude


def _yarn(
    table: npt.NDArray[np.float64], width: int, theta: float, scaling: RopeScaling
) -> tuple[npt.NDArray[np.float64], float]:
    """YaRN: interpolate pairs that turn fewer than beta_slow times, keep those above beta_fast, ramp between."""
    original = scaling.original_max_positions
    assert original is not None

    def pair_of(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_of(scaling.beta_fast if scaling.beta_fast is not None else 32.0)
    high = pair_of(scaling.beta_slow if scaling.beta_slow is not None else 1.0)
    if scaling.truncate is None or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    stretched = table / scaling.factor * ramp + table * (1 - ramp)

    def attention(factor: float, scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.attention_factor is not None:
        magnitude = scaling.attention_factor
    elif scaling.mscale and scaling.mscale_all_dim:
        magnitude = attention(scaling.factor, scaling.mscale) / attention(
            scaling.factor, scaling.mscale_all_dim
        )
    else:
        magnitude = attention(scaling.factor, 1.0)
    return stretched, magnitude
