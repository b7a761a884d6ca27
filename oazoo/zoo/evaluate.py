"""How well a model predicts a text, and how far it is from another model: perplexity, divergence, agreement.

Windows and scoring are those of llama.cpp's perplexity tool, so that figures compare. The text is tokenized whole, with
control tokens' names as plain text, and cut into windows of ``context`` tokens that do not overlap (the rest is left out);
the first token of each becomes the beginning token if the tokenizer adds one. Of each window the second half counts: the
logits at positions n/2 to n-2 predict tokens n/2 + 1 to n-1. Perplexity is the exponential of the mean negative
log-likelihood of those, its uncertainty one standard error of the mean.

Everything happens on the device, window by window for all models together; what comes back is a few numbers a token.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel
from oazoo.models.session import DeviceSession
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.scoring import ARGMAX, LARGEST, SUM, TARGET, divergence_rows, score_rows
from oazoo.text import BaseTokenizer
from oazoo.translators.convert import Progress

DEFAULT_CONTEXT = 512
#: Fewer have no second half to speak of.
MIN_CONTEXT = 4
#: Logits of one model that are on the device at a time; rows of a large vocabulary go in several parts.
_LOGIT_BYTES = 64 << 20

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """A model held against another, the reference, on the same tokens.

    Attributes:
        against: the reference's name.
        perplexity: of the reference.
        perplexity_ratio: the model's over the reference's.
        perplexity_ratio_error: one standard error, from the paired differences.
        kl_mean: mean Kullback-Leibler divergence of the model from the reference, nats a token.
        kl_mean_error: one standard error.
        kl_999: its 99.9th percentile.
        kl_max: its largest.
        same_top: share of tokens for which both find the same token most probable, 0 to 1.
    """

    against: str
    perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_mean: float
    kl_mean_error: float
    kl_999: float
    kl_max: float
    same_top: float


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        model: its name.
        perplexity: and ``perplexity_error``, one standard error.
        nll: mean negative log-likelihood, nats a token.
        bits_per_byte: that in bits, times the text's tokens a byte (of its UTF-8).
        tokens: how many were scored, of ``text_tokens`` in the text.
        windows: how many, of ``context`` tokens each.
        text_sha256: hash of the text's UTF-8.
        device: where it ran; ``seconds`` for all models together, loading left out.
        comparison: with the reference, if one was given.
    """

    model: str
    perplexity: float
    perplexity_error: float
    nll: float
    bits_per_byte: float
    tokens: int
    text_tokens: int
    windows: int
    context: int
    text_sha256: str
    device: str
    seconds: float
    comparison: Comparison | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``; figures beyond float64 become None."""
        other = self.comparison
        values = {**self.__dict__, "comparison": None if other is None else dict(other.__dict__)}
        inner = values["comparison"] or {}
        for table in (values, inner):
            for name, value in table.items():
                if isinstance(value, float) and not math.isfinite(value):
                    table[name] = None
        return values


def evaluate(
    model: TextModel | str | Path,
    text: str,
    *,
    against: TextModel | str | Path | None = None,
    context: int = DEFAULT_CONTEXT,
    windows: int | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Evaluation:
    """Perplexity of a model on a text and, if there is another to hold it against, how they differ.

    Args:
        model: a loaded model, or what :func:`oazoo.load` takes.
        text: at least one window of it.
        against: the reference: a model with the same tokenizer.
        context: tokens of a window, at least 4, at most what the models have positions for.
        windows: score only so many; all if None.
        device: where to load models given by name.
        progress: called with the windows that are done.
        notify: called with a line for each thing worth knowing.

    Raises:
        UsageError: the text is too short for a window, or context or windows make no sense.
        FormatError: the models' tokenizers differ, or a model's logits are not finite.
        OazooError: a model cannot be loaded, has no tokenizer, or does not fit the device.
    """
    return evaluate_all([model], text, against=against, context=context, windows=windows, device=device,
                        progress=progress, notify=notify)[0]  # fmt: skip


def evaluate_all(
    models: Sequence[TextModel | str | Path],
    text: str,
    *,
    against: TextModel | str | Path | None = None,
    context: int = DEFAULT_CONTEXT,
    windows: int | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[Evaluation]:
    """:func:`evaluate` for several models against one reference, which then runs once: an evaluation for each."""
    check_request(text, context, windows)
    wanted = [*models] if against is None else [against, *models]
    loaded = [loaded_model(m, device, progress, notify) for m in wanted]
    try:
        return _evaluate_loaded(loaded, text, against is not None, context, windows, progress)
    finally:
        for given, made in zip(wanted, loaded, strict=True):
            if not isinstance(given, TextModel) and isinstance(made.model, CausalModel):
                made.model.close()


def loaded_model(
    model: TextModel | str | Path,
    device: Device | None,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
) -> TextModel:
    """The model itself, or the one that :func:`oazoo.load` gives for its name."""
    from oazoo.zoo.load import load

    if isinstance(model, TextModel):
        return model
    return load(model, device=device, progress=progress, notify=notify)


def check_request(text: str, context: int, windows: int | None = None) -> None:
    """Refuse what cannot be evaluated with any model, before one is loaded.

    Raises:
        UsageError: an empty text, one with NUL characters, a window too small, or no windows.
    """
    if not text.strip():
        raise UsageError("the text to evaluate on is empty")
    if "\0" in text:
        raise UsageError(
            f"the text to evaluate on has a NUL at character {text.index(chr(0))}: that is a binary file, not a text"
        )
    if context < MIN_CONTEXT:
        raise UsageError(f"a window of {context} tokens is too small: at least {MIN_CONTEXT} are needed")
    if windows is not None and windows < 1:
        raise UsageError(f"{windows} windows: at least 1 must be scored")


def _evaluate_loaded(
    loaded: Sequence[TextModel],
    text: str,
    compare: bool,
    context: int,
    windows: int | None,
    progress: Progress | None,
) -> list[Evaluation]:
    """Evaluations of the models; with ``compare`` the first is the reference and has none of its own."""
    names = [model.name for model in loaded]
    causal = [_causal(model) for model in loaded]
    tokens = [np.asarray(model.tokenizer.encode(text, allow_special=False), np.int32) for model in loaded]
    for index in range(1, len(loaded)):
        _check_same_tokens(loaded, causal, tokens, index)
    ids = tokens[0]
    most = min(model.max_positions for model in causal)
    if context > most:
        raise UsageError(f"a window of {context} tokens: {' and '.join(names)} can have at most {most}")
    if ids.size < context:
        raise UsageError(
            f"the text has {ids.size:,} tokens, which is less than one window of {context}: give a longer text, or a "
            "smaller --context"
        )
    count = ids.size // context
    count = count if windows is None else min(windows, count)
    cut = ids[: count * context].reshape(count, context).copy()
    bos = _bos(loaded[0].tokenizer)
    if bos is not None:
        cut[:, 0] = bos
    start = time.perf_counter()
    # A model that stands there twice, such as a reference that is evaluated itself, runs once.
    runs = list(dict.fromkeys(causal))
    place = [runs.index(model) for model in causal]
    run_names = [names[place.index(run)] for run in range(len(runs))]
    scores, divergences = _run(runs, run_names, cut, compare, progress)
    seconds = time.perf_counter() - start
    encoded = text.encode()
    facts: dict[str, Any] = {
        "text_tokens": int(ids.size),
        "windows": count,
        "context": context,
        "text_sha256": hashlib.sha256(encoded).hexdigest(),
        "device": causal[0].device.info.name,
        "seconds": seconds,
    }
    results = []
    for index in range(1 if compare else 0, len(loaded)):
        nll = _nll(scores[place[index]])
        mean, error = _mean(nll)
        comparison = None
        if compare:
            comparison = _comparison(names[0], scores[0], scores[place[index]], divergences[place[index]])
        perplexity = _exp(mean)
        results.append(
            Evaluation(
                model=names[index],
                perplexity=perplexity,
                perplexity_error=perplexity * error,
                nll=mean,
                bits_per_byte=mean / math.log(2) * ids.size / len(encoded),
                tokens=nll.size,
                comparison=comparison,
                **facts,
            )
        )
    return results


def _causal(model: TextModel) -> CausalModel:
    if not isinstance(model.model, CausalModel):
        raise UsageError(f"{model.name} is not a model on the device: only those can be evaluated")
    return model.model


def _bos(tokenizer: BaseTokenizer) -> int | None:
    """The token that the tokenizer begins a text with, if it adds one."""
    return tokenizer.bos_id if tokenizer.bos_id in tokenizer.prefix_ids else None


def _check_same_tokens(
    loaded: Sequence[TextModel], causal: Sequence[CausalModel], tokens: Sequence[Ids], index: int
) -> None:
    """Refuse to compare models whose ids mean different things."""
    first, other = loaded[0], loaded[index]
    sizes = causal[0].vocab_size, causal[index].vocab_size
    if causal[0].device is not causal[index].device:
        raise UsageError(f"{first.name} and {other.name} are on different devices: load them onto one")
    why = ""
    if sizes[0] != sizes[1]:
        why = f"vocabularies of {sizes[0]:,} and {sizes[1]:,} tokens"
    elif not np.array_equal(tokens[0], tokens[index]):
        why = f"the text becomes {tokens[0].size:,} and {tokens[index].size:,} tokens, not the same ones"
    elif _bos(first.tokenizer) != _bos(other.tokenizer):
        why = "only one begins a text with its beginning token"
    else:
        for token_id in range(sizes[0]):
            a, b = first.tokenizer.token(token_id), other.tokenizer.token(token_id)
            if a != b:
                why = f"token {token_id} is {a!r} and {b!r}"
                break
    if why:
        raise FormatError(
            f"{first.name} and {other.name} cannot be compared, because their tokenizers differ: {why}"
        )


def _run(
    models: Sequence[CausalModel],
    names: Sequence[str],
    windows: Ids,
    compare: bool,
    progress: Progress | None,
) -> tuple[list[Floats], list[Floats]]:
    """Scores [tokens, 4] of every model, and with ``compare`` the divergences [tokens] of each from the first."""
    count, context = windows.shape
    scores: list[list[Floats]] = [[] for _ in models]
    divergences: list[list[Floats]] = [[] for _ in models] if compare else []
    sessions = [model.new_session(context) for model in models]
    width = models[0].vocab_size
    step = max(1, _LOGIT_BYTES // (4 * width))
    try:
        if progress is not None:
            progress("evaluating", 0, count, "windows")
        for number, ids in enumerate(windows):
            # Chunks end at the same positions in all models, so their rows stand side by side.
            for parts in zip(*(_scored(session, ids) for session in sessions), strict=True):
                first, rows = parts[0][0], parts[0][1].shape[0]
                for start in range(0, rows, step):
                    stop = min(start + step, rows)
                    targets = Tensor.from_numpy(models[0].device, ids[first + start + 1 : first + stop + 1])
                    reference: tuple[Tensor, Tensor] | None = None
                    for index, (model, (_, hidden)) in enumerate(zip(models, parts, strict=True)):
                        logits = model.head_logits(hidden.rows(start, stop))
                        score = score_rows(logits, targets)
                        if reference is not None:
                            far = divergence_rows(reference[0], logits, reference[1], score)
                            divergences[index].append(far.numpy().astype(np.float64))
                        elif compare:
                            reference = logits, score
                            divergences[index].append(np.zeros(stop - start))  # from itself
                        scores[index].append(score.numpy().astype(np.float64))
                        if (scores[index][-1][:, ARGMAX] < 0).any():
                            raise FormatError(
                                f"{names[index]}: the logits of window {number + 1} have values that are not finite"
                            )
            if progress is not None:
                progress("evaluating", number + 1, count, "windows")
    finally:
        for session in sessions:
            session.close()
    return [np.concatenate(s) for s in scores], [np.concatenate(d) for d in divergences]


def _scored(session: DeviceSession, ids: Ids) -> Iterator[tuple[int, Tensor]]:
    """The residual stream of the positions whose predictions count: the first position of a run, and its rows."""
    session.truncate(0)
    first, last = ids.size // 2, ids.size - 1  # the last token predicts nothing that is known
    # What nobody predicts from need not go through the model either.
    for start, hidden in session.feed(ids[:last]):
        low, high = max(first, start), start + hidden.shape[0]
        if low < high:
            yield low, hidden.rows(low - start, high - start)


def _nll(scores: Floats) -> Floats:
    """Negative log-likelihood of each token, nats."""
    result: Floats = scores[:, LARGEST] - scores[:, TARGET] + np.log(scores[:, SUM])
    return result


def _mean(values: Floats) -> tuple[float, float]:
    """The mean and its standard error (0 for a single value)."""
    spread = float(values.std()) if values.size > 1 else 0.0
    return float(values.mean()), spread / math.sqrt(max(1, values.size - 1))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _comparison(against: str, reference: Floats, scores: Floats, divergences: Floats) -> Comparison:
    before, after = _nll(reference), _nll(scores)
    gain, gain_error = _mean(after - before)
    kl, kl_error = _mean(divergences)
    ratio = _exp(gain)
    return Comparison(
        against=against,
        perplexity=_exp(float(before.mean())),
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * gain_error,
        kl_mean=kl,
        kl_mean_error=kl_error,
        kl_999=float(np.quantile(divergences, 0.999)),
        kl_max=float(divergences.max()),
        same_top=float(np.mean(reference[:, ARGMAX] == scores[:, ARGMAX])),
    )
