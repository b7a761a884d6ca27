"""SentencePiece BPE vocabularies (Llama 2, Mistral, TinyLlama) as a tokenizer.json.

A SentencePiece BPE model holds pieces with scores and no merge list: of all neighbours whose joined text is
a piece, the one with the highest score is joined first, the leftmost of equals. The ``tokenizers`` library
joins by rank in a list. The two agree when the list holds every split of every piece into two pieces,
ordered by the score of the whole, which is what :func:`merges` makes; it refuses scores that do not order
the pieces, but for runs of one character (Llama's and Mistral's runs of spaces all have the score -1e9).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oazoo.errors import TokenizerError
from oazoo.translators.assets import tokenizer_json

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
#: Added tokens of Phi-3 after which spaces stay.
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
#: Longest piece; SentencePiece itself stops at 64 bytes unless told otherwise.
_MAX_PIECE = 1024


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces in id order with score and type (the types of SentencePiece and GGUF, which share their numbers)."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    space_prefix: bool = True


def merges(vocabulary: Vocabulary, where: str) -> list[list[str]]:
    """The merge list, first joined first.

    Raises:
        TokenizerError: two pieces that can be joined have equal scores, so the order is not defined; see :func:`_of_runs`.
    """
    ids = {
        piece: number
        for number, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind == NORMAL
    }
    by_score: dict[float, dict[str, list[tuple[str, str]]]] = {}
    for piece, number in ids.items():
        if not 1 < len(piece) <= _MAX_PIECE:
            continue
        splits = [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in ids and piece[cut:] in ids
        ]
        if splits:
            by_score.setdefault(vocabulary.scores[number], {})[piece] = splits
    result: list[list[str]] = []
    for score in sorted(by_score, reverse=True):
        made = by_score[score]
        pairs = sorted(
            (pair for splits in made.values() for pair in splits), key=lambda p: (ids[p[0]], ids[p[1]])
        )
        if len(made) > 1:
            pairs = _of_runs(list(made), pairs)
        if not pairs:
            one, other = list(made)[:2]
            raise TokenizerError(
                f"{where}: the pieces {one[:32]!r} and {other[:32]!r} have the same score {score:g}, so their merge "
                "order is not defined: not a SentencePiece BPE vocabulary. "
                "Convert the weights alone with --no-tokenizer"
            )
        result += [[left, right] for left, right in pairs]
    return result


def is_run(piece: str) -> bool:
    """Whether a piece is one character several times."""
    return len(piece) > 1 and piece == piece[0] * len(piece)


def _of_runs(made: list[str], pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """An order of the merges of pieces that have one score; empty unless all of them are runs of one character.

    Published vocabularies have runs of spaces like that. Of equals the leftmost is joined first, so a run grows from its
    left end: what was joined is joined to what is left of it if that makes a piece, else it takes one more character, else a
    new piece is begun. An order that prefers merges in this way does the same.
    """
    if not all(is_run(piece) and piece[0] == made[0][0] for piece in made):
        return []
    return sorted(pairs, key=lambda p: (len(p[1]) == 1, len(p[0]) == 1, -len(p[0] + p[1])))


def build(
    vocabulary: Vocabulary,
    where: str,
    *,
    prefix: tuple[str, int] | None,
    suffix: tuple[str, int] | None,
    eats_space: bool = False,
) -> bytes:
    """The tokenizer.json of a SentencePiece BPE vocabulary with byte fallback.

    Args:
        vocabulary: pieces, scores, types.
        where: for messages.
        prefix: (text, id) of the beginning token when one is put before every text.
        suffix: (text, id) of the end token when one is put after every text.
        eats_space: as Phi-3 has it, added tokens take the space after them away, all but :data:`KEEP_SPACE`.
    """
    vocab = {piece: number for number, piece in enumerate(vocabulary.pieces)}
    byte_pieces = sum(f"<0x{value:02X}>" in vocab for value in range(256))
    unknown = next((p for p, kind in zip(vocabulary.pieces, vocabulary.types) if kind == UNKNOWN), None)
    if byte_pieces < 256 and unknown is None:
        raise TokenizerError(
            f"{where}: the vocabulary has neither the 256 byte pieces nor an unknown piece, so some text could not "
            "be encoded. Convert the weights alone with --no-tokenizer"
        )
    added = []
    for number, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types)):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            if kind == USER_DEFINED and SPACE in piece:
                raise TokenizerError(
                    f"{where}: the user-defined piece {piece[:32]!r} contains a space: not supported. "
                    "Convert the weights alone with --no-tokenizer"
                )
            added.append((number, piece, kind != USER_DEFINED))
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": byte_pieces == 256,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges(vocabulary, where),
    }
    to_space: Mapping[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers: list[Mapping[str, Any]] = [to_space]
    decoders: list[Mapping[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return tokenizer_json(
        model=model,
        added=added,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        prefix=prefix,
        suffix=suffix,
        eaters={text for _, text, _ in added if text not in KEEP_SPACE} if eats_space else (),
    )
