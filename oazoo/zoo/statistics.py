"""What a model's layers are fed with, measured once and kept: the statistics that quantising weighs errors with.

A file of them is a SafeTensors file: ``moments.NAME``, f32 [inputs], the mean squares of the inputs of the weight NAME (of a
stack of experts [experts, inputs]); ``covariance.NAME``, f32 [inputs, inputs], the means of their products, if these were
gathered. Weights that are fed the same (query, key and value) share one tensor, under the first one's name. The metadata say
what was measured, on which text, and what it costs to quantise each tensor, if that was measured
(:mod:`oazoo.zoo.sensitivity`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.errors import FormatError, UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.safetensors_writer import write_safetensors

Floats = npt.NDArray[np.float32]

_KIND, _VERSION = "oazoo.statistics", 1
_MOMENTS, _COVARIANCE = "moments.", "covariance."


@dataclass(frozen=True)
class Sensitivity:
    """What quantising each tensor costs.

    Attributes:
        losses: by name, the divergence (mean KL, nats a token) that the tensor alone causes at 4 bits.
        text: what was read, ``text_sha256`` the hash of its UTF-8; empty if nothing was measured.
        tokens: how many tokens of it.
    """

    losses: Mapping[str, float]
    text: str = ""
    text_sha256: str = ""
    tokens: int = 0

    def note(self) -> dict[str, Any]:
        """What a quantised file says about it."""
        if not self.tokens:
            return {"measured": False}
        return {"measured": True, "text": self.text, "text_sha256": self.text_sha256, "tokens": self.tokens}


@dataclass(frozen=True)
class Statistics:
    """Second moments of what every weight of a model is multiplied with, over a text.

    Attributes:
        model: its name.
        weights: checksum of the weights that ran (:attr:`oazoo.formats.oam.OamSource.weights_checksum`).
        text: what was read, ``text_sha256`` the hash of its UTF-8.
        tokens: how many tokens of it went through the model.
        shares: for each weight, the name under which its statistics are kept.
        moments: mean squares by that name, f32 [inputs]; of a stack of experts [experts, inputs].
        covariances: means of products by that name, f32 [inputs, inputs]; may be empty.
        sensitivities: by method of quantising, what it costs tensor by tensor; may be empty.
    """

    model: str
    weights: str
    text: str
    text_sha256: str
    tokens: int
    shares: Mapping[str, str]
    moments: Mapping[str, Floats]
    covariances: Mapping[str, Floats] = field(default_factory=dict)
    sensitivities: Mapping[str, Sensitivity] = field(default_factory=dict)

    def moment(self, name: str, inputs: int) -> Floats | None:
        """The mean squares of a weight's inputs; None if the model multiplies nothing with it.

        Raises:
            UsageError: there are not as many of them as the weight has inputs: another model was measured.
        """
        return self._find(self.moments, name, inputs)

    def covariance(self, name: str, inputs: int) -> Floats | None:
        """The means of products of a weight's inputs, f32 [inputs, inputs]; None if there are none."""
        return self._find(self.covariances, name, inputs)

    def _find(self, table: Mapping[str, Floats], name: str, inputs: int) -> Floats | None:
        found = table.get(self.shares.get(name, ""))
        if found is not None and found.shape[-1] != inputs:
            raise UsageError(
                f"the statistics are of {self.model}, whose {name} has {found.shape[-1]} inputs; this one has {inputs}. "
                "Gather them with the model that is quantised: oazoo calibrate"
            )
        return found

    def note(self) -> dict[str, Any]:
        """What a quantised file says about the statistics that it was made with."""
        return {
            "text": self.text,
            "text_sha256": self.text_sha256,
            "tokens": self.tokens,
            "source_weights": self.weights,
        }


