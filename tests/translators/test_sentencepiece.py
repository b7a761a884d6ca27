"""SentencePiece BPE vocabularies against an independent encoder that follows the algorithm as published."""

from __future__ import annotations

import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_folder, llama_metadata, llama_tensors, write_gguf
from sentencepiece_models import (
    ALPHABET,
    CORPUS,
    gguf_metadata,
    reference_encode,
    vocabulary,
    with_runs,
)
from tokenizers import Tokenizer

from oazoo.errors import TokenizerError
from oazoo.formats.detect import open_source
from oazoo.translators import convert
from oazoo.translators.sentencepiece_bpe import (
    NORMAL,
    USER_DEFINED,
    Vocabulary,
    build,
)
from oazoo.translators.sentencepiece_model import build as build_model
from oazoo.translators.settings import Settings


def made(v: Vocabulary) -> Tokenizer:
    return Tokenizer.from_buffer(build(v, "v", prefix=None, suffix=None))


@pytest.mark.parametrize("space_prefix", [True, False])
def test_ids_equal_the_algorithm(space_prefix: bool) -> None:
    v = vocabulary(space_prefix=space_prefix)
    tokenizer = made(v)
    random = np.random.default_rng(1)
    letters = [*ALPHABET.replace("▁", " "), " ", " ", "t", "h", "e", "a", "t", "日", "🙂", "\n"]
    texts = ["".join(random.choice(letters, size=random.integers(1, 40))) for _ in range(400)]
    words = CORPUS.split()
    texts += [" ".join(random.choice(words, size=6)) for _ in range(100)]
    for text in [*texts, "", " ", "  a", "a ", "\na"]:
        assert tokenizer.encode(text).ids == reference_encode(v, text), repr(text)


@pytest.mark.parametrize("text", ["the cat", " a", "  a", "a ", "日本 🙂", "\n\n x", "", "naïve"])
def test_texts_survive(text: str) -> None:
    tokenizer = made(vocabulary())
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_equal_scores_are_refused() -> None:
    v = vocabulary()
    scores = list(v.scores)
    scores[260] = scores[259]
    with pytest.raises(TokenizerError, match="same score"):
        build(Vocabulary(v.pieces, scores, v.types), "v", prefix=None, suffix=None)


#: Those of Llama 1 and 2 and of Mistral, in the order of their ids: there is no run of fifteen.
RUNS = (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)


@pytest.mark.parametrize("space_prefix", [True, False])
def test_runs_of_spaces_have_one_score(space_prefix: bool) -> None:
    v = with_runs(vocabulary(space_prefix=space_prefix), RUNS)
    tokenizer = made(v)
    for length in range(70):
        for text in (f"a{' ' * length}the", " " * length, f"{' ' * length}\n{' ' * (length // 2)}cat  "):
            assert tokenizer.encode(text).ids == reference_encode(v, text), repr(text)


def test_runs_of_any_lengths() -> None:
    """The order that stands for "the leftmost first" is right whatever runs there are."""
    bare = vocabulary(merges=0)
    for count in (2, 3, 4):
        for lengths in combinations(range(2, 8), count):
            v = with_runs(bare, lengths, "x")
            v = Vocabulary([*v.pieces, "x"], [*v.scores, -1e9], [*v.types, NORMAL], False)
            tokenizer = made(v)
            for length in range(2, 24):
                assert tokenizer.encode("x" * length).ids == reference_encode(v, "x" * length), lengths


def test_unspellable_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="byte pieces"):
        build(Vocabulary(["▁", "a"], [-1.0, -2.0], [NORMAL, NORMAL]), "v", prefix=None, suffix=None)


def test_user_defined_piece_with_a_space_is_refused() -> None:
    v = vocabulary()
    grown = Vocabulary([*v.pieces, "▁▁x"], [*v.scores, 0.0], [*v.types, USER_DEFINED])
    with pytest.raises(TokenizerError, match="user-defined"):
        build(grown, "v", prefix=None, suffix=None)


