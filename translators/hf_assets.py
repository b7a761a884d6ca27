"""Tokenizer, chat template, special tokens and generation defaults of a Hugging Face folder.

Files and their order of precedence:

- tokenizer: ``tokenizer.json``, carried byte for byte; else ``tokenizer.model`` (SentencePiece BPE); else
  ``vocab.json`` with ``merges.txt`` (GPT-2's byte-level BPE).
- chat template: ``chat_template.jinja``, else ``chat_template`` in ``tokenizer_config.json`` (a text, or a
  list of named ones, of which ``default`` is taken).
- token ids: ``config.json`` and ``generation_config.json``; the ids that end a sequence are the union of
  both and of the ``eos_token`` in ``tokenizer_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oazoo.errors import TokenizerError, TranslationError
from oazoo.translators import sentencepiece_model
from oazoo.translators.assets import (
    Assets,
    byte_level_bpe,
    check_equal,
    check_vocabulary,
    load_tokenizer,
    tokenizer_json,
)
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.translators.settings import Settings, parse_json, read_json, read_small
from oazoo.translators.translator import Checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_SMALL = 16 << 20
_MAX_TOKENIZER = 256 << 20
#: Sampling defaults that are carried: our name, the name in generation_config.json, whether it is a whole
#: number.
_SAMPLING = (
    ("temperature", "temperature", False),
    ("top_k", "top_k", True),
    ("top_p", "top_p", False),
    ("min_p", "min_p", False),
    ("repeat_penalty", "repetition_penalty", False),
)


@dataclass
class _Folder:
    """A checkpoint's folder; remembers which files were read."""

    path: Path
    read: list[Path] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def bytes(self, name: str, limit: int) -> bytes:
        self.read.append(self.path / name)
        return read_small(self.path / name, limit)

    def settings(self, name: str) -> Settings:
        if not self.has(name):
            return Settings({}, str(self.path / name))
        self.read.append(self.path / name)
        return Settings(read_json(self.path / name, _MAX_SMALL), str(self.path / name))


def hf_assets(checkpoint: Checkpoint, rows: int, with_tokenizer: bool = True) -> tuple[Assets, list[Path]]:
    """Everything but the weights of a Hugging Face checkpoint, and the files it was read from.

    Args:
        checkpoint: a checkpoint with a folder.
        rows: rows of the embedding.
        with_tokenizer: ``False`` to leave tokenizer and template out.

    Raises:
        TokenizerError: a tokenizer that is broken, of an unknown kind, or has ids without an embedding row.
        TranslationError: settings of a wrong type.
    """
    assert checkpoint.folder is not None
    folder = _Folder(checkpoint.folder)
    notes: list[str] = []
    config, tokens = checkpoint.settings(), folder.settings("tokenizer_config.json")
    defaults = folder.settings("generation_config.json")
    named = {name: text for name in _TOKEN_NAMES if (text := _token_text(tokens, name))}
    data = tokenizer = template = None
    if not with_tokenizer:
        notes.append("tokenizer and chat template left out, as asked")
    else:
        template = _template(folder, tokens, notes)
        data, tokenizer = _tokenizer(folder, tokens, notes)
        if tokenizer is not None:
            note = check_vocabulary(tokenizer, rows, str(folder.path))
            if note:
                notes.append(note)
    generation = _generation(config, defaults, named, tokenizer, rows, notes)
    if tokenizer is not None:
        for name, key in (("bos_token", "bos_id"), ("pad_token", "pad_id")):
            if name not in named and key in generation:
                text = tokenizer.id_to_token(generation[key])
                if text is not None:
                    named[name] = text
        if "eos_token" not in named and generation["eos_ids"]:
            text = tokenizer.id_to_token(generation["eos_ids"][0])
            if text is not None:
                named["eos_token"] = text
    return Assets(data, template, named, generation, tuple(notes)), folder.read


def _token_text(settings: Settings, name: str) -> str | None:
    """A special token, given as a text or as an object with ``content``."""
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None:
        return None
    if not isinstance(value, str):
        raise TranslationError(f"{settings.where}: {name} must be a text or an object with content")
    return value


def _template(folder: _Folder, tokens: Settings, notes: list[str]) -> str | None:
    if folder.has("chat_template.jinja"):
        data = folder.bytes("chat_template.jinja", _MAX_SMALL)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{folder.path / 'chat_template.jinja'}: not UTF-8 text") from error
    value = tokens.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TokenizerError(f"{tokens.where}: chat_template must be a text or a list of named texts")
    found: dict[str, str] = {}
    for entry in value:
        item = Settings(entry, f"{tokens.where}: chat_template")
        found[item.text("name")] = item.text("template")
    left_out = [repr(name[:64]) for name in found if name != "default"]
    if left_out:
        notes.append(f"chat templates left out: {', '.join(left_out)}; the default is kept")
    return found.get("default")


