"""Making tokenizers: byte-level BPE learned from text, and plain bytes, as ``tokenizer.json`` files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from oazoo.errors import TokenizerError, UsageError
from oazoo.text.base import BaseTokenizer
from oazoo.text.byte_alphabet import SPELLING
from oazoo.text.characters import HEADER as CHARACTERS_HEADER
from oazoo.text.characters import CharacterTokenizer
from oazoo.text.oa_bpe import HEADER, OaBpeTokenizer
from oazoo.text.tokenizer import Tokenizer, guard

#: The control token that ends a document, unless others are asked for.
END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 1 << 20


def train_byte_level(
    texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = (END_OF_TEXT,)
) -> bytes:
    """A byte-level BPE vocabulary in the manner of GPT-2, as the bytes of a ``tokenizer.json``.

    The control tokens get the first ids, the 256 bytes follow, then the merges. Text is split into words first, with the
    space in front of a word as part of it; no merge crosses a word's border. The same texts in the same order give the
    same file.

    Args:
        texts: what to learn from, in pieces of any length; pairs are not counted across two pieces.
        vocab_size: tokens in all. Fewer result when the texts have no more pairs to merge.
        special_tokens: names of the control tokens, in the order of their ids.

    Raises:
        UsageError: a vocabulary too small for the bytes and the control tokens or above 2**20, a control token that is
            empty or comes twice.
        TokenizerError: the library fails.
    """
    named = list(special_tokens)
    if any(not name for name in named) or len(set(named)) < len(named):
        raise UsageError("control tokens must have names, each its own")
    least = 256 + len(named)
    if not least <= vocab_size <= MAX_VOCABULARY:
        raise UsageError(
            f"a vocabulary of {vocab_size} tokens cannot be: 256 bytes and {len(named)} control tokens are part of it "
            f"({least}), and at most {MAX_VOCABULARY} are possible"
        )
    library = _byte_level({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(name, normalized=False, special=True) for name in named],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    failures: list[Exception] = []

    def readable() -> Iterator[str]:
        try:
            yield from texts
        except Exception as error:  # the library would turn it into one of its own
            failures.append(error)

    with guard("the vocabulary cannot be learned"):
        library.train_from_iterator(readable(), trainer)
    if failures:
        raise failures[0]
    return str(library.to_str()).encode("utf-8")


def byte_tokenizer_json() -> bytes:
    """A ``tokenizer.json`` in which every byte is a token and its value is its id: :class:`ByteTokenizer` as a file."""
    library = _byte_level({character: byte for byte, character in enumerate(SPELLING)}, [], split=False)
    return str(library.to_str()).encode("utf-8")


def tokenizer_from_file(
    data: bytes | bytearray | memoryview, *, eos_ids: Sequence[int] = ()
) -> BaseTokenizer:
    """The tokenizer that a file's bytes define: a ``tokenizer.json``, or an ``oa_bpe_v1`` or ``oazoo_char_v1`` vocabulary.

    Raises:
        TokenizerError: it is none of these, or damaged.
    """
    start = bytes(data[:64]).lstrip()
    if start.startswith(HEADER.encode()):
        return OaBpeTokenizer.from_bytes(data)
    if start.startswith(CHARACTERS_HEADER.encode()):
        return CharacterTokenizer.from_bytes(data)
    if start.startswith(b"{"):
        return Tokenizer(data, eos_ids=eos_ids)
    raise TokenizerError(f"is neither a tokenizer.json nor an {HEADER} or {CHARACTERS_HEADER} vocabulary")


def _byte_level(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, split: bool = True
) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    library.decoder = decoders.ByteLevel()
    return library
