"""Reading ``tokenizer.model``: the part of SentencePiece's protobuf that a BPE tokenizer needs.

Field numbers are those of ``sentencepiece_model.proto``: ModelProto {1: pieces, 2: trainer_spec, 3:
normalizer_spec}, SentencePiece {1: piece, 2: score, 3: type}, TrainerSpec {3: model_type}, NormalizerSpec
{1: name, 2: precompiled_charsmap, 3: add_dummy_prefix, 4: remove_extra_whitespaces}.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from oazoo.errors import TokenizerError
from oazoo.translators import sentencepiece_bpe as spm
from oazoo.translators.settings import Settings

_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_MAX_PIECES = 1 << 24

Value = int | bytes


def build(data: bytes, config: Settings, where: str) -> bytes:
    """The tokenizer.json of a SentencePiece BPE model.

    Args:
        data: the contents of ``tokenizer.model``.
        config: ``tokenizer_config.json`` (``add_bos_token``, ``add_eos_token``, added tokens).
        where: for messages.

    Raises:
        TokenizerError: damaged, not BPE, or with a text normalization that is not the identity.
    """
    pieces: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    model_type = 1
    normalizer: dict[int, Value] = {}
    for number, value in _fields(data, where):
        if number == 1 and isinstance(value, bytes):
            entry = dict(_fields(value, where))
            pieces.append(_text(entry.get(1, b""), where))
            scores.append(_float(entry.get(2), where))
            kind = entry.get(3, spm.NORMAL)
            types.append(kind if isinstance(kind, int) else 0)
        elif number == 2 and isinstance(value, bytes):
            kind = dict(_fields(value, where)).get(3, 1)
            model_type = kind if isinstance(kind, int) else 0
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value, where))
    if not pieces or len(set(pieces)) != len(pieces):
        raise TokenizerError(f"{where}: not a SentencePiece model (no pieces, or a piece that comes twice)")
    if model_type != 2:
        kind_name = _MODEL_TYPES.get(model_type, str(model_type))
        raise TokenizerError(
            f"{where}: SentencePiece models of the type {kind_name} are not supported; supported: bpe. "
            "Convert the weights alone with --no-tokenizer"
        )
    name = _text(normalizer.get(1, b"identity"), where)
    if name != "identity" or normalizer.get(2, b"") != b"" or normalizer.get(4, 1) != 0:
        raise TokenizerError(
            f"{where}: the text normalization {name[:32]!r} or the removal of extra spaces is not supported. "
            "Convert the weights alone with --no-tokenizer"
        )
    _add_tokens(config, pieces, scores, types)
    vocabulary = spm.Vocabulary(pieces, scores, types, bool(normalizer.get(3, 1)))
    prefix = _end(config, "bos_token", "<s>", pieces) if config.boolean("add_bos_token", True) else None
    suffix = _end(config, "eos_token", "</s>", pieces) if config.boolean("add_eos_token", False) else None
    return spm.build(vocabulary, where, prefix=prefix, suffix=suffix)


def _add_tokens(config: Settings, pieces: list[str], scores: list[float], types: list[int]) -> None:
    """Append the tokens of ``added_tokens_decoder`` that the model itself does not have, in id order."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping):
        raise TokenizerError(f"{config.where}: added_tokens_decoder must be an object")
    entries: list[tuple[int, Settings]] = []
    for key, value in added.items():
        if not key.isdecimal() or len(key) > 9:
            raise TokenizerError(f"{config.where}: added_tokens_decoder: {key[:32]!r} is not a token id")
        entries.append((int(key), Settings(value, f"{config.where}: added_tokens_decoder.{key}")))
    for number, entry in sorted(entries, key=lambda item: item[0]):
        text = entry.text("content")
        kind = spm.CONTROL if entry.boolean("special", False) else spm.USER_DEFINED
        if number < len(pieces):
            if pieces[number] != text:
                raise TokenizerError(
                    f"{config.where}: the added token {text[:32]!r} has the id {number} of {pieces[number][:32]!r}"
                )
            if types[number] != spm.UNKNOWN:
                types[number] = kind
            continue
        if number != len(pieces):
            raise TokenizerError(f"{config.where}: added token ids leave a hole at {len(pieces)}")
        pieces.append(text)
        scores.append(0.0)
        types.append(kind)


def _end(config: Settings, key: str, default: str, pieces: list[str]) -> tuple[str, int]:
    value: Any = config.get(key)
    if isinstance(value, Mapping):
        value = value.get("content")
    text = value if isinstance(value, str) else default
    if text not in pieces:
        raise TokenizerError(f"{config.where}: {key} {text[:32]!r} is not in the vocabulary")
    return text, pieces.index(text)


def _fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    """Fields of a protobuf message: (number, integer or bytes). Sizes are checked against the bytes that are left."""
    position, count = 0, 0
    while position < len(data):
        key, position = _varint(data, position, where)
        number, wire = key >> 3, key & 7
        count += 1
        if number == 0 or count > _MAX_PIECES:
            raise TokenizerError(f"{where}: damaged SentencePiece model (field {number})")
        if wire == 0:
            value, position = _varint(data, position, where)
            yield number, value
            continue
        if wire == 2:
            size, position = _varint(data, position, where)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise TokenizerError(f"{where}: damaged SentencePiece model (wire type {wire})")
        if size > len(data) - position:
            raise TokenizerError(
                f"{where}: damaged SentencePiece model (a field of {size} bytes runs over the end)"
            )
        yield number, data[position : position + size]
        position += size


def _varint(data: bytes, position: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise TokenizerError(f"{where}: damaged SentencePiece model (a number without an end)")


def _text(value: Value, where: str) -> str:
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
    except UnicodeDecodeError:
        pass
    raise TokenizerError(f"{where}: damaged SentencePiece model (a text that is not UTF-8)")


def _float(value: Value | None, where: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bytes) and len(value) == 4:
        (number,) = struct.unpack("<f", value)
        if math.isfinite(number):
            return float(number)
    raise TokenizerError(f"{where}: damaged SentencePiece model (a score that is not a finite number)")
