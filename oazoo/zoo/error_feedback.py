"""Packing a model to Q4 with error feedback, layer by layer: every layer is fed with what those before it became.

The kernel is :class:`oazoo.runtime.ops.feedback.Feedback`. What it needs, how a weight's inputs vary together, depends on
what the weights before were packed to: the errors that they leave are inputs too, and in directions in which the dense
model's inputs hardly vary. Covariances of the dense model let errors pile up in just these. So the model runs over the text
a layer at a time, with everything before packed already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats.source import SourceTensor
from oazoo.models import CausalModel
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.feedback import Feedback
from oazoo.runtime.ops.linear import observing
from oazoo.runtime.tensor import BLOCK
from oazoo.zoo.calibrate import Gathered, Ids, calibrate, sequences_of
from oazoo.zoo.quantize_plan import TensorQuantization
from oazoo.zoo.statistics import Statistics

if TYPE_CHECKING:
    from oazoo.generation.text_model import TextModel
    from oazoo.translators.convert import Progress

Floats = npt.NDArray[np.float32]

#: How far covariances are drawn towards their diagonals at least, for texts differ; and how many tokens of a text tell as
#: much as one that has nothing to do with its neighbours. See :func:`drawn`.
SHRINK, DEPENDENT = 0.1, 6
#: Of the mean variance, what every input has in noise besides, so that none is without any.
DAMPING = 1e-5
#: The token embedding, and the head where it is not the same table.
EMBEDDING, HEAD = "embed.weight", "head.weight"
#: Values that are read at a time.
_VALUES = 4 << 20


class ErrorFeedback:
    """Packs the weights of a model in the order in which it uses them.

    Args:
        statistics: of the dense model; their covariances are used where the model cannot be run along.
        model: the model, whose weights are replaced as they are packed; None: the statistics must have all covariances.
        text: what to run it on; the general text of this package if None.
        progress: called with the tokens that are done.
    """

    def __init__(
        self,
        device: Device,
        statistics: Statistics,
        model: TextModel | None = None,
        text: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._device, self.statistics = device, statistics
        self._layers: _Layers | None = None
        self._factors: tuple[str, Feedback] | None = None
        self._tokens = statistics.tokens
        if model is not None:
            assert isinstance(model.model, CausalModel)
            self._layers = _Layers(model.model, sequences_of(model, text, None), progress)

    def order(self, steps: Sequence[TensorQuantization]) -> list[TensorQuantization]:
        """The tensors as they must be packed: what stands before the layers, the layers in turn, what stands behind."""
        return sorted(steps, key=lambda step: _place(step.name))

    def takes(self, step: TensorQuantization) -> bool:
        """Whether a tensor is packed with error feedback: its inputs were seen, and its rows are whole blocks."""
        whole = (
            step.target == "q4" and not step.reason and len(step.shape) == 2 and step.shape[1] % BLOCK == 0
        )
        moment = self.statistics.moment(step.name, step.shape[1]) if whole else None
        return moment is not None and bool(moment.mean() > 0)

    def pack(self, tensor: SourceTensor, allow_nonfinite: bool) -> list[npt.NDArray[Any]]:
        """The codes and scales of a tensor that :meth:`takes` takes.

        Raises:
            FormatError: values that are not finite.
        """
        info = tensor.info
        outputs, inputs = info.shape
        feedback = self._feedback(info.name, inputs)
        codes: list[npt.NDArray[Any]] = []
        scales: list[npt.NDArray[Any]] = []
        rows = max(1, min(outputs, _VALUES // inputs))
        for chunk in tensor.chunks(rows * inputs):
            values = chunk.astype(np.float32)
            finite = np.isfinite(values)
            if not finite.all():
                if not allow_nonfinite:
                    raise FormatError(
                        f"tensor {info.name!r} holds {int((~finite).sum())} values that are not finite; they would be "
                        "packed as 0. Mend the source, or allow it (--allow-nonfinite)"
                    )
                values = np.where(finite, values, np.float32(0))
            some_codes, some_scales = feedback.pack(values.reshape(-1, inputs))
            codes.append(some_codes)
            scales.append(some_scales)
        return [*codes, *scales]

    def packed(self, step: TensorQuantization, pieces: Iterable[npt.NDArray[Any]]) -> None:
        """Take note of what a tensor became, so that what follows is fed accordingly."""
        if self._layers is not None:
            raw = b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)
            self._layers.replace(step.name, step.shape, step.target, raw)

    def close(self) -> None:
        """Let the model and what was measured go."""
        if self._layers is not None:
            self._layers.model.close()
        self._layers = self._factors = None

    def _feedback(self, name: str, inputs: int) -> Feedback:
        """The factors for a weight; those that are fed the same share them."""
        shared = self.statistics.shares[name]
        if self._factors is not None and self._factors[0] == shared:
            return self._factors[1]
        covariance = self._layers.covariance(name) if self._layers is not None else None
        if covariance is None:
            covariance = self.statistics.covariance(name, inputs)
        if covariance is None or not covariance.diagonal().mean() > 0:
            # An expert that no token went to after all: then columns pass nothing on, and are weighted.
            moment = self.statistics.moment(name, inputs)
            assert moment is not None
            covariance = np.diag(moment)
        covariance = drawn(covariance, self._tokens)
        if name == EMBEDDING:
            # Rows are looked up as well as multiplied with, and then every column counts.
            covariance = covariance / covariance.diagonal().mean() + np.eye(inputs, dtype=np.float32)
        # Only the last factors are kept: those of the weights that share them come one after another.
        self._factors = None
        self._factors = (shared, Feedback(self._device, covariance, DAMPING))
        return self._factors[1]


def drawn(covariance: Floats, tokens: int) -> Floats:
    """A covariance without what is probably chance: drawn towards its diagonal, C ← (1 − λ) C + λ diag C.

    Between inputs that have nothing to do with each other, ``tokens`` of a text still show a correlation r, with a mean
    square of about 1 / n, n being what the text is worth in independent tokens. What mean square all have beyond that is
    worth keeping, and λ is the rest (Schäfer and Strimmer, Statistical Applications in Genetics and Molecular Biology 4,
    2005): near 0 where inputs vary together strongly or the text is long, near 1 where nothing but chance is seen.

    Args:
        covariance: f32 [inputs, inputs].
        tokens: over how many it was taken.
    """
    variance = covariance.diagonal().astype(np.float64)
    inputs = variance.size
    deviation = np.sqrt(np.maximum(variance, np.finfo(np.float64).tiny))
    seen = variance > 0
    correlation = (covariance / deviation[:, None] / deviation).astype(np.float64)
    square = float((correlation[np.ix_(seen, seen)] ** 2).sum()) - int(seen.sum())
    chance = DEPENDENT / max(tokens, 1) * max(inputs * (inputs - 1), 1)
    share = 1.0 if square <= chance else SHRINK + (1 - SHRINK) * chance / square
    result = (1 - share) * covariance
    result[np.diag_indices_from(result)] = covariance.diagonal()
    return result.astype(np.float32)


def dense_statistics(model: TextModel, text: str | None, progress: Progress | None) -> Statistics:
    """What error feedback has to know of the dense model: mean squares, and the covariance of a tied head's inputs."""
    return calibrate(model, text, covariance=(EMBEDDING,), progress=progress)


