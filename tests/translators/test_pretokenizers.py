"""How text is split under each name that GGUF files give: against the published rules, run by another engine."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_gguf
from click.testing import CliRunner
from exported import gguf_values
from tokenizers import Tokenizer
from tricky_texts import TEXTS, learned_metadata, tiny_llama

from oazoo.cli import main
from oazoo.formats.oam import OamSource
from oazoo.translators.gguf_tokenizer import build
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.translators.settings import Settings

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Name → rule as its author publishes it, whether digits are taken apart first, and whether text is normalized (NFC).
#: The rules of GPT-2, cl100k and o200k are OpenAI's (tiktoken), the others those of the models' tokenizer.json.
PUBLISHED: dict[str, tuple[str, bool, bool]] = {
    "gpt-2": (GPT2, False, False),
    "mpt": (GPT2, False, True),
    "olmo": (GPT2, False, True),
    "smollm": (GPT2, True, False),
    "starcoder": (GPT2, True, False),
    "refact": (GPT2, True, False),
    "command-r": (GPT2, True, True),
    "llama-bpe": (CL100K, False, False),
    "llama3": (CL100K, False, False),
    "llama-v3": (CL100K, False, False),
    "dbrx": (CL100K, False, False),
    "smaug-bpe": (CL100K, False, False),
    "qwen2": (QWEN2, False, True),
    "deepseek-r1-qwen": (QWEN2, False, False),
    "tekken": (TEKKEN, False, False),
    "gpt-4o": (O200K, False, False),
}
#: Unicode's White_Space, which is what ``\s`` means there; Python's adds four separators of files and records.
SPACES = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680"
    + "".join(map(chr, range(0x2000, 0x200B)))
    + "\u2028\u2029\u202f\u205f\u3000"
)


def explicit(rule: str, texts: tuple[str, ...]) -> re.Pattern[str]:
    r"""A rule for Python's ``re``, which knows no ``\p``: each class lists its characters that occur in the texts."""
    letters = sorted({c for text in texts for c in text + unicodedata.normalize("NFC", text)})

    def members(test: Callable[[str], bool]) -> str:
        return "".join(re.escape(c) for c in letters if test(c)) or "\U0010fffd"

    for kind in ("Lu", "Ll", "Lt", "Lm", "Lo", "L", "M", "N"):
        inside = members(lambda c, kind=kind: unicodedata.category(c).startswith(kind))  # type: ignore[misc]
        rule = re.sub(rf"(\[[^\]]*)\\p\{{{kind}\}}", lambda m, s=inside: m[1] + s, rule)  # type: ignore[misc]
        while re.search(rf"\[[^\]]*\\p\{{{kind}\}}", rule):
            rule = re.sub(rf"(\[[^\]]*)\\p\{{{kind}\}}", lambda m, s=inside: m[1] + s, rule)  # type: ignore[misc]
        rule = rule.replace(rf"\p{{{kind}}}", f"[{inside}]")
    rule = rule.replace(r"[^\s", f"[^{re.escape(SPACES)}").replace(r"\S", f"[^{re.escape(SPACES)}]")
    return re.compile(rule.replace(r"\s", f"[{re.escape(SPACES)}]"))


def pieces(name: str, text: str) -> list[str]:
    """A text split by the published rule, all in Python."""
    rule, digits, normalized = PUBLISHED[name]
    text = unicodedata.normalize("NFC", text) if normalized else text
    parts = [text]
    if digits:
        parts = re.split(
            f"([{''.join(c for c in set(text) if unicodedata.category(c)[0] == 'N') or chr(0xFFFF)}])", text
        )
    pattern = explicit(rule, TEXTS)
    found = [piece for part in parts if part for piece in pattern.findall(part)]
    assert "".join(found) == text
    return found


def made(metadata: dict[str, Any]) -> Tokenizer:
    settings = Settings(metadata, "m.gguf")
    return Tokenizer.from_buffer(build(settings, metadata["tokenizer.ggml.tokens"]))


def test_every_name_has_a_published_rule() -> None:
    assert set(PUBLISHED) == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_splits_are_those_of_the_published_rule(name: str) -> None:
    tokenizer = made(learned_metadata(name))
    assert tokenizer.pre_tokenizer is not None
    for text in TEXTS:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer is not None else text
        found = [normal[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]
        assert found == pieces(name, text)


def test_the_texts_tell_the_rules_apart() -> None:
    """Rules that differ give other pieces for at least one of the texts."""
    kinds: dict[tuple[str, bool, bool], list[list[str]]] = {}
    for name, rule in PUBLISHED.items():
        kinds.setdefault(rule, [pieces(name, text) for text in TEXTS])
    results = list(kinds.values())
    assert all(a != b for n, a in enumerate(results) for b in results[:n])


def convert(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_go_through_the_command_line_and_back(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", *tiny_llama(learned_metadata(name)))
    assert convert(path, "-o", tmp_path / "m.oam").exit_code == 0
    with OamSource(tmp_path / "m.oam") as source:
        stored = Tokenizer.from_buffer(source.asset("asset/tokenizer.json") or b"")
    ours = made(learned_metadata(name))
    assert [stored.encode(text).ids for text in TEXTS] == [ours.encode(text).ids for text in TEXTS]
    done = CliRunner().invoke(main, ["export", str(tmp_path / "m.oam"), "-o", str(tmp_path / "out.gguf")])
    assert done.exit_code == 0, done.output
    again = gguf_values(tmp_path / "out.gguf")["tokenizer.ggml.pre"]
    assert PRE_TOKENIZERS[again] == PRE_TOKENIZERS[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "jina-v2-code"}, "the pre-tokenizer 'jina-v2-code' is not supported"),
        ({"pre": "default"}, "the pre-tokenizer 'default' is not supported"),
        ({"pre": None}, "does not name its pre-tokenizer"),
        ({"model": "bert"}, "tokenizers of the kind 'bert' are not supported"),
        ({"model": "t5"}, "tokenizers of the kind 't5' are not supported"),
        ({"model": "rwkv"}, "tokenizers of the kind 'rwkv' are not supported"),
    ],
)
def test_what_is_not_known_is_named_and_weights_can_be_had_alone(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    metadata = learned_metadata("gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    known = {key: value for key, value in metadata.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", *tiny_llama(known))
    done = convert(path, "-o", tmp_path / "m.oam")
    assert done.exit_code == 1 and words in " ".join(done.stderr.split()), done.output
    assert "--no-tokenizer" in done.stderr and not (tmp_path / "m.oam").exists()
    assert convert(path, "-o", tmp_path / "m.oam", "--no-tokenizer").exit_code == 0
    with OamSource(tmp_path / "m.oam") as source:
        assert source.asset("asset/tokenizer.json") is None
