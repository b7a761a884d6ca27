"""Tuning a packed model on what the original says: codes stay, the scales of blocks and the vectors learn.

Packing makes every weight come close to the original's by itself. What is lost by all together shows in the predictions
only, and there some of it can be made good: the packed model reads a text, and the float32 scales of its blocks, the weights
of norms and the biases learn, by Adam, to give the original's distribution of the next token at every place (distillation,
arXiv:1503.02531, of step sizes only, as in EfficientQAT, arXiv:2407.11062). There are 32 times fewer scales than weights and
each token tells a whole distribution, so a short text teaches them what holds for others. Neither size nor encodings change.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_rewrite import Change, write_with_weights
from oazoo.models import CausalModel
from oazoo.models.session import check_ids
from oazoo.nn.layers import Embedding, Linear
from oazoo.nn.module import Parameter
from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor, get_device
from oazoo.runtime.ops.loss import divergence
from oazoo.runtime.ops.scoring import divergence_rows, score_rows
from oazoo.runtime.tape import loss_by_rows
from oazoo.runtime.tensor import BLOCK_CODE_BYTES
from oazoo.training.optimizers import Adam
from oazoo.training.schedules import WarmupCosine
from oazoo.training.step import TrainingStep
from oazoo.zoo.calibrate import OWN_TEXT, own_text
from oazoo.zoo.files import open_file
from oazoo.zoo.load import load
from oazoo.zoo.progress import Progress

Ids = npt.NDArray[np.int32]

#: Passes over the text; and what a step changes scales and vectors by, as a share of a tensor's root mean square, where the
#: divergence is 1 nat: it goes with the root of the divergence, as the way does that there is to go.
PASSES, RATE = 1, 2e-3
#: How much faster vectors move: every row tells of each of their elements.
_VECTORS = 1.5
#: Tokens of a sequence; a step reads one.
CONTEXT = 512
#: Steps until the rate is reached; for as many in a hundred, at most.
_WARMUP, _WARMUP_SHARE = 5, 0.2
#: One sequence of so many is not learned from: what the others taught is measured on it.
_HELD_OUT = 12
_BETAS = (0.9, 0.99)
#: Logits of both models that are held at a time.
_LOGITS = 1 << 24
#: Whose scales learn. Those of 8 bits stay: what a few steps leave in noise would be more than they lose.
_TUNED = "q4"


@dataclass(frozen=True)
class TuneReport:
    """What tuning came to.

    Attributes:
        passes: over the text; 0 if what was learned made predictions worse on the sequences that were held out, and the
            packed model was left as it was.
        steps: of the optimizer.
        tokens: of the text that it learned from, and ``held_out`` those that it was measured on.
        before, after: mean divergence from the original on these, nats a token.
        learned: scales and elements of vectors.
    """

    passes: int
    steps: int
    tokens: int
    held_out: int
    before: float
    after: float
    learned: int
    text: str
    text_sha256: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def note(self) -> dict[str, Any]:
        """What the file says about it."""
        return {name: value for name, value in self.to_json().items() if name != "seconds"}


def tune(
    packed: str | Path,
    original: str | Path,
    output: str | Path,
    *,
    text: str | None = None,
    ids: npt.ArrayLike | None = None,
    name: str = "",
    passes: int = PASSES,
    rate: float = RATE,
    overwrite: bool = False,
    device: Device | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> TuneReport:
    """Let a packed model's scales and vectors learn to predict as the original does.

    Args:
        packed: an `.oam` model with Q4 weights.
        original: the model that it was made from, an `.oam` as well.
        output: the file to write. Vectors that learned are f32 in it; all else is as in ``packed``.
        text: what both read, at least 64 tokens; the general text of this package if None.
        ids: its tokens, int [tokens], in place of the text; for a model without a tokenizer.
        name: what to call the text.
        passes: over the text.
        rate: see :data:`RATE`.
        overwrite: replace an existing output.
        device: where to run; the default device if None.
        progress: called with the tokens that are done.
        notify: called with a line for each thing worth knowing.

    Raises:
        UsageError: the files are of different models, nothing is packed, or the text is too short.
        FormatError: the models' predictions are not finite.
        OazooError: a model cannot be loaded, has no tokenizer, or does not fit the device.
    """
    check_passes(passes)
    if not 0 < rate < np.inf:
        raise UsageError(f"a rate of {rate:g}: it must be positive")
    begun = time.perf_counter()
    check_not_input(output, [Path(packed), Path(original)])
    check_output(output, overwrite=overwrite)
    if text is not None and ids is not None:
        raise UsageError("give a text or its tokens, not both")
    given = (own_text() if text is None else text) if ids is None else np.asarray(ids)
    name = name or ("a text of the user's" if text is not None or ids is not None else OWN_TEXT)
    device = device or get_device()
    with ExitStack() as stack:
        after, before = (stack.enter_context(open_file(path)) for path in (packed, original))
        for source in (after, before):
            if not isinstance(source, OamSource):
                raise FormatError(f"{source.path} is a {source.format} file; tuning takes .oam files")
        assert isinstance(after, OamSource) and isinstance(before, OamSource)
        _check_same(after, before)
        teacher = _Teacher(before.path, given, device, progress)
        stack.callback(teacher.close)
        student = load(after.path, device=device, progress=progress).model
        assert isinstance(student, CausalModel)
        stack.callback(student.close)
        tuning = _Tuning(student, teacher, passes, rate, progress)
        report = tuning.run(name, given if isinstance(given, str) else "")
        if not report.passes and notify is not None:
            notify(
                f"tuning made it worse on what it had not read (divergence {report.before:.4g}, then {report.after:.4g} "
                "nats a token); scales stay as they were"
            )
        _write(after, output, tuning.values() if report.passes else {}, report, overwrite)
    return replace(report, seconds=time.perf_counter() - begun)


def check_passes(passes: int) -> None:
    """Raise a UsageError for a number of passes that cannot be."""
    if not 1 <= passes <= 1000:
        raise UsageError(f"{passes} passes over the text; 1 to 1000 are possible")


def _check_same(packed: OamSource, original: OamSource) -> None:
    """Raise a UsageError unless both are the same model, and something is packed in one that is not in the other."""
    shapes = [{n: t.info.shape for n, t in source.items()} for source in (packed, original)]
    same = all(packed.metadata.get(key) == original.metadata.get(key) for key in ("family", "model"))
    if not same or shapes[0] != shapes[1]:
        raise UsageError(f"{packed.path} was not made from {original.path}: they are different models")
    if not any(t.info.encoding == _TUNED for t in packed.values()):
        raise UsageError(
            f"{packed.path}: nothing in it is {_TUNED}, so there are no scales to tune (q8 loses next to nothing)"
        )


class _Teacher:
    """The original: it has read the text once, and gives logits from what its last layer put out then."""

    def __init__(
        self, path: Path, text: str | npt.NDArray[Any], device: Device, progress: Progress | None
    ) -> None:
        loaded = load(path, device=device, progress=progress)
        model = loaded.model
        if not isinstance(model, CausalModel):
            raise UsageError(f"{loaded.name} is not a model on the device: only those can be tuned")
        self._model = model
        found = loaded.tokenizer.encode(text, allow_special=False) if isinstance(text, str) else text
        ids = np.asarray(found, np.int32)
        check_ids(ids, model.used_vocab_size)
        self.sequences = _sequences(ids, min(CONTEXT, model.max_positions))
        self.hidden: list[npt.NDArray[np.float32]] = []
        total = sum(s.size for s in self.sequences)
        for index, sequence in enumerate(self.sequences):
            out = model.sequence_hidden(Tensor.from_numpy(device, sequence[None])).numpy()
            if not np.isfinite(out).all():
                raise FormatError(f"{path}: what its last layer puts out is not finite")
            self.hidden.append(out)
            if progress is not None:
                progress("reading", (index + 1) * sequence.size, total, "tokens")
        # Only the head is needed from here on.
        for parameter in model.layers.parameters():
            parameter.shards = ()

    def logits(self, hidden: Tensor) -> Tensor:
        """f32 [rows, hidden] to [rows, vocabulary]."""
        return self._model.head_logits(hidden)

    def close(self) -> None:
        """Give its memory back."""
        self._model.close()


def _sequences(ids: Ids, context: int) -> list[Ids]:
    """Sequences of one length; the last begins within the one before, so that it is whole."""
    if ids.size < 64:
        raise UsageError(f"the text has {ids.size} tokens; at least 64 are needed to tune anything")
    length = min(context, ids.size // 2)
    starts = [*range(0, ids.size - length, length), ids.size - length]
    return [ids[start : start + length] for start in starts]


class _Tuning:
    """The optimization of one packed model."""

    def __init__(
        self,
        model: CausalModel,
        teacher: _Teacher,
        passes: int,
        rate: float,
        progress: Progress | None,
    ) -> None:
        self._model, self._teacher, self._passes, self._progress = model, teacher, passes, progress
        self._rate, self._device = rate, model.device
        #: What learns, by the names of parameters.
        self._learning = dict(_learning(model))
        #: Root mean squares of what learns, a group of the optimizer each.
        self._sizes: list[float] = []
        groups: list[Mapping[str, Any]] = []
        vectors = {name for name, parameter in model.named_parameters() if len(parameter.shape) == 1}
        for name, tensor in self._learning.items():
            size = float(np.sqrt(np.mean(tensor.numpy().astype(np.float64) ** 2)))
            if size > 0 and np.isfinite(size):
                groups.append({"params": [(name, tensor)], "lr": 0.0})
                self._sizes.append(size * (_VECTORS if name in vectors else 1.0))
            else:
                tensor.requires_grad = False
        if not groups:
            raise UsageError("none of the model's packed weights can be tuned")
        self._optimizer = Adam(groups, betas=_BETAS, eps=1e-12)
        count = len(teacher.sequences)
        self._held = [i for i in range(count) if i % _HELD_OUT == min(_HELD_OUT, count) // 2]
        self._read = [i for i in range(count) if i not in self._held]

    def run(self, name: str, text: str) -> TuneReport:
        """Go through the text as often as was asked for."""
        length = self._teacher.sequences[0].size
        step = TrainingStep(self._loss, self._optimizer)
        shapes = (((1, length), "i32"), (self._teacher.hidden[0].shape, "f32"))
        need, free = step.measure(*shapes), self._device.allocator.available_bytes
        if need > free:
            raise OutOfDeviceMemoryError(
                f"tuning takes {need:,} bytes of device memory beside the models, and {self._device.info.name} has about "
                f"{free:,} free; use another device (OAZOO_DEVICE), or go without"
            )
        before = self._held_out()
        if not np.isfinite(before).all():
            raise FormatError("the packed model's predictions are not finite: it cannot be tuned")
        steps = self._passes * len(self._read)
        peak = self._rate * float(np.sqrt(max(before.mean(), 0.0)))
        schedule = WarmupCosine(peak, min(_WARMUP, int(_WARMUP_SHARE * steps)), steps)
        for done, index in enumerate(self._order()):
            rate = schedule(done)
            for group, size in enumerate(self._sizes):
                self._optimizer.set_lr(rate * size, group)
            step(self._teacher.sequences[index][None], self._teacher.hidden[index])
            loss = step.losses()
            if not np.isfinite(loss).all():
                raise FormatError("the packed model's predictions are not finite: it cannot be tuned")
            if self._progress is not None:
                label = f"tuning, divergence {loss[-1]:.4f}"
                self._progress(label, (done + 1) * length, steps * length, "tokens")
        after = self._held_out()
        # Errors that were fitted to this very text are fewer here than elsewhere, so that less is won here: what counts is
        # that nothing was lost beyond what so few tokens can tell, one standard error of the difference.
        change = after - before
        kept_it = bool(change.mean() <= change.std() / np.sqrt(change.size))
        return TuneReport(
            passes=self._passes if kept_it else 0,
            steps=steps,
            tokens=length * len(self._read),
            held_out=length * len(self._held),
            before=float(before.mean()),
            after=float(after.mean()),
            learned=sum(tensor.numel for tensor in self._learning.values()),
            text=name,
            text_sha256=hashlib.sha256(text.encode()).hexdigest() if text else "",
            seconds=0.0,
        )

    def values(self) -> dict[str, Parameter]:
        """The parameters that learned, by name."""
        return {n: p for n, p in self._model.named_parameters() if n in self._learning}

    def _order(self) -> Iterator[int]:
        """Which sequence each step reads: all of them in every pass, in an order of its own."""
        rng = np.random.default_rng(0)
        for _ in range(self._passes):
            yield from (self._read[i] for i in rng.permutation(len(self._read)))

    def _loss(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Mean divergence from the teacher, f32 [1]. ``hidden``: what its last layer put out, f32 [tokens, hidden]."""
        own = self._model.sequence_hidden(ids)
        tokens = own.shape[0]

        def some(part: Tensor, start: int, stop: int) -> Tensor:
            reference = self._teacher.logits(hidden.rows(start, stop))
            return divergence(reference, self._model.head_logits(part), count=tokens)

        return loss_by_rows(some, own, self._stretch(tokens))

    def _held_out(self) -> npt.NDArray[np.float64]:
        """The divergence at each place of what is not learned from, nats."""
        found = []
        for index in self._held:
            own = self._model.sequence_hidden(
                Tensor.from_numpy(self._device, self._teacher.sequences[index][None])
            )
            hidden = Tensor.from_numpy(self._device, self._teacher.hidden[index])
            size = self._stretch(own.shape[0])
            for start in range(0, own.shape[0], size):
                stop = min(start + size, own.shape[0])
                p = self._teacher.logits(hidden.rows(start, stop))
                q = self._model.head_logits(own.rows(start, stop))
                zeros = Tensor.from_numpy(self._device, np.zeros(stop - start, np.int32))
                scores = [score_rows(logits, zeros) for logits in (p, q)]
                found.append(divergence_rows(p, q, *scores).numpy().astype(np.float64))
        return np.concatenate(found)

    def _stretch(self, tokens: int) -> int:
        """How many rows of logits are made at a time."""
        return max(4, min(tokens, _LOGITS // self._model.vocab_size))


def _learning(model: CausalModel) -> Iterator[tuple[str, Tensor]]:
    """What learns: scales of Q4 linear layers and tables that lie in one buffer, and vectors."""
    packed: set[int] = {
        id(module.weight) for module in model.modules() if isinstance(module, (Linear, Embedding))
    }
    for name, parameter in model.named_parameters():
        if len(parameter.shards) != 1:
            continue
        tensor = parameter.tensor
        if tensor.dtype == _TUNED and id(parameter) in packed:
            yield name, tensor.learn_scales()
        elif len(parameter.shape) == 1 and tensor.dtype == "f32":
            tensor.requires_grad = True
            yield name, tensor


def _write(
    source: OamSource,
    output: str | Path,
    learned: Mapping[str, Parameter],
    report: TuneReport,
    overwrite: bool,
) -> None:
    """The packed file with other scales and vectors."""
    content: dict[str, Any] = dict(source.metadata)
    note = content.get("quantization")
    content["quantization"] = {**(note if isinstance(note, Mapping) else {}), "tuned": report.note()}
    payload = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    changes = {name: _change(source[name].info.encoding, parameter) for name, parameter in learned.items()}
    write_with_weights(source, output, payload, changes, overwrite=overwrite)


def _change(encoding: str, parameter: Parameter) -> Change:
    """A parameter as it is stored now: packed as before, or a vector of f32."""
    if encoding in BLOCK_CODE_BYTES:
        return encoding, lambda: [parameter.tensor.bytes()]
    return "f32", lambda: [parameter.values()]
