"""Rotary settings of Hugging Face configs and of GGUF metadata, as :class:`~oazoo.configs.RopeScaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from oazoo.configs import RopeScaling
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.settings import Settings

_SUPPORTED = "none (default), linear, dynamic, llama3, yarn, longrope"

#: Keys of a Hugging Face rope dictionary that each kind may have, beyond the common ones.
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {
        "factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "attention_factor",
    },
}
#: Other names of a kind, from older configs.
_ALIASES = {"none": "default", "su": "longrope"}


def hf_rope(config: Settings, default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """rope_theta and scaling of a ``config.json``.

    Reads ``rope_theta`` from the top level or from ``rope_parameters``, and the scaling from
    ``rope_parameters`` or ``rope_scaling``, its kind under ``rope_type`` or ``type``.

    Raises:
        TranslationError: an unknown kind or key, by name; or two places that disagree.
    """
    sections = {key: config.get(key) for key in ("rope_parameters", "rope_scaling")}
    present = {key: value for key, value in sections.items() if value is not None}
    thetas = {}
    if "rope_theta" in config:
        thetas["rope_theta"] = config.number("rope_theta")
    kinds: dict[str, RopeScaling | None] = {}
    for key, value in present.items():
        if not isinstance(value, Mapping):
            raise TranslationError(f"{config.where}: {key} must be an object, found {type(value).__name__}")
        section = Settings(value, f"{config.where}: {key}")
        if "rope_theta" in section:
            thetas[f"{key}.rope_theta"] = section.number("rope_theta")
        kinds[key] = _hf_scaling(section, config)
    for what, found in (("rope_theta", thetas), ("the rotary scaling", kinds)):
        if len(set(found.values())) > 1:
            pairs = ", ".join(f"{k} = {v}" for k, v in found.items())
            raise TranslationError(f"{config.where}: {what} is given twice and differs: {pairs}")
    theta = next(iter(thetas.values()), default_theta)
    return theta, next(iter(kinds.values()), None)


def _hf_scaling(section: Settings, config: Settings) -> RopeScaling | None:
    names = {section.text(key) for key in ("rope_type", "type") if key in section}
    if len(names) > 1:
        raise TranslationError(f"{section.where}: rope_type and type disagree: {', '.join(sorted(names))}")
    kind = names.pop() if names else "default"
    kind = _ALIASES.get(kind, kind)
    if kind not in _KEYS:
        raise TranslationError(
            f"{section.where}: rotary scaling {kind[:64]!r} is not supported; supported: {_SUPPORTED}"
        )
    unknown = sorted(set(section.values) - _COMMON - _KEYS[kind])
    if kind != "default" and unknown:
        raise TranslationError(f"{section.where}: {kind} scaling with unknown setting {unknown[0][:64]!r}")
    if kind == "default":
        return None

    def optional(key: str) -> float | None:
        return section.number(key) if key in section else None

    if kind == "longrope":
        return _longrope(section, config)
    original: int | None = None
    if "original_max_position_embeddings" in section:
        original = section.integer("original_max_position_embeddings")
    elif kind in ("dynamic", "yarn"):
        original = config.integer("max_position_embeddings")
    return RopeScaling(
        kind=kind,
        factor=section.number("factor"),
        original_max_positions=original,
        low_freq_factor=optional("low_freq_factor"),
        high_freq_factor=optional("high_freq_factor"),
        beta_fast=section.number("beta_fast", 32.0) if kind == "yarn" else None,
        beta_slow=section.number("beta_slow", 1.0) if kind == "yarn" else None,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=section.boolean("truncate", True) if kind == "yarn" else None,
    )


def _longrope(section: Settings, config: Settings) -> RopeScaling:
    """LongRoPE: two lists of factors, and a scale of cos and sin that follows from how far the context was stretched."""
    longest = config.integer("max_position_embeddings")
    # Phi-3 states the original length at the top level.
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = section.integer("original_max_position_embeddings", longest)
    if isinstance(original, bool) or not isinstance(original, int) or original <= 0:
        raise TranslationError(
            f"{config.where}: original_max_position_embeddings must be a positive whole number"
        )
    factor = section.number("factor") if "factor" in section else longest / original
    if "attention_factor" in section:
        magnitude = section.number("attention_factor")
    else:
        magnitude = longrope_magnitude(factor, original)
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        attention_factor=magnitude,
        factors=_factor_list(section, "short_factor"),
        long_factors=_factor_list(section, "long_factor"),
    )


def longrope_magnitude(factor: float, original: int) -> float:
    """What LongRoPE multiplies cos and sin by for a context ``factor`` times the original (arXiv:2402.13753)."""
    if factor <= 1 or original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _factor_list(section: Settings, key: str) -> tuple[float, ...]:
    values = section.get(key)
    if not isinstance(values, (list, tuple)) or len(values) > 4096:
        raise TranslationError(f"{section.where}: {key} must be a list of numbers")
    return tuple(Settings({key: value}, section.where).number(key) for value in values)


def hf_rotary_dim(
    config: Settings, head_dim: int, key: str = "partial_rotary_factor", default: float = 1.0
) -> int | None:
    """How many components of a head are rotated, or None for all; stated at the top level or in ``rope_parameters``.

    Raises:
        TranslationError: two places that disagree, or a share outside 0 to 1.
    """
    found = {}
    for name in (key, "partial_rotary_factor"):
        if name in config:
            found[name] = config.number(name)
    for section in ("rope_parameters", "rope_scaling"):
        value = config.get(section)
        if isinstance(value, Mapping) and value.get("partial_rotary_factor") is not None:
            inner = Settings(value, f"{config.where}: {section}")
            found[f"{section}.partial_rotary_factor"] = inner.number("partial_rotary_factor")
    if len(set(found.values())) > 1:
        pairs = ", ".join(f"{k} = {v}" for k, v in found.items())
        raise TranslationError(
            f"{config.where}: the rotated share of a head is given twice and differs: {pairs}"
        )
    share = next(iter(found.values()), default)
    if not 0 < share <= 1:
        raise TranslationError(f"{config.where}: a rotated share of {share} is not between 0 and 1")
    rotated = int(head_dim * share)
    return None if rotated == head_dim else rotated


def gguf_rope(
    meta: Settings, arch: str, source: WeightSource, context: int
) -> tuple[float, RopeScaling | None]:
    """rope_theta and scaling of GGUF metadata, including the frequency factors of a ``rope_freqs.weight``
    tensor.

    Raises:
        TranslationError: an unknown or unsupported kind, by name.
    """
    theta = meta.number(f"{arch}.rope.freq_base", 10000.0)
    kind = meta.text(f"{arch}.rope.scaling.type", "none")
    factor = meta.number(f"{arch}.rope.scaling.factor", 0.0)
    legacy = meta.number(f"{arch}.rope.scale_linear", 0.0)
    if kind == "none" and legacy not in (0.0, 1.0):
        kind, factor = "linear", legacy
    original = meta.integer(f"{arch}.rope.scaling.original_context_length", context)
    scaling: RopeScaling | None = None
    if kind == "linear":
        scaling = RopeScaling(kind="linear", factor=factor) if factor not in (0.0, 1.0) else None
    elif kind == "yarn":
        # attn_factor multiplies the scale of cos and sin that YaRN prescribes; only the plain rule is
        # carried.
        for key, neutral in (("attn_factor", 1.0), ("ext_factor", 1.0), ("yarn_ext_factor", 1.0)):
            if meta.number(f"{arch}.rope.scaling.{key}", neutral) != neutral:
                raise TranslationError(f"{meta.where}: {arch}.rope.scaling.{key} is not supported")
        if meta.number(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
            raise TranslationError(f"{meta.where}: {arch}.rope.scaling.yarn_log_multiplier is not supported")
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=meta.number(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.number(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
            truncate=True,
        )
    elif kind not in ("none", "longrope"):
        raise TranslationError(
            f"{meta.where}: {arch}.rope.scaling.type {kind[:64]!r} is not supported; "
            "supported: none, linear, yarn, longrope"
        )
    factors = _frequency_factors(source, "rope_freqs.weight")
    short, long = (_frequency_factors(source, f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    if short is not None or long is not None:
        if short is None or long is None or factors is not None or kind not in ("none", "longrope"):
            raise TranslationError(
                f"{meta.where}: LongRoPE needs rope_factors_short.weight and rope_factors_long.weight and no other scaling"
            )
        magnitude = meta.number(f"{arch}.rope.scaling.attn_factor", 1.0)
        return theta, RopeScaling(
            kind="longrope",
            factor=context / original,
            original_max_positions=original,
            attention_factor=magnitude,
            factors=short,
            long_factors=long,
        )
    if kind == "longrope":
        raise TranslationError(f"{meta.where}: LongRoPE scaling without its factor tensors")
    if factors is None:
        return theta, scaling
    if scaling is not None:
        raise TranslationError(
            f"{meta.where}: both {kind} scaling and rope_freqs.weight; one of them must be absent"
        )
    return theta, RopeScaling(kind="factors", factors=factors)


def _frequency_factors(source: WeightSource, name: str) -> tuple[float, ...] | None:
    if name not in source:
        return None
    tensor = source[name]
    if len(tensor.info.shape) != 1 or tensor.info.numel > 4096:
        raise TranslationError(
            f"{source.path}: {name} has shape {list(tensor.info.shape)}, not [head_dim / 2]"
        )
    values: Any = np.asarray(tensor.numpy(), dtype=np.float64).tolist()
    return tuple(values)
