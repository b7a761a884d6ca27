"""What a merge has changed: the merged model beside the one that runs with its adapter, on a few prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import OazooError, TokenizerError
from oazoo.generation.text_model import TextModel
from oazoo.runtime import Device, get_device
from oazoo.zoo.load import load
from oazoo.zoo.progress import Progress

PROMPTS = (
    "The quick brown fox jumps over the lazy dog, and then it",
    "Question: What is the capital of France?\nAnswer: The capital",
    "def add(a, b):\n    return a + b\n\n\ndef multiply(",
    "In the year 1848 there were 1,234 of them; by 1912",
)
#: Tokens of a prompt, at most, and those of the random ones that a model without a tokenizer gets.
_TOKENS = 32

Logits = npt.NDArray[np.float32]


class MergeDifferenceError(OazooError):
    """A merged model gives other logits than its adapter did, beyond the tolerance."""


@dataclass(frozen=True)
class MergeCheck:
    """How the merged model differs from the one with the adapter beside its weights.

    Attributes:
        largest: the largest difference of a logit.
        kl: mean divergence of the merged model's next tokens from the other's, nats a token.
        same_top: share of places where both find the same token most probable.
        tokens: places that were compared.
    """

    largest: float
    kl: float
    same_top: float
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)

    def check(self, tolerance: float | None) -> None:
        """Raise a MergeDifferenceError if a logit differs by more than ``tolerance``, or by what is no number."""
        if tolerance is not None and not self.largest <= tolerance:
            raise MergeDifferenceError(
                f"a logit of the merged model differs by {self.largest:.4g}, more than the {tolerance:g} that are allowed; "
                "weights stored in more bits keep more of the adapter (--dtype f16, f32)"
            )


def compare(
    source: str | Path,
    adapter: str | Path,
    merged: str | Path,
    *,
    device: Device | None = None,
    progress: Progress | None = None,
) -> MergeCheck:
    """Run both models, one after the other, and compare their logits.

    Args:
        source, adapter: the model with the adapter beside its weights, computed in float32.
        merged: the file that :func:`oazoo.zoo.adapters.merge` wrote of them.

    Raises:
        OazooError: a model cannot be loaded; there is no device.
    """
    where = device or get_device()
    wanted = _logits(load(source, adapter=adapter, device=where, progress=progress))
    found = _logits(load(merged, device=where, progress=progress))
    largest = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    divergences, same = [], []
    for ours, theirs in zip(found, wanted, strict=True):
        log_p, log_q = _log_softmax(theirs), _log_softmax(ours)
        divergences.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    kl, agree = np.concatenate(divergences), np.concatenate(same)
    return MergeCheck(largest, float(kl.mean()), float(agree.mean()), len(kl))


def _logits(model: TextModel) -> list[Logits]:
    """Of each prompt, float32 [tokens, vocabulary]; the model is closed."""
    try:
        return [model.logits(ids) for ids in _prompts(model)]
    finally:
        model.close()


def _prompts(model: TextModel) -> list[list[int]]:
    most = min(_TOKENS, model.model.max_positions)
    try:
        found = [model.tokenizer.encode(prompt)[:most] for prompt in PROMPTS]
    except TokenizerError:
        found = []
    if found and all(found):
        return found
    draw = np.random.default_rng(0)
    return [draw.integers(0, model.model.vocab_size, most).tolist() for _ in PROMPTS]


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return result
