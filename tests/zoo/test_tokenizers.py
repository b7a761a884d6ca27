"""Tokenizers by name: files of both kinds, models that carry them, and bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oazoo.errors import OazooError, TokenizerError, UsageError
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.text import CharacterTokenizer, OaBpeTokenizer
from oazoo.text.train import byte_tokenizer_json, train_byte_level
from oazoo.zoo.tokenizers import load_tokenizer

TEXT = "the cat sat on the mat, the cat sat. " * 5


def model(path: Path, assets: dict[str, bytes], generation: object = None) -> Path:
    payload = json.dumps({"oazoo": 1, "generation": generation}).encode()
    config = OamConfig(architecture="test", payload=payload)
    with OamWriter(path, config=config, entries=[OamEntry("w", (2,), "f32")], assets=assets) as writer:
        writer.write("w", bytes(8))
    return path


def test_each_kind(tmp_path: Path) -> None:
    ours, theirs = OaBpeTokenizer.train([TEXT], 270).to_bytes(), train_byte_level([TEXT], 270)
    (tmp_path / "ours.txt").write_bytes(ours)
    (tmp_path / "theirs.json").write_bytes(theirs)
    of_ours = model(tmp_path / "ours.oam", {"oa_bpe_v1.txt": ours})
    of_theirs = model(tmp_path / "theirs.oam", {"tokenizer.json": theirs}, {"eos_ids": [0]})
    assert load_tokenizer("bytes").encode(TEXT) == list(TEXT.encode())
    for file, carried in ((tmp_path / "ours.txt", of_ours), (tmp_path / "theirs.json", of_theirs)):
        ids = load_tokenizer(file).encode(TEXT)
        assert len(ids) < len(TEXT) / 2 and load_tokenizer(carried).encode(TEXT) == ids
        assert load_tokenizer(carried).decode(ids) == TEXT
    characters = model(
        tmp_path / "char.oam", {"oazoo_char_v1.txt": CharacterTokenizer.train([TEXT]).to_bytes()}
    )
    assert load_tokenizer(characters).decode(load_tokenizer(characters).encode(TEXT)) == TEXT
    assert load_tokenizer(of_theirs).eos_ids == (0,) and load_tokenizer(of_ours).eos_ids == ()


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"none\.oam: the model has no tokenizer"):
        load_tokenizer(model(tmp_path / "none.oam", {}))
    bad = tmp_path / "bad.txt"
    for data in (b"", b"OAM", b"oa_bpe_v1\n5\n", b"{}", byte_tokenizer_json()[:100]):
        bad.write_bytes(data)
        with pytest.raises(TokenizerError, match=r"bad\.txt: "):
            load_tokenizer(bad)
    (tmp_path / "cut.oam").write_bytes((tmp_path / "none.oam").read_bytes()[:200])
    with pytest.raises(OazooError):
        load_tokenizer(tmp_path / "cut.oam")
