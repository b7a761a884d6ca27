"""What quantising costs, tensor by tensor: measured by running a model with one of them quantised at a time.

A tensor's cost is the divergence (nats a token) that it alone causes. Measuring each by a run through the whole model would
take as many runs as there are tensors. But what a tensor in a layer does first is to move the residual stream behind that
layer, and the divergence at the end is, to a good approximation, the mean squared relative move times a factor that changes
slowly with depth. So each tensor costs a run of its own layer, and the factor is measured at a few layers, with all of
the layer's tensors quantised. For SmolLM2 the costs rank as those of full runs do (see docs/quantization.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.formats.oam import OamSource
from oazoo.models import CausalModel
from oazoo.models.cache import Cache
from oazoo.nn.module import Parameter
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.scoring import divergence_rows, score_rows
from oazoo.translators.convert import Progress
from oazoo.zoo.calibrate import OWN_TEXT, own_text
from oazoo.zoo.files import open_file
from oazoo.zoo.load import load, place
from oazoo.zoo.quantize_plan import BLOCKS
from oazoo.zoo.statistics import Sensitivity

#: Tokens of a sequence, and sequences, taken evenly from the text. The second half of each is held against the original.
CONTEXT, SEQUENCES = 128, 2
#: Layers between the first and the last at which the factor from moves to divergence is measured.
_DEPTHS = 5

Ids = npt.NDArray[np.int32]

#: Cost of a weight, relative to one of a down projection, for models that cannot run: what was measured on SmolLM2-135M,
#: rounded. Patterns of our names, of Hugging Face's and of GGUF's; the first that matches counts.
_USUAL: tuple[tuple[float, tuple[str, ...]], ...] = (
    (12.0, ("*.attn.v.weight", "*.v_proj.weight", "*.attn_v.weight")),
    (1.7, ("embed.weight", "head.weight", "*embed_tokens.weight", "lm_head.weight", "token_embd.weight")),
    (1.5, ("*.attn.[ko].weight", "*.[ko]_proj.weight", "*.attn_k.weight", "*.attn_output.weight")),
    (0.4, ("*.attn.q.weight", "*.q_proj.weight", "*.attn_q.weight")),
    (0.7, ("*.gate.weight", "*.up.weight", "*.gate_proj.weight", "*.up_proj.weight", "*.ffn_[gu]*.weight")),
)
_FIRST_LAYER = 2.0


def usual(source: OamSource, names: Sequence[str]) -> Sensitivity:
    """A guess from names and sizes, for models that cannot run."""

    def cost(name: str) -> float:
        weight = next((w for w, patterns in _USUAL if any(fnmatchcase(name, p) for p in patterns)), 1.0)
        return source[name].info.numel * weight * (_FIRST_LAYER if ".0." in name else 1.0)

    found = {name: cost(name) for name in names}
    total = sum(found.values()) or 1.0
    return Sensitivity({name: value / total for name, value in found.items()})


def measure(
    original: Path | str,
    quantized: Path | str,
    text: str | None = None,
    *,
    name: str = "",
    device: Device | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what each tensor costs that is quantised in one file and not, or otherwise, in the other.

    Args:
        original: an `.oam` model that can run.
        quantized: the same model quantised, by whatever method.
        text: at least 32 tokens of it; the general text of this package if None.
        name: what to call the text.
        device: where to run; the default device if None.
        progress: called with the runs of a layer that are done.

    Raises:
        UsageError: too little text.
        OazooError: the model cannot be loaded, or has no tokenizer.
    """
    given = own_text() if text is None else text
    with ExitStack() as stack:
        after = stack.enter_context(open_file(quantized))
        before = stack.enter_context(open_file(original))
        loaded = load(original, device=device, progress=progress)
        model = loaded.model
        if not isinstance(model, CausalModel):
            raise UsageError(f"{loaded.name} is not a model on the device: only those can be measured")
        stack.callback(model.close)
        changed = [
            n
            for n, t in after.items()
            if t.info.encoding in BLOCKS and before[n].info.encoding != t.info.encoding
        ]
        ids = np.asarray(loaded.tokenizer.encode(given, allow_special=False), np.int32)
        sequences = spread(ids, min(CONTEXT, model.max_positions), SEQUENCES)

        def packed(tensor: str) -> tuple[Tensor, ...]:
            return tuple(place(after[tensor], model.device))

        losses = _Measurement(model, sequences, packed, progress).run(changed)
    return Sensitivity(
        losses,
        name or (OWN_TEXT if text is None else "a text of the user's"),
        hashlib.sha256(given.encode()).hexdigest(),
        sum(s.size for s in sequences),
    )


