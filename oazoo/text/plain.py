"""Keeping names of control tokens in a message from becoming those tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from oazoo.text.base import BaseTokenizer


class PlainText:
    """Hides chosen spellings from a chat template and its tokenizer, and puts them back as plain text.

    A template mixes its own control tokens with the messages, and afterwards nobody can tell whose they are.
    So each name in a message is replaced before by a mark that templates leave alone: private-use characters
    around a number that nobody can foresee.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = sorted(
            names, key=len, reverse=True
        )  # of two names that begin alike the longer one counts
        self._nonce = secrets.randbits(63)
        self._find = re.compile("|".join(map(re.escape, self._names))) if self._names else None
        self._mark = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")

    def hide(self, text: str) -> str:
        """``text`` with each of the names as a mark."""
        if self._find is None:
            return text
        return self._find.sub(lambda hit: f"\ue000{self._nonce}:{self._names.index(hit.group())}\ue001", text)

    def encode(self, text: str, tokenizer: BaseTokenizer, *, begins: bool = True) -> list[int]:
        """The prompt ids of a text with marks: what they stand for as plain text, everything else as usual.

        A text that does not begin but goes on gets no beginning token.
        """
        pieces = self._mark.split(text)  # text, number, text, number, …, text
        if begins:
            ids = tokenizer.encode_prompt(pieces[0])
        else:
            ids = tokenizer.encode(pieces[0], add_special_tokens=False)
        for number, after in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += tokenizer.encode(self._names[int(number)], add_special_tokens=False, allow_special=False)
            ids += tokenizer.encode(after, add_special_tokens=False)
        return ids
