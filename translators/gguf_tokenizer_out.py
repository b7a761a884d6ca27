"""A tokenizer.json as the metadata of a GGUF file: byte-level BPE whose split rule GGUF has a name for, or SentencePiece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oazoo.errors import TokenizerError
from oazoo.translators.assets import Assets, check_equal, load_tokenizer
from oazoo.translators.gguf_tokenizer import EATS_SPACE, build
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.translators.sentencepiece_bpe import CONTROL, KEEP_SPACE, NORMAL, UNUSED, USER_DEFINED
from oazoo.translators.sentencepiece_out import is_sentencepiece, spm_settings
from oazoo.translators.settings import Settings, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_AT = "tokenizer.ggml."
_ALONE = "Export the weights alone with --no-tokenizer"
#: Settings of a BPE model that must be off, with the values that mean so.
_OFF: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0, 0.0),
    "unk_token": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
#: Defaults of the library, for fields that a file leaves out. Offsets into the text do not change ids.
_BYTE_LEVEL = {"add_prefix_space": True, "use_regex": True}


def gguf_text_settings(
    assets: Assets, rows: int, where: str, *, architecture: str = "", name: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Metadata for tokenizer, chat template and token ids; and notes.

    Args:
        assets: what travels with the model. Without a tokenizer the file says that it has none.
        rows: rows of the embedding: the token list is padded to it, as llama.cpp asks.
        where: for messages.
        architecture: that of the file.
        name: what the model is called.

    Raises:
        TokenizerError: a tokenizer that GGUF cannot state exactly; the message names what stands in the way.
    """
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if assets.tokenizer is None:
        settings[f"{_AT}model"] = "none"
        notes.append("the model has no tokenizer: the GGUF file says so, and takes token ids only")
        tokenizer = None
    else:
        tokenizer = load_tokenizer(assets.tokenizer, where)
        found, said = _vocabulary(assets.tokenizer, tokenizer, rows, where, architecture == EATS_SPACE)
        settings |= found
        notes += said
        if architecture == EATS_SPACE and found[f"{_AT}model"] == "llama":
            settings |= _named_phi3(name)
    settings |= _ids(assets, tokenizer, notes)
    if assets.tokenizer is not None and tokenizer is not None:
        settings |= _ends(tokenizer, settings, where)
        told = settings | {"general.architecture": architecture}
        rebuilt = build(Settings(told, where), settings[f"{_AT}tokens"])
        check_equal(tokenizer, load_tokenizer(rebuilt, where), where)
    if assets.chat_template:
        settings["tokenizer.chat_template"] = assets.chat_template
    return settings, notes


def _named_phi3(name: str | None) -> dict[str, Any]:
    """llama.cpp knows by the model's name that added tokens take the space after them."""
    if name is not None and any(word in name.lower() for word in ("phi-3", "phi3")):
        return {}
    return {"general.name": "Phi-3" if name is None else f"{name} (Phi-3)"}


def _vocabulary(
    data: bytes, tokenizer: Tokenizer, rows: int, where: str, eats_space: bool
) -> tuple[dict[str, Any], list[str]]:
    document = parse_json(data, where)
    model = document.get("model") or {}
    pieces = is_sentencepiece(model)
    if not pieces:
        _check_model(model, document, where)
    tokens = [f"[PAD{number}]" for number in range(rows)]
    kinds = [UNUSED] * rows
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= rows:
            raise TokenizerError(
                f"{where}: the token {token[:64]!r} has id {number}, the embedding {rows} rows"
            )
        # A token that is named like padding at its place is padding, which came with a GGUF file.
        kinds[number] = UNUSED if token == tokens[number] else NORMAL
        tokens[number] = token
    for entry in document.get("added_tokens") or ():
        eats = pieces and eats_space and entry.get("content") not in KEEP_SPACE
        if eats and not entry.get("rstrip"):
            raise TokenizerError(
                f"{where}: the added token {str(entry.get('content'))[:64]!r} keeps the space after it, which llama.cpp "
                f"takes away in Phi-3 models. {_ALONE}"
            )
        if any(entry.get(flag) for flag in ("lstrip", "single_word")) or (entry.get("rstrip") and not eats):
            raise TokenizerError(
                f"{where}: the added token {str(entry.get('content'))[:64]!r} takes the space around it, which GGUF "
                f"cannot state. {_ALONE}"
            )
        kinds[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    if len(set(tokens)) != len(tokens):
        raise TokenizerError(
            f"{where}: the vocabulary has tokens that are named like padding, [PAD…]. {_ALONE}"
        )
    if pieces:
        return spm_settings(document, tokens, kinds, where)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()]
    settings = {
        f"{_AT}model": "gpt2",
        f"{_AT}pre": _label(document, model, where),
        f"{_AT}tokens": tokens,
        f"{_AT}token_type": kinds,
        f"{_AT}merges": merges,
    }
    return settings, []


