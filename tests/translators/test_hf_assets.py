"""Tokenizer, template and generation settings of Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BYTES, GPT2, gpt2_tensors, llama_folder, write_hf
from tokenizers import Tokenizer

from oazoo.errors import OazooError, TokenizerError, TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan
from oazoo.translators.assets import PROBE, Assets
from oazoo.translators.gguf_tokenizer import build
from oazoo.translators.settings import Settings


def tokenizer_json(added: int = 3, pre: str = "gpt-2") -> dict[str, Any]:
    """A byte-level BPE tokenizer of 256 tokens and some added ones."""
    names = ["<s>", "</s>", "<|im_end|>", "<|extra|>"][:added]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*BYTES, *names],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * added,
        "tokenizer.ggml.merges": [],
    }
    document: dict[str, Any] = json.loads(build(Settings(metadata, "m"), metadata["tokenizer.ggml.tokens"]))
    return document


def assets(folder: Path) -> tuple[Assets, tuple[str, ...]]:
    with plan(folder) as planned:
        return planned.assets, planned.notes


def test_tokenizer_json_is_carried_byte_for_byte(tmp_path: Path) -> None:
    text = json.dumps(tokenizer_json(), indent=3)
    folder = llama_folder(tmp_path / "hf", {"vocab_size": 259}, tokenizer__json=text)
    convert(folder, tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        stored = source.asset("asset/tokenizer.json")  # type: ignore[attr-defined]
    assert stored == text.encode()
    original = Tokenizer.from_str(text)
    assert Tokenizer.from_buffer(stored).encode(PROBE).ids == original.encode(PROBE).ids


def test_padding_rows_are_reported_with_both_numbers(tmp_path: Path) -> None:
    _, notes = assets(llama_folder(tmp_path / "hf", {"vocab_size": 288}, tokenizer__json=tokenizer_json()))
    assert any("288 rows" in note and "259 tokens" in note for note in notes)


def test_ids_without_a_row_are_refused(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf", {"vocab_size": 256}, tokenizer__json=tokenizer_json())
    with pytest.raises(TokenizerError, match=r"id 258.*256 rows.*259 tokens"):
        convert(folder, tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()
    convert(folder, tmp_path / "m.oam", with_tokenizer=False)
    with open_source(tmp_path / "m.oam") as source:
        assert source.asset("asset/tokenizer.json") is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ("{", "JSON"),
        ('{"a": 1, "a": 2}', "twice"),
        ("{}", "cannot be used"),
        ('{"model": {"type": "NoSuchModel"}}', "cannot be used"),
        (b"\xff\xfe", "UTF-8"),
        ('{"a":' * 100000 + "1" + "}" * 100000, "nested|recursion"),
    ],
)
def test_broken_tokenizers(tmp_path: Path, text: str | bytes, named: str) -> None:
    with pytest.raises(OazooError, match=named):
        assets(llama_folder(tmp_path / "hf", tokenizer__json=text))


def test_json_is_preferred_to_model(tmp_path: Path) -> None:
    folder = llama_folder(
        tmp_path / "hf", {"vocab_size": 259}, tokenizer__json=tokenizer_json(), tokenizer__model=b"junk"
    )
    _, notes = assets(folder)
    assert any("tokenizer.model is not read" in note for note in notes)


def test_no_tokenizer_is_reported(tmp_path: Path) -> None:
    found, notes = assets(llama_folder(tmp_path / "hf"))
    assert found.tokenizer is None and any("no tokenizer" in note for note in notes)


def test_gpt2_vocabulary_and_merges(tmp_path: Path) -> None:
    """vocab.json and merges.txt alone: every text of GPT-2's rule splits and joins as they say."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokens = [*BYTES, "Ġt", "he", "Ġthe", "<|endoftext|>"]
    folder = write_hf(
        tmp_path / "hf",
        GPT2 | {"vocab_size": 260, "eos_token_id": 259},
        gpt2_tensors(GPT2 | {"vocab_size": 260}),
        vocab__json={token: number for number, token in enumerate(tokens)},
        merges__txt="#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges),
    )
    found, _ = assets(folder)
    assert found.tokenizer is not None
    tokenizer = Tokenizer.from_buffer(found.tokenizer)
    assert tokenizer.encode(" the hen<|endoftext|>").tokens == ["Ġthe", "Ġ", "he", "n", "<|endoftext|>"]
    assert tokenizer.decode(tokenizer.encode(PROBE).ids) == PROBE


