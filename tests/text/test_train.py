"""Learning a byte-level vocabulary, the byte tokenizer as a file, and reading text in pieces."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library

from oazoo.errors import TokenizerError, UsageError
from oazoo.text import ByteTokenizer, OaBpeTokenizer, Tokenizer
from oazoo.text.files import data_files, lines_of, text_pieces, vocabulary_texts
from oazoo.text.train import byte_tokenizer_json, tokenizer_from_file, train_byte_level

TEXT = "the cat sat on the mat. The café naïve 你好 😀! don't\n" * 30
HARD = ["\x00\x01\x7f", "a\n\n  b\t", "é€𝄞", "<|endoftext|>", "", " ", "\r\n"]


def test_the_vocabulary_is_a_real_tokenizer_json() -> None:
    made = train_byte_level([TEXT], 290, special_tokens=["<|endoftext|>", "<|pad|>"])
    tokenizer = Tokenizer(made, eos_ids=[0])
    assert tokenizer.vocab_size == 290
    assert dict(tokenizer.special_tokens) == {"<|endoftext|>": 0, "<|pad|>": 1}
    library = Library.from_buffer(made)
    for text in (TEXT, *HARD):
        ids = tokenizer.encode(text, allow_special=False)
        assert tokenizer.decode(ids) == text
        if "<" not in text:
            assert ids == library.encode(text).ids
    assert tokenizer.encode("cat<|endoftext|>")[-1] == 0
    assert len(tokenizer.encode(TEXT)) < len(TEXT) // 2


def test_learning_is_the_same_in_another_process() -> None:
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefg") for _ in range(draw.randrange(1, 8))) for _ in range(3000)]
    text = " ".join(words)
    program = (
        "import sys; from oazoo.text.train import train_byte_level\n"
        "sys.stdout.buffer.write(train_byte_level([sys.stdin.read()], 700))"
    )
    other = subprocess.run([sys.executable, "-c", program], input=text.encode(), capture_output=True)
    assert other.stdout == train_byte_level([text], 700)


@pytest.mark.parametrize(
    ("size", "specials"), [(256, ["<e>"]), (-5, []), (1 << 21, []), (300, ["a", "a"]), (300, [""])]
)
def test_impossible_vocabularies(size: int, specials: list[str]) -> None:
    with pytest.raises(UsageError):
        train_byte_level([TEXT], size, special_tokens=specials)


def test_a_failure_of_the_reader_comes_through() -> None:
    def pieces() -> Iterator[str]:
        yield "some text"
        raise UsageError("here")

    with pytest.raises(UsageError, match="here"):
        train_byte_level(pieces(), 300)


def test_byte_file_is_the_byte_tokenizer() -> None:
    tokenizer, plain = Tokenizer(byte_tokenizer_json()), ByteTokenizer()
    assert tokenizer.vocab_size == plain.vocab_size == 256
    for text in (TEXT, *HARD):
        assert tokenizer.encode(text) == plain.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


def test_the_kind_of_a_file_is_told_by_its_content() -> None:
    assert isinstance(tokenizer_from_file(byte_tokenizer_json()), Tokenizer)
    assert isinstance(tokenizer_from_file(b"oa_bpe_v1\n0\n"), OaBpeTokenizer)
    with pytest.raises(TokenizerError, match="neither"):
        tokenizer_from_file(b"PK\x03\x04")


def test_pieces_join_to_the_text_and_keep_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oazoo.text.files._BLOCK_BYTES", 1 << 14)
    draw = random.Random(1)
    parts = ["a", "word ", "é", "😀", "\n", "\r\n", "  ", "line of text here\n", "\n\n"]
    text = "".join(draw.choice(parts) for _ in range(30_000))
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    pieces = list(text_pieces(path))
    assert "".join(pieces) == text and len(pieces) > 4
    assert max(map(len, pieces)) < 40_000
    tokenizer = Tokenizer(train_byte_level([text[:20_000]], 300))
    whole = tokenizer.encode(text)
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == whole


@pytest.mark.parametrize("text", ["", "x" * 3_000_000, "ab " * 700_000, "é" * 1_500_001])
def test_pieces_of_texts_without_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text, "utf-8")
    assert "".join(text_pieces(path)) == text


def test_a_small_text_is_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text\nand more\n", newline="")
    assert list(text_pieces(path)) == ["some text\nand more\n"]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"abc\xffdef", 3),
        (b"x" * (1 << 20) + b"\xc3", 1 << 20),
        (b"x" * ((1 << 20) - 1) + b"\xe2\x82\x41", (1 << 20) - 1),
        (b"ok \xed\xa0\x80", 3),
        ("text".encode("utf-16"), 0),
    ],
)
def test_bytes_that_are_not_utf8_are_named(tmp_path: Path, data: bytes, place: int) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=rf"bad\.txt: is not UTF-8 text: byte {place} is wrong"):
        list(text_pieces(path))


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.TXT", "c.bin", ".hidden.txt", ".git/x.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert [p.relative_to(tmp_path).as_posix() for p in data_files([tmp_path])] == [
        "a/y.TXT",
        "a/z.md",
        "b.txt",
    ]
    assert data_files([tmp_path / "c.bin"]) == [tmp_path / "c.bin"]
    for wrong, message in (
        ([tmp_path / "no"], "no such"),
        ([tmp_path / "b.txt", tmp_path], "named twice"),
        ([], "no data"),
        (["/dev/null"], "neither a file"),
    ):
        with pytest.raises(UsageError, match=message):
            data_files(wrong)


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\r\n\n  \r\n{1}\n{2}")
    assert list(lines_of(path)) == [(1, b"{}"), (4, b"{1}"), (5, b"{2}")]
    path.write_bytes(b"{}\n" + b"x" * ((16 << 20) + 1))
    with pytest.raises(UsageError, match=r"lines\.jsonl:2: the line is longer than 16 MiB"):
        list(lines_of(path))


def test_texts_that_a_vocabulary_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oazoo.text.files._BLOCK_BYTES", 20)
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one line\nanother line\nand a third\n", newline="")
    lines.write_text(
        '{"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "answer"}]}\n\n'
        '{"prompt": "p", "completion": "c", "id": 1}\n{"text": "t"}\n'
    )
    pieces = list(vocabulary_texts([text, lines]))
    assert (
        len(pieces) > 6
        and "".join(pieces[:-5]) == text.read_text()
        and pieces[-5:] == ["ask", "answer", "p", "c", "t"]
    )
    assert list(vocabulary_texts([text, lines], whole=True)) == [text.read_text(), *pieces[-5:]]
    for bad in (
        "{",
        "3",
        "{}",
        '{"text": 3}',
        '{"messages": [1]}',
        '{"messages": 4}',
        '{"messages": [{"role": "user"}]}',
    ):
        lines.write_text('{"text": "t"}\n' + bad)
        with pytest.raises(UsageError, match=r"b\.jsonl:2: is no example"):
            list(vocabulary_texts([lines]))
