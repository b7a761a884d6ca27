"""Running a model over a text to learn what its weights are multiplied with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.generation.text_model import TextModel
from oazoo.models import CausalModel
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.arithmetic import accumulate, fill
from oazoo.runtime.ops.linear import observing
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.ops.product import weight_gradient
from oazoo.runtime.ops.routing import Groups, expert_squares
from oazoo.translators.convert import Progress
from oazoo.zoo.evaluate import check_request, loaded_model
from oazoo.zoo.files import open_file
from oazoo.zoo.statistics import Statistics

#: Tokens that go through the model as one sequence.
CONTEXT = 512
#: Logits that are on the device at a time.
_LOGIT_BYTES = 64 << 20
#: What statistics say they were gathered on when no text was given.
OWN_TEXT = "oazoo's general text"

Ids = npt.NDArray[np.int32]


def own_text() -> str:
    """The general text that ships with the package: prose, rules, code, data, dialogue, instructions, mathematics."""
    return files("oazoo.zoo").joinpath("calibration.txt").read_text(encoding="utf-8")


def calibrate(
    model: TextModel | str | Path,
    text: str | None = None,
    *,
    name: str = "",
    covariance: bool | Sequence[str] = False,
    max_tokens: int | None = None,
    device: Device | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Statistics:
    """Run a model over a text and gather the second moments of what each of its weights is multiplied with.

    The text is cut into sequences of 512 tokens, or of as many as the model has positions for; all of its tokens count.

    Args:
        model: a loaded model, or what :func:`oazoo.load` takes.
        text: at least 16 tokens of it; the general text of this package if None.
        name: what to call the text in the statistics.
        covariance: also the means of products of each two inputs, of every weight, or of those named: inputs² floats for
            each weight's inputs.
        max_tokens: leave out what comes after so many; at least 16.
        device: where to load a model given by name.
        progress: called with the tokens that are done.
        notify: called with a line for each thing worth knowing.

    Raises:
        UsageError: no text to speak of.
        FormatError: an input of a weight is not finite.
        OazooError: the model cannot be loaded, has no tokenizer, or does not fit the device.
    """
    given = own_text() if text is None else text
    check_request(given, 4)
    if max_tokens is not None and max_tokens < 16:
        raise UsageError(f"{max_tokens} tokens are too few to measure anything: at least 16 are needed")
    loaded = loaded_model(model, device, progress, notify)
    causal = loaded.model
    if not isinstance(causal, CausalModel):
        raise UsageError(f"{loaded.name} is not a model on the device: only those can be measured")
    try:
        sequences = sequences_of(loaded, given, max_tokens)
        gathered = Gathered(causal, covariance)
        _run(causal, sequences, gathered, progress)
        facts = {
            "model": loaded.name,
            "weights": _checksum(loaded),
            "text": name or (OWN_TEXT if text is None else "a text of the user's"),
            "text_sha256": hashlib.sha256(given.encode()).hexdigest(),
        }
        return gathered.statistics(facts, sum(s.size for s in sequences))
    finally:
        if loaded is not model:
            causal.close()


def _checksum(model: TextModel) -> str:
    """The checksum of the weights in the model's file; empty for a model that did not come from one."""
    path = model.info.get("path")
    if not path:
        return ""
    with open_file(str(path)) as source:
        return source.weights_checksum if isinstance(source, OamSource) else ""


def sequences_of(model: TextModel, text: str | None, max_tokens: int | None) -> list[Ids]:
    """A text's tokens, cut into what goes through the model at once; the general text of this package if None.

    Raises:
        UsageError: fewer than 16 tokens.
    """
    given = own_text() if text is None else text
    ids = np.asarray(model.tokenizer.encode(given, allow_special=False), np.int32)
    ids = ids if max_tokens is None else ids[:max_tokens]
    if ids.size < 16:
        raise UsageError(f"the text has {ids.size} tokens; at least 16 are needed to measure anything")
    assert isinstance(model.model, CausalModel)
    return cut(ids, min(CONTEXT, model.model.max_positions))


def cut(ids: Ids, context: int) -> list[Ids]:
    """Sequences of ``context`` tokens; a rest of fewer than 16 is left out, unless it is all there is."""
    parts = [ids[start : start + context] for start in range(0, ids.size, context)]
    return [part for part in parts if part.size >= min(16, context)]