@pytest.mark.parametrize(
    ("vocab", "merges", "named"),
    [
        ({"a": 0, "b": 1}, "a b\n", "line 1"),
        ({"a": 0, "b": 1, "ab": 2}, "#version: 0.2\na b\nab\n", "line 3"),
        ({"a": 0, "b": 0}, "", "same id"),
        ({"a": -1}, "", "ids"),
        ({"a": "0"}, "", "ids"),
        ([], "", "map"),
        ({"a": 0}, b"\xff", "UTF-8"),
    ],
)
def test_broken_gpt2_vocabularies(tmp_path: Path, vocab: Any, merges: Any, named: str) -> None:
    with pytest.raises(TokenizerError, match=named):
        assets(llama_folder(tmp_path / "hf", vocab__json=vocab, merges__txt=merges))


NAMED = [{"name": "default", "template": "DEFAULT"}, {"name": "tool_use", "template": "TOOLS"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config__json": {}}, None),
        ({"tokenizer_config__json": {"chat_template": "CONFIG"}}, "CONFIG"),
        ({"tokenizer_config__json": {"chat_template": NAMED}}, "DEFAULT"),
        ({"tokenizer_config__json": {"chat_template": NAMED[1:]}}, None),
        ({"chat_template__jinja": "FILE é"}, "FILE é"),
        ({"chat_template__jinja": "FILE", "tokenizer_config__json": {"chat_template": "CONFIG"}}, "FILE"),
    ],
)
def test_chat_template_places_and_priority(tmp_path: Path, files: Any, expected: str | None) -> None:
    found, notes = assets(llama_folder(tmp_path / "hf", **files))
    assert found.chat_template == expected
    if "tool_use" in str(files):
        assert any("tool_use" in note for note in notes)


@pytest.mark.parametrize("template", [3, ["x"], [{"name": "a"}], {"default": "x"}])
def test_bad_templates(tmp_path: Path, template: Any) -> None:
    with pytest.raises(OazooError, match="chat_template"):
        assets(llama_folder(tmp_path / "hf", tokenizer_config__json={"chat_template": template}))


def test_every_end_token_is_kept(tmp_path: Path) -> None:
    """config.json says one, generation_config.json another two, tokenizer_config.json a fourth."""
    folder = llama_folder(
        tmp_path / "hf",
        {"vocab_size": 259, "eos_token_id": 2},
        generation_config__json={"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 40, "top_p": 1},
        tokenizer__json=tokenizer_json(),
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"},
    )
    found, _ = assets(folder)
    assert found.generation == {
        "bos_id": 1,
        "eos_ids": [2, 7, 258],
        "temperature": 0.6,
        "top_k": 40,
        "top_p": 1.0,
    }
    assert found.tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_end_tokens_without_a_row_are_left_out_and_reported(tmp_path: Path) -> None:
    found, notes = assets(llama_folder(tmp_path / "hf", {"eos_token_id": [2, 50256], "bos_token_id": 50256}))
    assert found.generation == {"eos_ids": [2]}
    assert sum("50256" in note for note in notes) == 2


@pytest.mark.parametrize(
    ("changes", "files", "named"),
    [
        ({"eos_token_id": "2"}, {}, "eos_token_id"),
        ({"eos_token_id": [True]}, {}, "eos_token_id"),
        ({"eos_token_id": -1}, {}, "eos_token_id"),
        ({"bos_token_id": 1.5}, {}, "bos_token_id"),
        ({}, {"generation_config__json": {"temperature": "hot"}}, "temperature"),
        ({}, {"generation_config__json": {"top_k": 1.5}}, "top_k"),
        ({}, {"generation_config__json": {"top_p": -1}}, "top_p"),
        ({}, {"generation_config__json": []}, "generation_config"),
        ({}, {"generation_config__json": "{"}, "generation_config"),
        ({}, {"tokenizer_config__json": {"bos_token": 3}}, "bos_token"),
    ],
)
def test_ill_typed_settings(tmp_path: Path, changes: Any, files: Any, named: str) -> None:
    with pytest.raises(OazooError, match=named):
        assets(llama_folder(tmp_path / "hf", changes, **files))


def test_licence_comes_from_the_model_card(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf", README__md="---\ntags: [x]\nlicense: 'mit'\n---\nlicense: gpl\n")
    assert convert(folder, tmp_path / "m.oam").source["license"] == "mit"


def test_a_stored_tokenizer_that_differs_is_noticed(tmp_path: Path) -> None:
    from oazoo.translators.assets import check_equal

    one = Tokenizer.from_str(json.dumps(tokenizer_json(pre="gpt-2")))
    other = Tokenizer.from_str(json.dumps(tokenizer_json(pre="qwen2")))
    check_equal(one, Tokenizer.from_str(one.to_str()), "x")
    other.add_tokens(["don"])
    with pytest.raises(TokenizerError, match="differs"):
        check_equal(one, other, "x")


def test_an_unknown_kind_of_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TranslationError, match=r"tokenizer_config\.json"):
        assets(llama_folder(tmp_path / "hf", tokenizer_config__json=[1]))
