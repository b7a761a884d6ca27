"""SentencePiece BPE vocabularies against an independent encoder that follows the algorithm as published."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_folder, llama_metadata, llama_tensors, write_gguf
from tokenizers import Tokenizer

from oazoo.errors import TokenizerError
from oazoo.formats.detect import open_source
from oazoo.translators import convert
from oazoo.translators.sentencepiece_bpe import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    build,
)
from oazoo.translators.sentencepiece_model import build as build_model
from oazoo.translators.settings import Settings

CORPUS = "the cat sat on the mat and the other cat ate the hat that the rat had; naïve café " * 3
ALPHABET = "▁abcdefghijklmnopqrstuvwxyzéï.;"


def vocabulary(merges: int = 60, space_prefix: bool = True) -> Vocabulary:
    """Pieces as SentencePiece numbers them: unknown, control, bytes, joined pieces by rank, single characters."""
    words = ["▁" + word for word in CORPUS.split()]
    splits = {word: list(word) for word in words}
    joined: list[str] = []
    while len(joined) < merges:
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in zip(splits[word], splits[word][1:]):
                counts[pair] = counts.get(pair, 0) + 1
        if not counts:
            break
        best = max(sorted(counts), key=lambda pair: counts[pair])
        if "".join(best) not in joined:
            joined.append("".join(best))
        for word, parts in splits.items():
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
            splits[word] = parts
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *joined, *ALPHABET]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(joined) + len(ALPHABET))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(joined) + len(ALPHABET))]
    return Vocabulary(pieces, scores, types, space_prefix)


def reference_encode(v: Vocabulary, text: str) -> list[int]:
    """Of all neighbours that form a piece, join the pair of the highest score, the leftmost of equals,
    until none is left; what is not a piece becomes its UTF-8 bytes."""
    ids = {piece: number for number, piece in enumerate(v.pieces)}
    if not text:
        return []
    text = text.replace(" ", "▁")
    parts = list("▁" + text if v.space_prefix else text)
    while True:
        best = None
        for at in range(len(parts) - 1):
            number = ids.get(parts[at] + parts[at + 1])
            if (
                number is not None
                and v.types[number] == NORMAL
                and (best is None or v.scores[number] > best[0])
            ):
                best = (v.scores[number], at)
        if best is None:
            break
        parts[best[1] : best[1] + 2] = ["".join(parts[best[1] : best[1] + 2])]
    result: list[int] = []
    for part in parts:
        result += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return result


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


def test_unspellable_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="byte pieces"):
        build(Vocabulary(["▁", "a"], [-1.0, -2.0], [NORMAL, NORMAL]), "v", prefix=None, suffix=None)


def test_user_defined_piece_with_a_space_is_refused() -> None:
    v = vocabulary()
    grown = Vocabulary([*v.pieces, "▁▁x"], [*v.scores, 0.0], [*v.types, USER_DEFINED])
    with pytest.raises(TokenizerError, match="user-defined"):
        build(grown, "v", prefix=None, suffix=None)


def gguf_metadata(v: Vocabulary) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(v.pieces),
        "tokenizer.ggml.scores": list(v.scores),
        "tokenizer.ggml.token_type": list(v.types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


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
