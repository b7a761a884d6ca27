"""Tokenizers against the library's own encoding and decoding, and against hostile definitions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from oazoo.errors import TokenizerError
from oazoo.text import ByteTokenizer, Tokenizer

Build = dict[str, Callable[..., Library]]
SPACES = [" a", "a", "  a", "\na", "", " ", "a ", "a\n\n b", "\t a"]
TEXTS = [*SPACES, "12345 don't\n\n  x", "café naïve 你好 😀!", "🙂é한", "hello world", "e\u0301 \u200d👩‍👩‍👧"]


def wrap(library: Library, **options: Any) -> Tokenizer:
    return Tokenizer(library.to_str().encode(), **options)


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_round_trip_and_ids(build: Build, text: str) -> None:
    library = build["byte_level"]()
    tokenizer = wrap(library)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == text == library.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_round_trip_and_ids(build: Build, text: str) -> None:
    library = build["sentencepiece"]()
    tokenizer = wrap(library, bos_id=1, eos_ids=[2])
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == text == library.decode(ids)


@pytest.mark.parametrize("text", SPACES)
@pytest.mark.parametrize("prefix_space", [True, False])
def test_prefix_space_follows_the_library(build: Build, text: str, prefix_space: bool) -> None:
    library = build["byte_level"](prefix_space=prefix_space)
    ids = wrap(library).encode(text)
    assert ids == library.encode(text).ids
    assert wrap(library).decode(ids) == library.decode(ids)


@pytest.mark.parametrize("scheme", ["always", "never", "first"])
@pytest.mark.parametrize("text", ["hello a", " hello", "a", "  a", "é hello"])
def test_metaspace_decodes_as_the_library(build: Build, scheme: str, text: str) -> None:
    library = build["metaspace"](scheme)
    tokenizer = wrap(library)
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    assert tokenizer.decode(ids) == library.decode(ids)


def test_text_after_a_special_token_keeps_its_space(build: Build) -> None:
    tokenizer = wrap(build["byte_level"]())
    for text in ("<|im_start|> a", "<|im_start|>a", "<|im_end|>\na"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "metaspace", "wordpiece"])
def test_stream_is_the_full_decode_for_random_ids(build: Build, kind: str) -> None:
    library = build[kind]()
    tokenizer = wrap(library)
    rng = random.Random(7)
    size = library.get_vocab_size()
    for _ in range(200):
        ids = [rng.randrange(size + 5) for _ in range(rng.randrange(1, 20))]  # some ids have no token
        decoder = tokenizer.stream()
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)
        for piece in pieces:
            piece.encode("utf-8")


def test_byte_level_decoding_of_invalid_bytes_is_the_librarys(build: Build) -> None:
    library = build["byte_level"]()
    tokenizer = wrap(library)
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(library.get_vocab_size()) for _ in range(rng.randrange(1, 30))]
        assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("make", ["bytes", "byte_level", "sentencepiece"])
def test_characters_come_whole_when_forced_byte_by_byte(build: Build, make: str) -> None:
    text = "🙂é한"
    data = text.encode()
    if make == "bytes":
        tokenizer: Any = ByteTokenizer()
        ids = list(data)
    elif make == "byte_level":
        tokenizer = wrap(build["byte_level"]())
        alphabet = {b: wrap_byte(tokenizer, b) for b in set(data)}
        ids = [alphabet[b] for b in data]
    else:
        tokenizer = wrap(build["sentencepiece"]())
        ids = [3 + b for b in data]
    decoder = tokenizer.stream()
    assert [decoder.push(i) for i in ids] == ["", "", "", "🙂", "", "é", "", "", "한"]
    assert decoder.flush() == ""

    decoder = tokenizer.stream()
    assert [decoder.push(i) for i in ids[:6] + ids[6:8]][-2:] == ["", ""]
    assert decoder.flush() == "\ufffd"  # the text ends in the middle of a character


def wrap_byte(tokenizer: Tokenizer, value: int) -> int:
    """The id of a single byte in a byte-level vocabulary (its spelling in GPT-2's alphabet, from the paper's
    code).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    char = chr(value) if value in printable else chr(256 + rest.index(value))
    found = tokenizer.token_id(char)
    assert found is not None
    return found


def test_continuing_a_text_keeps_the_leading_space(build: Build) -> None:
    tokenizer = wrap(build["sentencepiece"](), bos_id=1)
    prompt = tokenizer.encode_prompt("hello")
    more = [i for piece in ("▁wor", "ld") if (i := tokenizer.token_id(piece)) is not None]
    assert tokenizer.decode(more) == "world"
    assert tokenizer.decode(more, after=prompt) == " world"
    assert tokenizer.decode(more, after=[1]) == "world"  # after nothing but the beginning token a text begins


def test_continuing_with_a_decoder_only_the_library_knows(build: Build) -> None:
    tokenizer = wrap(build["wordpiece"]())
    ids = tokenizer.encode("hello worldly!")
    assert tokenizer.decode(ids) == "hello worldly!"
    assert tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:], after=ids[:1]) == "hello worldly!"


def test_beginning_token_exactly_once(build: Build) -> None:
    tokenizer = wrap(build["sentencepiece"](), bos_id=1)
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("<s>hello").count(1) == 1
    assert tokenizer.encode_prompt("<s>hello").count(1) == 1
    assert tokenizer.encode("hello", add_special_tokens=False).count(1) == 0


