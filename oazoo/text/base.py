"""What every tokenizer here can do, whatever its vocabulary is made of."""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from oazoo.errors import TokenizerError
from oazoo.text.streaming import StreamDecoder

#: The shape of a control token in the ``<|name|>`` family of vocabularies (also with the full-width bars of
#: DeepSeek's).
_CONTROL_TOKEN = re.compile(r"<[|｜][^\s<>|｜]{1,64}[|｜]>")

#: More text than any context holds: a longer prompt is refused before it is cut into tokens.
MAX_TEXT_CHARS = 1 << 24


class BaseTokenizer(ABC):
    """Text to token ids and back.

    ``bos_id`` is the id that starts a text, or None; ``eos_ids`` are all ids that end one (chat models have
    several).
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, added and special ones included. Ids need not be consecutive."""

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, int]:
        """The control tokens: text → id. They carry no text of their own when decoded."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (``Ġthe``, ``▁the``, ``<|im_end|>``), or None for an id
        without one.
        """

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""

    @abstractmethod
    def _encode_plain(self, text: str, allow_special: bool) -> list[int]:
        """Ids of ``text`` with nothing added around them."""

    @abstractmethod
    def stream(self, *, skip_special: bool = True, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for ids that come one at a time; see :meth:`decode` for the arguments."""

    #: Ids that the tokenizer's definition puts before and after a text.
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """The ids of ``text``.

        With ``add_special_tokens`` the ids that the tokenizer's definition puts around a text are added; a
        beginning token that the text already starts with is not added again. With ``allow_special`` the names
        of control tokens in the text (``<|im_end|>``) become those tokens; without, they are ordinary text.

        Raises :class:`TokenizerError` when the text is not valid Unicode, too long, or cannot be expressed.
        """
        _check_text(text)
        ids = self._encode_plain(text, allow_special)
        if not add_special_tokens:
            return ids
        return [*self._prefix_for(ids), *ids, *self.suffix_ids]

    def encode_prompt(self, text: str, *, allow_special: bool = True) -> list[int]:
        """The ids of a text that is to be continued: as :meth:`encode`, but nothing that would end it is
        appended.
        """
        _check_text(text)
        ids = self._encode_plain(text, allow_special)
        return [*self._prefix_for(ids), *ids]

    def _prefix_for(self, ids: Sequence[int]) -> tuple[int, ...]:
        if ids and self.bos_id is not None and ids[0] == self.bos_id:
            return tuple(i for i in self.prefix_ids if i != self.bos_id)
        return self.prefix_ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, after: Sequence[int] = ()) -> str:
        """The text of ``ids``.

        ``after`` are the ids that come before in the same text: a vocabulary that drops the first space of a
        text must not drop it in the middle. Control tokens are left out unless ``skip_special`` is false.
        Bytes that are no valid UTF-8 become U+FFFD. An id without a token (the padding rows of an embedding)
        decodes to nothing; something that cannot be an id at all (negative, above 2**32, not an integer)
        raises :class:`TokenizerError`.
        """
        decoder = self.stream(skip_special=skip_special, after=after)
        pieces = [decoder.push(token_id) for token_id in ids]
        pieces.append(decoder.flush())
        return "".join(pieces)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token."""
        token = self.token(token_id)
        return token is not None and self.special_tokens.get(token) == token_id

    def check_special(self, text: str, *, ignore: Collection[str] = ()) -> None:
        """Refuse text with a control token that this vocabulary does not have.

        Only the ``<|name|>`` spelling is looked at, and only when the vocabulary itself has tokens of that
        spelling: there a name that is not in it is a mistake (another family's prompt format, a typing error)
        which the model would read as a handful of meaningless characters. ``ignore`` are spellings that are
        meant as plain text.
        """
        known = [t for t in self.special_tokens if _CONTROL_TOKEN.fullmatch(t)]
        if not known:
            return
        for match in _CONTROL_TOKEN.finditer(text):
            name = match.group()
            if name in ignore or self.token_id(name) is not None:
                continue
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            meant = f"did you mean {near[0]}? " if near else f"it has {', '.join(sorted(known)[:6])}. "
            raise TokenizerError(
                f"the prompt has the special token {name} at character {match.start()}, which this model's "
                f"vocabulary does not have: {meant}To have it read as plain text, use --no-special "
                f"(allow_special=False)."
            )

    @staticmethod
    def control_tokens_in(text: str) -> set[str]:
        """The control-token spellings (``<|name|>``) that occur in ``text``."""
        return set(_CONTROL_TOKEN.findall(text))


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
    if len(text) > MAX_TEXT_CHARS:
        raise TokenizerError(
            f"the text has {len(text)} characters; at most {MAX_TEXT_CHARS} are encoded at once"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text is not valid Unicode: lone surrogate at character {error.start}. Was a file read with "
            f"the wrong encoding?"
        ) from None
