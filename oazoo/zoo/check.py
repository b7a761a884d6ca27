"""``convert --check``: does the converted model answer as its source means it to?

A few prompts run through two programs that share nothing: the source's own tensors, names and settings in NumPy
(:mod:`oazoo.translators.reference`), and the converted file on the Vulkan device. A wrong map shows in the logits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import OazooError, UsageError
from oazoo.formats.detect import open_source
from oazoo.translators.convert import ConversionReport
from oazoo.translators.fp8 import decode_fp8
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.reference import NoReferenceError, Reference, reference_for
from oazoo.translators.translator import open_checkpoint

if TYPE_CHECKING:
    from oazoo.generation.text_model import TextModel
    from oazoo.runtime import Device

Ids = npt.NDArray[np.int64]

#: Longest prompt, in tokens.
MAX_TOKENS = 32
#: What two orders of the same float32 sums may differ by, as a share of the largest logit.
TOLERANCE = 3e-4
_TEXTS = (
    "The capital of France is",
    "def add(a, b):\n    return a +",
    "1, 2, 3, 5, 8, 13, 21,",
    "Grüße aus Zürich — 你好, world! 🙂",
)
#: Lengths of the prompts that are ids without a meaning.
_LENGTHS = (1, 7, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """One prompt: its text (or what its ids are), and how far the logits after its tokens are apart.

    ``same_best``: at how many of the ``tokens`` positions both have the same largest logit.
    """

    prompt: str
    tokens: int
    max_difference: float
    largest_logit: float
    same_best: int


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    ``rounding``: the largest difference of a logit that rounding weights in the conversion explains, measured by rounding
    them in the source; 0 if none was rounded, None if that cannot be computed. ``why_not``: why nothing was compared.
    """

    prompts: tuple[PromptCheck, ...] = ()
    tolerance: float = 0.0
    rounding: float | None = 0.0
    device: str = ""
    seconds: float = 0.0
    why_not: str = ""

    @property
    def compared(self) -> bool:
        """Whether there was something to compare."""
        return not self.why_not

    @property
    def max_difference(self) -> float:
        """The largest difference of any logit; infinite where only one of the two is a number."""
        return max((prompt.max_difference for prompt in self.prompts), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every logit is within the tolerance; True also where nothing could be compared."""
        return self.max_difference <= self.tolerance if self.compared else True

    def to_json(self) -> dict[str, Any]:
        """The check as JSON values; a difference that is not finite is null."""
        if not self.compared:
            return {"compared": False, "why_not": self.why_not}
        return {
            "compared": True,
            "passed": self.passed,
            "max_difference": _finite(self.max_difference),
            "tolerance": self.tolerance,
            "rounding": self.rounding,
            "device": self.device,
            "seconds": self.seconds,
            "prompts": [
                {
                    "prompt": p.prompt,
                    "tokens": p.tokens,
                    "max_difference": _finite(p.max_difference),
                    "largest_logit": _finite(p.largest_logit),
                    "same_best": p.same_best,
                }
                for p in self.prompts
            ],
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def check_conversion(
    source: str | Path,
    report: ConversionReport,
    *,
    arch: str = "auto",
    tolerance: float | None = None,
    chosen: Mapping[str, str] | None = None,
    device: Device | None = None,
) -> CheckReport:
    """Compare a converted file with its source.

    Args:
        source: the checkpoint that was converted.
        report: what the conversion said.
        arch: as for the conversion.
        tolerance: largest difference of a logit that counts as equal; by default :data:`TOLERANCE` of the largest logit,
            and twice what rounding explains.
        chosen: as for the conversion.
        device: where the converted model runs; the default device if None.

    Raises:
        OazooError: the source cannot be read, the result cannot be loaded, or there is no usable device.
    """
    check_tolerance(tolerance)
    start = time.perf_counter()
    why = _why_not(report)
    if why:
        return CheckReport(why_not=why)
    with open_source(source) as opened:
        checkpoint = decode_fp8(open_checkpoint(opened, arch, own_map=True))
        try:
            reference = reference_for(
                checkpoint.source, checkpoint.naming, checkpoint.config, checkpoint.declared, chosen or {}
            )
        except NoReferenceError as error:
            return CheckReport(why_not=str(error))
        from oazoo.zoo.load import load

        with load(report.output, device=device) as model:
            prompts = _prompts(model, reference.max_tokens)
            try:
                wanted = reference.logits([ids for _, ids in prompts])
                rounding = _rounding(reference, report, [ids for _, ids in prompts], wanted)
            except NoReferenceError as error:
                return CheckReport(why_not=str(error))
            found = tuple(
                _compare(text, model.logits(ids), logits)
                for (text, ids), logits in zip(prompts, wanted, strict=True)
            )
            where = str(model.info["device"])
    if tolerance is None:
        largest = max((p.largest_logit for p in found if math.isfinite(p.largest_logit)), default=1.0)
        tolerance = TOLERANCE * largest + 2 * (rounding or 0.0)
    return CheckReport(found, tolerance, rounding, where, time.perf_counter() - start)


def check_tolerance(tolerance: float | None) -> None:
    """Raise a UsageError for a tolerance that is no positive number."""
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance > 0):
        raise UsageError(f"the tolerance of the check must be a positive number, not {tolerance}")


def _why_not(report: ConversionReport) -> str:
    """Why a converted file cannot be run, if it cannot."""
    if isinstance(report.config, RawConfig):
        return "the tensors were kept without a model (--arch raw)"
    from oazoo.configs import FlowConfig
    from oazoo.models import why_not_run

    if isinstance(report.config, FlowConfig):
        return "a flow model has no logits to compare"
    return why_not_run(report.config) or ""


def _prompts(model: TextModel, limit: int | None) -> list[tuple[str, Ids]]:
    """A few prompts: texts where there is a tokenizer, and ids spread over the whole vocabulary."""
    longest = min(MAX_TOKENS, model.model.max_positions, limit or MAX_TOKENS)
    vocabulary = getattr(model.model, "used_vocab_size", model.model.vocab_size)
    prompts: list[tuple[str, Ids]] = []
    if model.has_tokenizer:
        for text in _TEXTS:
            try:
                ids = np.array(model.encode_text(text)[:longest], np.int64)
            except OazooError:  # a vocabulary that has no token for some sign
                continue
            if ids.size:
                prompts.append((text, ids))
    for length in sorted({min(length, longest) for length in _LENGTHS}):
        # Steps of the golden ratio spread over any vocabulary without a pattern.
        share = (np.arange(1, length + 1) * 0.6180339887498949 + length * 0.1) % 1.0
        prompts.append((f"{length} ids", (share * vocabulary).astype(np.int64)))
    return prompts


def _rounding(
    reference: Reference,
    report: ConversionReport,
    sequences: Sequence[Ids],
    wanted: Sequence[npt.NDArray[np.float32]],
) -> float | None:
    """The largest change of a logit when the source's own weights are rounded to what the result stores."""
    rounded = rounded_sources(report)
    if not rounded:
        return 0.0
    if not reference.can_round:
        return None
    changed = reference.logits(sequences, rounded)
    with np.errstate(invalid="ignore"):
        largest = max(float(np.abs(a - b).max()) for a, b in zip(changed, wanted, strict=True))
    return largest if math.isfinite(largest) else None


def rounded_sources(report: ConversionReport) -> Mapping[str, str]:
    """Source tensor → the dense encoding that it was rounded to, for those that were."""
    return {name: tensor.encoding for tensor in report.rounded for name in tensor.sources}


def _compare(text: str, found: npt.NDArray[np.float32], wanted: npt.NDArray[np.float32]) -> PromptCheck:
    if found.shape != wanted.shape:
        return PromptCheck(text, len(wanted), math.inf, math.inf, 0)
    with np.errstate(invalid="ignore"):
        apart = np.abs(found.astype(np.float64) - wanted)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    apart = np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))
    best = int((found.argmax(axis=1) == wanted.argmax(axis=1)).sum())
    finite = np.abs(wanted[np.isfinite(wanted)])
    return PromptCheck(text, len(wanted), float(apart.max()), float(finite.max(initial=0.0)), best)
