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
    merges = [_pair(merge) for merge in model.get("merges") or ()]
    # Added tokens that stand for spaces are not found in texts, only merged: Gemma's runs of them.
    for left, right in merges:
        number = ids.get(left + right)
        if number is not None and spm.SPACE in left + right and types[number] == spm.USER_DEFINED:
            types[number] = spm.NORMAL
    # Merges with a token in them that is found in texts before merging begins never happen.
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == spm.NORMAL}
    merges = [pair for pair in merges if normal.issuperset((*pair, "".join(pair)))]
    groups = _groups(merges, where)
    ranked = {"".join(pair): float(-rank) for rank, pairs in enumerate(groups) for pair in pairs}
    scores = _scores(tokens, types, ranked)
    vocabulary = spm.Vocabulary(tokens, scores, types, prefix)
    _check(groups, vocabulary, where)
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


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _groups(merges: Sequence[tuple[str, str]], where: str) -> list[list[tuple[str, str]]]:
    """The merges that make one piece together, in the order of the list, where they have to stand in one place.

    Runs of one character may be mixed with each other: then they are one group, and have one score.
    """
    groups, scattered = _grouped(merges, "")
    if scattered and all(map(spm.is_run, scattered)):
        groups, scattered = _grouped(merges, "".join({piece[0] for piece in scattered}))
    if scattered:
        raise TokenizerError(
            f"{where}: the merges that make {scattered[0][:32]!r} stand in several places of the list, which scores cannot "
            f"say. {_ALONE}"
        )
    return groups


def _grouped(merges: Sequence[tuple[str, str]], mixed: str) -> tuple[list[list[tuple[str, str]]], list[str]]:
    """Groups, and the pieces that are made in several places. Runs of each of the characters ``mixed`` count as one."""
    groups: list[list[tuple[str, str]]] = []
    last, seen, scattered = "", set[str](), []
    for pair in merges:
        piece = "".join(pair)
        name = piece[:2] if mixed and piece[0] in mixed and spm.is_run(piece) else piece
        if name != last:
            if name in seen:
                scattered.append(name)
            seen.add(name)
            groups.append([])
        groups[-1].append(pair)
        last = name
    return groups, scattered


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


def _check(groups: Sequence[Sequence[tuple[str, str]]], vocabulary: spm.Vocabulary, where: str) -> None:
    """What the scores mean must be what the list of merges says."""
    meant = [_pair(merge) for merge in spm.merges(vocabulary, where)]
    start = 0
    for group in groups:
        pieces = {"".join(pair) for pair in group}
        found = []
        while start < len(meant) and "".join(meant[start]) in pieces:
            found.append(meant[start])
            start += 1
        if set(found) != set(group) or (len(pieces) > 1 and found != list(group)):
            raise _not_those("".join(group[0]), where)
    if start < len(meant):
        raise _not_those("".join(meant[start]), where)


def _not_those(piece: str, where: str) -> TokenizerError:
    return TokenizerError(
        f"{where}: the merges of this tokenizer are not those of scores: {piece[:32]!r} would be made in other ways. "
        f"{_ALONE}"
    )
