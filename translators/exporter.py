"""What an exporter is, how exporters are found, and the proof that what they say reads back as the same model.

An exporter turns a typed config into the settings of a published checkpoint (``config.json``, GGUF metadata, or an ONNX
graph) and names the import map that belongs to them. The engine runs that map backwards. Nobody has to trust an exporter:
before a byte moves, its settings and tensors are read by the translator that imports such checkpoints, and what that
derives must be the model that is exported.

A module of this package that defines ``EXPORTERS``, a tuple of :class:`Exporter`, is found by itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig
from oazoo.errors import FormatError, TranslationError
from oazoo.formats import encodings
from oazoo.formats.onnx import GraphSource, parse_model
from oazoo.formats.onnx_writer import GraphPlan, model_bytes
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource
from oazoo.translators.engine import check
from oazoo.translators.rope_out import same_scaling
from oazoo.translators.rules import Rule
from oazoo.translators.translator import Checkpoint, Translator, choose, open_checkpoint

if TYPE_CHECKING:
    from oazoo.translators.own_map import OwnMap

#: Container → whose names it uses.
NAMINGS = {"safetensors": "hf", "gguf": "gguf", "onnx": "onnx"}
_FLOAT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Outgoing:
    """What an exporter says about one model.

    ``settings`` are entries of config.json, GGUF key/values, or texts of an ONNX model's metadata. ``rules`` are the import
    map of such a checkpoint, to be run backwards. ``extra`` are float32 tensors that hold settings rather than weights.
    ``graph`` gives the graph around the weights, from what each is stored as, where the container holds one. ``reads_as`` is
    the config that the file reads back as, where it says the same in other terms (norm weights with the offset added).
    """

    naming: str
    architecture: str
    settings: Mapping[str, Any]
    rules: Sequence[Rule]
    extra: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reads_as: ModelConfig | None = None
    graph: Callable[[Mapping[str, str]], GraphPlan] | None = None
    #: config.json holds the settings and nothing else: the program that reads it takes nothing else.
    alone: bool = False


@dataclass(frozen=True)
class Exporter:
    """Writes models of ``family`` as ``architecture``; ``build`` refuses, by name, what that cannot express."""

    family: str
    naming: str
    architecture: str
    build: Callable[[Any], Outgoing] = field(repr=False)


@cache
def exporters() -> tuple[Exporter, ...]:
    """All exporters, in the order in which they are tried: those of this package, then those of others."""
    import oazoo.translators as package
    from oazoo.translators.own_map import plugins

    found: list[Exporter] = []
    for module in pkgutil.iter_modules(package.__path__):
        found += getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "EXPORTERS", ())
    return (*found, *(entry for plugin in plugins() for entry in plugin.offers.exporters))


def exportable() -> list[str]:
    """What can be written, as lines ``"decoder → gguf: llama, qwen2"``."""
    lines: dict[tuple[str, str], list[str]] = {}
    for entry in exporters():
        names = lines.setdefault((entry.family, entry.naming), [])
        if entry.architecture not in names:
            names.append(entry.architecture)
    words = {naming: container for container, naming in NAMINGS.items()}
    return [f"{family} → {words[naming]}: {', '.join(names)}" for (family, naming), names in lines.items()]


def outgoing(
    config: ModelConfig, naming: str, declared: Sequence[str] = (), own: OwnMap | None = None
) -> Outgoing:
    """The first architecture that expresses the model; those that it was declared as come first.

    With a map of the caller's, ``own``, only its exporters are asked.

    Raises:
        TranslationError: none does; the message gives the reason of each.
    """
    return next(every_outgoing(config, naming, declared, own))


def every_outgoing(
    config: ModelConfig, naming: str, declared: Sequence[str] = (), own: OwnMap | None = None
) -> Iterator[Outgoing]:
    """Every architecture that expresses the model, in the order of :func:`outgoing`; at least one, or its error."""
    entries = exporters() if own is None else own.exporters
    known = [entry for entry in entries if (entry.family, entry.naming) == (config.family, naming)]
    if not known and own is not None:
        raise TranslationError(f"{own.where}: has no exporter for the family {config.family!r} as {naming}")
    if not known:
        raise TranslationError(
            f"models of the family {config.family!r} cannot be exported as {naming}. Supported:\n  "
            + "\n  ".join(exportable())
        )
    names = {_short(name) for name in declared}
    reasons = []
    for entry in sorted(known, key=lambda entry: _short(entry.architecture) not in names):
        try:
            out = entry.build(config)
        except TranslationError as error:
            reasons.append(f"{entry.architecture}: {error}")
        else:
            yield out
    if len(reasons) == len(known):
        raise TranslationError("no architecture expresses this model:\n  " + "\n  ".join(reasons))


def _short(architecture: str) -> str:
    return architecture.lower().removesuffix("forcausallm").removesuffix("lmheadmodel")


class _PlannedTensor(SourceTensor):
    """A tensor of a checkpoint that is not written yet."""

    def __init__(self, info: TensorInfo, values: npt.NDArray[Any] | None) -> None:
        self.info = info
        self._values = values

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.numpy().reshape(-1).view(np.uint8)

    def numpy(self) -> npt.NDArray[Any]:
        if self._values is None:
            raise FormatError(f"{self.info.name} is planned, not written")
        return self._values

    def chunks(self, elements: int) -> Iterator[npt.NDArray[Any]]:
        yield self.numpy().reshape(-1)


class _PlannedSource(WeightSource):
    """The checkpoint as it will be, for the translator that imports it."""

    def __init__(self, path: Path, out: Outgoing, infos: Sequence[TensorInfo]) -> None:
        self.path, self.files = path, ()
        self.format = {naming: container for container, naming in NAMINGS.items()}[out.naming]
        self.metadata = dict(out.settings)
        self._tensors: dict[str, SourceTensor] = {
            info.name: _PlannedTensor(info, out.extra.get(info.name)) for info in infos
        }

    def close(self) -> None:
        """Nothing is open."""


class _PlannedGraph(_PlannedSource, GraphSource):
    """The same of a container that holds a graph, which is read as it will be written."""

    def __init__(self, path: Path, out: Outgoing, infos: Sequence[TensorInfo], graph: GraphPlan) -> None:
        super().__init__(path, out, infos)
        texts = {key: str(value) for key, value in out.settings.items()}
        self.metadata, self.graph, _ = parse_model(model_bytes(graph, texts))
        for name, values in graph.constants.items():
            info = TensorInfo(name, values.shape, encodings.for_dtype(values.dtype), values.nbytes)
            self._tensors[name] = _PlannedTensor(info, values)


def check_reads_back(
    out: Outgoing,
    config: ModelConfig,
    infos: Sequence[TensorInfo],
    path: Path,
    own: Sequence[Translator] = (),
) -> None:
    """Read the planned checkpoint with the translator that imports it; it must be the same model.

    Raises:
        TranslationError: it is not; the message names the settings that would change.
    """
    if out.graph is not None:
        graph = out.graph({info.name: info.encoding for info in infos})
        check_same_model(open_checkpoint(_PlannedGraph(path, out, infos, graph)), config, own)
        return
    source = _PlannedSource(path, out, infos)
    folder = path if out.naming == "hf" else None
    checkpoint = Checkpoint(source, out.naming, out.settings, folder, (out.architecture,))
    check_same_model(checkpoint, out.reads_as or config, own)


def check_same_model(checkpoint: Checkpoint, config: ModelConfig, own: Sequence[Translator] = ()) -> None:
    """Translate a checkpoint; it must be the model of ``config``. Raises what :func:`check_reads_back` does."""
    name = ", ".join(checkpoint.declared)
    try:
        translation = choose(checkpoint, own=own).translate(checkpoint)
        check(checkpoint, translation)
    except TranslationError as error:
        raise TranslationError(
            f"the model cannot be written as {name}: what was written could not be read: {error}"
        ) from error
    assert isinstance(
        translation.config, ModelConfig
    )  # what an architecture is declared for has a typed config
    changed = config_differences(config, translation.config)
    if changed:
        shown = "; ".join(f"{name}: {a} would become {b}" for name, a, b in changed)
        raise TranslationError(f"the model cannot be written as {name}: {shown}")


def config_differences(first: ModelConfig, second: ModelConfig) -> list[tuple[str, Any, Any]]:
    """Fields in which two configs differ: (name, first, second).

    Numbers may differ by what a 32-bit float loses, and rotary scalings by the way they are stated.
    """
    if first.family != second.family:
        return [("family", first.family, second.family)]
    result: list[tuple[str, Any, Any]] = []
    for entry in dataclasses.fields(first):
        a, b = getattr(first, entry.name), getattr(second, entry.name)
        if entry.name == "rope_scaling":
            assert isinstance(first, DecoderConfig) and isinstance(second, DecoderConfig)
            same = same_scaling(first, second)
        elif entry.name == "norm_bias":
            assert isinstance(first, NanoGPTConfig) and isinstance(second, NanoGPTConfig)
            same = first.has_norm_bias == second.has_norm_bias
        elif isinstance(a, float) and isinstance(b, float):
            same = math.isclose(a, b, rel_tol=_FLOAT_TOLERANCE)
        else:
            same = a == b
        if not same:
            result.append((entry.name, _plain(a), _plain(b)))
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value.to_json() if hasattr(value, "to_json") else value