def save_statistics(statistics: Statistics, path: str | Path, *, overwrite: bool = False) -> None:
    """Write them to a SafeTensors file, atomically."""
    tensors: dict[str, Floats] = {_MOMENTS + name: m for name, m in statistics.moments.items()}
    tensors |= {_COVARIANCE + name: c for name, c in statistics.covariances.items()}
    facts = {
        "model": statistics.model,
        "weights": statistics.weights,
        "text": statistics.text,
        "text_sha256": statistics.text_sha256,
        "tokens": statistics.tokens,
        "shares": dict(statistics.shares),
        "sensitivities": {
            method: {**found.__dict__, "losses": dict(found.losses)}
            for method, found in statistics.sensitivities.items()
        },
        "tool": f"oazoo {__version__}",
    }
    metadata = {
        "format": _KIND,
        "version": str(_VERSION),
        "statistics": json.dumps(facts, ensure_ascii=False),
    }
    write_safetensors(path, tensors, metadata=metadata, overwrite=overwrite)


def load_statistics(path: str | Path) -> Statistics:
    """Read a file that :func:`save_statistics` wrote.

    Raises:
        FormatError: another kind of file, or values that cannot be (not finite, negative mean squares, sizes that differ).
    """
    with open_source(path) as source:
        metadata = source.metadata
        if not isinstance(source, SafetensorsSource) or metadata.get("format") != _KIND:
            raise FormatError(f"{path}: holds no statistics; make them with: oazoo calibrate MODEL -o {path}")
        if metadata.get("version") != str(_VERSION):
            raise FormatError(
                f"{path}: statistics of version {metadata.get('version')!r}; this oazoo reads version {_VERSION}"
            )
        facts = _facts(path, metadata.get("statistics"))
        moments: dict[str, Floats] = {}
        covariances: dict[str, Floats] = {}
        for name, tensor in source.items():
            shape = tensor.info.shape
            square = name.startswith(_COVARIANCE)
            fits = len(shape) == 2 and len(set(shape)) == 1
            if not square:
                fits = name.startswith(_MOMENTS) and len(shape) in (1, 2)
            if not fits or tensor.info.encoding != "f32" or not tensor.info.numel:
                raise FormatError(
                    f"{path}: {name} ({tensor.info.encoding}{list(shape)}) is no part of statistics"
                )
            values = np.array(tensor.numpy(), np.float32)
            diagonal = values.diagonal() if square else values
            if not np.isfinite(values).all() or (diagonal < 0).any():
                raise FormatError(f"{path}: {name} has values that no mean of squares can have")
            (covariances if square else moments)[name.split(".", 1)[1]] = values
        missing = sorted({*facts["shares"].values()} - {*moments})
        if missing:
            raise FormatError(f"{path}: the mean squares of {missing[0]} are missing")
        return Statistics(moments=moments, covariances=covariances, **facts)


def _facts(path: str | Path, text: Any) -> dict[str, Any]:
    """The metadata, each field of its type."""
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError as error:
        raise FormatError(f"{path}: the metadata are damaged: {error}") from None
    types: dict[str, type] = {
        "model": str,
        "weights": str,
        "text": str,
        "text_sha256": str,
        "tokens": int,
        "shares": dict,
    }
    if not isinstance(found, dict) or any(not isinstance(found.get(k), t) for k, t in types.items()):
        raise FormatError(f"{path}: the metadata lack one of {', '.join(types)}")
    if not all(isinstance(name, str) for name in found["shares"].values()):
        raise FormatError(f"{path}: 'shares' in the metadata must name tensors")
    known = {key: found[key] for key in types}
    return known | {"sensitivities": _sensitivities(path, found.get("sensitivities", {}))}


def _sensitivities(path: str | Path, found: Any) -> dict[str, Sensitivity]:
    types: dict[str, type] = {"losses": dict, "text": str, "text_sha256": str, "tokens": int}
    result = {}
    for method, entry in found.items() if isinstance(found, dict) else [("", None)]:
        if not isinstance(entry, dict) or any(not isinstance(entry.get(k), t) for k, t in types.items()):
            raise FormatError(f"{path}: 'sensitivities' in the metadata lack one of {', '.join(types)}")
        for name, loss in entry["losses"].items():
            if type(loss) not in (int, float) or not 0 <= loss < float("inf"):
                raise FormatError(f"{path}: the sensitivity of {name} is {loss!r}, which nothing can cost")
        result[method] = Sensitivity(**{key: entry[key] for key in types})
    return result
