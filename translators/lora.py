"""LoRA adapters between our layers and the modules of the published model, by the family's import map.

Where the published model keeps several of our layers in one module (Phi-3's q, k and v; GPT-NeoX's interleaved by head),
their adapters become one of the sum of the ranks, whose B has blocks: the same change, exactly. The other way round, each
of our layers gets the module's A and its own rows of B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from oazoo.configs import ModelConfig
from oazoo.errors import FormatError, TranslationError, UsageError
from oazoo.formats.lora import Adapter, LoraPair
from oazoo.formats.messages import quoted, some
from oazoo.translators.exporter import Outgoing, every_outgoing, outgoing
from oazoo.translators.rules import Identity, Transpose2D, invert

Shape = tuple[int, int]
Rows = npt.NDArray[np.int64]

#: Matrices that are looked up, or convolve, and multiply nothing.
_NOT_LINEAR = ("embed", "positions", "conv")
#: What decides which expert a token goes to: adapted only where it is named.
_ROUTERS = ("router", "shared_gate")


@dataclass(frozen=True)
class Place:
    """Where one of our layers is in the published model.

    Attributes:
        module: its name there.
        shape: [out, in] of the module.
        rows: which of the module's outputs are the layer's, in the layer's order; None for all as they are.
    """

    module: str
    shape: Shape
    rows: Rows | None


@dataclass(frozen=True)
class LoraMap:
    """The linear layers of a model that can have an adapter, and where each is in the published model.

    Attributes:
        architecture: of the published model, such as ``LlamaForCausalLM``.
        places: our layer, such as ``layers.0.attn.q`` → its place.
        shapes: our layer → [out, in].
        fan_in_fan_out: whether the published model stores these weights as [in, out] (GPT-2).
    """

    architecture: str
    places: Mapping[str, Place]
    shapes: Mapping[str, Shape]
    fan_in_fan_out: bool

    @property
    def modules(self) -> list[str]:
        """The published model's modules."""
        return list(dict.fromkeys(place.module for place in self.places.values()))


def linear_layers(config: ModelConfig) -> dict[str, Shape]:
    """The layers of a model that multiply by a matrix: name → [out, in]. Stacked experts are not among them."""
    found = {}
    for name, shape in config.parameters().items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(shape) == 2 and stem.rpartition(".")[2] not in _NOT_LINEAR:
            found[stem] = (shape[0], shape[1])
    return found


def choose_layers(
    config: ModelConfig, targets: Sequence[str] = (), places: Mapping[str, Place] | None = None
) -> list[str]:
    """The layers that are to have an adapter.

    Args:
        config: the model.
        targets: names, ends of names (``attn.q``), shell-style patterns, or ends of the published model's names
            (``q_proj``); without any, all linear layers but the head and the routers of experts.
        places: for the last of these, from :func:`lora_map`.

    Raises:
        UsageError: a target that fits nothing; the message lists what there is.
    """
    layers = list(linear_layers(config))
    if not targets:
        return [name for name in layers if name != "head" and name.rpartition(".")[2] not in _ROUTERS]
    chosen: set[str] = set()
    for target in targets:
        fitting = {name for name in layers if _fits(name, target)}
        if places is not None:
            fitting |= {name for name in layers if name in places and _fits(places[name].module, target)}
        if not fitting:
            kinds = list(dict.fromkeys(_kind(name) for name in layers))
            raise UsageError(
                f"no linear layer of this {config.family} model is called {target!r}; there are {', '.join(kinds)}"
            )
        chosen |= fitting
    return [name for name in layers if name in chosen]


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatchcase(name, target)


