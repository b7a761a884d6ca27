"""Characters as tokens: text there and back, what is refused, and hostile vocabulary files."""

from __future__ import annotations

import random

import pytest

from oazoo.errors import TokenizerError, UsageError
from oazoo.text import CharacterTokenizer
from oazoo.text.train import tokenizer_from_file

TEXT = "Ein Dörfchen – 한국 🙂\r\n\tété\n"


def test_there_and_back() -> None:
    tokenizer = CharacterTokenizer.train([TEXT[:10], TEXT[10:]])
    wanted = sorted(set(TEXT))
    assert tokenizer.vocab_size == len(wanted) and not tokenizer.special_tokens
    assert tokenizer.encode(TEXT) == [wanted.index(c) for c in TEXT]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert [tokenizer.token(i) for i in range(len(wanted))] == wanted and tokenizer.token(len(wanted)) is None
    assert tokenizer.token_id("🙂") == wanted.index("🙂") and tokenizer.token_id("x") is None
    again = tokenizer_from_file(tokenizer.to_bytes())
    assert isinstance(again, CharacterTokenizer) and again.encode(TEXT) == tokenizer.encode(TEXT)
    stream = tokenizer.stream()
    assert [stream.push(i) for i in tokenizer.encode(TEXT)] == list(TEXT) and stream.flush() == ""


def test_an_unknown_character_is_refused() -> None:
    tokenizer = CharacterTokenizer.train(["abc\n"])
    with pytest.raises(
        TokenizerError, match=r"'é' \(U\+00E9\), character 6 of the text, in its line 3, is none of the 4"
    ):
        tokenizer.encode("ab\n\ncé")
    assert tokenizer.decode([0, 99, 1]) == "\na"
    with pytest.raises(UsageError, match="no characters"):
        CharacterTokenizer.train(["", ""])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "first line"),
        (b"oazoo_char_v2\n1\n97\n", "first line"),
        (b"oazoo_char_v1", "does not say how many"),
        (b"oazoo_char_v1\n", "does not say how many"),
        (b"oazoo_char_v1\n0\n", "has no characters"),
        (b"oazoo_char_v1\n2\n97\n", "says that it has 2 characters, but 1"),
        (b"oazoo_char_v1\n1\n97\n98\n", "says that it has 1 characters, but 2"),
        (b"oazoo_char_v1\n1\na\n", "line 3"),
        (b"oazoo_char_v1\n1\n-1\n", "line 3"),
        (b"oazoo_char_v1\n1\n\xd9\xa1\n", "line 3"),
        (b"oazoo_char_v1\n1\n9999999\n", "code point 9999999"),
        (b"oazoo_char_v1\n1\n55296\n", "code point 55296"),
        (b"oazoo_char_v1\n2\n98\n97\n", "character 1 of the vocabulary is code point 97"),
        (b"oazoo_char_v1\n2\n97\n97\n", "ascending"),
        (b"oazoo_char_v1\n1\n" + b"9" * 10_000_000, "at most"),
    ],
)
def test_bad_files(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        CharacterTokenizer.from_bytes(data)


def test_damaged_files_are_read_or_refused() -> None:
    good = CharacterTokenizer.train([TEXT]).to_bytes()
    draw = random.Random(5)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.choice(b"0123456789\n\r a\xff")
        try:
            tokenizer = CharacterTokenizer.from_bytes(data)
        except TokenizerError:
            continue
        assert CharacterTokenizer.from_bytes(tokenizer.to_bytes()).token(0) == tokenizer.token(0)
