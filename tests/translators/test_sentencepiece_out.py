"""SentencePiece tokenizers on their way into GGUF: merges become scores that mean the same, or are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_metadata, llama_tensors, write_gguf, write_hf
from exported import gguf_values
from family_folders import bent
from sentencepiece_models import (
    ALPHABET,
    CORPUS,
    PHI3_CHAT,
    gguf_metadata,
    phi3_document,
    reference_encode,
    vocabulary,
    with_phi3,
    with_runs,
)
from tokenizers import Tokenizer

from oazoo.errors import TokenizerError
from oazoo.formats.oam import OamSource
from oazoo.translators import convert
from oazoo.translators.assets import Assets
from oazoo.translators.export import export
from oazoo.translators.gguf_tokenizer import build as rebuild
from oazoo.translators.gguf_tokenizer_out import gguf_text_settings
from oazoo.translators.sentencepiece_bpe import NORMAL, USER_DEFINED, Vocabulary, build
from oazoo.translators.settings import Settings

AT = "tokenizer.ggml."
TO_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


def document(v: Vocabulary) -> dict[str, Any]:
    """A tokenizer.json of the form of Llama 2, with <s> before every text."""
    found: dict[str, Any] = json.loads(build(v, "v", prefix=("<s>", 1), suffix=None))
    return found


def written(
    source: Mapping[str, Any], rows: int | None = None, **tokens: str
) -> tuple[dict[str, Any], list[str]]:
    count = len(source["model"]["vocab"]) if rows is None else rows
    return gguf_text_settings(Assets(json.dumps(source).encode(), None, tokens), count, "x")


def texts() -> list[str]:
    random, words = np.random.default_rng(5), CORPUS.split()
    letters = [*ALPHABET.replace("▁", " "), " ", " ", "t", "h", "e", "日", "🙂", "\n"]
    found = ["".join(random.choice(letters, size=random.integers(1, 30))) for _ in range(100)]
    return [*found, *(" ".join(random.choice(words, size=5)) for _ in range(50)), "", " ", "  a", "a "]


def check_ids(source: Mapping[str, Any], found: Mapping[str, Any], v: Vocabulary, start: str = "") -> None:
    """The published algorithm, run on what was written, gives the ids of the document."""
    stored = Vocabulary(found[f"{AT}tokens"], found[f"{AT}scores"], found[f"{AT}token_type"], v.space_prefix)
    assert found[f"{AT}add_space_prefix"] is v.space_prefix
    tokenizer = Tokenizer.from_buffer(json.dumps(source).encode())
    again = Tokenizer.from_buffer(rebuild(Settings(dict(found), "x"), found[f"{AT}tokens"]))
    for text in texts():
        if start and text.startswith(start):
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference_encode(stored, text) == again.encode(text, add_special_tokens=False).ids


def test_a_gguf_file_becomes_what_it_was(tmp_path: Path) -> None:
    v = vocabulary()
    rows = len(v.pieces)
    meta = gguf_metadata(v) | {
        f"{AT}pre": "default",
        f"{AT}add_space_prefix": True,
        f"{AT}add_bos_token": True,
    }
    tensors = gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
    convert(write_gguf(tmp_path / "in.gguf", llama_metadata(rows) | meta, tensors), tmp_path / "m.oam")
    report = export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert not report.rounded
    found = gguf_values(tmp_path / "out.gguf")
    for key, value in meta.items():
        if key != f"{AT}scores":
            assert found[key] == value, key
    order = sorted(range(259, rows), key=lambda n: -v.scores[n])  # special pieces and bytes have no score
    assert sorted(range(259, rows), key=lambda n: -found[f"{AT}scores"][n]) == order


def llama2(d: dict[str, Any]) -> None:
    pass


def metaspace(scheme: str) -> Callable[[dict[str, Any]], None]:
    def change(d: dict[str, Any]) -> None:
        d["normalizer"] = None
        d["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        }
        if scheme == "never":
            d["decoder"]["decoders"].pop()

    return change


def gemma(d: dict[str, Any]) -> None:
    d["normalizer"] = TO_SPACE
    d["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    d["decoder"]["decoders"] = d["decoder"]["decoders"][:3]


def texts_of_merges(d: dict[str, Any]) -> None:
    d["model"]["merges"] = [" ".join(pair) for pair in d["model"]["merges"]]


FORMS: dict[str, tuple[Callable[[dict[str, Any]], None], bool]] = {
    "llama 2": (llama2, True),
    "metaspace, always": (metaspace("always"), True),
    "metaspace, first": (metaspace("first"), True),
    "metaspace, never": (metaspace("never"), False),
    "gemma": (gemma, False),
    "older library": (texts_of_merges, True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_documents(form: str) -> None:
    change, space_prefix = FORMS[form]
    v = vocabulary(space_prefix=space_prefix)
    d = document(vocabulary())
    change(d)
    found, notes = written(d, bos_token="<s>", unk_token="<unk>")
    scheme = form.rpartition(" ")[2] if form.startswith("metaspace") else "never"
    check_ids(d, found, v, " " if scheme != "never" else "")
    assert found[f"{AT}tokens"] == list(v.pieces) and found[f"{AT}token_type"] == list(v.types)
    assert (found[f"{AT}model"], found[f"{AT}add_bos_token"], found[f"{AT}bos_token_id"]) == (
        "llama",
        True,
        1,
    )
    assert any("does not begin with a space" in note for note in notes) == (scheme != "never")
    assert any("after each special token" in note for note in notes) == (scheme == "first")


def test_runs_of_spaces_keep_their_one_score() -> None:
    """Llama's and Mistral's: the list that stands for a common score becomes it again, other pieces keep theirs."""
    v = with_runs(vocabulary(), (2, 4, 8, 5, 3))
    found, _ = written(document(v))
    check_ids(document(v), found, v)
    assert len(set(found[f"{AT}scores"][-5:])) == 1
    merged = (
        "".join(pair)
        for pair in document(v)["model"]["merges"]
        if pair[0][0] != "▁" or len(pair[1].strip("▁"))
    )
    assert min(found[f"{AT}scores"][v.pieces.index(piece)] for piece in merged) > found[f"{AT}scores"][-1]
    for text in (" " * length for length in range(30)):
        stored = Vocabulary(v.pieces, found[f"{AT}scores"], v.types)
        assert reference_encode(stored, text) == reference_encode(v, text)


def test_runs_in_an_order_of_their_own() -> None:
    """As transformers lists them, by id: scores that differ say that."""
    v = with_runs(vocabulary(), (2, 4, 8, 5, 3))
    d = document(v)
    by_id = {piece: number for number, piece in enumerate(v.pieces)}
    runs = [pair for pair in d["model"]["merges"] if set("".join(pair)) == {"▁"}]
    rest = [pair for pair in d["model"]["merges"] if pair not in runs]
    d["model"]["merges"] = rest + sorted(runs, key=lambda pair: by_id["".join(pair)])
    found, _ = written(d)
    assert len(set(found[f"{AT}scores"][-5:])) == 5
    check_ids(d, found, v)
    d["model"]["merges"] = rest + sorted(runs, key=lambda pair: (by_id[pair[1]], by_id[pair[0]]))
    with pytest.raises(TokenizerError, match="are not those of scores"):
        written(d)


def test_runs_of_spaces_that_are_added_tokens_as_well() -> None:
    """Gemma lists them as added and merges them too: they stay pieces with a score."""
    v = vocabulary(space_prefix=False)
    grown = Vocabulary([*v.pieces, "▁▁"], [*v.scores, -0.5], [*v.types, NORMAL], False)
    d = document(grown)
    d["added_tokens"].append(dict(d["added_tokens"][0], id=len(v.pieces), content="▁▁", special=False))
    found, _ = written(d)
    assert found[f"{AT}token_type"] == list(grown.types)
    check_ids(d, found, grown)


def test_added_tokens_and_padding() -> None:
    v = vocabulary()
    grown = Vocabulary([*v.pieces, "<tool>"], [*v.scores, 0.0], [*v.types, USER_DEFINED])
    found, _ = written(document(grown), rows=len(grown.pieces) + 2)
    assert found[f"{AT}tokens"][-3:] == ["<tool>", f"[PAD{len(v.pieces) + 1}]", f"[PAD{len(v.pieces) + 2}]"]
    assert found[f"{AT}token_type"][-3:] == [4, 5, 5] and len(found[f"{AT}scores"]) == len(grown.pieces) + 2
    tokenizer = Tokenizer.from_buffer(rebuild(Settings(found, "x"), found[f"{AT}tokens"]))
    assert tokenizer.encode("the<tool>cat", add_special_tokens=False).ids == [
        *reference_encode(grown, "the"),
        len(v.pieces),
        *reference_encode(grown, "cat"),
    ]


def test_merges_of_added_tokens_do_not_matter() -> None:
    """Converters list how <s> could be merged from its letters; the text is recognised as a token before that."""
    v = vocabulary()
    pieces, scores = [*v.pieces, "<", "s>", "<hat>", "hat>"], [*v.scores, -900.0, -901.0, 0.0, -902.0]
    grown = Vocabulary(pieces, scores, [*v.types, NORMAL, NORMAL, USER_DEFINED, NORMAL])
    d = document(grown)
    d["model"]["merges"] = [["<", "s>"], ["<", "hat>"], *d["model"]["merges"]]
    found, _ = written(d)
    assert found[f"{AT}token_type"] == list(grown.types)
    tokenizer = Tokenizer.from_buffer(rebuild(Settings(found, "x"), found[f"{AT}tokens"]))
    original = Tokenizer.from_buffer(json.dumps(d).encode())
    for text in (*texts(), "the <hat> cat<s>", "<hat<hat>hat>"):
        assert tokenizer.encode(text).ids == original.encode(text).ids


def test_phi3_drops_the_space_after_added_tokens(tmp_path: Path) -> None:
    v = with_phi3(vocabulary())
    d = phi3_document(v)
    rows = len(v.pieces)

    def grow(tensors: dict[str, Any]) -> None:
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[key] = np.resize(tensors[key], (rows, 48))

    folder = bent(tmp_path / "hf", "phi3", {"vocab_size": rows}, grow, tokenizer__json=d)
    convert(folder, tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out.gguf")
    values = gguf_values(tmp_path / "out.gguf")
    assert values["general.architecture"] == "phi3" and values["general.name"] == "hf (Phi-3)"
    convert(tmp_path / "out.gguf", tmp_path / "again.oam")
    with OamSource(tmp_path / "again.oam") as source:
        again = Tokenizer.from_buffer(source.asset("asset/tokenizer.json") or b"")
    original = Tokenizer.from_buffer(json.dumps(d).encode())
    user, end, assistant, ends = (
        v.pieces.index(t) for t in ("<|user|>", "<|end|>", "<|assistant|>", "<|endoftext|>")
    )
    encode = partial(reference_encode, v)
    wanted = [
        1,
        user,
        *encode("the cat"),
        end,
        assistant,
        *encode("the"),
        ends,
        *encode(" hat"),
        2,
        *encode("a"),
    ]
    assert original.encode(PHI3_CHAT).ids == again.encode(PHI3_CHAT).ids == wanted


@pytest.mark.parametrize(("name", "wanted"), [(None, "Phi-3"), ("My Phi3", None), ("Mine", "Mine (Phi-3)")])
def test_phi3_is_known_by_its_name(name: str | None, wanted: str | None) -> None:
    v = with_phi3(vocabulary())
    d = phi3_document(v)
    assets = Assets(json.dumps(d).encode())
    found, _ = gguf_text_settings(assets, len(v.pieces), "x", architecture="phi3", name=name)
    assert found.get("general.name") == wanted
    d["added_tokens"][-1]["rstrip"] = False
    with pytest.raises(TokenizerError, match=r"'<\|user\|>' keeps the space after it"):
        gguf_text_settings(Assets(json.dumps(d).encode()), len(v.pieces), "x", architecture="phi3")


def scattered(d: dict[str, Any]) -> None:
    d["model"]["merges"].append(d["model"]["merges"][0])


def one_less(d: dict[str, Any]) -> None:
    d["model"]["merges"].pop()


def odd_spaces(d: dict[str, Any]) -> None:
    d["normalizer"]["normalizers"].append({"type": "NFKC"})


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a piece in two places": (scattered, "stand in several places"),
    "a merge that is not there": (one_less, "are not those of scores"),
    "another normalizer": (odd_spaces, "how this SentencePiece tokenizer treats spaces"),
    "another decoder": (lambda d: d["decoder"]["decoders"].pop(0), "treats spaces"),
    "a space that stays": (lambda d: d["decoder"]["decoders"].pop(), "does not take back the space"),
    "whole words first": (lambda d: d["model"].update(ignore_merges=True), "with ignore_merges"),
    "dropout": (lambda d: d["model"].update(dropout=0.1), "with dropout"),
    "a token that takes space": (
        lambda d: d["added_tokens"][1].update(rstrip=True),
        "takes the space around",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_scores_cannot_say(case: str) -> None:
    d = document(vocabulary())
    change, message = REFUSED[case]
    change(d)
    with pytest.raises(TokenizerError, match=message):
        written(d)


def test_a_folder_goes_out_and_comes_back(tmp_path: Path) -> None:
    """Llama as Hugging Face has it, to GGUF and back: the ids of every text stay."""
    v = vocabulary()
    d = document(v)
    config = LLAMA | {"vocab_size": len(v.pieces)}
    folder = write_hf(
        tmp_path / "hf",
        config,
        llama_tensors(config),
        tokenizer__json=d,
        tokenizer_config__json={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    convert(folder, tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out.gguf")
    values = gguf_values(tmp_path / "out.gguf")
    assert [values[f"{AT}{key}_token_id"] for key in ("unknown", "bos", "eos")] == [0, 1, 2]
    convert(tmp_path / "out.gguf", tmp_path / "again.oam")
    export(tmp_path / "again.oam", tmp_path / "back")
    again = Tokenizer.from_file(str(tmp_path / "back" / "tokenizer.json"))
    for text in [*texts(), "the</s>cat"]:
        assert again.encode(text).ids == Tokenizer.from_buffer(json.dumps(d).encode()).encode(text).ids
