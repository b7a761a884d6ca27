"""Maps of your own: a file named on the command line, or a package that is installed beside this one.

``--map FILE.toml`` is data; nothing in it is run. ``--map FILE.py`` runs the file, as ``python FILE.py`` would: name only
files that you trust. A package offers maps under the entry point group ``oazoo.translators``; installing it is what says
that its code may run. All end as the same two tuples, ``TRANSLATORS`` and ``EXPORTERS``. See docs/tutorial-own-map.md.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from oazoo.errors import OazooError, TranslationError, UsageError
from oazoo.translators.exporter import Exporter
from oazoo.translators.translator import NAMINGS, Checkpoint, Translation, Translator, offered

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class OwnMap:
    """What a file or a package offers. ``where`` names it in messages."""

    where: str
    translators: tuple[Translator, ...] = ()
    exporters: tuple[Exporter, ...] = ()


@dataclass(frozen=True)
class Plugin:
    """An entry point. One that cannot be used has a ``fault`` and offers nothing."""

    name: str
    package: str
    offers: OwnMap
    fault: str = ""

    def __str__(self) -> str:
        return f"the translator {self.name!r} of the package {self.package!r} cannot be used: {self.fault}"


def load_map(path: Path | str) -> OwnMap:
    """The translators and exporters of a map file, ``.toml`` or ``.py``.

    A Python file is run: load only files that you trust.

    Raises:
        UsageError: there is no such file, or its name has another ending.
        TranslationError: the file is no map; the message says what is wrong, and where.
    """
    path = Path(path)
    if path.suffix not in (".toml", ".py"):
        raise UsageError(f"{path}: a map is a .toml or a .py file")
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.suffix == ".toml":
        from oazoo.translators.toml_map import read_toml_map

        translator, exporters = read_toml_map(path)
        return OwnMap(str(path), (translator,), exporters)
    return _offers(_run(path), str(path))


def _run(path: Path) -> ModuleType:
    """The module of a Python file, run."""
    name = f"oazoo_own_map_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        _guarded(lambda: spec.loader.exec_module(module), f"{path}: the map cannot be run")  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _guarded(call: Callable[[], _Result], what: str) -> _Result:
    """Run somebody else's code; what it raises becomes one message."""
    try:
        return call()
    except (KeyboardInterrupt, MemoryError, OazooError):
        raise
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise TranslationError(
            f"{what}: {type(error).__name__}: {str(error)[:300]} ({Path(at.filename).name}, line {at.lineno})"
        ) from error


def _offers(module: Any, where: str) -> OwnMap:
    """What a module offers, checked."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, kind in (("TRANSLATORS", Translator), ("EXPORTERS", Exporter)):
        entries = getattr(module, name, ())
        if not isinstance(entries, (tuple, list)) or not all(isinstance(entry, kind) for entry in entries):
            raise TranslationError(f"{where}: {name} must be a tuple of {kind.__name__}")
        found[name] = tuple(entries)
    if not found["TRANSLATORS"]:
        raise TranslationError(f"{where}: defines no TRANSLATORS, a tuple of Translator")
    names = [entry.name for entry in found["TRANSLATORS"]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise TranslationError(f"{where}: two translators are named {twice!r}")
    for entry in found["TRANSLATORS"]:
        check_accepts(entry.accepts, where)
    return OwnMap(
        where,
        tuple(replace(entry, translate=_checked(entry, where)) for entry in found["TRANSLATORS"]),
        tuple(replace(entry, build=_guarded_build(entry, where)) for entry in found["EXPORTERS"]),
    )


def check_accepts(accepts: Sequence[Any], where: str) -> None:
    """Raise a TranslationError unless every entry is ``NAMING:ARCHITECTURE``."""
    if not isinstance(accepts, (tuple, list)) or not accepts:
        raise TranslationError(f"{where}: accepts must list what is read, such as 'hf:MyModelForCausalLM'")
    for entry in accepts:
        naming, colon, name = entry.partition(":") if isinstance(entry, str) else ("", "", "")
        if naming not in NAMINGS or not colon or not name:
            raise TranslationError(
                f"{where}: accepts has {str(entry)[:64]!r}, which is not NAMING:ARCHITECTURE; namings: {', '.join(NAMINGS)}"
            )


def _checked(entry: Translator, where: str) -> Callable[[Checkpoint], Translation]:
    what = f"{where}: the translator {entry.name!r} failed"

    def translate(checkpoint: Checkpoint) -> Translation:
        result = _guarded(lambda: entry.translate(checkpoint), what)
        if not isinstance(result, Translation):
            raise TranslationError(f"{what}: it gave {type(result).__name__}, not a Translation")
        return result

    return translate


def _guarded_build(entry: Exporter, where: str) -> Callable[[Any], Any]:
    return lambda config: _guarded(
        lambda: entry.build(config), f"{where}: the exporter {entry.architecture!r} failed"
    )


# -- packages ----------------------------------------------------------------------------------------------------------


@cache
def plugins() -> tuple[Plugin, ...]:
    """Every entry point of the group, loaded; those that cannot be have a fault, and hinder no other."""
    return tuple(_plugin(point) for point in sorted(offered(), key=lambda point: point.name))


def _plugin(point: EntryPoint) -> Plugin:
    package = point.dist.name if point.dist is not None else point.value
    where = f"package {package!r}"
    try:
        offers = _offers(_guarded(point.load, f"{point.value} cannot be imported"), where)
    except OazooError as error:
        return Plugin(point.name, package, OwnMap(where), str(error))
    return Plugin(point.name, package, offers)