def _check_model(model: Mapping[str, Any], document: Mapping[str, Any], where: str) -> None:
    kind, decoder = model.get("type"), (document.get("decoder") or {}).get("type")
    if kind == "BPE" and decoder != "ByteLevel":
        kind = f"BPE with the decoder {decoder}"
    if kind != "BPE":
        raise TokenizerError(
            f"{where}: a tokenizer of the kind {str(kind)[:64]!r} cannot be written to GGUF; supported: byte-level and "
            f"SentencePiece BPE. {_ALONE}"
        )
    for key, values in _OFF.items():
        if model.get(key) not in values:
            raise TokenizerError(f"{where}: BPE with {key} cannot be written to GGUF. {_ALONE}")


def _label(document: Mapping[str, Any], model: Mapping[str, Any], where: str) -> str:
    """The name that GGUF has for a split rule."""
    splits, normalizer = _plain(document.get("pre_tokenizer")), _plain(document.get("normalizer"))
    whole_words = bool(model.get("ignore_merges"))
    for name, known in PRE_TOKENIZERS.items():
        if (splits, normalizer, whole_words) == (
            _plain(known.to_json()),
            _plain(known.normalizer),
            known.whole_words,
        ):
            return name
    raise TokenizerError(
        f"{where}: GGUF has no name for the way in which this tokenizer splits text "
        f"({str(document.get('pre_tokenizer'))[:160]}); known: {', '.join(PRE_TOKENIZERS)}. {_ALONE}"
    )


def _plain(part: Any) -> Any:
    """A part of a tokenizer.json in one form: nested sequences opened, defaults filled in, offsets left out."""
    if not isinstance(part, Mapping):
        return []
    if part.get("type") == "Sequence":
        inner = part.get("pretokenizers") or part.get("normalizers") or ()
        return [step for entry in inner for step in _plain(entry)]
    step = {key: value for key, value in part.items() if key != "trim_offsets"}
    return [_BYTE_LEVEL | step if step.get("type") == "ByteLevel" else step]


def _ids(assets: Assets, tokenizer: Tokenizer | None, notes: list[str]) -> dict[str, Any]:
    """Ids of special tokens. GGUF has three for the end: of the sequence, of the turn, of the message."""

    def named(name: str) -> int | None:
        text = assets.tokens.get(name)
        return tokenizer.token_to_id(text) if tokenizer is not None and isinstance(text, str) else None

    generation = assets.generation
    ends = sorted(generation.get("eos_ids") or ())
    first = named("eos_token")
    if first is not None and first in ends:
        ends = [first, *(number for number in ends if number != first)]
    if len(ends) > 3:
        notes.append(f"GGUF holds three ids that end a sequence; left out: {ends[3:]}")
    bos = generation.get("bos_id", named("bos_token"))
    found = {
        "bos_token_id": bos,
        "padding_token_id": generation.get("pad_id", named("pad_token")),
        "unknown_token_id": named("unk_token"),
        **dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends)),
    }
    sampling = sorted(set(generation) - {"bos_id", "eos_ids", "pad_id"})
    if sampling:
        notes.append(f"sampling defaults are not part of GGUF; left out: {', '.join(sampling)}")
    return {_AT + key: value for key, value in found.items() if value is not None}


def _ends(tokenizer: Tokenizer, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Which tokens are put around every text, as the tokenizer itself does it."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), 0)
    before, after = full[:at], full[at + len(bare) :]
    result: dict[str, Any] = {f"{_AT}add_bos_token": bool(before), f"{_AT}add_eos_token": bool(after)}
    for key, found in (("bos", before), ("eos", after)):
        if not found:
            continue
        stated = settings.get(f"{_AT}{key}_token_id")
        if len(found) > 1 or (key == "eos" and stated not in (None, found[0])):
            raise TokenizerError(
                f"{where}: the tokenizer puts the ids {found} around every text, which GGUF cannot state. {_ALONE}"
            )
        result[f"{_AT}{key}_token_id"] = found[0]
    return result
