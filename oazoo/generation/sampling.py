"""Choosing the next token from logits.

The order is fixed, and each step works on what the one before has left:

1. *repeat penalty*: the logit of every token among the last ``repeat_window`` ones is divided by
``repeat_penalty`` when
   positive and multiplied by it when negative (Keskar et al. 2019, CTRL).
2. *temperature* 0: the largest logit wins, of equal ones the lowest id. Nothing below applies.
3. *temperature*: logits are divided by it.
4. *top-k*: the ``top_k`` largest stay.
5. *top-p*: of those, by falling probability, the fewest whose probabilities add up to ``top_p`` (Holtzman et
al. 2020). 6. *min-p*: of those, the ones at least ``min_p`` times as probable as the first (Nguyen et al.
2024). 7. one draw among the rest, in proportion to their probabilities.

Equal logits rank by id. Everything is computed in float64. The random numbers come straight from PCG64, whose
stream NumPy guarantees: the same logits and the same seed give the same tokens, in every process and on every
machine.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import GenerationError, UsageError

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How to choose tokens and when to stop; :class:`UsageError` for values that mean nothing.

    ``temperature`` ≥ 0 (0: always the most probable token). ``top_k`` ≥ 0 (0: off). 0 < ``top_p`` ≤ 1 (1:
    off). 0 ≤ ``min_p`` ≤ 1 (0: off). ``repeat_penalty`` > 0 (1: off), over the last ``repeat_window`` tokens
    of prompt and answer (0: none, -1: all). ``seed`` 0 to 2**64 - 1; None or -1 draws one, which the result
    reports. ``max_tokens`` ≥ 1; None: 512, or what fits. ``stop``: texts that end the answer and are not part
    of it. ``ignore_eos``: go on after the model's end tokens.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, None)
        _integer("top_k", self.top_k, 0, None, "0 switches it off")
        _number("top_p", self.top_p, 0, 1, "1 switches it off", above=True)
        _number("min_p", self.min_p, 0, 1, "0 switches it off")
        _number("repeat_penalty", self.repeat_penalty, 0, None, "1 switches it off", above=True)
        _integer("repeat_window", self.repeat_window, -1, None, "-1 is everything, 0 nothing")
        if self.seed is not None:
            _integer("seed", self.seed, -1, 2**64 - 1, "-1 draws one")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        stop: Any = self.stop  # what callers really hand in
        if isinstance(stop, str) or not isinstance(stop, Sequence):
            raise UsageError("stop must be a list of texts")
        object.__setattr__(self, "stop", tuple(stop))
        if len(self.stop) > MAX_STOPS:
            raise UsageError(f"stop has {len(self.stop)} texts; at most {MAX_STOPS} are allowed")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise UsageError(
                    f"a stop text must have 1 to {MAX_STOP_CHARS} characters, not {str(text)[:40]!r}"
                )
        if type(self.ignore_eos) is not bool:
            raise UsageError(f"ignore_eos must be true or false, not {self.ignore_eos!r}")

    @classmethod
    def make(cls, defaults: Mapping[str, Any] | None = None, **settings: Any) -> SamplingSettings:
        """Settings from a model's own ``defaults`` (other keys in it are left alone) and a caller's
        ``settings``.

        A setting that is None counts as not given. Raises :class:`UsageError` for a setting that does not
        exist.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise UsageError(f"there is no setting {', '.join(unknown)}; there are {', '.join(names)}")
        own = {k: v for k, v in (defaults or {}).items() if k in names and v is not None}
        if defaults and defaults.get("do_sample") is False:  # Hugging Face's way to say greedy
            own["temperature"] = 0.0
        given = {k: v for k, v in settings.items() if v is not None}
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        return cls(**{**own, **given})