def test_from_gguf(tmp_path: Path) -> None:
    v = vocabulary()
    rows = len(v.pieces)
    tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
    write_gguf(tmp_path / "m.gguf", llama_metadata(rows) | gguf_metadata(v), tensors)
    convert(tmp_path / "m.gguf", tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        stored = source.asset("asset/tokenizer.json")  # type: ignore[attr-defined]
    # SentencePiece models begin with <s> unless told otherwise; special tokens in the text are recognised.
    ids = Tokenizer.from_buffer(stored).encode("the cat</s>the").ids
    assert ids == [1, *reference_encode(v, "the cat"), 2, *reference_encode(v, "the")]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer.ggml.scores": None}, "no scores"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores"),
        ({"tokenizer.ggml.scores": [float("nan")] * 350}, "scores"),
        ({"tokenizer.ggml.bos_token_id": 100000}, "bos_token_id"),
    ],
)
def test_bad_gguf_vocabularies(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    v = vocabulary()
    rows = len(v.pieces)
    metadata = llama_metadata(rows) | gguf_metadata(v) | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(tmp_path / "m.gguf", metadata, gguf_names(llama_tensors(LLAMA | {"vocab_size": rows})))
    with pytest.raises(TokenizerError, match=named):
        convert(tmp_path / "m.gguf", tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()


def field(number: int, value: int | bytes | float | str) -> bytes:
    """One protobuf field."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    result = b""
    while value > 127:
        result += bytes([value & 127 | 128])
        value >>= 7
    return result + bytes([value])


def proto(
    v: Vocabulary, model_type: int = 2, normalizer: str = "identity", charsmap: bytes = b"", strip: int = 0
) -> bytes:
    """A tokenizer.model, byte by byte."""
    data = b""
    for piece, score, kind in zip(v.pieces, v.scores, v.types, strict=True):
        entry = field(1, piece) + field(2, score) + (field(3, kind) if kind != NORMAL else b"")
        data += field(1, entry)
    data += field(2, field(3, model_type) + field(4, len(v.pieces)))
    return data + field(3, field(1, normalizer) + field(2, charsmap) + field(3, 1) + field(4, strip))


def test_from_a_folder_with_tokenizer_model_only(tmp_path: Path) -> None:
    v = vocabulary()
    rows = len(v.pieces) + 1
    tokenizer_config = {
        "add_bos_token": True,
        "eos_token": {"content": "<|user_end|>"},
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            str(len(v.pieces)): {"content": "<|user_end|>", "special": True},
        },
    }
    llama_folder(
        tmp_path / "hf",
        {"vocab_size": rows},
        tokenizer__model=proto(v),
        tokenizer_config__json=tokenizer_config,
    )
    convert(tmp_path / "hf", tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        stored = source.asset("asset/tokenizer.json")  # type: ignore[attr-defined]
        generation = source.metadata["generation"]
    ids = Tokenizer.from_buffer(stored).encode("the cat<|user_end|>").ids
    assert ids == [1, *reference_encode(v, "the cat"), len(v.pieces)]
    assert generation["eos_ids"] == [2, len(v.pieces)]


EMPTY = Settings({}, "tokenizer_config.json")


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no pieces"),
        (proto(vocabulary(), model_type=1), "unigram"),
        (proto(vocabulary(), model_type=9), "9"),
        (proto(vocabulary(), normalizer="nmt_nfkc"), "nmt_nfkc"),
        (proto(vocabulary(), charsmap=b"x"), "normalization"),
        (proto(vocabulary(), strip=1), "normalization"),
        (proto(vocabulary())[:-3], "damaged"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "damaged"),
        (b"\xff" * 11, "damaged"),
        (b"\x0b", "damaged"),
        (b"\x00\x00", "damaged"),
        (field(1, field(1, b"\xff\xfe")), "UTF-8"),
        (field(1, field(1, "a") + field(2, float("nan"))), "score"),
    ],
)
def test_damaged_or_unsupported_models(data: bytes, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        build_model(data, EMPTY, "tokenizer.model")


def test_damage_anywhere_is_an_error_or_a_tokenizer() -> None:
    whole = proto(vocabulary(merges=5))
    for cut in range(0, len(whole), 29):
        for data in (whole[:cut], whole[:cut] + b"\xff" + whole[cut + 1 :]):
            try:
                build_model(data, EMPTY, "tokenizer.model")
            except TokenizerError:
                pass