def _run(model: CausalModel, sequences: Sequence[Ids], gathered: Gathered, progress: Progress | None) -> None:
    total, done = sum(s.size for s in sequences), 0
    session = model.new_session(max(s.size for s in sequences))
    step = max(1, _LOGIT_BYTES // (4 * model.vocab_size))
    try:
        with observing(gathered):
            for ids in sequences:
                session.truncate(0)
                for _, hidden in session.feed(ids):
                    # The head's inputs count as well; its outputs are not needed.
                    for start in range(0, hidden.shape[0], step):
                        model.head_logits(hidden.rows(start, min(start + step, hidden.shape[0])))
                done += ids.size
                # Also keeps the queue short.
                model.device.synchronize()
                if progress is not None:
                    progress("calibrating", done, total, "tokens")
    finally:
        session.close()


class Gathered:
    """Sums of squares, and of products, of the inputs of every weight, on the device.

    Args:
        model: whose weights.
        covariance: whether to sum products, of all weights or of those named.
        skip: how many tokens of every sequence not to count. Only if all of a sequence runs at once.
    """

    def __init__(self, model: CausalModel, covariance: bool | Sequence[str], skip: int = 0) -> None:
        self._device = model.device
        self._covariance, self._skip = covariance, skip
        self._names = {s.address: name for name, p in model.named_parameters() for s in p.shards}
        self._experts = {name: p.shape[0] for name, p in model.named_parameters()}
        self._squares: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._shares: dict[str, str] = {}
        # With mean 0 and deviation 1 for each row, a norm weight's gradient of (x, x) is the sum of squares.
        self._plain: dict[int, Tensor] = {}

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], groups: Groups | None = None, by_token: bool = False
    ) -> None:
        names = list(dict.fromkeys(self._names[w.address] for w in weights if w.address in self._names))
        if not names:
            return
        if groups is not None and any(self._experts[name] != groups.experts for name in names):
            return  # a part of a stack that several buffers hold: nothing is known of the whole
        key = names[0]
        for name in names:
            self._shares.setdefault(name, key)
        if groups is not None:
            self._of_experts(key, x, groups, by_token)
            return
        if x.shape[0] > self._skip:
            x = x.rows(self._skip, x.shape[0])
        rows, inputs = x.shape
        if rows not in self._plain:
            unit = np.tile(np.array([0, 1], np.float32), (rows, 1))
            self._plain[rows] = Tensor.from_numpy(self._device, unit)
        _, squares = column_sums(x, x, self._plain[rows], bias=False, weight=True)
        assert squares is not None
        if key in self._squares:
            accumulate(self._squares[key], squares)
        else:
            self._squares[key] = squares
        if self._covariance is True or (self._covariance and key in self._covariance):
            if key not in self._products:
                self._products[key] = fill(Tensor.empty(self._device, (inputs, inputs)), 0.0)
            weight_gradient(x, x, out=self._products[key])

    def _of_experts(self, key: str, x: Tensor, groups: Groups, by_token: bool) -> None:
        """Sums of squares by expert, [experts, inputs]."""
        if key not in self._squares:
            self._squares[key] = fill(Tensor.empty(self._device, (groups.experts, x.shape[1])), 0.0)
        expert_squares(self._squares[key], x, groups, by_token=by_token)

    def statistics(self, facts: dict[str, str], tokens: int) -> Statistics:
        """The means over ``tokens``.

        Raises:
            FormatError: something that was summed up is not finite.
        """
        moments, covariances = (
            self._means(sums, tokens, facts["model"]) for sums in (self._squares, self._products)
        )
        return Statistics(
            **facts,
            tokens=tokens,
            shares=self._shares,
            moments=moments,
            covariances=covariances,
            sensitivities={},
        )

    def covariances(self, tokens: int) -> tuple[dict[str, str], dict[str, npt.NDArray[np.float32]]]:
        """For each weight the name under which its covariance is kept, and the covariances over ``tokens``."""
        return self._shares, self._means(self._products, tokens, "the model")

    @staticmethod
    def _means(sums: dict[str, Tensor], tokens: int, model: str) -> dict[str, npt.NDArray[np.float32]]:
        table = {}
        for name in list(sums):
            values = sums.pop(name).numpy() / np.float32(tokens)
            if not np.isfinite(values).all():
                raise FormatError(f"{model}: the inputs of {name} are not finite, or too large to square")
            table[name] = _of_all_experts(values.astype(np.float32))
        return table


def _of_all_experts(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Mean squares [experts, inputs] where those of experts that no token went to are the mean of the others'; others as
    they are.
    """
    if values.ndim == 2 and not (seen := values.any(axis=1)).all() and seen.any():
        values[~seen] = values[seen].mean(axis=0)
    return values