def _place(name: str) -> tuple[int, int]:
    if fnmatchcase(name, "layers.*"):
        number = name.split(".")[1]
        return 1, int(number) if number.isdecimal() else 0
    return (2, 0) if name == HEAD or name.startswith("norm") else (0, 0)


class _Layers:
    """The residual stream of every sequence before some layer, and the covariances of that layer's inputs."""

    def __init__(self, model: CausalModel, sequences: Sequence[Ids], progress: Progress | None) -> None:
        self.model = model
        self._sequences, self._progress = sequences, progress
        self._layers = list(model.layers)
        self._parameters = dict(model.named_parameters())
        self._hidden: list[Tensor] = []
        #: The layer that is being packed; -1 while it is the embedding.
        self._layer = -1
        self._shares: dict[str, str] = {}
        self._covariances: dict[str, Floats] = {}

    def covariance(self, name: str) -> Floats | None:
        """Of the inputs of a weight, given all that was packed before; None for what comes before the layers."""
        group, layer = _place(name)
        if group == 0:
            return None
        target = layer if group == 1 else len(self._layers)
        while self._layer < target:
            self._advance()
        if not self._covariances:
            self._measure()
        return self._covariances.get(self._shares.get(name, ""))

    def replace(self, name: str, shape: tuple[int, ...], encoding: str, raw: bytes) -> None:
        """Run with these values from now on. A weight split over several buffers stays as it is."""
        parameter = self._parameters.get(name)
        if parameter is not None and len(parameter.shards) == 1 and parameter.shards[0].shape == shape:
            parameter.shards = (Tensor.from_bytes(self.model.device, shape, encoding, raw),)

    def _advance(self) -> None:
        """Through the layer that is packed now."""
        if self._layer < 0:
            self._hidden = [self._embedded(ids) for ids in self._sequences]
        else:
            layer = self._layers[self._layer]
            for index, x in enumerate(self._hidden):
                self._hidden[index] = layer(x, self.model.new_cache(x.shape[0]))
                # Also keeps the queue short.
                self.model.device.synchronize()
        self._layer += 1
        self._shares, self._covariances = {}, {}

    def _embedded(self, ids: Ids) -> Tensor:
        return self.model.embed_tokens(
            Tensor.from_numpy(self.model.device, ids), self.model.new_cache(ids.size)
        )

    def _measure(self) -> None:
        # The first token of a sequence is an outlier in many models, and means little.
        gathered = Gathered(self.model, covariance=True, skip=1)
        total, done = sum(ids.size for ids in self._sequences), 0
        with observing(gathered):
            for x in self._hidden:
                if self._layer < len(self._layers):
                    self._layers[self._layer](x, self.model.new_cache(x.shape[0]))
                else:
                    self.model.head_logits(x)
                self.model.device.synchronize()
                done += x.shape[0]
                if self._progress is not None:
                    label = f"measuring layer {self._layer + 1} of {len(self._layers)}"
                    self._progress(label, done, total, "tokens")
        self._shares, self._covariances = gathered.covariances(total)
