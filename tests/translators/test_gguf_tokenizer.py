"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, bpe_metadata, gguf_names, llama_metadata, llama_tensors, write_gguf
from tokenizers import Tokenizer

from oazoo.errors import TokenizerError
from oazoo.formats.detect import open_source
from oazoo.translators import convert
from oazoo.translators.gguf_tokenizer import build, gguf_assets
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.translators.settings import Settings
from oazoo.translators.translator import open_checkpoint

DATA = Path(__file__).resolve().parent.parent / "data" / "tokenizer"


def made(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer of some metadata."""
    settings = Settings(metadata, "m.gguf")
    return Tokenizer.from_buffer(build(settings, metadata["tokenizer.ggml.tokens"]))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return made(json.loads(lzma.decompress((DATA / "smollm2-metadata.json.xz").read_bytes())))


def test_smollm2_gives_the_reference_ids(smollm2: Tokenizer) -> None:
    for case in json.loads((DATA / "smollm2-prompts.json").read_text("utf-8")):
        assert smollm2.encode(case["prompt"]).ids == case["ids"]
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["prompt"]


def test_smollm2_splits_digits_one_by_one(smollm2: Tokenizer) -> None:
    assert smollm2.encode("12345").tokens == list("12345")


def test_smollm2_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>x<|im_end|>").ids[::2] == [1, 2]
    assert smollm2.decode([1, 2]) == ""
    assert smollm2.get_vocab_size() == 49152


@pytest.mark.parametrize("text", [" a", "a", "  a", "\na", "", " ", "<s> a", "é\x00🙂한", "\r\n\t"])
def test_every_text_survives(text: str) -> None:
    tokenizer = made(bpe_metadata())
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


#: Pieces of a text under each split rule, written out by hand from the rule.
TEXT = "I'll DON'T 12345\n\n  x"
PIECES = {
    "gpt-2": ["I", "'ll", " DON", "'", "T", " 12345", "\n\n ", " x"],
    "smollm": ["I", "'ll", " DON", "'", "T", " ", "1", "2", "3", "4", "5", "\n\n ", " x"],
    "llama-bpe": ["I", "'ll", " DON", "'T", " ", "123", "45", "\n\n", " ", " x"],
    "qwen2": ["I", "'ll", " DON", "'T", " ", "1", "2", "3", "4", "5", "\n\n", " ", " x"],
    "tekken": ["I", "'ll", " DON", "'T", " ", "1", "2", "3", "4", "5", "\n\n", " ", " x"],
}


@pytest.mark.parametrize("name", PIECES)
def test_split_rules(name: str) -> None:
    tokenizer = made(bpe_metadata() | {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False})
    assert tokenizer.pre_tokenizer is not None
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in pieces] == PIECES[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_listed_rule_builds(name: str) -> None:
    tokenizer = made(bpe_metadata() | {"tokenizer.ggml.pre": name})
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


@pytest.mark.parametrize(("name", "expected"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True)])
def test_beginning_token_by_default(name: str, expected: bool) -> None:
    metadata = bpe_metadata() | {"tokenizer.ggml.pre": name}
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert (made(metadata).encode("x").ids[0] == bos) is expected
    assert made(metadata | {"tokenizer.ggml.add_bos_token": True}).encode("x").ids[0] == bos
    assert made(metadata | {"tokenizer.ggml.add_bos_token": False}).encode("x").ids[0] != bos


def test_beginning_and_end_token_once_each() -> None:
    metadata = bpe_metadata() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    ids = made(metadata).encode("x").ids
    assert ids[0] == bos and ids[-1] == eos and len(ids) == 3
    assert made(metadata).encode("x", "x").ids.count(bos) == 2


def test_whole_words_are_taken_unmerged() -> None:
    """llama-bpe takes a piece that is in the vocabulary as it is; gpt-2 reaches it by merges only."""
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][-1] = "qqq"
    metadata["tokenizer.ggml.token_type"][-1] = 1
    assert made(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("qqq").tokens == ["q", "q", "q"]
    ignoring = made(metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    assert ignoring.encode("qqq").tokens == ["qqq"]


def test_user_defined_tokens_are_recognised_but_not_hidden() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = made(metadata)
    ids = tokenizer.encode("a<pad>b").ids
    assert ids[1] == len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.decode(ids) == "a<pad>b"


def _without(key: str) -> dict[str, Any]:
    return {name: value for name, value in bpe_metadata().items() if name != f"tokenizer.ggml.{key}"}


def _changed(**changes: Any) -> dict[str, Any]:
    return bpe_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


BAD: list[tuple[dict[str, Any], str]] = [
    (_changed(pre="no-such-rule"), "no-such-rule"),
    (_changed(pre="default"), "default"),
    (_changed(pre=7), "pre must be a text"),
    (_without("pre"), "does not name"),
    (_changed(model="bert"), "bert"),
    (_changed(model=3), "model"),
    (_without("merges"), "merges"),
    (_changed(merges=["a"]), "merge 0"),
    (_changed(merges=["Ġ t", "a b"]), "merge 1"),
    (_changed(merges=["Ġ  t"]), "merge 0"),
    (_changed(merges=[1]), "merge 0"),
    (_changed(merges="x y"), "merges"),
    (_changed(token_type=[1, 1]), "token_type"),
    (_changed(token_type=["1"] * 265), "token_type"),
    (_changed(add_bos_token=1), "add_bos_token"),
    (_changed(add_bos_token=True, bos_token_id=9999), "bos_token_id"),
    (_changed(add_space_prefix=True), "add_space_prefix"),
]


@pytest.mark.parametrize(("metadata", "named"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_cannot_be_rebuilt_is_refused_by_name(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception, match=named) as caught:
        made(metadata)
    assert caught.type.__module__ == "oazoo.errors"


def _file(tmp_path: Path, vocab: int, **changes: Any) -> Path:
    tensors = llama_tensors(LLAMA | {"vocab_size": vocab})
    return write_gguf(tmp_path / "m.gguf", llama_metadata(vocab) | _changed(**changes), gguf_names(tensors))


def test_rows_without_tokens_are_kept_and_reported(tmp_path: Path) -> None:
    report = convert(_file(tmp_path, 300), tmp_path / "m.oam")
    assert any("300 rows" in note and "265 tokens" in note for note in report.notes)
    with open_source(tmp_path / "m.oam") as source:
        assert source["embed.weight"].info.shape == (300, 32)


def test_tokens_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"264.*200 rows"):
        convert(_file(tmp_path, 200), tmp_path / "m.oam")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]
    report = convert(tmp_path / "m.gguf", tmp_path / "m.oam", with_tokenizer=False)
    assert any("left out" in note for note in report.notes)


def test_repeated_tokens_are_refused(tmp_path: Path) -> None:
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    tokens[7] = tokens[5]
    with pytest.raises(TokenizerError, match="two ids, 5 and 7"):
        convert(_file(tmp_path, 265, tokens=tokens), tmp_path / "m.oam")


def test_every_end_token_is_kept(tmp_path: Path) -> None:
    path = _file(tmp_path, 265, eot_token_id=264, eom_token_id=262)
    with open_source(path) as source:
        assets = gguf_assets(open_checkpoint(source), 265)
    assert assets.generation == {"bos_id": 262, "eos_ids": [262, 263, 264]}
    assert assets.tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}


def test_chat_template_travels(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": 265}))
    metadata = llama_metadata(265) | bpe_metadata() | {"tokenizer.chat_template": "{{ messages }} é"}
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    report = convert(write_gguf(tmp_path / "m.gguf", metadata, tensors), tmp_path / "m.oam")
    assert any("tool_use" in note for note in report.notes)
    with open_source(tmp_path / "m.oam") as source:
        stored = source.asset("asset/chat_template.jinja")  # type: ignore[attr-defined]
    assert stored.decode("utf-8") == "{{ messages }} é"


def test_a_file_without_tokenizer_converts(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(llama_tensors(LLAMA)))
    report = convert(path, tmp_path / "m.oam")
    assert any("no tokenizer" in note for note in report.notes)
    assert np.isfinite(report.max_error)
