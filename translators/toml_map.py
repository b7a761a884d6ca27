"""Reading a map from TOML: every entry is checked, and nothing is run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oazoo.configs import ModelConfig
from oazoo.errors import TranslationError
from oazoo.translators.declared_map import TRANSFORMS, DeclaredMap, Entry
from oazoo.translators.exporter import Exporter, Outgoing
from oazoo.translators.own_map import check_accepts
from oazoo.translators.rules import Ignored
from oazoo.translators.settings import read_small
from oazoo.translators.translator import Translator

_MAX_BYTES = 1 << 20
_TOP = {"name", "title", "accepts", "family", "config", "rules", "ignored"}
_RULE = {"target", "targets", "source", "sources", "transform", "axis", "heads", "sizes", "shape", "optional"}
_FIELD = {"from", "default", "values"}


def read_toml_map(path: Path) -> tuple[Translator, tuple[Exporter, ...]]:
    """The translator of a TOML map, and exporters for what it reads.

    Raises:
        TranslationError: the file is not TOML, or no map; the message names the entry.
    """
    where = str(path)
    try:
        data = tomllib.loads(read_small(path, _MAX_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TranslationError(f"{where}: not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise TranslationError(f"{where}: not TOML: {error}") from error
    except RecursionError as error:
        raise TranslationError(f"{where}: nested too deeply") from error
    _known(data, _TOP, where)
    name, family = _text(data, "name", where), _text(data, "family", where)
    accepts = data.get("accepts")
    check_accepts(accepts or (), where)
    assert isinstance(accepts, list)
    config = _table(data.get("config"), f"{where}: config")
    for field, value in config.items():
        _check_field(value, f"{where}: config.{field}")
    own = DeclaredMap(where, family, tuple(accepts), config, _entries(data, where), _ignored(data, where))
    if not own.entries:
        raise TranslationError(f"{where}: has no [[rules]]")
    title = data.get("title", name)
    translator = Translator(name, str(title), own.accepts, own.translate)
    return translator, tuple(_exporter(own, accept) for accept in accepts if _exportable(accept))


def _exportable(accept: str) -> bool:
    return accept.partition(":")[0] in ("hf", "gguf")


def _exporter(own: DeclaredMap, accept: str) -> Exporter:
    naming, _, architecture = accept.partition(":")

    def build(config: ModelConfig) -> Outgoing:
        return own.export(config, naming, architecture)

    return Exporter(own.family, naming, architecture, build)


def _check_field(value: Any, at: str) -> None:
    if not isinstance(value, Mapping) or "from" not in value:
        return
    _known(value, _FIELD, at)
    if not isinstance(value["from"], str) or not value["from"]:
        raise TranslationError(f"{at}: from must be the key of a setting")
    if "values" in value:
        _table(value["values"], f"{at}.values")


def _entries(data: Mapping[str, Any], where: str) -> tuple[Entry, ...]:
    result = []
    for number, rule in enumerate(_tables(data, "rules", where), 1):
        at = f"{where}: rule {number}"
        _known(rule, _RULE, at)
        transform = rule.get("transform", "identity")
        if transform not in TRANSFORMS:
            raise TranslationError(
                f"{at}: unknown transform {str(transform)[:64]!r}; known: {', '.join(TRANSFORMS)}"
            )
        targets, sources = _names(rule, "target", at), _names(rule, "source", at)
        at += f" ({targets[0]})"
        _check_counts(transform, targets, sources, at)
        _check_options(rule, transform, at)
        layered = {"{layer}" in name for name in targets}
        if len(layered) > 1 or (not layered.pop() and any("{layer}" in name for name in sources)):
            raise TranslationError(f"{at}: {{layer}} must stand in every target if it stands anywhere")
        result.append(Entry(at, targets, sources, transform, rule))
    return tuple(result)


def _check_counts(transform: str, targets: Sequence[str], sources: Sequence[str], at: str) -> None:
    many_targets, many_sources = transform == "split", transform in ("concat", "stack")
    if len(targets) > 1 and not many_targets:
        raise TranslationError(f"{at}: {transform} has one target; only split has several")
    if len(sources) > 1 and not many_sources:
        raise TranslationError(f"{at}: {transform} has one source; only concat and stack have several")
    if any("{expert}" in name for name in sources) and not (transform == "stack" and len(sources) == 1):
        raise TranslationError(f"{at}: {{expert}} stands in the one source of a stack")


def _check_options(rule: Mapping[str, Any], transform: str, at: str) -> None:
    for option, homes in {
        "axis": ("concat", "split"),
        "heads": ("half-split",),
        "sizes": ("concat",),
        "shape": ("reshape",),
    }.items():
        if option in rule and transform not in homes:
            raise TranslationError(f"{at}: {option} goes with {' and '.join(homes)}, not with {transform}")
    if transform == "half-split" and "heads" not in rule:
        raise TranslationError(f'{at}: half-split needs heads, a number or a field such as "num_heads"')
    axis, optional = rule.get("axis", 0), rule.get("optional", False)
    if isinstance(axis, bool) or not isinstance(axis, int) or not 0 <= axis < 8:
        raise TranslationError(f"{at}: axis must be a whole number from 0 to 7")
    if not isinstance(optional, bool):
        raise TranslationError(f"{at}: optional must be true or false")
    for option in ("sizes", "shape"):
        values = rule.get(option, [])
        if not isinstance(values, list) or not all(isinstance(value, (int, str)) for value in values):
            raise TranslationError(f"{at}: {option} must be a list of numbers or fields of the config")


def _ignored(data: Mapping[str, Any], where: str) -> tuple[Ignored, ...]:
    result = []
    for number, entry in enumerate(_tables(data, "ignored", where), 1):
        at = f"{where}: ignored {number}"
        _known(entry, {"pattern", "reason"}, at)
        pattern, reason = _text(entry, "pattern", at), _text(entry, "reason", at)
        try:
            re.compile(pattern)
        except re.error as error:
            raise TranslationError(f"{at}: {pattern[:64]!r} is no regular expression: {error}") from error
        result.append(Ignored(pattern, reason))
    return tuple(result)


def _known(table: Mapping[str, Any], keys: set[str], at: str) -> None:
    unknown = sorted(set(table) - keys)
    if unknown:
        raise TranslationError(f"{at}: unknown key {unknown[0][:64]!r}; known: {', '.join(sorted(keys))}")


def _text(table: Mapping[str, Any], key: str, at: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise TranslationError(f"{at}: {key} must be a text, found {type(value).__name__}")
    return value


def _table(value: Any, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TranslationError(f"{at} must be a table")
    return value


def _tables(data: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TranslationError(f"{where}: {key} must be tables, [[{key}]]")
    return value


def _names(rule: Mapping[str, Any], key: str, at: str) -> tuple[str, ...]:
    """One name under ``key``, or a list of them under its plural."""
    one, many = rule.get(key), rule.get(f"{key}s")
    if (one is None) == (many is None):
        raise TranslationError(f"{at}: needs {key} or {key}s, one of them")
    names = [one] if many is None else many
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise TranslationError(f"{at}: {key}s must be names of tensors")
    return tuple(names)
