"""A tokenizer.json from the metadata of a GGUF file, and the rest of what GGUF says about text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from oazoo.errors import TokenizerError
from oazoo.translators import sentencepiece_bpe as spm
from oazoo.translators.assets import (
    PROBE,
    Assets,
    byte_level_bpe,
    check_vocabulary,
    load_tokenizer,
    tokenizer_json,
)
from oazoo.translators.pretokenizers import pre_tokenizer
from oazoo.translators.settings import Settings
from oazoo.translators.translator import Checkpoint

_KINDS = ("gpt2", "llama")
_AT = "tokenizer.ggml."
#: The architecture of which SentencePiece tokenizers drop the space after an added token.
EATS_SPACE = "phi3"
_SPECIAL_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_assets(checkpoint: Checkpoint, rows: int, with_tokenizer: bool = True) -> Assets:
    """Tokenizer, chat template and token ids of a GGUF checkpoint.

    Args:
        checkpoint: a GGUF checkpoint.
        rows: rows of the embedding.
        with_tokenizer: ``False`` to leave tokenizer and template out.

    Raises:
        TokenizerError: a kind or pre-tokenizer that cannot be rebuilt exactly, by name; an inconsistent
            vocabulary; a token id without an embedding row.
    """
    meta = checkpoint.settings()
    generation, notes = _generation(meta, rows)
    if not with_tokenizer:
        return Assets(generation=generation, notes=(*notes, "tokenizer and chat template left out, as asked"))
    template, template_notes = _template(meta)
    notes += template_notes
    if "tokenizer.ggml.tokens" not in meta:
        notes.append("the file has no tokenizer")
        return Assets(chat_template=template, generation=generation, notes=tuple(notes))
    tokens = _tokens(meta)
    data = build(meta, tokens)
    tokenizer = load_tokenizer(data, meta.where)
    note = check_vocabulary(tokenizer, rows, meta.where)
    if note:
        notes.append(note)
    _check_round_trip(tokenizer, meta, notes)
    named: dict[str, Any] = {}
    for key, name in _SPECIAL_IDS.items():
        numbers = meta.ids(f"{_AT}{key}_token_id")
        if numbers and numbers[0] < len(tokens):
            named[name] = tokens[numbers[0]]
    return Assets(data, template, named, generation, tuple(notes))


def build(meta: Settings, tokens: Sequence[str]) -> bytes:
    """The tokenizer.json that the metadata describes; see :func:`gguf_assets` for errors."""
    kind = meta.text(f"{_AT}model")
    if kind not in _KINDS:
        raise TokenizerError(
            f"{meta.where}: tokenizers of the kind {kind[:64]!r} are not supported; supported: "
            f"{', '.join(_KINDS)}. Convert the weights alone with --no-tokenizer"
        )
    types = _numbers(meta, "token_type", len(tokens)) or [spm.NORMAL] * len(tokens)
    if kind == "llama":
        scores = _numbers(meta, "scores", len(tokens))
        if scores is None:
            raise TokenizerError(f"{meta.where}: the SentencePiece vocabulary has no scores")
        if not all(math.isfinite(score) for score in scores):
            raise TokenizerError(f"{meta.where}: {_AT}scores holds values that are not finite")
        vocabulary = spm.Vocabulary(
            tokens, scores, [int(t) for t in types], meta.boolean(f"{_AT}add_space_prefix", True)
        )
        prefix, suffix = _ends(meta, tokens, add_bos=True)
        # A file does not say it: it is so in Phi-3's published tokenizer, and llama.cpp goes by the model's name.
        eats_space = meta.get("general.architecture") == EATS_SPACE
        return spm.build(vocabulary, meta.where, prefix=prefix, suffix=suffix, eats_space=eats_space)
    label = meta.text(f"{_AT}pre") if f"{_AT}pre" in meta else None
    split = pre_tokenizer(label, meta.where)
    if meta.boolean(f"{_AT}add_space_prefix", False):
        raise TokenizerError(f"{meta.where}: add_space_prefix with a byte-level vocabulary is not supported")
    vocab = {token: number for number, token in enumerate(tokens)}
    special = (spm.UNKNOWN, spm.CONTROL)
    added = [
        (number, tokens[number], kind in special)
        for number, kind in enumerate(types)
        if kind in (*special, spm.USER_DEFINED)
    ]
    prefix, suffix = _ends(meta, tokens, add_bos=split.add_bos)
    return tokenizer_json(
        model=byte_level_bpe(vocab, _merges(meta, vocab), whole_words=split.whole_words),
        added=added,
        normalizer=split.normalizer,
        pre_tokenizer=split.to_json(),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        prefix=prefix,
        suffix=suffix,
    )


def _tokens(meta: Settings) -> list[str]:
    tokens = meta.get(f"{_AT}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise TokenizerError(f"{meta.where}: {_AT}tokens must be a list of texts")
    named = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    if len(set(named)) != len(named):
        seen: dict[str, int] = {}
        for number, token in enumerate(named):
            if token in seen:
                raise TokenizerError(
                    f"{meta.where}: the token {token[:64]!r} has two ids, {seen[token]} and {number}"
                )
            seen[token] = number
    return named


def _numbers(meta: Settings, key: str, count: int) -> list[float] | None:
    values = meta.get(_AT + key)
    if values is None:
        return None
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
    ):
        raise TokenizerError(f"{meta.where}: {_AT}{key} must be a list of numbers")
    if len(values) != count:
        raise TokenizerError(f"{meta.where}: {_AT}{key} has {len(values)} entries for {count} tokens")
    return values


def _merges(meta: Settings, vocab: dict[str, int]) -> list[list[str]]:
    merges = meta.get(f"{_AT}merges")
    if not isinstance(merges, list):
        raise TokenizerError(f"{meta.where}: {_AT}merges is missing or not a list")
    pairs = []
    for number, merge in enumerate(merges):
        # A byte-level token never holds a space, so the one space divides the two sides.
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not (left and right and left in vocab and right in vocab and left + right in vocab):
            raise TokenizerError(
                f"{meta.where}: merge {number} ({str(merge)[:64]!r}) does not join two tokens to a third"
            )
        pairs.append([left, right])
    return pairs


def _ends(
    meta: Settings, tokens: Sequence[str], *, add_bos: bool
) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """The tokens put before and after every text."""

    def token(key: str) -> tuple[str, int]:
        numbers = meta.ids(f"{_AT}{key}_token_id")
        if len(numbers) != 1 or numbers[0] >= len(tokens):
            raise TokenizerError(
                f"{meta.where}: {_AT}add_{key}_token is set, but {_AT}{key}_token_id is "
                f"{numbers[0] if numbers else 'missing'} with {len(tokens)} tokens"
            )
        return tokens[numbers[0]], numbers[0]

    declared = f"{_AT}bos_token_id" in meta
    before = meta.boolean(f"{_AT}add_bos_token", add_bos and declared)
    after = meta.boolean(f"{_AT}add_eos_token", False)
    return token("bos") if before else None, token("eos") if after else None


def _generation(meta: Settings, rows: int) -> tuple[dict[str, Any], list[str]]:
    """Token ids for generation. End, end-of-turn and end-of-message all end a sequence."""
    generation: dict[str, Any] = {}
    notes: list[str] = []
    ends: set[int] = set()
    for key in ("eos", "eot", "eom"):
        ends.update(meta.ids(f"{_AT}{key}_token_id"))
    singles = {"bos_id": "bos", "pad_id": "padding"}
    for name, key in singles.items():
        for number in meta.ids(f"{_AT}{key}_token_id")[:1]:
            if number < rows:
                generation[name] = number
            else:
                notes.append(f"{_AT}{key}_token_id {number} has no embedding row ({rows} rows): left out")
    outside = sorted(number for number in ends if number >= rows)
    if outside:
        notes.append(f"end-of-sequence ids {outside} have no embedding row ({rows} rows): left out")
    generation["eos_ids"] = sorted(number for number in ends if number < rows)
    return generation, notes


def _template(meta: Settings) -> tuple[str | None, list[str]]:
    notes = [
        f"the chat template {key.removeprefix('tokenizer.chat_template.')[:64]!r} is left out; the default is kept"
        for key in meta.values
        if key.startswith("tokenizer.chat_template.")
    ]
    if "tokenizer.chat_template" not in meta:
        return None, notes
    return meta.text("tokenizer.chat_template"), notes


def _check_round_trip(tokenizer: Any, meta: Settings, notes: list[str]) -> None:
    ids = tokenizer.encode(PROBE, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != PROBE:
        notes.append(
            "the vocabulary cannot spell every text: the probe text does not survive encoding and decoding"
        )
