"""Real tokenizers of the kinds that language models use, built here with the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "In 1969, 12345 people visited; café naïve 你好 😀! don't",
] * 4


def byte_level(*, prefix_space: bool = False) -> Library:
    """A byte-level BPE in the manner of GPT-2 and SmolLM2, with ChatML's control tokens first."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def sentencepiece(*, bos: bool = True) -> Library:
    """A SentencePiece-style BPE with byte fallback in the manner of Llama 2: ``▁`` for a space, one put in
    front.
    """
    words = [
        "▁",
        "a",
        "b",
        "e",
        "h",
        "i",
        "l",
        "n",
        "o",
        "r",
        "s",
        "t",
        "w",
        "▁a",
        "▁h",
        "he",
        "ll",
        "▁he",
        "▁hell",
    ]
    words += ["▁hello", "or", "▁w", "▁wor", "ld", "d", "\n"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "h"), ("h", "e"), ("l", "l"), ("▁", "he"), ("▁he", "ll"), ("▁hell", "o")]
    merges += [("o", "r"), ("▁", "w"), ("▁w", "or"), ("l", "d")]
    library = Library(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        library.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return library


def metaspace(scheme: str = "always") -> Library:
    """A Unigram vocabulary with a Metaspace pre-tokenizer and decoder in the manner of T5 and XLM-R."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁a", -1.0),
        ("▁hello", -1.0),
        ("a", -3.0),
        ("hello", -3.0),
        ("é", -4.0),
    ]
    library = Library(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 7)])
    library.add_special_tokens(["</s>"])
    return library


def wordpiece() -> Library:
    """A BERT-style vocabulary, whose decoder only the library knows."""
    words = ["[UNK]", "hello", "world", "##ly", "!", ",", "'", "s", "don", "t"]
    library = Library(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


@pytest.fixture(scope="session")
def byte_level_json() -> bytes:
    return byte_level().to_str().encode()


@pytest.fixture(scope="session")
def build() -> dict[str, Callable[..., Library]]:
    """The builders by name, for tests that vary them."""
    return {
        "byte_level": byte_level,
        "sentencepiece": sentencepiece,
        "metaspace": metaspace,
        "wordpiece": wordpiece,
    }
