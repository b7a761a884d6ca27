"""A map that is only declared: what a config field is taken from, and rules with ``{layer}`` for the number of a layer.

Sizes are not written down: those of targets follow from the config, those of sources from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oazoo.configs import ModelConfig, config_from_json
from oazoo.errors import TranslationError
from oazoo.formats.source import WeightSource
from oazoo.translators.exporter import Outgoing
from oazoo.translators.rules import (
    Concat,
    Identity,
    Ignored,
    Reshape,
    RopePermute,
    Rule,
    Shape,
    Slice,
    Transform,
    Transpose2D,
)
from oazoo.translators.stack import Stack
from oazoo.translators.translator import Checkpoint, Translation

TRANSFORMS = ("identity", "transpose", "concat", "split", "half-split", "stack", "reshape")
_MAX_NAMES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One rule of the file, not expanded yet."""

    at: str
    targets: tuple[str, ...]
    sources: tuple[str, ...]
    transform: str
    options: Mapping[str, Any]

    @property
    def optional(self) -> bool:
        return bool(self.options.get("optional", False))


@dataclass(frozen=True)
class DeclaredMap:
    """The file, checked as far as it can be without a checkpoint."""

    where: str
    family: str
    accepts: tuple[str, ...]
    config: Mapping[str, Any]
    entries: tuple[Entry, ...]
    ignored: tuple[Ignored, ...]

    def translate(self, checkpoint: Checkpoint) -> Translation:
        """What the map says about a checkpoint."""
        values = {name: self._setting(checkpoint, name, value) for name, value in self.config.items()}
        try:
            config = config_from_json(self.family, {k: v for k, v in values.items() if v is not None})
        except TranslationError as error:
            raise TranslationError(f"{self.where}: config: {error}") from error
        return Translation(config, self.rules(config, checkpoint.source), self.ignored)

    def _setting(self, checkpoint: Checkpoint, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or "from" not in value:
            return value
        found = _look_up(checkpoint.config, value["from"])
        if found is None:
            if "default" not in value:
                raise TranslationError(
                    f"{checkpoint.where}: {value['from']} is missing; {self.where} takes {name} from it"
                )
            return value["default"]
        if "values" in value:
            words = value["values"]
            if str(found) not in words:
                raise TranslationError(
                    f"{checkpoint.where}: {value['from']} = {str(found)[:64]!r} is not among the values that {self.where} "
                    f"knows: {', '.join(words)}"
                )
            return words[str(found)]
        return found

    def rules(self, config: ModelConfig, source: WeightSource | None) -> list[Rule]:
        """The rules for a config. Without a ``source``, sizes of its tensors have to be stated in the map."""
        expansion = _Expansion(config, source)
        return [rule for entry in self.entries for rule in expansion.expand(entry)]

    def export(self, config: ModelConfig, naming: str, architecture: str) -> Outgoing:
        """The map run backwards: settings from fields, and the rules."""
        values = config.to_json()
        settings: dict[str, Any] = {}
        for name, value in self.config.items():
            mine = values.pop(name, None)
            if isinstance(value, Mapping) and "from" in value:
                if mine is not None:
                    _place(settings, value["from"], _backwards(value, mine, name), nested=naming == "hf")
            elif mine != value:
                raise TranslationError(f"its {name} is always {value}")
        plain = type(config).from_json(
            {name: value for name, value in config.to_json().items() if name in self.config}
        )
        changed = [name for name in values if getattr(plain, name) != getattr(config, name)]
        if changed:
            raise TranslationError(f"it has no setting for {', '.join(changed)}")
        if naming == "gguf":
            settings["general.architecture"] = architecture
        else:
            settings["architectures"] = [architecture]
        return Outgoing(naming, architecture, settings, self.rules(config, None))


class _Expansion:
    """Rules of the file made into rules of the engine."""

    def __init__(self, config: ModelConfig, source: WeightSource | None) -> None:
        self.config, self.source, self.shapes = config, source, config.parameters()
        self.names = 0

    def expand(self, entry: Entry) -> list[Rule]:
        layered = any("{layer}" in name for name in entry.targets)
        result = []
        for layer in range(self.config.num_layers) if layered else (0,):
            targets = [name.replace("{layer}", str(layer)) for name in entry.targets]
            if entry.optional and all(target not in self.shapes for target in targets):
                continue
            sources = self._sources(entry, layer)
            self.names += len(sources) + len(targets)
            if self.names > _MAX_NAMES:
                raise TranslationError(f"{entry.at}: the rules name more than {_MAX_NAMES:,} tensors")
            try:
                result += self._rules(entry, targets, sources)
            except TranslationError as error:
                raise TranslationError(f"{entry.at}: {error}") from error
        return result

    def _sources(self, entry: Entry, layer: int) -> tuple[str, ...]:
        names = tuple(name.replace("{layer}", str(layer)) for name in entry.sources)
        if entry.transform != "stack" or "{expert}" not in names[0]:
            return names
        count = getattr(self.config, "num_experts", 0)
        return tuple(names[0].replace("{expert}", str(number)) for number in range(count))

    def _rules(self, entry: Entry, targets: list[str], sources: tuple[str, ...]) -> list[Rule]:
        axis = entry.options.get("axis", 0)
        if entry.transform != "split":
            return [Rule(targets[0], sources, self._transform(entry, targets[0], sources, axis))]
        sizes = [self._size(self._target(target), axis) for target in targets]
        rules, start = [], 0
        for target, size in zip(targets, sizes, strict=True):
            rules.append(Rule(target, sources, Slice(axis, start, start + size, sum(sizes))))
            start += size
        return rules

    def _transform(self, entry: Entry, target: str, sources: tuple[str, ...], axis: int) -> Transform:
        match entry.transform:
            case "identity":
                return Identity()
            case "transpose":
                return Transpose2D()
            case "half-split":
                return RopePermute(self._number(entry.options["heads"]))
            case "stack":
                return Stack(len(sources))
            case "concat":
                stated = entry.options.get("sizes")
                if stated is not None:
                    return Concat(axis, tuple(self._number(size) for size in stated))
                return Concat(axis, tuple(self._size(self._shape(name, "sizes"), axis) for name in sources))
            case _:
                stated = entry.options.get("shape")
                if stated is not None:
                    before = tuple(self._number(size) for size in stated)
                else:
                    before = self._shape(sources[0], "shape")
                return Reshape(before, self._target(target))

    def _target(self, name: str) -> Shape:
        if name not in self.shapes:
            raise TranslationError(
                f"a model of the family {self.config.family!r} has no parameter {name[:128]!r}"
            )
        return self.shapes[name]

    def _shape(self, name: str, option: str) -> Shape:
        if self.source is None:
            raise TranslationError(f"to run it backwards, the rule has to state {option}")
        if name not in self.source:
            raise TranslationError(f"the checkpoint lacks {name}")
        return self.source[name].info.shape

    def _size(self, shape: Shape, axis: int) -> int:
        if not 0 <= axis < len(shape):
            raise TranslationError(f"shape {list(shape)} has no axis {axis}")
        return shape[axis]

    def _number(self, value: int | str) -> int:
        found = getattr(self.config, value, None) if isinstance(value, str) else value
        if isinstance(found, bool) or not isinstance(found, int) or found <= 0:
            raise TranslationError(
                f"{str(value)[:64]!r} is no positive number, and no field of the config that is one"
            )
        return found


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    """A setting by its key as it is, or by a path with dots through objects."""
    if key in config:
        return config[key]
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _place(settings: dict[str, Any], key: str, value: Any, *, nested: bool) -> None:
    path = key.split(".") if nested else [key]
    for part in path[:-1]:
        settings = settings.setdefault(part, {})
    settings[path[-1]] = value


def _backwards(field: Mapping[str, Any], value: Any, name: str) -> Any:
    if "values" not in field:
        return value
    words = [word for word, meaning in field["values"].items() if meaning == value]
    if not words:
        raise TranslationError(f"no value of {field['from']} means {name} = {value}")
    return words[0]
