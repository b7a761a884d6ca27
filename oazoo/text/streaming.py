"""Decoding token by token: whole characters only, and in sum exactly the text that decoding at once gives.

A token is not a piece of text but a piece of bytes: an emoji may be spread over four of them. The decoders
here hold bytes back until a character is complete; what is still incomplete at the end becomes U+FFFD in
:meth:`flush`.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from oazoo.errors import TokenizerError

#: How many ids before the first new one a re-decoding decoder keeps, so that its rules see a text's middle as
#: a middle.
_CONTEXT_IDS = 8


class StreamDecoder(ABC):
    """Turns ids into text as they come. Not for use by two threads at once."""

    def push(self, token_id: int) -> str:
        """Take one more id; the text that is now certain, often empty."""
        try:
            token_id = token_id.__index__()
        except AttributeError:
            raise TokenizerError(f"a token id must be an integer, not {type(token_id).__name__}") from None
        if not 0 <= token_id < 1 << 32:
            raise TokenizerError(f"{token_id} is not a token id: ids go from 0 to 2**32 - 1")
        return self._push(token_id)

    @abstractmethod
    def _push(self, token_id: int) -> str: ...

    @abstractmethod
    def flush(self) -> str:
        """The text still held back. Call once, at the end."""


class ByteStreamDecoder(StreamDecoder):
    """For vocabularies whose tokens are byte strings.

    ``token_bytes(id, first)`` gives a token's bytes, None for one to leave out; ``first`` is true until a
    token with bytes has been seen. Up to ``strip`` leading spaces of the text are dropped.
    """

    def __init__(
        self, token_bytes: Callable[[int, bool], bytes | None], *, strip: int = 0, first: bool = True
    ) -> None:
        self._token_bytes = token_bytes
        self._strip = strip
        self._first = first
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _push(self, token_id: int) -> str:
        data = self._token_bytes(token_id, self._first)
        if data is None:
            return ""
        self._first = False
        return self._without_leading(self._utf8.decode(data))

    def flush(self) -> str:
        return self._without_leading(self._utf8.decode(b"", True))

    def _without_leading(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text = text[1:]
                self._strip -= 1
        return text


class RedecodingStreamDecoder(StreamDecoder):
    """For any other vocabulary: decodes everything so far again and gives out what has been added.

    The end of the text is held back while it may still change: as long as it ends in U+FFFD (an incomplete
    character), or does not go on from what was given out.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(after[-_CONTEXT_IDS:])
        self._given = decode(self._ids) if self._ids else ""

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("�") or not text.startswith(self._given):
            return ""
        return self._give(text)

    def flush(self) -> str:
        text = self._decode(self._ids) if self._ids else ""
        return self._give(text) if text.startswith(self._given) else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given = text
        return new
