"""What travels with the weights: the tokenizer, the chat template, special tokens and generation defaults."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oazoo.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Text on which two tokenizers of different split rules disagree: digits, contractions, runs of space, line
#: ends, several scripts, a symbol of four bytes, a control character.
PROBE = (
    "12345 don't\n\n  x  I'LL we've\t\tA1b2 3.14  café naïve 你好 Привет 😀👍🏽 foo_bar(x[0])!?\r\n"
    "  indented\n\n\n   '''quoted''' <tag> 1,000,000 e^x \x01 end "
)


@dataclass(frozen=True)
class Assets:
    """The parts of a checkpoint that are not weights, ready to store.

    ``tokenizer`` is the text of a ``tokenizer.json`` in UTF-8. ``tokens`` holds ``bos_token``,
    ``eos_token``, ``unk_token`` and ``pad_token`` as texts (for chat templates). ``generation`` holds
    ``bos_id``, ``eos_ids`` (every id that ends a sequence), ``pad_id`` and the sampling defaults that the
    checkpoint states.
    """

    tokenizer: bytes | None = None
    chat_template: str | None = None
    tokens: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def files(self) -> dict[str, bytes]:
        """Name → bytes of the assets stored in an ``.oam``."""
        stored: dict[str, bytes] = {}
        if self.tokenizer is not None:
            stored["asset/tokenizer.json"] = self.tokenizer
        if self.chat_template:
            stored["asset/chat_template.jinja"] = self.chat_template.encode("utf-8", "surrogatepass")
        return stored


def load_tokenizer(data: bytes, where: str) -> Tokenizer:
    """A ``tokenizers.Tokenizer`` from the bytes of a tokenizer.json.

    Raises:
        TokenizerError: the library does not accept it.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(data)
    # The library raises plain Exception, and its panics derive from BaseException.
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise TokenizerError(
            f"{where}: the tokenizer cannot be used: {str(error)[:200]}; convert the weights alone with --no-tokenizer"
        ) from error


def check_vocabulary(tokenizer: Tokenizer, rows: int, where: str) -> str | None:
    """Compare the ids of a tokenizer with the rows of the embedding.

    Returns:
        A note with both numbers when the embedding has rows without a token; ``None`` when they agree.

    Raises:
        TokenizerError: a token has an id without a row.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise TokenizerError(f"{where}: the tokenizer has no tokens")
    token, largest = max(vocabulary.items(), key=lambda item: item[1])
    if largest >= rows:
        raise TokenizerError(
            f"{where}: the tokenizer's token {token[:64]!r} has id {largest}, but the embedding has only {rows} rows "
            f"(the tokenizer has {len(vocabulary)} tokens); the tokenizer belongs to another model, or added tokens "
            "were not trained. Convert the weights alone with --no-tokenizer"
        )
    if len(vocabulary) < rows:
        return f"the embedding has {rows} rows, the tokenizer {len(vocabulary)} tokens: rows without a token are kept"
    return None


def check_equal(first: Tokenizer, second: Tokenizer, where: str) -> None:
    """Check that two tokenizers give the same ids for the probe text, with and without special tokens.

    Raises:
        TokenizerError: they do not.
    """
    for special in (False, True):
        a = first.encode(PROBE, add_special_tokens=special).ids
        b = second.encode(PROBE, add_special_tokens=special).ids
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            raise TokenizerError(
                f"{where}: the stored tokenizer differs from the source's on the probe text, from token {at}"
            )


def byte_level_bpe(
    vocab: Mapping[str, int], merges: Iterable[Any], *, whole_words: bool = False
) -> dict[str, Any]:
    """The ``model`` object of a byte-level BPE; ``whole_words``: a word that is a token is taken without merging."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole_words,
        "vocab": dict(vocab),
        "merges": list(merges),
    }


def tokenizer_json(
    *,
    model: Mapping[str, Any],
    added: Iterable[tuple[int, str, bool]],
    normalizer: Mapping[str, Any] | None,
    pre_tokenizer: Mapping[str, Any] | None,
    decoder: Mapping[str, Any],
    prefix: tuple[str, int] | None,
    suffix: tuple[str, int] | None,
    eaters: Container[str] = (),
) -> bytes:
    """Assemble a tokenizer.json.

    Args:
        model: the ``model`` object.
        added: (id, text, special) of the tokens that are recognised in the text before it is split.
        normalizer, pre_tokenizer, decoder: their objects.
        prefix, suffix: (text, id) of the token put before or after every sequence, if any.
        eaters: texts of added tokens that take the space after them away.
    """
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    second: list[dict[str, Any]] = [{"Sequence": {"id": "B", "type_id": 1}}]
    specials: dict[str, Any] = {}
    for token, before in ((prefix, True), (suffix, False)):
        if token is None:
            continue
        text, number = token
        specials[text] = {"id": text, "ids": [number], "tokens": [text]}
        for pieces, kind in ((template, 0), (pair, 0), (second, 1)):
            pieces.insert(0 if before else len(pieces), {"SpecialToken": {"id": text, "type_id": kind}})
    processor = None
    if specials:
        processor = {
            "type": "TemplateProcessing",
            "single": template,
            "pair": pair + second,
            "special_tokens": specials,
        }
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": text in eaters,
                "normalized": False,
                "special": special,
            }
            for number, text, special in added
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": processor,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
