"""The models that ship with the package: pulled without a network, what their cards say, and alive."""

from __future__ import annotations

from pathlib import Path

import pytest

import oazoo
from oazoo.errors import FormatError, PullError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.zoo.cards import card_names, load_card, parse_card
from oazoo.zoo.pull import pull, pull_card
from oazoo.zoo.refs import BundledRef, parse_ref
from oazoo.zoo.store import Store

BUNDLED = [
    name for name in card_names() if any(isinstance(s.ref, BundledRef) for s in load_card(name).sources)
]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    return tmp_path


def test_there_are_some() -> None:
    assert {"bytelm-kjv", "nanogpt-kjv"} <= set(BUNDLED)


@pytest.mark.parametrize("name", BUNDLED)
def test_a_shipped_model(name: str, offline: Path) -> None:
    pulled = pull(name)
    card = load_card(name)
    assert pulled.path.suffix == ".oam" and pulled.nbytes <= 3_000_000
    with OamSource(pulled.path) as source:
        source.verify()
        elements = sum(t.info.numel for t in source.values())
        assert elements == card.parameters
        assert any(t.info.encoding == "q8" for t in source.values())
    model = oazoo.load(name)
    assert model.model.max_positions == card.context_length  # type: ignore[attr-defined]
    assert model.tokenizer.vocab_size == card.tokenizer.vocabulary_size
    answer = model.generate("And the LORD said unto", raw=True, max_tokens=60, temperature=0)
    # It has learned words: most of what it writes greedily is in the text that it learned from.
    words = [word.strip(".,:;?!").lower() for word in answer.text.split()[:-1]]
    common = {
        "the",
        "and",
        "of",
        "to",
        "that",
        "unto",
        "he",
        "his",
        "him",
        "them",
        "shall",
        "in",
        "all",
        "i",
        "thou",
        "a",
        "lord",
    }
    assert len(words) >= 4 and sum(word in common for word in words) >= len(words) / 3, answer.text


def test_a_name_that_does_not_ship(offline: Path) -> None:
    with pytest.raises(PullError, match=r"this package: it has no file other\.oam"):
        pull("bundled:other.oam")
    for text in ("bundled:", "bundled:../x.oam", "bundled:x.gguf", "bundled:a/b.oam"):
        with pytest.raises(UsageError, match="no file of this package"):
            parse_ref(text)


def _card(name: str, digest: str) -> str:
    file = f"{name}.oam"
    return (
        "---\nlicense: mit\nlanguage: [en]\nlibrary_name: oazoo\noazoo:\n"
        "  architecture: x\n  parameters: 1\n  context_length: 1\n"
        "  tokenizer: {kind: bytes, vocabulary_size: 256}\n  prompt_format: plain\n  sources:\n"
        f"    - ref: bundled:{file}\n      files: [{{path: {file}, sha256: {digest}}}]\n---\n# T\n"
    )


def test_a_file_that_is_not_the_cards(offline: Path) -> None:
    card = parse_card("broken", _card("bytelm-kjv", "ab" * 32).encode())
    with pytest.raises(PullError, match="is not what its card says"):
        pull_card(card, Store())
    assert not list((offline / "home").rglob("*.oam"))


def test_a_card_without_a_digest() -> None:
    text = _card("x", "0" * 64).replace(f", sha256: {'0' * 64}", "")
    with pytest.raises(FormatError, match="a bundled file needs itself as its file"):
        parse_card("x", text.encode())
