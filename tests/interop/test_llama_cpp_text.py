"""Tokenizers rebuilt from GGUF metadata, against llama.cpp reading the same file."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, llama_tensors, write_gguf, write_hf
from family_folders import bent
from sentencepiece_models import CORPUS, PHI3_CHAT, phi3_document, vocabulary, with_phi3, with_runs
from tokenizers import Tokenizer
from tricky_texts import TEXTS, learned_metadata, tiny_llama

import oazoo
from oazoo.translators.gguf_tokenizer import build
from oazoo.translators.pretokenizers import PRE_TOKENIZERS
from oazoo.translators.sentencepiece_bpe import build as build_pieces
from oazoo.translators.settings import Settings

pytestmark = pytest.mark.interop
llama_cpp: Any = pytest.importorskip(
    "cyllama.llama.llama_cpp", reason="needs the packages of tests/interop/requirements.txt"
)
#: llama.cpp's pattern for these takes a mark that combines for no part of a word; the published rules say it is one.
WITHOUT_MARKS = ("tekken", "gpt-4o")


@pytest.fixture(scope="module", autouse=True)
def backend() -> None:
    llama_cpp.disable_logging()
    llama_cpp.llama_backend_init()
    llama_cpp.ggml_backend_load_all()


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_ids_are_llama_cpps(name: str, tmp_path: Path) -> None:
    metadata = learned_metadata(name)
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers = 0
    path = write_gguf(tmp_path / "m.gguf", *tiny_llama(metadata))
    model = llama_cpp.LlamaModel(path_model=str(path), params=options)
    theirs = model.get_vocab()
    ours = Tokenizer.from_buffer(build(Settings(metadata, "m.gguf"), metadata["tokenizer.ggml.tokens"]))
    differing = {text for text in TEXTS if ours.encode(text).ids != theirs.tokenize(text, False, False)}
    allowed = set()
    if PRE_TOKENIZERS[name].normalizer is not None:  # llama.cpp does not normalize text
        allowed = {text for text in TEXTS if unicodedata.normalize("NFC", text) != text}
    if name in WITHOUT_MARKS:
        allowed = {text for text in TEXTS if any(unicodedata.category(c)[0] == "M" for c in text)}
    print(f"{name}: {len(TEXTS) - len(differing)} of {len(TEXTS)} texts have llama.cpp's ids")
    assert differing <= allowed


@pytest.mark.parametrize("space_prefix", (True, False))
def test_sentencepiece_goes_out(space_prefix: bool, tmp_path: Path) -> None:
    """Merges became scores: llama.cpp gives the ids of the tokenizer.json that was exported."""
    v = with_runs(vocabulary(space_prefix=space_prefix), (2, 4, 8, 5, 3, 16))
    data = build_pieces(v, "v", prefix=("<s>", 1), suffix=None)
    config = LLAMA | {"vocab_size": len(v.pieces)}
    oazoo.convert(
        write_hf(tmp_path / "hf", config, llama_tensors(config), tokenizer__json=data), tmp_path / "m.oam"
    )
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers = 0
    model = llama_cpp.LlamaModel(path_model=str(tmp_path / "out.gguf"), params=options)
    theirs = model.get_vocab()
    ours = Tokenizer.from_buffer(data)
    texts = [*TEXTS, CORPUS, "the cat sat on the hat", " a  the", "naïve café; cat."]
    texts += [f"a{' ' * length}the{' ' * (length // 2)}" for length in range(40)]
    for text in texts:
        assert theirs.tokenize(text, True, True) == ours.encode(text).ids, text
    assert theirs.tokenize("the</s>cat", True, True) == ours.encode("the</s>cat").ids
    print(f"SentencePiece, prefix {space_prefix}: {len(texts)} texts have llama.cpp's ids")


def test_phi3_drops_the_space_after_added_tokens(tmp_path: Path) -> None:
    """Nothing in the file says so: llama.cpp knows it by the name that the export gives."""
    v = with_phi3(vocabulary())

    def grow(tensors: dict[str, Any]) -> None:
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[key] = np.resize(tensors[key], (len(v.pieces), 48))

    document = phi3_document(v)
    folder = bent(tmp_path / "hf", "phi3", {"vocab_size": len(v.pieces)}, grow, tokenizer__json=document)
    oazoo.convert(folder, tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers = 0
    model = llama_cpp.LlamaModel(path_model=str(tmp_path / "out.gguf"), params=options)
    wanted = Tokenizer.from_buffer(json.dumps(document).encode()).encode(PHI3_CHAT).ids
    assert model.get_vocab().tokenize(PHI3_CHAT, True, True) == wanted
