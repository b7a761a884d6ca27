"""Settings on their way out: configs, rotary scalings, token ids, tokenizers; and what cannot be said is refused."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import (
    LLAMA,
    bpe_metadata,
    gguf_names,
    llama_folder,
    llama_metadata,
    llama_tensors,
    write_gguf,
)
from exported import gguf_bytes, gguf_values
from reference_models import load_oam, rope_inverse_frequencies
from tokenizers import Tokenizer

from oazoo.configs import DecoderConfig, NanoGPTConfig
from oazoo.errors import TokenizerError, TranslationError
from oazoo.formats.oam import OamSource
from oazoo.translators import convert
from oazoo.translators.assets import PROBE, Assets
from oazoo.translators.export import export
from oazoo.translators.exporter import config_differences, exportable, outgoing
from oazoo.translators.gguf_tokenizer import build
from oazoo.translators.gguf_tokenizer_out import gguf_text_settings
from oazoo.translators.settings import Settings

DATA = Path(__file__).resolve().parent.parent / "data"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}

CASES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "yarn": {"rope_scaling": YARN},
    "mistral": MISTRAL | {"sliding_window": None},
    "mistral window": MISTRAL | {"sliding_window": 8},
    "qwen2": QWEN2,
}
HF_ONLY: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "yarn scaled": {"rope_scaling": YARN | {"attention_factor": 1.5}},
    "qwen2 window": QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}
#: What the refusal of GGUF says.
WHY = {
    "dynamic": "dynamic rotary scaling",
    "yarn scaled": "attention_factor",
    "qwen2 window": "attention window",
}


def same_config(first: Path, second: Path) -> None:
    a, b = load_oam(first)[1], load_oam(second)[1]
    assert not config_differences(a, b)
    if isinstance(a, DecoderConfig) and isinstance(b, DecoderConfig):
        for tokens in (8, 60):
            (x, s), (y, t) = rope_inverse_frequencies(a, tokens), rope_inverse_frequencies(b, tokens)
            assert np.allclose(x, y, rtol=2e-6, atol=0) and s == pytest.approx(t, rel=1e-6)


@pytest.mark.parametrize("output", ("folder", "out.gguf"))
@pytest.mark.parametrize("case", CASES)
def test_configs_come_back(case: str, output: str, tmp_path: Path) -> None:
    convert(llama_folder(tmp_path / "in", CASES[case]), tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / output)
    convert(tmp_path / output, tmp_path / "again.oam")
    same_config(tmp_path / "m.oam", tmp_path / "again.oam")
    if output == "folder":
        written = json.loads((tmp_path / output / "config.json").read_text())
        assert written["architectures"] == (LLAMA | CASES[case])["architectures"]


@pytest.mark.parametrize("case", HF_ONLY)
def test_configs_that_only_hugging_face_can_state(case: str, tmp_path: Path) -> None:
    convert(llama_folder(tmp_path / "in", HF_ONLY[case]), tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "again.oam")
    same_config(tmp_path / "m.oam", tmp_path / "again.oam")
    with pytest.raises(TranslationError, match=WHY[case]):
        export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_llama3_scaling_is_the_table_that_llama_cpp_reads(tmp_path: Path) -> None:
    convert(llama_folder(tmp_path / "in", CASES["llama3"]), tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out.gguf")
    kind, shape, data = gguf_bytes(tmp_path / "out.gguf")["rope_freqs.weight"]
    assert (kind, shape) == ("F32", (4,))
    config = load_oam(tmp_path / "m.oam")[1]
    assert isinstance(config, DecoderConfig)
    plain = dataclasses.replace(config, rope_scaling=None)
    expected = rope_inverse_frequencies(plain, 8)[0] / rope_inverse_frequencies(config, 8)[0]
    assert np.allclose(np.frombuffer(data, "<f4"), expected, rtol=1e-6)
    # And back to a config that states the rule.
    convert(tmp_path / "out.gguf", tmp_path / "again.oam")
    export(tmp_path / "again.oam", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["rope_scaling"] == LLAMA3
    assert written["rope_parameters"] == LLAMA3 | {"rope_theta": 500000.0}


def test_factors_of_no_published_rule_stay_in_gguf(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors(LLAMA)) | {"rope_freqs.weight": np.array([1, 2, 3, 5], np.float32)}
    convert(write_gguf(tmp_path / "in.gguf", llama_metadata(), tensors), tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert gguf_bytes(tmp_path / "out.gguf") == gguf_bytes(tmp_path / "in.gguf")
    with pytest.raises(TranslationError, match="none of Llama 3's published scalings"):
        export(tmp_path / "m.oam", tmp_path / "out")


def test_a_window_that_llama_cpp_ignores_is_said(tmp_path: Path) -> None:
    convert(llama_folder(tmp_path / "in", CASES["mistral window"]), tmp_path / "m.oam")
    report = export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert any("beyond 8 tokens" in note for note in report.notes)


def test_a_model_that_no_architecture_expresses() -> None:
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4,
        norm_eps=1e-5, rope_theta=1e4, max_positions=8, tied_embeddings=True, attention_output_bias=True,
    )  # fmt: skip
    with pytest.raises(TranslationError) as caught:
        outgoing(config, "hf")
    for reason in (
        "LlamaForCausalLM: it has biases on q",
        "MistralForCausalLM: it has no",
        "Qwen2ForCausalLM: it",
    ):
        assert reason in str(caught.value)
    bare = NanoGPTConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, norm_eps=1e-5, max_positions=8,
        tied_embeddings=True, bias=False,
    )  # fmt: skip
    for naming in ("hf", "gguf"):
        with pytest.raises(TranslationError, match="GPT-2 has a bias in every"):
            outgoing(bare, naming)


def test_what_can_be_exported_is_documented() -> None:
    text = (DATA.parent.parent / "docs" / "export.md").read_text("utf-8")
    for line in exportable():
        for name in line.split(": ")[1].split(", "):
            assert f"`{name}`" in text, name


def test_ids_sampling_template_and_licence_travel(tmp_path: Path) -> None:
    vocab = len(bpe_metadata()["tokenizer.ggml.tokens"])
    meta = llama_metadata(vocab) | bpe_metadata() | {"tokenizer.chat_template": "{{ messages }}"}
    meta |= {"tokenizer.ggml.eot_token_id": vocab - 1, "general.license": "mit", "general.name": "Tiny"}
    path = write_gguf(tmp_path / "in.gguf", meta, gguf_names(llama_tensors(LLAMA | {"vocab_size": vocab})))
    convert(path, tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "out.gguf")
    found = gguf_values(tmp_path / "out.gguf")
    for key, value in meta.items():
        if key.startswith(("tokenizer.", "general.")):
            assert found[key] == value, key
    assert json.loads(found["oazoo.source"])["format"] == "gguf"
    export(tmp_path / "m.oam", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["eos_token_id"] == [vocab - 2, vocab - 1] and config["bos_token_id"] == vocab - 3
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == [
        vocab - 2,
        vocab - 1,
    ]
    tokens = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert tokens["chat_template"] == "{{ messages }}" and tokens["eos_token"] == "<|end|>"
    assert 'license: "mit"' in (tmp_path / "hf" / "README.md").read_text()
    convert(tmp_path / "hf", tmp_path / "again.oam")
    with OamSource(tmp_path / "m.oam") as a, OamSource(tmp_path / "again.oam") as b:
        assert a.metadata["generation"] == b.metadata["generation"]
        assert a.metadata["tokenizer"] == b.metadata["tokenizer"]
        assert a.asset("asset/tokenizer.json") == b.asset("asset/tokenizer.json")
        assert a.asset("asset/chat_template.jinja") == b.asset("asset/chat_template.jinja")
        assert b.metadata["source"]["license"] == "mit"


def test_sampling_defaults_travel_to_hugging_face_and_are_named_for_gguf(tmp_path: Path) -> None:
    sampling = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.5}
    folder = llama_folder(tmp_path / "in", generation_config__json=sampling | {"eos_token_id": [2, 3]})
    convert(folder, tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert written == sampling | {"bos_token_id": 1, "eos_token_id": [2, 3]}
    report = export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert any("left out: do_sample, repeat_penalty" in note for note in report.notes)


def smollm2() -> dict[str, Any]:
    path = DATA / "tokenizer" / "smollm2-metadata.json.xz"
    values: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return values


def test_a_real_tokenizer_becomes_the_metadata_it_was() -> None:
    meta = smollm2()
    tokens = meta["tokenizer.ggml.tokens"]
    data = build(Settings(meta, "smollm2"), tokens)
    generation = {
        "bos_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_ids": [meta["tokenizer.ggml.eos_token_id"]],
    }
    found, _ = gguf_text_settings(Assets(data, None, {}, generation), len(tokens) + 8, "smollm2")
    assert found["tokenizer.ggml.tokens"] == [
        *tokens,
        *(f"[PAD{n}]" for n in range(len(tokens), len(tokens) + 8)),
    ]
    assert found["tokenizer.ggml.token_type"] == [*meta["tokenizer.ggml.token_type"], *[5] * 8]
    for key in ("model", "pre", "merges", "bos_token_id", "eos_token_id"):
        assert found[f"tokenizer.ggml.{key}"] == meta[f"tokenizer.ggml.{key}"], key
    first = Tokenizer.from_buffer(data)
    second = Tokenizer.from_buffer(build(Settings(found, "out"), found["tokenizer.ggml.tokens"]))
    for case in json.loads((DATA / "tokenizer" / "smollm2-prompts.json").read_text()):
        assert first.encode(case["prompt"]).ids == second.encode(case["prompt"]).ids == case["ids"]
    assert first.encode(PROBE).ids == second.encode(PROBE).ids


def changed(document: dict[str, Any], **parts: Any) -> bytes:
    return json.dumps(document | parts).encode()


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "byte fallback": ({"model": {"byte_fallback": True}}, "how this SentencePiece tokenizer treats"),
    "unigram": (
        {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0, "merges": None}},
        "Unigram",
    ),
    "split rule": ({"pre_tokenizer": {"type": "Whitespace"}}, "no name for the way"),
    "decoder": ({"decoder": {"type": "BPEDecoder", "suffix": "</w>"}}, "BPE with the decoder BPEDecoder"),
    "unknown token": ({"model": {"unk_token": "a"}}, "BPE with unk_token"),
    "space eater": ({"added": {"lstrip": True}}, "takes the space around it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tokenizers_that_gguf_cannot_state(case: str) -> None:
    meta = bpe_metadata()
    document = json.loads(build(Settings(meta, "x"), meta["tokenizer.ggml.tokens"]))
    changes, message = REFUSED[case]
    for part, value in changes.items():
        if part == "model":
            document["model"] |= value
            document["model"] = {
                k: v for k, v in document["model"].items() if v is not None or k == "unk_token"
            }
        elif part == "added":
            document["added_tokens"][0] |= value
        else:
            document[part] = value
    if document["model"]["type"] == "Unigram":
        document["model"] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
        document["added_tokens"] = []
    with pytest.raises(TokenizerError, match=message):
        gguf_text_settings(Assets(changed(document)), 300, "x")


def test_two_tokens_before_every_text() -> None:
    meta = bpe_metadata() | {"tokenizer.ggml.add_bos_token": True}
    document = json.loads(build(Settings(meta, "x"), meta["tokenizer.ggml.tokens"]))
    document["post_processor"]["single"].insert(0, document["post_processor"]["single"][0])
    with pytest.raises(TokenizerError, match="around every text"):
        gguf_text_settings(Assets(changed(document)), 300, "x")
