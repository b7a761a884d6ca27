"""Rotary settings on their way out: as Hugging Face configs and GGUF metadata state them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import DecoderConfig, RopeScaling
from oazoo.errors import TranslationError

#: Llama 3's published scalings: (factor, low, high, original context).
_LLAMA3 = tuple((factor, 1.0, 4.0, 8192) for factor in (8.0, 32.0, 16.0, 4.0, 2.0, 64.0))
_FACTORS_TOLERANCE = 1e-5
#: Architectures for which llama.cpp reads tensors of frequency factors, and for which kinds of scaling.
_GGUF_TABLES = {"llama": ("llama3", "factors", "longrope"), "phi3": ("longrope",)}


def llama3_factors(scaling: RopeScaling, head_dim: int, theta: float) -> npt.NDArray[np.float32]:
    """What Llama 3's rule divides each inverse frequency by, [head_dim / 2]; GGUF stores the rule so."""
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    assert scaling.original_max_positions is not None
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    inverse = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling.original_max_positions * inverse / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - blend) / scaling.factor + blend)).astype(np.float32)


def frequency_factors(config: DecoderConfig) -> npt.NDArray[np.float32] | None:
    """The frequency factors that a scaling amounts to, or None if it is of another kind."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("llama3", "factors"):
        return None
    if scaling.factors is not None:
        return np.array(scaling.factors, dtype=np.float32)
    return llama3_factors(scaling, config.head_dim, config.rope_theta)


def same_scaling(first: DecoderConfig, second: DecoderConfig) -> bool:
    """Whether two configs turn positions the same way, however they say it."""
    a, b = frequency_factors(first), frequency_factors(second)
    if a is None or b is None:
        return a is b and _close_json(first.rope_scaling, second.rope_scaling)
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=_FACTORS_TOLERANCE, atol=0))


def _close_json(first: RopeScaling | None, second: RopeScaling | None) -> bool:
    if first is None or second is None:
        return first is second
    a, b = first.to_json(), second.to_json()
    return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)


def _close(a: Any, b: Any) -> bool:
    """Whether two values are equal up to what a 32-bit float loses."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def rotary_share(config: DecoderConfig) -> float:
    """The part of a head that is rotated, such that readers who round the product down get the number back."""
    share = config.rotated / config.head_dim
    return share if int(config.head_dim * share) == config.rotated else math.nextafter(share, 1.0)


def hf_rope_settings(config: DecoderConfig) -> dict[str, Any]:
    """``rope_theta``, ``rope_parameters`` (transformers 5) and, where scaled, ``rope_scaling`` (transformers 4).

    Raises:
        TranslationError: frequency factors that follow from no rule that such a config can state.
    """
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        scaling = _as_llama3(config)
    section: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    if scaling is not None:
        named = {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
            "truncate": scaling.truncate,
        }
        section |= {key: value for key, value in named.items() if value is not None}
        if scaling.kind == "linear":
            section.pop("original_max_position_embeddings", None)
        if scaling.kind == "longrope":
            section |= {
                "short_factor": list(scaling.factors or ()),
                "long_factor": list(scaling.long_factors or ()),
            }
    parameters = section | {"rope_theta": config.rope_theta}
    settings: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_parameters": parameters}
    if config.rotary_dim is not None:
        parameters["partial_rotary_factor"] = settings["partial_rotary_factor"] = (
            config.rotary_dim / config.head_dim
        )
    if scaling is not None:
        settings["rope_scaling"] = section
    return settings


def _as_llama3(config: DecoderConfig) -> RopeScaling:
    wanted = frequency_factors(config)
    assert wanted is not None
    for factor, low, high, original in _LLAMA3:
        scaling = RopeScaling(
            kind="llama3",
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_positions=original,
        )
        found = llama3_factors(scaling, config.head_dim, config.rope_theta)
        if np.allclose(found, wanted, rtol=_FACTORS_TOLERANCE, atol=0):
            return scaling
    raise TranslationError(
        "the rotary frequency factors follow from none of Llama 3's published scalings, and a Hugging Face config "
        "cannot list them one by one; export to GGUF instead"
    )


def gguf_rope_settings(
    config: DecoderConfig, arch: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    """Rotary keys of GGUF metadata, and the ``rope_freqs.weight`` tensor that Llama 3's scaling becomes.

    Raises:
        TranslationError: a kind, or a setting of YaRN, that GGUF has no key for.
    """
    at, scaling = f"{arch}.rope.", config.rope_scaling
    tabled = scaling is not None and scaling.kind in ("llama3", "factors", "longrope")
    if scaling is not None and tabled and scaling.kind not in _GGUF_TABLES.get(arch, ()):
        raise TranslationError(
            f"llama.cpp reads no frequency factors for {arch!r}, which {scaling.kind} scaling needs"
        )
    settings: dict[str, Any] = {at + "dimension_count": config.rotated, at + "freq_base": config.rope_theta}
    factors = frequency_factors(config)
    if factors is not None:
        return settings, {"rope_freqs.weight": factors}
    if scaling is None:
        return settings, {}
    if scaling.kind == "longrope":
        settings |= {
            at + "scaling.type": "longrope",
            at + "scaling.original_context_length": scaling.original_max_positions,
            at + "scaling.attn_factor": 1.0 if scaling.attention_factor is None else scaling.attention_factor,
        }
        return settings, {
            "rope_factors_long.weight": np.array(scaling.long_factors, dtype=np.float32),
            "rope_factors_short.weight": np.array(scaling.factors, dtype=np.float32),
        }
    if scaling.kind == "dynamic":
        raise TranslationError(
            "dynamic rotary scaling depends on the length of the text; GGUF has no key for it"
        )
    settings |= {at + "scaling.type": scaling.kind, at + "scaling.factor": scaling.factor}
    if scaling.kind == "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(scaling, name) is not None:
                raise TranslationError(f"YaRN's {name} cannot be stated in GGUF metadata")
        if scaling.truncate is False:
            raise TranslationError("YaRN without truncation cannot be stated in GGUF metadata")
        settings |= {
            at + "scaling.original_context_length": scaling.original_max_positions,
            at + "scaling.yarn_beta_fast": scaling.beta_fast,
            at + "scaling.yarn_beta_slow": scaling.beta_slow,
        }
    return settings, {}
