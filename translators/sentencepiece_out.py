"""A tokenizer.json of the SentencePiece kind as the metadata of a GGUF file.

Such a document has a list of merges, GGUF a score for each piece. Scores can say what the list says if it is ordered by
the piece that a merge makes, and holds every way in which that piece divides into two: then the place of a piece in the
list is its score. That is the form in which such lists are made from SentencePiece's own models; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oazoo.errors import TokenizerError
from oazoo.translators import sentencepiece_bpe as spm

_AT = "tokenizer.ggml."
_ALONE = "Export the weights alone with --no-tokenizer"
_TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": spm.SPACE}
_PREPEND = {"type": "Prepend", "prepend": spm.SPACE}
_DECODER = (
    {"type": "Replace", "pattern": {"String": spm.SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
#: Splitting at spaces once they have become something else, as Gemma's documents have it: it never happens.
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
#: Settings of the model that must be off, with the values that mean so.
_OFF: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0, 0.0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "ignore_merges": (None, False),
}


def is_sentencepiece(model: Mapping[str, Any]) -> bool:
    """Whether the ``model`` object is a BPE that spells what it does not know in byte pieces."""
    return model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def spm_settings(
    document: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], where: str
) -> tuple[dict[str, Any], list[str]]:
    """The metadata, and notes.

    Args:
        document: the tokenizer.json.
        tokens: texts by id, padded to the rows of the embedding.
        kinds: their types, with special tokens as CONTROL and other added ones as USER_DEFINED.
        where: for messages.

    Raises:
        TokenizerError: GGUF cannot state it exactly; the message names what stands in the way.
    """
    model = document["model"]
    for key, values in _OFF.items():
        if model.get(key) not in values:
            raise TokenizerError(f"{where}: SentencePiece BPE with {key} cannot be written to GGUF. {_ALONE}")
    prefix, notes = _space_prefix(document, where)
    ids = {token: number for number, token in enumerate(tokens)}
    types = list(kinds)
    for value in range(256):
        number = ids.get(f"<0x{value:02X}>")
        if number is not None and types[number] == spm.NORMAL:
            types[number] = spm.BYTE
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in ids:
        types[ids[unknown]] = spm.UNKNOWN
    groups = _groups(model.get("merges") or (), where)
    # Added tokens that stand for spaces are not found in texts, only merged: Gemma's runs of them.
    for whole in groups:
        if spm.SPACE in whole and whole in ids and types[ids[whole]] == spm.USER_DEFINED:
            types[ids[whole]] = spm.NORMAL
    made = [whole for whole in groups if whole in ids and types[ids[whole]] == spm.NORMAL]
    scores = _scores(tokens, types, {whole: float(-rank) for rank, whole in enumerate(made)})
    vocabulary = spm.Vocabulary(tokens, scores, types, prefix)
    _check(vocabulary, {whole: groups[whole] for whole in made}, where)
    settings = {
        f"{_AT}model": "llama",
        f"{_AT}pre": "default",
        f"{_AT}tokens": list(tokens),
        f"{_AT}scores": scores,
        f"{_AT}token_type": types,
        f"{_AT}add_space_prefix": prefix,
    }
    return settings, notes


def _space_prefix(document: Mapping[str, Any], where: str) -> tuple[bool, list[str]]:
    """Whether a space is put before every text, from the ways in which documents of this kind say it."""
    normalizers = _steps(document.get("normalizer"), "normalizers")
    splits = _steps(document.get("pre_tokenizer"), "pretokenizers")
    decoders = _steps(document.get("decoder"), "decoders")
    prefix = normalizers == [_PREPEND, _TO_SPACE]
    notes: list[str] = []
    known = prefix or normalizers == [_TO_SPACE]
    known = known and splits in ([], [_NO_SPLIT])
    if len(splits) == 1 and splits[0].get("type") == "Metaspace" and not normalizers:
        split = splits[0]
        scheme = split.get("prepend_scheme", "always" if split.get("add_prefix_space", True) else "never")
        known = split.get("replacement") == spm.SPACE and split.get("split") is False
        prefix = scheme != "never"
        if prefix:
            first = ", and after each special token inside it" if scheme == "first" else ""
            notes.append(
                f"llama.cpp puts a space before every text{first}; this tokenizer only before one that does not "
                "begin with a space"
            )
    if not known or decoders[:3] != list(_DECODER) or decoders[3:] not in ([], [_STRIP]):
        raise TokenizerError(
            f"{where}: GGUF cannot state how this SentencePiece tokenizer treats spaces (normalizer "
            f"{str(document.get('normalizer'))[:120]}, pre_tokenizer {str(document.get('pre_tokenizer'))[:120]}, decoder "
            f"{str(document.get('decoder'))[:160]}). {_ALONE}"
        )
    if prefix != (decoders[3:] == [_STRIP]):
        raise TokenizerError(
            f"{where}: the tokenizer's decoder does not take back the space that it puts before a text. {_ALONE}"
        )
    return prefix, notes


def _steps(part: Any, key: str) -> list[Mapping[str, Any]]:
    """A part of a document as a list of steps."""
    if not isinstance(part, Mapping):
        return []
    if part.get("type") == "Sequence":
        return [step for entry in part.get(key) or () for step in _steps(entry, key)]
    return [part]


def _groups(merges: Sequence[Any], where: str) -> dict[str, set[tuple[str, str]]]:
    """Piece → the pairs that it is made from, in the order of the list, where each piece has to stand in one place."""
    groups: dict[str, set[tuple[str, str]]] = {}
    last = None
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        whole = left + right
        if whole != last and whole in groups:
            raise TokenizerError(
                f"{where}: the merges that make {whole[:32]!r} stand in several places of the list, which scores cannot "
                f"say. {_ALONE}"
            )
        groups.setdefault(whole, set()).add((left, right))
        last = whole
    return groups


def _scores(tokens: Sequence[str], types: Sequence[int], ranked: Mapping[str, float]) -> list[float]:
    """A score for each id: merged pieces by rank, single characters and other pieces after them in the order of ids."""
    following = -float(len(ranked))
    scores = []
    for token, kind in zip(tokens, types, strict=True):
        if token in ranked:
            scores.append(ranked[token])
        elif kind == spm.NORMAL:
            scores.append(following)
            following -= 1.0
        else:
            scores.append(0.0)
    return scores


def _check(vocabulary: spm.Vocabulary, made: Mapping[str, set[tuple[str, str]]], where: str) -> None:
    """What the scores mean must be what the list of merges says, up to pairs of tokens that text never consists of."""
    normal = {
        piece for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True) if kind == spm.NORMAL
    }
    found = _groups(spm.merges(vocabulary, where), where)
    for whole in [*made, *found]:
        wanted = {pair for pair in made.get(whole, ()) if normal.issuperset(pair)}
        if wanted != found.get(whole, set()):
            missing = sorted(found.get(whole, set()) - wanted) or sorted(wanted - found.get(whole, set()))
            raise TokenizerError(
                f"{where}: the merges of this tokenizer are not those of scores: {whole[:32]!r} from {missing[0]}. {_ALONE}"
            )
