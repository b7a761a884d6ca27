"""The kinds of vocabulary a model can have, and what becomes of each in its file.

The kind is a choice of its own: any model can have any. Each is learned from the training text (but for the bytes) and
travels inside the model file, as one asset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oazoo.text.base import BaseTokenizer
from oazoo.text.characters import ASSET as CHARACTERS
from oazoo.text.characters import CharacterTokenizer
from oazoo.text.files import vocabulary_texts
from oazoo.text.oa_bpe import ASSET as OA_BPE
from oazoo.text.oa_bpe import OaBpeTokenizer
from oazoo.text.tokenizer import Tokenizer
from oazoo.text.train import byte_tokenizer_json, train_byte_level

#: ``byte``: the 256 bytes. ``char``: the characters of the text. ``bpe``: OA's merges over raw bytes (``oa_bpe_v1``).
#: ``words``: byte-level BPE in the manner of GPT-2, with a token that ends a text.
VocabularyKind = Literal["byte", "char", "bpe", "words"]

TOKENIZER_JSON = "tokenizer.json"
#: Assets of a model file that hold a tokenizer; the first that is there counts.
TOKENIZER_ASSETS = (TOKENIZER_JSON, OA_BPE, CHARACTERS)


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary: its tokenizer, the asset that a model file carries it as, and the ids that end a text."""

    tokenizer: BaseTokenizer
    asset: str
    definition: bytes
    eos_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocab_size


def learn_vocabulary(kind: VocabularyKind, files: Sequence[Path], size: int | None = None) -> Vocabulary:
    """The vocabulary of that kind for the text in ``files``.

    Args:
        kind: which.
        files: text and examples; see :func:`oazoo.text.files.vocabulary_texts`. Not read for ``byte``.
        size: tokens at most, for ``bpe`` and ``words``.

    Raises:
        UsageError: a file cannot be read as text, or a size that the kind cannot have.
    """
    if kind == "byte":
        definition = byte_tokenizer_json()
        return Vocabulary(Tokenizer(definition), TOKENIZER_JSON, definition)
    if kind == "char":
        characters = CharacterTokenizer.train(vocabulary_texts(files))
        return Vocabulary(characters, CHARACTERS, characters.to_bytes())
    assert size is not None, f"a vocabulary of kind {kind} has a size"
    if kind == "bpe":
        merges = OaBpeTokenizer.train(vocabulary_texts(files, whole=True), size)
        return Vocabulary(merges, OA_BPE, merges.to_bytes())
    definition = train_byte_level(vocabulary_texts(files), size)
    ends = (0,)  # the control token that ends a text comes first
    return Vocabulary(Tokenizer(definition, eos_ids=ends), TOKENIZER_JSON, definition, ends)


def tokenizer_of(assets: Mapping[str, bytes], settings: Mapping[str, Any]) -> BaseTokenizer | None:
    """The tokenizer that a model file carries, or None.

    Args:
        assets: by name; see ``TOKENIZER_ASSETS``.
        settings: may have ``bos_id``, ``eos_ids`` and ``add_bos``, for a tokenizer.json.

    Raises:
        TokenizerError: it is damaged.
    """
    if TOKENIZER_JSON in assets:
        return Tokenizer(
            assets[TOKENIZER_JSON],
            bos_id=settings.get("bos_id"),
            eos_ids=listed_ids(settings.get("eos_ids")),
            add_bos=settings.get("add_bos"),
        )
    if OA_BPE in assets:
        return OaBpeTokenizer.from_bytes(assets[OA_BPE])
    return CharacterTokenizer.from_bytes(assets[CHARACTERS]) if CHARACTERS in assets else None


def listed_ids(ids: Any) -> Sequence[Any]:
    """The end tokens as a list, which a file may give as one id, as a list, or not at all."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple, set, frozenset)) else (ids,)
