"""SentencePiece BPE vocabularies, and an encoder that follows the algorithm as published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from oazoo.translators.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, Vocabulary, build

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


def with_runs(v: Vocabulary, lengths: Sequence[int], character: str = "▁") -> Vocabulary:
    """With runs of a character as pieces, all of one score, as Llama and Mistral have runs of spaces."""
    pieces = [*v.pieces, *(character * length for length in lengths)]
    scores = [-1e9 if p == character else score for p, score in zip(v.pieces, v.scores, strict=True)]
    count = len(lengths)
    return Vocabulary(pieces, [*scores, *[-1e9] * count], [*v.types, *[NORMAL] * count], v.space_prefix)


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


def gguf_metadata(v: Vocabulary) -> dict[str, Any]:
    """The same as metadata of a GGUF file."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(v.pieces),
        "tokenizer.ggml.scores": list(v.scores),
        "tokenizer.ggml.token_type": list(v.types),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def with_phi3(v: Vocabulary) -> Vocabulary:
    """With some of the added tokens of Phi-3."""
    added = ("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>")
    return Vocabulary([*v.pieces, *added], [*v.scores, *[0.0] * 4], [*v.types, *[CONTROL] * 4])


def phi3_document(v: Vocabulary) -> dict[str, Any]:
    """A tokenizer.json in which, as Phi-3 has it, added tokens take the space after them away, all but three."""
    document: dict[str, Any] = json.loads(build(v, "v", prefix=("<s>", 1), suffix=None))
    for entry in document["added_tokens"]:
        entry["rstrip"] = entry["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return document


PHI3_CHAT = "<|user|>\nthe cat<|end|>\n<|assistant|>\n  the<|endoftext|> hat</s> a"