def _number(
    name: str, value: Any, low: float, high: float | None, hint: str = "", *, above: bool = False
) -> None:
    ok = (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
    ok = ok and (value > low if above else value >= low) and (high is None or value <= high)
    if not ok:
        bounds = f"{'above' if above else 'at least'} {low:g}" + (
            "" if high is None else f" and at most {high:g}"
        )
        raise UsageError(f"{name} must be a number {bounds}{f' ({hint})' if hint else ''}, not {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None, hint: str = "") -> None:
    ok = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not (ok and value >= low and (high is None or value <= high)):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(
            f"{name} must be a whole number {bounds}{f' ({hint})' if hint else ''}, not {value!r}"
        )


class Sampler:
    """Draws one token after another. ``seed`` is the one in use, drawn when the settings name none."""

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        drawn = settings.seed is None or settings.seed < 0
        self.seed = secrets.randbits(32) if drawn else int(settings.seed or 0)
        self._random = np.random.PCG64(self.seed)

    def sample(self, logits: npt.NDArray[np.floating[Any]], history: Sequence[int] = ()) -> int:
        """The next token id for ``logits`` [vocabulary].

        ``history`` are the ids so far, prompt first. Raises :class:`GenerationError` when a logit is not
        finite.
        """
        check_logits(logits)
        scores = logits.astype(np.float64)
        settings = self.settings
        if settings.repeat_penalty != 1.0:
            _penalize(scores, history, settings)
        if settings.temperature == 0:
            return int(np.argmax(scores))
        ids, probabilities = candidates(scores, settings)
        if len(ids) == 1:
            self._uniform()  # one number a token, so that equal seeds stay in step whatever the candidates
            return int(ids[0])
        sums = np.cumsum(probabilities)
        place = int(np.searchsorted(sums, self._uniform() * sums[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])

    def _uniform(self) -> float:
        """A number in [0, 1) with 53 random bits."""
        return float(int(self._random.random_raw()) >> 11) * 2.0**-53


def candidates(
    scores: npt.NDArray[np.float64], settings: SamplingSettings
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    """Steps 3 to 6: the ids [n] that may be drawn, most probable first where that matters, and their weights
    [n].

    ``scores`` [vocabulary] are finite, the temperature is not 0. The weights are probabilities up to a common
    factor.
    """
    # Subtracting first keeps a tiny temperature from making infinity minus infinity of it.
    with np.errstate(over="ignore"):
        scaled = (scores - scores.max()) / settings.temperature
    top_k = settings.top_k if 0 < settings.top_k < len(scaled) else 0
    ids = _largest(scaled, top_k) if top_k else np.arange(len(scaled))
    weights = np.exp(scaled[ids])
    if settings.top_p < 1.0:
        kept = _nucleus(scaled[ids], weights, settings.top_p)
        ids, weights = ids[kept], weights[kept]
    if settings.min_p > 0.0:
        keep = weights >= settings.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _largest(scores: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Ids of the ``count`` largest scores in falling order; of equal ones those with the lowest ids."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    equal = np.flatnonzero(scores == threshold)[: count - len(above)]
    ids = np.concatenate([above, equal])
    return ids[np.argsort(-scores[ids], kind="stable")]


def _nucleus(
    scores: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], top_p: float
) -> npt.NDArray[np.intp]:
    """Places of the fewest weights, largest score first, that reach ``top_p`` of the total; always at least one."""
    target = top_p * weights.sum()
    # Nearly always a few hundred do, and finding those is far cheaper than sorting a vocabulary.
    for count in (256, 8192, len(scores)):
        order = _largest(scores, min(count, len(scores)))
        sums = np.cumsum(weights[order])
        if sums[-1] >= target or len(order) == len(scores):
            break
    return order[: int(np.searchsorted(sums, target, side="left")) + 1]


def _penalize(scores: npt.NDArray[np.float64], history: Sequence[int], settings: SamplingSettings) -> None:
    window = settings.repeat_window
    recent = history if window < 0 else history[max(0, len(history) - window) :]
    seen = np.unique(np.asarray(recent, dtype=np.int64))
    seen = seen[(seen >= 0) & (seen < len(scores))]
    values = scores[seen]
    with np.errstate(over="ignore"):
        penalized = np.where(values > 0, values / settings.repeat_penalty, values * settings.repeat_penalty)
    # An extreme penalty must not make infinities, whose difference is no number.
    limit = np.finfo(np.float64).max
    scores[seen] = np.clip(penalized, -limit, limit)


class NonFiniteLogitsError(GenerationError):
    """The model's logits hold NaN or an infinity."""


def check_logits(logits: npt.NDArray[Any]) -> None:
    """Check that ``logits`` is a non-empty vector of finite numbers.

    Raises:
        GenerationError: it is no vector, or empty.
        NonFiniteLogitsError: it holds NaN or an infinity.
    """
    if logits.ndim != 1 or not logits.size:
        raise GenerationError(f"the model gave logits of shape {logits.shape}; a vector is needed")
    finite = np.isfinite(logits)
    if not finite.all():
        bad = np.flatnonzero(~finite)
        raise NonFiniteLogitsError(
            f"the model gave {len(bad)} of {logits.size} logits that are not finite numbers, the first is "
            f"{logits[bad[0]]} for token {bad[0]}. The weights may be damaged (try 'oazoo verify'), or the device "
            f"computes wrongly (try 'oazoo doctor' or another --device). --debug-nan finds the layer."
        )