def spread(ids: Ids, context: int, count: int) -> list[Ids]:
    """Up to ``count`` sequences of ``context`` tokens at even distances; a shorter text is one sequence.

    Raises:
        UsageError: fewer than 32 tokens, or a model with fewer positions.
    """
    if min(ids.size, context) < 32:
        raise UsageError(
            f"{min(ids.size, context)} tokens are too few to measure anything: at least 32 are needed"
        )
    count = max(1, min(count, ids.size // context))
    length = min(context, ids.size)
    starts = [(2 * i + 1) * (ids.size - length) // (2 * count) for i in range(count)]
    return [ids[start : start + length] for start in starts]


class _Swapped:
    """A parameter that has other values inside a ``with``."""

    def __init__(self, parameters: Mapping[Parameter, tuple[Tensor, ...]]) -> None:
        self._new = parameters
        self._old = {parameter: parameter.shards for parameter in parameters}

    def __enter__(self) -> None:
        for parameter, shards in self._new.items():
            parameter.shards = shards

    def __exit__(self, *_: object) -> None:
        for parameter, shards in self._old.items():
            parameter.shards = shards


class _Measurement:
    def __init__(
        self,
        model: CausalModel,
        sequences: Sequence[Ids],
        packed: Callable[[str], tuple[Tensor, ...]],
        progress: Progress | None,
    ) -> None:
        self._model, self._sequences, self._packed, self._progress = model, sequences, packed, progress
        self._layers = list(model.layers)
        self._parameters = dict(model.named_parameters())
        self._done = self._total = 0
        #: For each sequence the residual stream before every layer and after the last, and the original's scored logits.
        self._streams: list[list[Tensor]] = []
        self._references: list[tuple[Tensor, Tensor, Tensor]] = []
        # Positions are written before they are read, so a cache serves any number of runs.
        self._caches = [model.new_cache(ids.size) for ids in sequences]

    def run(self, names: Sequence[str]) -> dict[str, float]:
        """The divergence that each of ``names`` causes."""
        inside: dict[int, list[str]] = {}
        for name in names:
            if name in self._parameters:
                inside.setdefault(self._layer_of(name), []).append(name)
        outside = inside.pop(-1, [])
        depths = sorted(inside)
        chosen = _measured(depths)
        count = len(self._layers)
        whole = sum(count - layer for layer in chosen) + count * (1 + len(outside))
        self._total = len(self._sequences) * (sum(map(len, inside.values())) + whole)
        for ids, cache in zip(self._sequences, self._caches, strict=True):
            streams = self._through(cache, 0, self._embedded(ids, cache))
            logits, targets = self._logits(streams[-1], ids)
            self._streams.append(streams)
            self._references.append((logits, score_rows(logits, targets), targets))
        losses = {name: 0.0 for name in names if name not in self._parameters}
        for name in outside:
            with _Swapped({self._parameters[name]: self._packed(name)}):
                losses[name] = self._divergence(0, embedding=True)
        moves: dict[int, dict[str, float]] = {}
        factors: dict[int, float] = {}
        for layer, some in sorted(inside.items()):
            tensors = {name: self._packed(name) for name in some}
            moves[layer] = {}
            for name in some:
                with _Swapped({self._parameters[name]: tensors[name]}):
                    moves[layer][name] = self._move(layer)
            total = sum(moves[layer].values())
            if layer in chosen:
                with _Swapped({self._parameters[name]: tensors[name] for name in some}):
                    found = self._divergence(layer)
                if total > 0 and found > 0:
                    factors[layer] = found / total
        for layer, some_moves in moves.items():
            factor = _between(factors, layer)
            losses |= {name: move * factor for name, move in some_moves.items()}
        return losses

    def _layer_of(self, name: str) -> int:
        """The number of the layer that a weight belongs to, -1 for those outside."""
        parts = name.split(".")
        return int(parts[1]) if parts[0] == "layers" and parts[1].isdecimal() else -1

    def _embedded(self, ids: Ids, cache: Cache) -> Tensor:
        cache.begin_at(0)
        return self._model.embed_tokens(Tensor.from_numpy(self._model.device, ids), cache)

    def _through(self, cache: Cache, first: int, x: Tensor) -> list[Tensor]:
        """The residual stream ``x`` before layer ``first``, and after it and each that follows."""
        streams = [x]
        cache.begin_at(0)
        for layer in self._layers[first:]:
            streams.append(layer(streams[-1], cache))
        self._step(len(streams) - 1)
        return streams

    def _step(self, layers: int) -> None:
        self._model.device.synchronize()
        self._done += layers
        if self._progress is not None:
            self._progress("measuring sensitivity", self._done, self._total, "layer runs")

    def _logits(self, stream: Tensor, ids: Ids) -> tuple[Tensor, Tensor]:
        """Logits in the second half of a sequence, and the tokens that follow."""
        half = ids.size // 2
        targets = Tensor.from_numpy(self._model.device, ids[half + 1 :])
        return self._model.head_logits(stream.rows(half, ids.size - 1)), targets

    def _divergence(self, first: int, embedding: bool = False) -> float:
        """Mean divergence of the model as it is now; layers before ``first`` are as they were."""
        parts = []
        for ids, cache, streams, (reference, score, targets) in zip(
            self._sequences, self._caches, self._streams, self._references, strict=True
        ):
            x = self._embedded(ids, cache) if embedding else streams[first]
            logits, _ = self._logits(self._through(cache, first, x)[-1], ids)
            parts.append(divergence_rows(reference, logits, score, score_rows(logits, targets)).numpy())
        return _finite(np.concatenate(parts))

    def _move(self, layer: int) -> float:
        """Mean squared move of the residual stream behind a layer, as it is now, relative to its size."""
        parts = []
        for cache, streams in zip(self._caches, self._streams, strict=True):
            rows = slice(streams[layer].shape[0] // 2, -1)  # those whose predictions are compared
            cache.begin_at(0)
            now = self._layers[layer](streams[layer], cache).numpy()[rows].astype(np.float64)
            was = streams[layer + 1].numpy()[rows].astype(np.float64)
            size = np.maximum((was * was).sum(1), np.finfo(np.float64).tiny)
            parts.append(((now - was) ** 2).sum(1) / size)
            self._step(1)
        return _finite(np.concatenate(parts))


def _finite(values: npt.NDArray[Any]) -> float:
    """Their mean; something large where a tensor makes the model overflow."""
    mean = float(values.astype(np.float64).mean())
    return mean if np.isfinite(mean) else float(np.finfo(np.float32).max)


def _measured(layers: Sequence[int]) -> set[int]:
    """Layers to measure as wholes: the first and the last, which are unlike the others, and some evenly between."""
    if len(layers) < 3:
        return set(layers)
    between = np.linspace(1, len(layers) - 2, min(_DEPTHS, len(layers) - 2))
    return {layers[0], layers[-1], *(layers[round(i)] for i in between)}


def _between(factors: Mapping[int, float], layer: int) -> float:
    """The factor of a layer from those of its measured neighbours, linear in its logarithm; 1 if none was measured."""
    if not factors:
        return 1.0
    known = sorted(factors)
    return float(np.exp(np.interp(layer, known, np.log([factors[k] for k in known]))))
