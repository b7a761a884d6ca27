"""Checked access to settings from a file: strict JSON, typed fields, messages that name file and key."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oazoo.errors import TranslationError
from oazoo.formats import strict_json
from oazoo.formats.mapped import open_regular

#: Largest JSON file read whole. tokenizer.json of a 256k vocabulary is about 35 MB.
MAX_JSON_BYTES = 256 << 20


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file from an untrusted source.

    Raises:
        OazooError: unreadable, larger than ``limit`` bytes, not UTF-8, not JSON, repeated keys, NaN or
        Infinity,
            or nested too deeply.
    """
    return parse_json(read_small(path, limit), str(path), limit)


def read_small(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise TranslationError(f"{path}: larger than the {limit} bytes accepted for such a file")
    return data


def parse_json(data: bytes, where: str, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON bytes strictly; see :func:`read_json` for what is refused."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TranslationError(f"{where}: not UTF-8 text (byte {error.start})") from error
    return strict_json.loads(text, where, limit=limit)


class Settings:
    """A mapping of settings with typed getters.

    ``None`` counts as absent. A getter without a default raises :class:`~oazoo.errors.TranslationError`
    when the key is absent; every getter does when the value has another type. ``taken`` holds the keys that
    were asked for, so that a caller can tell which settings nobody looked at.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise TranslationError(f"{where}: expected an object, found {type(values).__name__}")
        self.values: Mapping[str, Any] = values
        self.where = where
        self.taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """The value as it is, ``None`` if absent."""
        self.taken.add(key)
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number (never a bool or a fraction)."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        if abs(value) >= 1 << 63:
            raise TranslationError(f"{self.where}: {key} is too large a number ({str(value)[:24]}…)")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(key, value, "a number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            raise TranslationError(f"{self.where}: {key} = {str(value)[:24]} is not a finite number")
        return result

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; empty if absent."""
        value = self.get(key)
        if value is None:
            return ()
        items = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 31:
                raise self._wrong(key, value, "a token id or a list of token ids")
        return tuple(items)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise TranslationError(f"{self.where}: {key} is missing")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> TranslationError:
        kind = type(value).__name__
        return TranslationError(f"{self.where}: {key} must be {expected}, found {kind} {str(value)[:40]!r}")
