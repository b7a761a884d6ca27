"""Comparing two models, in whatever containers they come: tensors, encodings, configs and what travels with them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import DecoderConfig, ModelConfig, config_from_json
from oazoo.errors import TokenizerError, TranslationError, UsageError
from oazoo.formats import encodings
from oazoo.formats.oam import OamSource
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource
from oazoo.translators.assets import Assets
from oazoo.translators.engine import CHUNK, Measured, TensorPlan, stream
from oazoo.translators.exporter import config_differences
from oazoo.translators.plan import plan
from oazoo.zoo.files import open_file

Values = Callable[[], Iterator[npt.NDArray[Any]]]
Progress = Callable[[str, int, int | None], None]
_RAW_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of one side. ``stored`` is given where the stored bytes are the values, untransformed.

    Bytes are asked for when they are compared and let go at once, so that memory stays bounded.
    """

    info: TensorInfo
    values: Values
    stored: SourceTensor | None


@dataclass(frozen=True)
class _Side:
    """A model ready to be compared."""

    source: WeightSource
    config: ModelConfig | None
    tensors: Mapping[str, _Tensor]
    options: Mapping[str, Any]
    #: Why names could not be translated.
    why: str


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far two tensors of one name are apart.

    ``max_abs`` and ``mean_abs`` are over the places where both values are finite; ``nonfinite`` counts the other
    places where the two are not the same. ``cosine`` is None where it is not defined: a tensor of zeros, or not finite.
    All three are None when the shapes differ.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    encodings: tuple[str, str]
    max_abs: float | None
    mean_abs: float | None
    cosine: float | None
    nonfinite: int

    def beyond(self, tolerance: float) -> bool:
        """Whether the tensors differ by more than ``tolerance`` anywhere."""
        return self.max_abs is None or self.nonfinite > 0 or self.max_abs > tolerance

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON values."""
        return {
            "name": self.name,
            "shapes": [list(shape) for shape in self.shapes],
            "encodings": list(self.encodings),
            "max_abs": self.max_abs,
            "mean_abs": self.mean_abs,
            "cosine": self.cosine,
            "nonfinite": self.nonfinite,
        }


@dataclass(frozen=True)
class Difference:
    """What two models do not have in common.

    ``names`` is ``"translated"`` when both were read as models of one family, so that their tensors go by our names,
    and ``"raw"`` otherwise; ``why_raw`` then says why. ``config`` and ``options`` list (name, first, second).
    """

    first: str
    second: str
    tolerance: float
    names: str
    why_raw: str
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    #: Every tensor that both have.
    tensors: tuple[TensorDifference, ...]
    config: tuple[tuple[str, Any, Any], ...]
    options: tuple[tuple[str, Any, Any], ...]

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        """Tensors that differ by more than the tolerance."""
        return tuple(tensor for tensor in self.tensors if tensor.beyond(self.tolerance))

    @property
    def equal(self) -> bool:
        """Whether tensors (within the tolerance) and model config are the same. Options do not count."""
        return not (self.missing or self.extra or self.differing or self.config)

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values; ``tensors`` are those that are not the same to the bit, whatever the tolerance."""
        return {
            "first": self.first,
            "second": self.second,
            "equal": self.equal,
            "tolerance": self.tolerance,
            "names": self.names,
            "why_raw": self.why_raw or None,
            "compared": len(self.tensors),
            "missing": list(self.missing),
            "extra": list(self.extra),
            "differing": [tensor.name for tensor in self.differing],
            "tensors": [t.to_json() for t in self.tensors if t.beyond(0) or len(set(t.encodings)) > 1],
            "config": [{"name": n, "first": a, "second": b} for n, a, b in self.config],
            "options": [{"name": n, "first": a, "second": b} for n, a, b in self.options],
        }


