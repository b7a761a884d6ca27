"""JSON from files, read strictly and in bounded memory.

``json.loads`` keeps the last of two equal keys, recurses as deep as the text says and builds values many times larger than
the text. Headers have a fixed, flat form, so a :class:`Cursor` walks the members of an object and leaves each value to the
caller, who knows how large it may be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats.messages import quoted

_BLANKS = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {quoted(twice)} comes twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_SURROGATE = re.compile("[\ud800-\udfff]")
_DECODER = json.JSONDecoder()
_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
#: Longest text of one small value (a tensor's entry in a header).
SMALL = 8192


def decode_utf8(data: bytes, what: str) -> str:
    """``data`` as text; FormatError names the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{what}: is not UTF-8 (byte {error.start})") from error


def loads(text: str, what: str, *, limit: int = 1 << 24) -> Any:
    """Parse a whole JSON text of at most ``limit`` characters; refuses repeated keys, NaN, and deep nesting.

    Raises:
        FormatError: any of these, or the text is not JSON. ``what`` names it in the message.
    """
    if len(text) > limit:
        raise FormatError(f"{what}: {len(text)} characters of JSON; at most {limit} are read")
    try:
        return _STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: is not JSON: {error}") from error


def load_object(text: str, what: str, *, limit: int = 1 << 24) -> dict[str, Any]:
    """As :func:`loads`, for a text that must hold one object."""
    value = loads(text, what, limit=limit)
    if not isinstance(value, dict):
        raise FormatError(f"{what}: holds {_kind(value)}, not a JSON object")
    return value


class Cursor:
    """A position in a JSON text, moved forward by reading values."""

    def __init__(self, text: str, what: str) -> None:
        self.text = text
        self.what = what
        self.position = 0

    def keys(self, what: str) -> Iterator[str]:
        """The keys of the object here, in order. The caller reads each value with this cursor before the next key.

        Raises:
            FormatError: there is no object, or a key comes twice. ``what`` names the object in messages.
        """
        self._expect("{", what)
        seen: set[str] = set()
        if self.peek() == "}":
            self.position += 1
            return
        while True:
            key = self.string("a key")
            if key in seen:
                raise FormatError(f"{self.what}: {what}: {quoted(key)} comes twice")
            seen.add(key)
            self._expect(":", what)
            yield key
            if self.peek() == "}":
                self.position += 1
                return
            self._expect(",", what)

    def string(self, what: str) -> str:
        """The string here."""
        if self.peek() != '"':
            raise FormatError(f"{self.what}: {what} must be a string (character {self.position})")
        try:
            value, self.position = _DECODER.raw_decode(self.text, self.position)
        except ValueError as error:
            raise FormatError(f"{self.what}: {what}: is not JSON: {error}") from error
        assert isinstance(value, str)
        if _SURROGATE.search(value):
            raise FormatError(f"{self.what}: {what} holds half of a surrogate pair")
        return value

    def value(self, what: str) -> Any:
        """The value here, of any kind and size."""
        self.peek()
        try:
            value, self.position = _STRICT.raw_decode(self.text, self.position)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.what}: {what}: is not JSON: {error}") from error
        return value

    def small_object(self, name: str) -> dict[str, Any]:
        """The object here, the value of ``name``, of at most :data:`SMALL` characters and without objects inside."""
        if self.peek() != "{":
            raise FormatError(f"{self.what}: {quoted(name)} must be an object (character {self.position})")
        stop = self.text.find("}", self.position, self.position + SMALL)
        if stop < 0:
            raise FormatError(f"{self.what}: {quoted(name)} has no end within {SMALL} characters")
        entry = self.text[self.position : stop + 1]
        try:
            value, end = _STRICT.raw_decode(entry)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self.what}: {quoted(name)}: is not JSON: {error}") from error
        if end != len(entry):
            raise FormatError(
                f"{self.what}: {quoted(name)} has a brace inside (character {self.position + end})"
            )
        assert isinstance(value, dict)
        self.position = stop + 1
        return value

    def finish(self, blanks: str) -> None:
        """Check that only characters of ``blanks`` follow."""
        if self.text[self.position :].strip(blanks):
            raise FormatError(f"{self.what}: text after the JSON object (character {self.position})")

    def peek(self) -> str:
        """The next character that is not white space ("" at the end)."""
        here = self.text[self.position : self.position + 1]
        if here in _BLANKS:
            found = _SPACE.match(self.text, self.position)
            assert found is not None
            self.position = found.end()
            here = self.text[self.position : self.position + 1]
        return here

    def _expect(self, character: str, what: str) -> None:
        found = self.peek()
        if found != character:
            raise FormatError(
                f"{self.what}: {what}: expected {character!r} at character {self.position}, found {found or 'the end'!r}"
            )
        self.position += 1


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )
