"""Characters as tokens: each Unicode code point that a text has, in order, is one.

A vocabulary file is ASCII text: ``oazoo_char_v1``, the number of characters, then one code point a line, ascending, as a
decimal number. Line *i* after those is id *i*. Nothing is normalised, and there is no token for what is unknown: every
id is a character that the training text had, and a text with any other is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from oazoo.errors import TokenizerError, UsageError
from oazoo.text.base import BaseTokenizer
from oazoo.text.streaming import ByteStreamDecoder, StreamDecoder

HEADER = "oazoo_char_v1"
#: The name under which a model file carries a vocabulary.
ASSET = "oazoo_char_v1.txt"
#: Code points there are, and eight characters for each.
MAX_CHARACTERS = 0x110000
MAX_FILE_BYTES = 64 + 8 * MAX_CHARACTERS

_SURROGATES = range(0xD800, 0xE000)


class CharacterTokenizer(BaseTokenizer):
    """One token a character, no control tokens, nothing added around a text.

    ``characters`` are code points, ascending. Raises :class:`TokenizerError` for one that is none, or out of order.
    """

    def __init__(self, characters: Sequence[int]) -> None:
        before = -1
        for index, point in enumerate(characters):
            if not before < point < MAX_CHARACTERS or point in _SURROGATES:
                raise TokenizerError(
                    f"character {index} of the vocabulary is code point {point}: they must be characters, ascending"
                )
            before = point
        if not characters:
            raise TokenizerError("the vocabulary has no characters")
        self._characters = tuple(map(chr, characters))
        self._ids = {character: index for index, character in enumerate(self._characters)}

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read a vocabulary file; :class:`TokenizerError` says which line is wrong."""
        if len(data) > MAX_FILE_BYTES:
            raise TokenizerError(
                f"the vocabulary file has {len(data)} bytes; at most {MAX_FILE_BYTES} are read"
            )
        lines = bytes(data).replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
        if lines[0] != HEADER.encode():
            raise TokenizerError(f"is no {HEADER} vocabulary: its first line is not {HEADER!r}")
        for number, line in enumerate(lines[1:], 2):
            if re.fullmatch(rb"[0-9]{1,7}", line) is None:
                raise TokenizerError(f"line {number} of the vocabulary file is not a number: {line[:40]!r}")
        if len(lines) < 2 or int(lines[1]) != len(lines) - 2:
            told = f"says that it has {int(lines[1])}" if len(lines) > 1 else "does not say how many it has"
            raise TokenizerError(
                f"the vocabulary file {told} characters, but {max(0, len(lines) - 2)} lines follow"
            )
        return cls([int(line) for line in lines[2:]])

    def to_bytes(self) -> bytes:
        """The vocabulary file."""
        return "\n".join(
            [HEADER, str(len(self._characters)), *(str(ord(c)) for c in self._characters), ""]
        ).encode()

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """The vocabulary of all characters in ``texts``.

        Raises:
            UsageError: there are none.
        """
        found: set[str] = set()
        for text in texts:
            found.update(text)
        if not found:
            raise UsageError("there are no characters to make a vocabulary of: the data is empty")
        return cls(sorted(map(ord, found)))

    @property
    def vocab_size(self) -> int:
        return len(self._characters)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return MappingProxyType({})

    def token(self, token_id: int) -> str | None:
        return self._characters[token_id] if 0 <= token_id < len(self._characters) else None

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def _encode_plain(self, text: str, allow_special: bool) -> list[int]:
        ids = [self._ids.get(character, -1) for character in text]
        if ids and min(ids) < 0:
            place = ids.index(-1)
            line = text.count("\n", 0, place) + 1
            raise TokenizerError(
                f"{text[place]!r} (U+{ord(text[place]):04X}), character {place + 1} of the text, in its line {line}, is "
                f"none of the {self.vocab_size} characters of the vocabulary: take it out, or train on text that has it"
            )
        return ids

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> StreamDecoder:
        def encoded(token_id: int, first: bool) -> bytes | None:
            token = self.token(token_id)
            return None if token is None else token.encode("utf-8")

        return ByteStreamDecoder(encoded)