def _kind(name: str) -> str:
    """A layer's name without its number."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def lora_map(config: ModelConfig, declared: Sequence[str] = (), naming: str = "hf") -> LoraMap:
    """Where the linear layers of a model are in the published one.

    Args:
        config: the model.
        declared: architectures that it is known to have come from; they are preferred.
        naming: ``hf`` or ``gguf``.

    Raises:
        TranslationError: no published architecture expresses the model; the message says why.
    """
    return _map_of(config, outgoing(config, naming, declared))


def _map_of(config: ModelConfig, out: Outgoing) -> LoraMap:
    parameters, layers = config.parameters(), linear_layers(config)
    shapes = {
        rule.target: rule.transform.shape([parameters[name] for name in rule.sources])
        for rule in invert(out.rules)
    }
    places: dict[str, Place] = {}
    transposed = False
    for rule in out.rules:
        layer = rule.target.removesuffix(".weight")
        if layer not in layers or rule.target == layer or len(rule.sources) != 1:
            continue
        source = rule.sources[0]
        shape = shapes[source]
        if len(shape) != 2 or not source.endswith(".weight"):
            continue
        rows = None
        if isinstance(rule.transform, Transpose2D):
            shape, transposed = shape[::-1], True
        elif rule.transform.on_rows and not isinstance(rule.transform, Identity):
            rows = rule.transform.apply([np.arange(shape[0], dtype=np.int64)[:, None]])[:, 0]
        elif not isinstance(rule.transform, Identity):
            continue  # no adapter of the one is an adapter of the other
        places[layer] = Place(source.removesuffix(".weight"), (shape[0], shape[1]), rows)
    return LoraMap(out.architecture, places, layers, transposed)


def to_published(pairs: Mapping[str, LoraPair], where: LoraMap) -> dict[str, LoraPair]:
    """Pairs of our layers as pairs of the published model's modules.

    Raises:
        TranslationError: a layer that the published model has no module for.
        FormatError: a pair that does not have its layer's shape.
    """
    parts: dict[str, list[str]] = {}
    for layer, pair in pairs.items():
        _check_shape(layer, pair, where)
        if layer not in where.places:
            raise TranslationError(
                f"{quoted(layer)} has no module of its own in {where.architecture}, so its adapter cannot be written for it"
            )
        parts.setdefault(where.places[layer].module, []).append(layer)
    return {
        module: _joined([(where.places[name], pairs[name]) for name in names])
        for module, names in parts.items()
    }


def _joined(parts: Sequence[tuple[Place, LoraPair]]) -> LoraPair:
    """One pair for a module that holds several layers, or one with its rows in another order."""
    first_place, first = parts[0]
    if len(parts) == 1 and first_place.rows is None:
        return first
    out, rank = first_place.shape[0], sum(pair.rank for _, pair in parts)
    alpha = first.scale * (math.sqrt(rank) if first.rslora else rank)
    b = np.zeros((out, rank), np.float32)
    at = 0
    for place, pair in parts:
        # One scale for all: what a pair's own scale differs by goes into its B.
        ratio = pair.scale / first.scale if first.scale else 1.0
        block = pair.b if ratio == 1 else pair.b * np.float32(ratio)
        rows = np.arange(out) if place.rows is None else place.rows
        b[rows, at : at + pair.rank] = block
        at += pair.rank
    return LoraPair(np.concatenate([pair.a for _, pair in parts]), b, alpha, first.rslora)


def bind(
    adapter: Adapter,
    config: ModelConfig,
    declared: Sequence[str] = (),
    path: object = "the adapter",
    naming: str = "hf",
) -> dict[str, LoraPair]:
    """Pairs of our layers from an adapter for the published model, under the names of ``naming``, ``hf`` or ``gguf``.

    A model may be expressed by several architectures (a Phi-3 as a Llama, with q, k and v apart); the first that has all of
    the adapter's modules counts.

    Raises:
        TranslationError: no published architecture expresses the model.
        FormatError: see :func:`to_ours`, for the first architecture.
    """
    maps = [_map_of(config, out) for out in every_outgoing(config, naming, declared)]
    fitting = (where for where in maps if adapter.pairs.keys() <= set(where.modules))
    return to_ours(adapter, next(fitting, maps[0]), path)


def to_ours(adapter: Adapter, where: LoraMap, path: object = "the adapter") -> dict[str, LoraPair]:
    """Pairs of the published model's modules as pairs of our layers; every one must find its layer.

    Raises:
        FormatError: a module that the model does not have, or one of another shape; the message names it.
    """
    by_module: dict[str, list[str]] = {}
    for layer, place in where.places.items():
        by_module.setdefault(place.module, []).append(layer)
    unknown = [module for module in adapter.pairs if module not in by_module]
    if unknown:
        raise FormatError(
            f"{path}: {len(unknown)} of {len(adapter.pairs)} adapted modules are none of this model ({where.architecture}): "
            f"{some([quoted(module) for module in unknown])}; it has {some([quoted(module) for module in where.modules])}"
        )
    found: dict[str, LoraPair] = {}
    for module, pair in adapter.pairs.items():
        shape = (pair.b.shape[0], pair.a.shape[1])
        for layer in by_module[module]:
            place = where.places[layer]
            if shape != place.shape:
                raise FormatError(
                    f"{path}: {quoted(module)} is for a weight of shape {list(shape)}; this model's has {list(place.shape)}"
                )
            b = pair.b if place.rows is None else np.ascontiguousarray(pair.b[place.rows])
            # The module's rank is the layer's too: scale and alpha stay.
            found[layer] = LoraPair(pair.a, b, pair.alpha, pair.rslora)
    return found


def _check_shape(layer: str, pair: LoraPair, where: LoraMap) -> None:
    shape = (pair.b.shape[0], pair.a.shape[1])
    if layer not in where.shapes:
        raise FormatError(f"{quoted(layer)} is no linear layer of this model")
    if shape != where.shapes[layer] or pair.b.shape[1] != pair.rank:
        raise FormatError(
            f"{quoted(layer)}: lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)} are not for a weight of shape "
            f"{list(where.shapes[layer])}"
        )
