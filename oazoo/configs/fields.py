"""What every typed configuration rests on: strict JSON, and the limits that keep sizes sane."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Self

from oazoo.errors import TranslationError

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 14
MAX_EXPERTS = 1 << 12
MAX_POSITIONS = 1 << 28
#: More than any published dense model by a factor of ten; keeps every later product of sizes within 64 bits.
MAX_PARAMETERS = 1 << 44


def check(condition: bool, where: str, what: str) -> None:
    """Raise a TranslationError that says where and what unless ``condition`` holds."""
    if not condition:
        raise TranslationError(f"{where}: {what}")


def _json_type_ok(value: Any, kind: Any) -> bool:
    """Whether a JSON value has the declared field type; an int may stand for a float, a bool for nothing."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_json_type_ok(value, option) for option in typing.get_args(kind))
    if origin is tuple:
        item = typing.get_args(kind)[0]
        return isinstance(value, (list, tuple)) and all(_json_type_ok(v, item) for v in value)
    if kind is types.NoneType:
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str)
    return isinstance(value, Mapping)


def _type_name(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) else str(kind)
    return text.replace("NoneType", "null").replace("None", "null").replace("oazoo.configs.rope.", "")


class StrictJson:
    """Strict conversion of a frozen dataclass from and to plain JSON values."""

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values; fields that are ``None`` are left out."""
        result: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, StrictJson):
                value = value.to_json()
            elif isinstance(value, tuple):
                value = list(value)
            result[field.name] = value
        return result

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Build from JSON values.

        Raises:
            TranslationError: not an object, unknown or missing field, wrong type, or value out of range.
        """
        where = cls.__name__
        check(isinstance(data, Mapping), where, f"expected a JSON object, found {type(data).__name__}")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in data:
            check(name in fields, where, f"unknown field {str(name)[:64]!r}; known: {', '.join(fields)}")
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name not in data:
                required = (
                    field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                )
                check(not required, where, f"field {name!r} is missing")
                continue
            value, kind = data[name], hints[name]
            check(
                _json_type_ok(value, kind),
                where,
                f"field {name!r} must be {_type_name(kind)}, "
                f"found {type(value).__name__} ({str(value)[:40]})",
            )
            values[name] = cls._convert(value, kind)
        return cls(**values)

    @staticmethod
    def _convert(value: Any, kind: Any) -> Any:
        options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        if value is None:
            return None
        if isinstance(value, Mapping):
            nested = next(o for o in options if isinstance(o, type) and issubclass(o, StrictJson))
            return nested.from_json(value)
        if isinstance(value, (list, tuple)):
            item = typing.get_args(next(o for o in options if typing.get_origin(o) is tuple))[0]
            return tuple(StrictJson._convert(v, item) for v in value)
        if isinstance(value, int) and not isinstance(value, bool) and int not in options and float in options:
            return _as_float(value)
        return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_ranges(config: Any, limits: Mapping[str, int]) -> None:
    """Check that each named field is between 1 and its limit, and ``norm_eps`` between 0 and 1."""
    where = type(config).__name__
    for name, limit in limits.items():
        value = getattr(config, name)
        check(0 < value <= limit, where, f"{name} = {str(value)[:40]} is out of range (1 to {limit})")
    eps = config.norm_eps
    check(math.isfinite(eps) and 0 <= eps < 1, where, f"norm_eps = {eps} is out of range (0 to 1)")


def check_transformer_sizes(config: Any) -> None:
    """:func:`check_ranges` of what every Transformer has."""
    check_ranges(
        config,
        {
            "vocab_size": MAX_VOCAB,
            "hidden_size": MAX_WIDTH,
            "intermediate_size": MAX_WIDTH * 4,
            "num_layers": MAX_LAYERS,
            "num_heads": MAX_HEADS,
            "max_positions": MAX_POSITIONS,
        },
    )


def check_parameter_count(config: Any, rough: int) -> None:
    """Bound the whole model before anything is sized by it; ``rough`` is about how many parameters it has."""
    check(
        rough <= MAX_PARAMETERS,
        type(config).__name__,
        f"about {rough:.3g} parameters, more than the {MAX_PARAMETERS:.3g} this program accepts",
    )
