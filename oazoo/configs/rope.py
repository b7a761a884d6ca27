"""How rotary frequencies are stretched for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oazoo.configs.fields import MAX_POSITIONS, StrictJson, check

ROPE_KINDS = ("linear", "dynamic", "llama3", "yarn", "factors", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling(StrictJson):
    """How the rotary inverse frequencies ``theta^(-2j/head_dim)`` are changed for long contexts.

    ``kind`` and the fields it uses:

    - ``linear``: positions divided by ``factor``.
    - ``dynamic``: NTK-aware growth of theta once a sequence exceeds ``original_max_positions``.
    - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_positions``.
    - ``yarn``: ``factor``, ``original_max_positions``, ``beta_fast``, ``beta_slow``, ``truncate`` and, for
      the scale of cos and sin, ``attention_factor`` or ``mscale``/``mscale_all_dim`` (arXiv:2309.00071).
    - ``factors``: each inverse frequency divided by its entry of ``factors`` (rotary_dim/2 values; GGUF
      stores Llama 3's scaling so).
    - ``longrope``: divided by ``factors`` while a sequence is no longer than ``original_max_positions``, by
      ``long_factors`` beyond; cos and sin are multiplied by ``attention_factor`` (arXiv:2402.13753).
    """

    kind: str
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        where = "rope_scaling"
        check(
            self.kind in ROPE_KINDS,
            where,
            f"unsupported kind {self.kind[:64]!r}; supported: none, {', '.join(ROPE_KINDS)}",
        )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            check(
                value is None or (math.isfinite(value) and 0 < value <= 1e6),
                where,
                f"{name} = {value} must be positive, at most 1e6",
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            check(
                value is None or (math.isfinite(value) and 0 <= value <= 1e6),
                where,
                f"{name} = {value} is out of range",
            )
        original = self.original_max_positions
        check(
            original is None or 0 < original <= MAX_POSITIONS,
            where,
            f"original_max_positions = {original} out of range",
        )
        if self.kind == "llama3":
            for name in ("low_freq_factor", "high_freq_factor", "original_max_positions"):
                check(getattr(self, name) is not None, where, f"kind 'llama3' needs {name}")
            assert self.low_freq_factor is not None and self.high_freq_factor is not None
            check(
                self.low_freq_factor < self.high_freq_factor,
                where,
                "low_freq_factor must be below high_freq_factor",
            )
        if self.kind in ("yarn", "dynamic", "longrope"):
            check(original is not None, where, f"kind {self.kind!r} needs original_max_positions")
        wanted = {"factors": ("factors",), "longrope": ("factors", "long_factors")}.get(self.kind, ())
        for name in ("factors", "long_factors"):
            values = getattr(self, name)
            check(
                (values is not None) == (name in wanted),
                where,
                f"kind {self.kind!r} {'needs the list' if name in wanted else 'does not take'} {name}",
            )
            check(
                values is None or (len(values) > 0 and all(math.isfinite(v) and v > 0 for v in values)),
                where,
                f"{name} must be finite and positive numbers, at least one",
            )