def diff(
    first: str | Path, second: str | Path, *, tolerance: float = 0.0, progress: Progress | None = None
) -> Difference:
    """Compare two models, each an ``.oam``, SafeTensors or GGUF file or a Hugging Face folder.

    Where both can be translated to one model family, tensors are compared under the names and in the order of rows that
    an ``.oam`` has, so a GGUF file and a Hugging Face folder of one model are the same. Otherwise tensors are compared
    under the names that they have. Values are compared in float64, piece by piece.

    Args:
        first: a path.
        second: a path.
        tolerance: largest absolute difference of two values that still counts as equal.
        progress: called with (label, bytes done, bytes in all).

    Raises:
        OazooError: UsageError (no such file, a negative tolerance), FormatError (damaged, or values that cannot be decoded).
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"a tolerance is a number from 0 up, not {tolerance}")
    with open_file(first) as source_a, open_file(second) as source_b:
        a, b = _read(source_a), _read(source_b)
        why = a.why or b.why
        if not why and a.config is not None and b.config is not None and a.config.family != b.config.family:
            why = f"the models are of different families: {a.config.family} and {b.config.family}"
        if why:
            a, b = _raw(source_a, a), _raw(source_b, b)
        a, b = _same_norms(a, b)
        common = [name for name in a.tensors if name in b.tensors]
        total, done = sum(a.tensors[name].info.nbytes for name in common), 0
        found = []
        for name in common:
            found.append(_compare(name, a.tensors[name], b.tensors[name]))
            done += a.tensors[name].info.nbytes
            if progress is not None:
                progress("compare", done, total)
        config: list[tuple[str, Any, Any]] = []
        if a.config is not None and b.config is not None:
            config = config_differences(a.config, b.config)
        return Difference(
            str(first),
            str(second),
            tolerance,
            "raw" if why else "translated",
            why,
            tuple(name for name in a.tensors if name not in b.tensors),
            tuple(name for name in b.tensors if name not in a.tensors),
            tuple(found),
            tuple(config),
            tuple(_options(a.options, b.options)),
        )


def _same_norms(a: _Side, b: _Side) -> tuple[_Side, _Side]:
    """Both sides with norm weights as what is computed with, where one holds w for 1 + w and the other the sum (Gemma)."""
    first, second = a.config, b.config
    if not (isinstance(first, DecoderConfig) and isinstance(second, DecoderConfig)):
        return a, b
    if first.norm_offset == second.norm_offset:
        return a, b
    return _with_offset(a, first), _with_offset(b, second)


def _with_offset(side: _Side, config: DecoderConfig) -> _Side:
    offset = np.float32(config.norm_offset)

    def summed(tensor: _Tensor) -> _Tensor:
        # In float32, as every program adds it.
        values = tensor.values
        return _Tensor(tensor.info, lambda: (np.asarray(v, np.float32) + offset for v in values()), None)

    tensors = {
        name: summed(tensor) if name.endswith("norm.weight") else tensor
        for name, tensor in side.tensors.items()
    }
    return dataclasses.replace(side, config=dataclasses.replace(config, norm_offset=0.0), tensors=tensors)


def _read(source: WeightSource) -> _Side:
    """A side under our names if it can be translated, else without tensors."""
    if isinstance(source, OamSource):
        return _read_oam(source)
    try:
        try:
            planned, tokens = plan(source), ""
        except TokenizerError as error:
            planned, tokens = plan(source, with_tokenizer=False), str(error)
    except TranslationError as error:
        return _Side(
            source, None, {}, {}, f"{source.path} cannot be translated: {str(error).splitlines()[0]}"
        )
    assert isinstance(planned.config, ModelConfig)  # what an architecture is declared for has a typed config
    tensors = {tensor.target: _translated(tensor, source) for tensor in planned.tensors}
    options = _asset_options(planned.assets)
    if tokens:
        options["tokenizer"] = tokens
    return _Side(source, planned.config, tensors, options, "")


def _read_oam(source: OamSource) -> _Side:
    assets = Assets(source.asset("asset/tokenizer.json"))
    options = _asset_options(assets)
    template = source.asset("asset/chat_template.jinja")
    if template is not None:
        options["chat template"] = _digest(template)
    for section in _SECTIONS:
        values = source.metadata.get(section)
        if isinstance(values, Mapping):
            options |= {f"{_SECTIONS[section]}.{key}": value for key, value in values.items()}
    try:
        config = config_from_json(source.metadata.get("family"), source.metadata.get("model"))
    except TranslationError as error:
        return _Side(source, None, {}, options, f"{source.path}: {error}")
    tensors = _raw(source, None).tensors
    return _Side(source, config, tensors, options, "")


_SECTIONS = {"generation": "generation", "tokenizer": "special token", "quantization": "quantization"}


def _asset_options(assets: Assets) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tokenizer": None if assets.tokenizer is None else _digest(assets.tokenizer),
        "chat template": None
        if not assets.chat_template
        else _digest(assets.chat_template.encode("utf-8", "replace")),
    }
    options |= {f"generation.{key}": value for key, value in assets.generation.items()}
    return options | {f"special token.{key}": value for key, value in assets.tokens.items()}


def _digest(data: bytes) -> str:
    return f"{len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"


def _options(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def _raw(source: WeightSource, side: _Side | None) -> _Side:
    """The tensors of a source under their own names."""
    tensors = {
        name: _Tensor(tensor.info, lambda tensor=tensor: tensor.chunks(CHUNK), tensor)  # type: ignore[misc]
        for name, tensor in source.items()
    }
    options = side.options if side is not None else {}
    return _Side(source, None, tensors, options, side.why if side is not None else "")


def _translated(tensor: TensorPlan, source: WeightSource) -> _Tensor:
    """A tensor as its rule makes it, in float64: nothing is rounded before it is compared."""
    wide = dataclasses.replace(tensor, encoding="f64", action="convert")
    kinds = set(tensor.source_encodings)
    kind = kinds.pop() if len(kinds) == 1 else "several"
    stored = sum(source[name].info.nbytes for name in tensor.rule.sources)
    plain = tensor.rule.transform.name == "Identity" and len(tensor.rule.sources) == 1
    return _Tensor(
        TensorInfo(tensor.target, tensor.shape, kind, stored),
        lambda: stream(wide, source, Measured()),
        source[tensor.rule.sources[0]] if plain else None,
    )


def _compare(name: str, a: _Tensor, b: _Tensor) -> TensorDifference:
    shapes, kinds = (a.info.shape, b.info.shape), (a.info.encoding, b.info.encoding)
    if shapes[0] != shapes[1]:
        return TensorDifference(name, shapes, kinds, None, None, None, 0)
    if kinds[0] == kinds[1] and _same_bytes(a.stored, b.stored):
        return TensorDifference(name, shapes, kinds, 0.0, 0.0, None, 0)
    largest, total, dot, norm_a, norm_b = 0.0, 0.0, 0.0, 0.0, 0.0
    nonfinite = 0
    for x, y in _paired(a.values(), b.values()):
        usable = np.isfinite(x) & np.isfinite(y)
        if not usable.all():
            bad = ~usable
            nonfinite += int((bad & ~((x == y) | (np.isnan(x) & np.isnan(y)))).sum())
            x, y = x[usable], y[usable]
        with np.errstate(over="ignore"):
            change = np.abs(x - y)
            largest = max(largest, float(change.max(initial=0.0)))
            total += float(change.sum())
            dot += float(x @ y)
            norm_a += float(x @ x)
            norm_b += float(y @ y)
    scale = math.sqrt(norm_a) * math.sqrt(norm_b)
    cosine = dot / scale if scale > 0 and math.isfinite(scale) and math.isfinite(dot) else None
    mean = total / max(1, encodings.numel(a.info.shape))
    if not math.isfinite(largest):  # the difference of two huge float64 values
        return TensorDifference(name, shapes, kinds, None, None, cosine, nonfinite)
    return TensorDifference(
        name, shapes, kinds, largest, mean if math.isfinite(mean) else None, cosine, nonfinite
    )


def _same_bytes(a: SourceTensor | None, b: SourceTensor | None) -> bool:
    if a is None or b is None or a.info.nbytes != b.info.nbytes:
        return False
    return all(map(np.array_equal, a.pieces(_RAW_STEP), b.pieces(_RAW_STEP)))


def _paired(
    a: Iterator[npt.NDArray[Any]], b: Iterator[npt.NDArray[Any]]
) -> Iterator[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """The same places of two flattened tensors, whose pieces may be cut differently."""
    empty = np.empty(0, np.float64)
    x, y = empty, empty
    while True:
        x = _wide(next(a, None), empty) if not x.size else x
        y = _wide(next(b, None), empty) if not y.size else y
        count = min(x.size, y.size)
        if not count:
            return
        yield x[:count], y[:count]
        x, y = x[count:], y[count:]


def _wide(piece: npt.NDArray[Any] | None, empty: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if piece is None:
        return empty
    flat = piece.reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    return flat.astype(np.float64)