def test_beginning_token_follows_the_override(build: Build) -> None:
    without = build["sentencepiece"](bos=False)
    assert wrap(without, bos_id=1).encode("a").count(1) == 0
    assert wrap(without, bos_id=1, add_bos=True).encode("a")[0] == 1
    assert wrap(build["sentencepiece"](), bos_id=1, add_bos=True).encode("a").count(1) == 1
    assert wrap(build["sentencepiece"](), bos_id=1, add_bos=False).encode("a").count(1) == 0
    with pytest.raises(TokenizerError, match="beginning token"):
        wrap(without, add_bos=True)


def test_prompt_is_not_ended_by_the_post_processor(build: Build) -> None:
    tokenizer = wrap(build["metaspace"]())
    assert tokenizer.encode("a")[-1] == 7
    assert tokenizer.encode_prompt("a")[-1] != 7


def test_truncation_and_padding_of_the_file_are_ignored(build: Build) -> None:
    library = build["byte_level"]()
    expected = library.encode("The quick brown fox").ids
    library.enable_truncation(3)
    library.enable_padding(length=64)
    assert wrap(library).encode("The quick brown fox") == expected


def test_control_tokens_as_tokens_or_as_text(byte_level_json: bytes) -> None:
    tokenizer = Tokenizer(byte_level_json)
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", allow_special=False)
    assert 2 not in plain and tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2]  # the switch does not stick
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.is_special(2) and not tokenizer.is_special(50)
    assert tokenizer.decode([2]) == "" and tokenizer.decode([2], skip_special=False) == "<|im_end|>"


def test_unknown_control_token_is_an_error(byte_level_json: bytes, build: Build) -> None:
    tokenizer = Tokenizer(byte_level_json)
    tokenizer.check_special("<|im_start|>user\nHello <b> a < b | c > d <|im_end|>")
    with pytest.raises(TokenizerError, match=r"<\|im_strat\|> at character 2.*did you mean <\|im_start\|>"):
        tokenizer.check_special("a <|im_strat|>")
    with pytest.raises(TokenizerError, match=r"<\|eot_id\|>"):
        tokenizer.check_special("<|eot_id|>")
    tokenizer.check_special("<|eot_id|>", ignore={"<|eot_id|>"})
    wrap(build["sentencepiece"]()).check_special("<|eot_id|>")  # this family has no such spelling: plain text


def test_added_tokens_outside_the_byte_alphabet_survive(build: Build) -> None:
    library = build["byte_level"]()
    library.add_tokens([AddedToken("é à", normalized=False)])
    tokenizer = wrap(library)
    ids = tokenizer.encode("aé àb")
    assert len(ids) == 3 and tokenizer.decode(ids) == "aé àb"


def test_ids_without_a_token(byte_level_json: bytes) -> None:
    tokenizer = Tokenizer(byte_level_json)
    assert tokenizer.token(399_999) is None
    assert tokenizer.decode([399_999, *tokenizer.encode("a")]) == "a"
    for bad in (-1, 2**32, "a", 1.0, None):
        with pytest.raises(TokenizerError):
            tokenizer.decode([bad])  # type: ignore[list-item]


def test_lone_surrogates_and_monstrous_texts_are_refused(byte_level_json: bytes) -> None:
    tokenizer = Tokenizer(byte_level_json)
    with pytest.raises(TokenizerError, match="surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TokenizerError, match="at most"):
        tokenizer.encode("a" * (2**24 + 1))


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3, 0xA9, 300]) == "é"
    assert tokenizer.token(0x41) == "A" and tokenizer.token(0) == "<0x00>" and tokenizer.token(256) is None
    assert tokenizer.token_id("A") == 0x41 and tokenizer.token_id("AB") is None


# ------------------------------------------------------------------------------------------- hostile
# definitions


def bpe(**changes: Any) -> bytes:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    definition: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model,
    }  # fmt: skip
    definition.update(changes)
    return json.dumps(definition).encode()


def unused_template(**special_tokens: Any) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "Z", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens}


BROKEN = {
    "empty": b"",
    "not json": b"\x00\x01\xff",
    "deep": b"[" * 200_000,
    "deep inside": bpe(normalizer=None).replace(
        b'"normalizer": null', b'"normalizer": ' + b'{"a":' * 100_000
    ),
    "no model": b"{}",
    "unknown model": bpe(model={"type": "Nope"}),
    "merge of unknown tokens": bpe(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "z"]]}),
    "negative id": bpe(model={"type": "BPE", "vocab": {"a": -1}, "merges": []}),
    "empty unigram": bpe(model={"type": "Unigram", "unk_id": 0, "vocab": []}),
    "unknown id outside": bpe(model={"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}),
    "broken regex": bpe(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
    "library panics on the normaliser": bpe(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "library panics on the post-processor": bpe(post_processor=unused_template()),
    "unknown decoder": bpe(decoder={"type": "Nope"}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_definitions_are_clear_errors(name: str) -> None:
    with pytest.raises(TokenizerError):
        Tokenizer(BROKEN[name])


def test_text_that_the_vocabulary_cannot_express() -> None:
    words = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
    with pytest.raises(TokenizerError, match="cannot be expressed"):
        Tokenizer(bpe(model=words)).encode("b")


def test_truncated_and_damaged_definitions_never_escape(byte_level_json: bytes) -> None:
    rng = random.Random(11)
    for _ in range(200):
        data = bytearray(byte_level_json)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            tokenizer = Tokenizer(bytes(data))
            tokenizer.decode(tokenizer.encode("The quick 😀"))
        except TokenizerError:
            pass


@pytest.mark.parametrize("value", [-1, 2**32, "2", True, 1.5])
def test_nonsense_ids_from_the_configuration(byte_level_json: bytes, value: Any) -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        Tokenizer(byte_level_json, bos_id=value)
    with pytest.raises(TokenizerError, match="not a token id"):
        Tokenizer(byte_level_json, eos_ids=[value])
