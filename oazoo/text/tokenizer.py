"""Tokenizers: the one defined by a ``tokenizer.json``, and plain bytes.

The ``tokenizers`` library does the encoding, exactly as the file says. Decoding is done here for the two
kinds of vocabulary that language models use (byte-level BPE, and SentencePiece pieces with byte fallback),
because a stream needs each token's bytes and the library only gives text; its own decoder is used for every
other kind.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

import tokenizers

from oazoo.errors import TokenizerError
from oazoo.text.base import BaseTokenizer
from oazoo.text.byte_alphabet import ALPHABET
from oazoo.text.streaming import ByteStreamDecoder, RedecodingStreamDecoder, StreamDecoder

#: The largest published tokenizer.json files are about 35 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20


class Tokenizer(BaseTokenizer):
    """The tokenizer that a ``tokenizer.json`` defines.

    Truncation and padding that the file may ask for are switched off: a prompt is never cut in silence.

    ``data`` is the file's bytes. ``bos_id`` and ``eos_ids`` come from the model's configuration, since the
    file does not say which tokens begin and end a text. ``add_bos`` overrides whether a text begins with
    ``bos_id``; None follows the file's post-processor. Raises :class:`TokenizerError` for a file that is not
    one, is damaged, or uses something unknown.
    """

    def __init__(
        self,
        data: bytes | bytearray | memoryview,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
    ) -> None:
        if len(data) > MAX_TOKENIZER_BYTES:
            raise TokenizerError(
                f"the tokenizer is {len(data)} bytes long; at most {MAX_TOKENIZER_BYTES} are read"
            )
        with guard("the tokenizer.json is damaged or of an unknown kind"):
            self._library = tokenizers.Tokenizer.from_buffer(bytes(data))
            self._library.no_truncation()
            self._library.no_padding()
            added = self._library.get_added_tokens_decoder()
        self._lock = threading.Lock()
        self._specials = {t.content: i for i, t in added.items() if t.special}
        self._special_ids = frozenset(self._specials.values())
        self._added = {i: t.content for i, t in added.items()}
        self._bytes: dict[int, bytes | None] = {}
        self.bos_id = self._checked_id("beginning", bos_id)
        self.eos_ids = tuple(
            dict.fromkeys(i for e in eos_ids if (i := self._checked_id("end", e)) is not None)
        )
        self.prefix_ids, self.suffix_ids = self._surroundings()
        if add_bos is not None:
            if add_bos and self.bos_id is None:
                raise TokenizerError(
                    "the model asks for a beginning token before each text but does not name one"
                )
            rest = tuple(i for i in self.prefix_ids if i != self.bos_id)
            self.prefix_ids = (self.bos_id, *rest) if add_bos and self.bos_id is not None else rest
        self._piece = _piece_rule(self._decoder_definition())

    def _checked_id(self, role: str, token_id: int | None) -> int | None:
        if token_id is None:
            return None
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 1 << 32:
            raise TokenizerError(f"the {role} token id {token_id!r} is not a token id")
        return token_id

    def _surroundings(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the post-processor puts before and after a text."""
        if self._library.post_processor is None:
            return (), ()
        with guard("the tokenizer's post-processor is broken"):
            plain = self._library.encode("a", add_special_tokens=False).ids
            full = self._library.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
        raise TokenizerError(
            "the tokenizer's post-processor changes the text's own tokens, which is not supported"
        )

    def _decoder_definition(self) -> Mapping[str, Any] | None:
        decoder = self._library.decoder
        if decoder is None:
            return None
        with guard("the tokenizer's decoder is of an unknown kind"):
            definition = json.loads(decoder.__getstate__())
        return definition if isinstance(definition, dict) else None

    @cached_property
    def vocab_size(self) -> int:
        return int(self._library.get_vocab_size(with_added_tokens=True))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return MappingProxyType(self._specials)

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Every token that was added to the trained vocabulary, control tokens included: id → text."""
        return MappingProxyType(self._added)

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < 1 << 32:
            return None
        token: str | None = self._library.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        found: int | None = self._library.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _encode_plain(self, text: str, allow_special: bool) -> list[int]:
        # The switch belongs to the library's object, so two threads must not encode with it set differently.
        with self._lock, guard("the text cannot be expressed in this vocabulary"):
            self._library.encode_special_tokens = not allow_special
            return list(self._library.encode(text, add_special_tokens=False).ids)

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> StreamDecoder:
        if self._piece is None:
            return RedecodingStreamDecoder(lambda ids: self._library_decode(ids, skip_special), after)
        begins = all(self.is_special(i) or self._token_bytes(i) is None for i in after)
        rule = self._piece

        def token_bytes(token_id: int, first: bool) -> bytes | None:
            if skip_special and token_id in self._special_ids:
                return None
            data = self._token_bytes(token_id)
            if data is not None and first and rule.first_drops and token_id not in self._added:
                return data.replace(b" ", b"")
            return data

        return ByteStreamDecoder(token_bytes, strip=rule.strip if begins else 0, first=begins)

    def _token_bytes(self, token_id: int) -> bytes | None:
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes | None:
        if token_id in self._added:  # spelled as it reads: no byte alphabet, no space marker
            return self._added[token_id].encode("utf-8")
        token = self.token(token_id)
        return None if token is None or self._piece is None else self._piece.to_bytes(token)

    def _library_decode(self, ids: Sequence[int], skip_special: bool) -> str:
        with guard("these ids cannot be decoded"):
            return str(self._library.decode(list(ids), skip_special_tokens=skip_special))


class ByteTokenizer(BaseTokenizer):
    """Every byte is a token: 256 ids, no control tokens, nothing added around a text."""

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return MappingProxyType({})

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < 256:
            return None
        return chr(token_id) if 0x20 <= token_id < 0x7F else f"<0x{token_id:02X}>"

    def token_id(self, token: str) -> int | None:
        return next((i for i in range(256) if self.token(i) == token), None)

    def _encode_plain(self, text: str, allow_special: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> StreamDecoder:
        return ByteStreamDecoder(lambda token_id, _: bytes([token_id]) if token_id < 256 else None)


class _PieceRule:
    """How a vocabulary spells bytes: ``to_bytes(token)``, and what becomes of a text's first spaces."""

    def __init__(
        self, to_bytes: Callable[[str], bytes], *, strip: int = 0, first_drops: bool = False
    ) -> None:
        self.to_bytes = to_bytes
        self.strip = strip
        self.first_drops = first_drops


