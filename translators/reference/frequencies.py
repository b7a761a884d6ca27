"""Inverse frequencies of rotary positions, for a sequence of some tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.translators.reference.description import Frequencies, NoReferenceError

_Values = npt.NDArray[np.float64]


def plain(theta: float, width: int) -> _Values:
    """theta^(−2j/width), [width / 2]."""
    inverse: _Values = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    return inverse


def linear(theta: float, width: int, factor: float) -> Frequencies:
    """Positions divided by ``factor``."""
    return plain(theta, width) / factor, 1.0


def dynamic(theta: float, width: int, factor: float, length: float, context: float) -> _Values:
    """NTK-aware growth of theta with the length of the sequence."""
    grown = theta * (factor * length / context - (factor - 1)) ** (width / (width - 2))
    return plain(grown, width)


def llama3(theta: float, width: int, s: Mapping[str, Any]) -> Frequencies:
    """Llama 3.1: slow frequencies divided by the factor, fast ones kept, a ramp between them."""
    inverse, factor = plain(theta, width), float(s["factor"])
    low, high = float(s["low_freq_factor"]), float(s["high_freq_factor"])
    turns = float(s["original_max_position_embeddings"]) * inverse / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return inverse * (share + (1 - share) / factor), 1.0


def yarn(
    theta: float,
    width: int,
    *,
    factor: float,
    original: float,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
    scale: float | None = None,
) -> Frequencies:
    """YaRN (arXiv:2309.00071); ``scale`` is 0.1 ln(factor) + 1 where it is not given."""

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    inverse = plain(theta, width)
    if scale is None:
        scale = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return inverse / factor * ramp + inverse * (1 - ramp), scale


def of_config(
    section: Mapping[str, Any], config: Mapping[str, Any], theta: float, width: int, tokens: int
) -> Frequencies:
    """The frequencies that a Hugging Face rope dictionary asks for; ``config`` is what it stands in."""
    kind = section.get("rope_type", section.get("type")) or "default"
    context = config.get("max_position_embeddings")
    if kind in ("default", "none"):
        return plain(theta, width), 1.0
    if kind == "linear":
        return linear(theta, width, float(section["factor"]))
    if kind == "dynamic":  # theta grows once a sequence is longer than what the model was trained for
        trained = float(section.get("original_max_position_embeddings") or context or 0)
        return dynamic(theta, width, float(section["factor"]), max(tokens, trained), trained), 1.0
    if kind == "llama3":
        return llama3(theta, width, section)
    original = section.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings", context
    )
    if kind == "yarn":
        factor = float(section["factor"])
        return yarn(
            theta,
            width,
            factor=factor,
            original=float(original or 0),
            fast=float(section.get("beta_fast") or 32),
            slow=float(section.get("beta_slow") or 1),
            truncate=bool(section.get("truncate", True)),
            scale=_yarn_scale(section, factor),
        )
    if kind in ("longrope", "su"):
        stretched = float(section.get("factor") or float(context or 0) / float(original or 1))
        scale = section.get("attention_factor")
        if scale is None:
            scale = (
                1.0 if stretched <= 1 else math.sqrt(1 + math.log(stretched) / math.log(float(original or 0)))
            )
        factors = section["long_factor" if tokens > float(original or 0) else "short_factor"]
        return plain(theta, width) / np.array(factors, np.float64), float(scale)
    raise NoReferenceError(f"the rotary scaling {str(kind)[:64]!r} is not known to the check")


def _yarn_scale(section: Mapping[str, Any], factor: float) -> float | None:
    if section.get("attention_factor") is not None:
        return float(section["attention_factor"])
    some, every = section.get("mscale"), section.get("mscale_all_dim")
    if some and every and factor > 1:
        return float((0.1 * some * math.log(factor) + 1) / (0.1 * every * math.log(factor) + 1))
    return None
