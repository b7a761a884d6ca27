"""oazoo tokenizer: train, encode, decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer as Library

from oazoo.cli.main import main

TEXT = "the cat sat on the mat.\nthe cat ate the rat that sat on the mat, été.\n" * 20


def oazoo(*arguments: str | Path, text: str | None = None) -> Any:
    return CliRunner().invoke(main, ["tokenizer", *map(str, arguments)], input=text)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.txt"
    path.write_text(TEXT, "utf-8", newline="")
    return path


def test_byte_level_file_is_one_that_the_library_reads(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.json"
    made = oazoo("train", "--data", data, "--vocab-size", "275", "-o", out, "--json")
    assert made.exit_code == 0, made.stderr
    report = json.loads(made.stdout)
    assert report["vocab_size"] == 275 and report["text_bytes"] == len(TEXT.encode())
    assert report["special_tokens"] == {"<|endoftext|>": 0}
    library = Library.from_file(str(out))
    wanted = library.encode("the cat été\n").ids
    encoded = oazoo("encode", out, "the cat été\n", "--json")
    assert json.loads(encoded.stdout)["ids"] == wanted and len(wanted) < 10
    decoded = oazoo("decode", out, *map(str, wanted), "--json")
    assert json.loads(decoded.stdout) == {"text": "the cat été\n"}

    again = tmp_path / "again.json"
    assert oazoo("train", "--data", data, "--vocab-size", "275", "-o", again, "-q").stderr == ""
    assert again.read_bytes() == out.read_bytes()
    there = oazoo("train", "--data", data, "--vocab-size", "275", "-o", out)
    assert there.exit_code == 2 and "exists already" in there.stderr


def test_oa_bpe(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "vocabulary.txt"
    made = oazoo("train", "--data", data, "--vocab-size", "4096", "--kind", "oa-bpe", "-o", out)
    assert made.exit_code == 0, made.stderr
    assert "no more pairs" in made.stderr and out.read_bytes().startswith(b"oa_bpe_v1\n")
    encoded = oazoo("encode", out, "--text", "-", text="the mat\n")
    assert encoded.exit_code == 0 and "bytes a token" in encoded.stderr
    assert oazoo("decode", out, text=encoded.stdout).stdout == "the mat\n\n"


def test_characters(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "characters.txt"
    made = oazoo("train", "--data", data, "--kind", "char", "-o", out, "--json")
    assert made.exit_code == 0, made.stderr
    assert json.loads(made.stdout)["vocab_size"] == len(set(TEXT))
    encoded = oazoo("encode", out, "été", "--json")
    assert json.loads(encoded.stdout)["ids"] == [sorted(set(TEXT)).index(c) for c in "été"]
    unknown = oazoo("encode", out, "the Cat")
    assert unknown.exit_code == 1 and "'C' (U+0043), character 5" in unknown.stderr


def test_bytes() -> None:
    assert oazoo("encode", "bytes", "aé").stdout == "97 195 169\n"
    assert oazoo("decode", "bytes", "97", "195", "169").stdout == "aé\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "DATA", "--vocab-size", "100", "-o", "OUT"], "256 bytes"),
        (["train", "--data", "nowhere", "--vocab-size", "300", "-o", "OUT"], "no such file or folder"),
        (["train", "--data", "FOLDER", "--vocab-size", "300", "-o", "OUT"], "no files in it that end in"),
        (
            ["train", "--data", "DATA", "--vocab-size", "300", "--kind", "oa-bpe", "--special", "x", "-o", "OUT"],
            "no control tokens",
        ),
        (["train", "--data", "DATA", "--vocab-size", "300"], "--output"),
        (["train", "--data", "DATA", "-o", "OUT"], "--vocab-size is for"),
        (["train", "--data", "DATA", "--vocab-size", "300", "--kind", "char", "-o", "OUT"], "--vocab-size is for"),
        (["encode", "DATA"], "give a text"),
        (["encode", "nowhere", "text"], "no such file"),
        (["decode", "bytes", "1", "x"], "not a token id"),
        (["decode", "bytes", "--", "-1"], "not a token id"),
    ],
)  # fmt: skip
def test_misuse(data: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "folder").mkdir()
    places = {"DATA": data, "OUT": tmp_path / "out", "FOLDER": tmp_path / "folder"}
    ended = oazoo(*(places.get(word, word) for word in arguments))
    assert ended.exit_code == 2 and message in " ".join(ended.stderr.split())
    assert not (tmp_path / "out").exists()


def test_bad_files(data: Path, tmp_path: Path) -> None:
    ended = oazoo("encode", data, "text")
    assert ended.exit_code == 1 and "neither a tokenizer.json nor an oa_bpe_v1" in ended.stderr
    data.write_bytes(b"good \xff bad")
    ended = oazoo("train", "--data", data, "--vocab-size", "300", "-o", tmp_path / "out")
    assert ended.exit_code == 2 and "not UTF-8 text: byte 5" in ended.stderr
