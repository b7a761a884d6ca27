"""Rotary settings of Hugging Face configs and of GGUF metadata, as :class:`~oazoo.configs.RopeScaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from oazoo.configs import RopeScaling
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.settings import Settings

_SUPPORTED = "none (default), linear, dynamic, llama3, yarn"

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
}


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
    kind = "default" if kind == "none" else kind
    if kind not in _KEYS:
        raise TranslationError(
            f"{section.where}: rotary scaling {kind[:64]!r} is not supported; supported: {_SUPPORTED}"
        )
    if section.number("partial_rotary_factor", 1.0) != 1.0:
        raise TranslationError(f"{section.where}: partial_rotary_factor other than 1 is not supported")
    unknown = sorted(set(section.values) - _COMMON - _KEYS[kind])
    if kind != "default" and unknown:
        raise TranslationError(f"{section.where}: {kind} scaling with unknown setting {unknown[0][:64]!r}")
    if kind == "default":
        return None

    def optional(key: str) -> float | None:
        return section.number(key) if key in section else None

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
    elif kind != "none":
        raise TranslationError(
            f"{meta.where}: {arch}.rope.scaling.type {kind[:64]!r} is not supported; "
            "supported: none, linear, yarn"
        )
    factors = _frequency_factors(source)
    if factors is None:
        return theta, scaling
    if scaling is not None:
        raise TranslationError(
            f"{meta.where}: both {kind} scaling and rope_freqs.weight; one of them must be absent"
        )
    return theta, RopeScaling(kind="factors", factors=factors)


def _frequency_factors(source: WeightSource) -> tuple[float, ...] | None:
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in source:
            raise TranslationError(f"{source.path}: {name}: LongRoPE scaling is not supported")
    if "rope_freqs.weight" not in source:
        return None
    tensor = source["rope_freqs.weight"]
    if len(tensor.info.shape) != 1 or tensor.info.numel > 4096:
        raise TranslationError(
            f"{source.path}: rope_freqs.weight has shape {list(tensor.info.shape)}, not [head_dim / 2]"
        )
    values: Any = np.asarray(tensor.numpy(), dtype=np.float64).tolist()
    return tuple(values)