def _piece_rule(definition: Mapping[str, Any] | None) -> _PieceRule | None:
    """The rule for a ``decoder`` of a tokenizer.json, or None for one that only the library knows."""
    kind = definition.get("type") if definition else None
    if definition is None:
        return None
    if kind == "ByteLevel":
        return _PieceRule(_byte_level_bytes)
    if kind == "Metaspace":
        marker = str(definition.get("replacement", "▁"))
        drops = definition.get("prepend_scheme", "always") != "never"
        return _PieceRule(lambda token: token.replace(marker, " ").encode("utf-8"), first_drops=drops)
    if kind == "Sequence":
        return _sentencepiece_rule(definition.get("decoders"))
    return None


def _sentencepiece_rule(steps: Any) -> _PieceRule | None:
    """Replace(marker → space), ByteFallback, Fuse and perhaps Strip(n leading spaces): what SentencePiece
    models have.
    """
    if not isinstance(steps, list) or len(steps) not in (3, 4) or not all(isinstance(s, dict) for s in steps):
        return None
    if [s.get("type") for s in steps] != ["Replace", "ByteFallback", "Fuse", "Strip"][: len(steps)]:
        return None
    pattern = steps[0].get("pattern")
    marker = pattern.get("String") if isinstance(pattern, dict) else None
    content = steps[0].get("content")
    if not isinstance(marker, str) or not marker or not isinstance(content, str):
        return None
    strip = 0
    if len(steps) == 4:
        if steps[3].get("content") != " " or steps[3].get("stop") != 0:
            return None
        strip = int(steps[3].get("start", 0))

    def to_bytes(token: str) -> bytes:
        value = _fallback_byte(token)
        return bytes([value]) if value is not None else token.replace(marker, content).encode("utf-8")

    return _PieceRule(to_bytes, strip=strip)


def _fallback_byte(token: str) -> int | None:
    """The byte that a ``<0xE2>`` token stands for, or None."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([ALPHABET[c] for c in token])
    except KeyError:  # not spelled in the byte alphabet: the token is its own text
        return token.encode("utf-8")


@contextmanager
def guard(what: str) -> Iterator[None]:
    """Failures inside the library as a TokenizerError, its panics included (they are no ``Exception``)."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        detail = " ".join(str(error).split())[:300]
        raise TokenizerError(f"{what}: {detail or type(error).__name__}") from error