def _tokenizer(folder: _Folder, tokens: Settings, notes: list[str]) -> tuple[bytes | None, Tokenizer | None]:
    if folder.has("tokenizer.json"):
        data = folder.bytes("tokenizer.json", _MAX_TOKENIZER)
        where = str(folder.path / "tokenizer.json")
        if not isinstance(parse_json(data, where), Mapping):
            raise TokenizerError(f"{where}: does not hold a JSON object")
        tokenizer = load_tokenizer(data, where)
        if folder.has("tokenizer.model"):
            notes.append("tokenizer.json is used; tokenizer.model is not read")
        _probe(folder, tokenizer)
        return data, tokenizer
    if folder.has("tokenizer.model"):
        where = str(folder.path / "tokenizer.model")
        data = sentencepiece_model.build(folder.bytes("tokenizer.model", _MAX_TOKENIZER), tokens, where)
        return data, load_tokenizer(data, where)
    if folder.has("vocab.json") and folder.has("merges.txt"):
        data = _gpt2(folder)
        return data, load_tokenizer(data, str(folder.path / "vocab.json"))
    notes.append(
        "no tokenizer: the folder has no tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
    )
    return None, None


def _probe(folder: _Folder, stored: Tokenizer) -> None:
    """Compare what is stored with the tokenizer as the library itself reads the source file."""
    from tokenizers import Tokenizer

    path = folder.path / "tokenizer.json"
    check_equal(Tokenizer.from_file(str(path)), stored, str(path))


def _gpt2(folder: _Folder) -> bytes:
    """GPT-2's vocab.json and merges.txt as a tokenizer.json."""
    where = str(folder.path / "vocab.json")
    vocab = parse_json(folder.bytes("vocab.json", _MAX_TOKENIZER), where)
    if not isinstance(vocab, Mapping) or not all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 31 for v in vocab.values()
    ):
        raise TokenizerError(f"{where}: must map tokens to ids")
    if len(set(vocab.values())) != len(vocab):
        raise TokenizerError(f"{where}: two tokens have the same id")
    where = str(folder.path / "merges.txt")
    try:
        lines = folder.bytes("merges.txt", _MAX_TOKENIZER).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{where}: not UTF-8 text (byte {error.start})") from error
    merges = []
    for number, line in enumerate(lines, 1):
        if not line.strip("\r") or (number == 1 and line.startswith("#version")):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2 or any(part not in vocab for part in (*parts, "".join(parts))):
            raise TokenizerError(f"{where}: line {number} does not join two tokens to a third: {line[:64]!r}")
        merges.append(parts)
    split = PRE_TOKENIZERS["gpt-2"]
    end = "<|endoftext|>"
    return tokenizer_json(
        model=byte_level_bpe(vocab, merges),
        added=[(vocab[end], end, True)] if end in vocab else [],
        normalizer=None,
        pre_tokenizer=split.to_json(),
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        prefix=None,
        suffix=None,
    )


def _generation(
    config: Settings,
    defaults: Settings,
    named: Mapping[str, str],
    tokenizer: Tokenizer | None,
    rows: int,
    notes: list[str],
) -> dict[str, Any]:
    """Token ids and sampling defaults; ids without an embedding row are left out and reported."""
    ends = {*config.ids("eos_token_id"), *defaults.ids("eos_token_id")}
    if tokenizer is not None and "eos_token" in named:
        number = tokenizer.token_to_id(named["eos_token"])
        if number is not None:
            ends.add(number)
    outside = sorted(number for number in ends if number >= rows)
    if outside:
        notes.append(f"end-of-sequence ids {outside} have no embedding row ({rows} rows): left out")
    generation: dict[str, Any] = {"eos_ids": sorted(number for number in ends if number < rows)}
    for name, key in (("bos_id", "bos_token_id"), ("pad_id", "pad_token_id")):
        for number in (defaults.ids(key) or config.ids(key))[:1]:
            if number < rows:
                generation[name] = number
            else:
                notes.append(f"{key} {number} has no embedding row ({rows} rows): left out")
    for name, key, whole in _SAMPLING:
        if key in defaults:
            value = defaults.integer(key) if whole else defaults.number(key)
            if value < 0:
                raise TranslationError(f"{defaults.where}: {key} = {value} is negative")
            generation[name] = value
    if "do_sample" in defaults:
        generation["do_sample"] = defaults.boolean("do_sample")
    return generation
