"""Decoder families from Hugging Face folders: ties, windows, rotary positions, ignored tensors, ids; refusals by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_hf
from family_folders import FAMILIES, bent, embedding, golden, ones
from model_goldens import reference
from reference_models import load_oam, logits, rope_inverse_frequencies
from tokenizers import Tokenizer, models

import oazoo
from oazoo.configs import DecoderConfig
from oazoo.errors import TokenizerError, TranslationError
from oazoo.translators import plan

DEFAULT_TIE = {"gemma2": True, "gemma3_six": True}


def config_of(folder: Path) -> DecoderConfig:
    with plan(folder) as planned:
        assert isinstance(planned.config, DecoderConfig)
        return planned.config


# Ties


@pytest.mark.parametrize("name", FAMILIES)
def test_ties(name: str, tmp_path: Path) -> None:
    head, embed = FAMILIES[name], embedding(name)

    def without(tensors: dict[str, Any]) -> None:
        tensors.pop(head, None)

    def copied(tensors: dict[str, Any]) -> None:
        tensors[head] = tensors[embed].copy()

    def other(tensors: dict[str, Any]) -> None:
        tensors[head] = tensors[embed] + 1

    tied = config_of(bent(tmp_path / "tied", name, {"tie_word_embeddings": True}, without))
    assert tied.tied_embeddings and "head.weight" not in tied.parameters()
    with pytest.raises(TranslationError, match=head):
        plan(bent(tmp_path / "absent", name, {"tie_word_embeddings": False}, without))
    own = config_of(bent(tmp_path / "own", name, {"tie_word_embeddings": False}, other))
    assert not own.tied_embeddings and own.parameters()["head.weight"] == (160, own.hidden_size)

    unset = {"tie_word_embeddings": ...}
    if DEFAULT_TIE.get(name):
        with plan(bent(tmp_path / "unset", name, unset, without)) as planned:
            assert planned.config.to_json()["tied_embeddings"] is True
            assert any("default, true" in note for note in planned.notes)
    else:
        with pytest.raises(TranslationError, match="default in this family is false"):
            plan(bent(tmp_path / "unset", name, unset, without))
        with plan(bent(tmp_path / "unset-own", name, unset, other)) as planned:
            assert planned.config.to_json()["tied_embeddings"] is False
            assert any("default, false" in note for note in planned.notes)

    report = oazoo.convert(
        bent(tmp_path / "copy", name, {"tie_word_embeddings": True}, copied), tmp_path / "c.oam"
    )
    assert report.ignored == ((head, "a copy of the tied embedding"),)
    with pytest.raises(TranslationError, match="the two differ"):
        oazoo.convert(bent(tmp_path / "lie", name, {"tie_word_embeddings": True}, other), tmp_path / "d.oam")


# Ignored and unknown tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_and_frequencies_are_no_weights(name: str, tmp_path: Path) -> None:
    neox = name == "gpt_neox"
    at = "gpt_neox.layers.0.attention" if neox else "model.layers.0.self_attn"
    extra = {f"{at}.rotary_emb.inv_freq": ones(4)}
    if neox:
        extra[f"{at}.bias"] = np.tril(ones(1, 1, 8, 8, dtype=np.uint8))
        extra[f"{at}.masked_bias"] = ones(1)
    folder = bent(tmp_path / "in", name, None, lambda tensors: tensors.update(extra))
    report = oazoo.convert(folder, tmp_path / "m.oam")
    assert {ignored for ignored, _ in report.ignored} == set(extra)
    assert all(reason for _, reason in report.ignored)
    for unknown in (f"{at}.bias2", "model.layers.9.mlp.up_proj.weight", "visual.patch.weight"):
        folder = bent(
            tmp_path / "odd", name, None, lambda tensors, key=unknown: tensors.update({key: ones(4)})
        )
        with pytest.raises(TranslationError, match="has no use for"):
            plan(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_missing_or_misshapen(name: str, tmp_path: Path) -> None:
    for key in golden(name)[1]:
        if "layers.1" in key or key == FAMILIES[name]:
            continue
        if key.endswith("bias") and "query_key_value" not in key:
            continue
        with pytest.raises(TranslationError) as caught:
            plan(bent(tmp_path / "in", name, None, lambda tensors, key=key: tensors.pop(key)))
        assert key in str(caught.value)
        with pytest.raises(TranslationError) as caught:
            plan(
                bent(
                    tmp_path / "in",
                    name,
                    None,
                    lambda tensors, key=key: tensors.update({key: tensors[key][1:]}),
                )
            )
        assert key in str(caught.value)


# Vocabulary and ids


@pytest.mark.parametrize("name", FAMILIES)
def test_vocabulary_and_rows(name: str, tmp_path: Path) -> None:
    def tokenizer(size: int) -> str:
        vocabulary = {chr(0x4E00 + number): number for number in range(size)}
        return Tokenizer(models.BPE(vocabulary, [])).to_str()

    with plan(bent(tmp_path / "few", name, tokenizer__json=tokenizer(150))) as planned:
        assert any("160 rows" in note and "150 tokens" in note for note in planned.notes)
        assert planned.config.vocab_size == 160
    with pytest.raises(TokenizerError, match=r"id 162.*only 160 rows"):
        plan(bent(tmp_path / "many", name, tokenizer__json=tokenizer(163)))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_id_that_ends_a_sequence(name: str, tmp_path: Path) -> None:
    folder = bent(
        tmp_path / "in", name, {"eos_token_id": 2}, generation_config__json={"eos_token_id": [2, 7]}
    )
    oazoo.convert(folder, tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == [2, 7]
    oazoo.convert(tmp_path / "out", tmp_path / "again.oam")
    assert load_oam(tmp_path / "again.oam")[1] == load_oam(tmp_path / "m.oam")[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_that_are_not_set_are_written_as_null(name: str, tmp_path: Path) -> None:
    """Families have defaults of their own for them, which would be ids of another vocabulary."""
    unset = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    oazoo.convert(bent(tmp_path / "in", name, unset), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: written[key] for key in unset} == unset


# Windows

GEMMA2_TYPES = ["full_attention", "sliding_attention"]
WINDOWS: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("qwen3", {"use_sliding_window": False, "sliding_window": 4, "layer_types": ...}, [None, None]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": ...}, [None, 4]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, [4, 4]),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "layer_types": ...}, [None, None]),
    ("phi3", {"sliding_window": None}, [None, None]),
    ("phi3", {"sliding_window": 4}, [4, 4]),
    ("gemma2", {"layer_types": ..., "sliding_window": 4}, [4, None]),
    ("gemma2", {"layer_types": GEMMA2_TYPES, "sliding_window": 4}, [None, 4]),
    ("gemma2", {"layer_types": ["full_attention"] * 2, "sliding_window": None}, [None, None]),
    ("gemma2", {"layer_types": ..., "sliding_window": ...}, [4096, None]),
    ("gemma3_six", {"layer_types": ..., "_sliding_window_pattern": ..., "sliding_window": 4}, [4] * 5 + [None]),
    ("gemma3_six", {"layer_types": ..., "_sliding_window_pattern": 3, "sliding_window": 4}, [4, 4, None] * 2),
    (
        "gemma3_six",
        {"layer_types": ..., "_sliding_window_pattern": ..., "sliding_window_pattern": 2, "sliding_window": 4},
        [4, None] * 3,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WINDOWS)))
def test_windows(case: int, tmp_path: Path) -> None:
    name, changes, wanted = WINDOWS[case]
    config = config_of(bent(tmp_path / "in", name, changes))
    assert [config.layer_window(layer) for layer in range(config.num_layers)] == wanted


# Rotary positions

HALF = {"partial_rotary_factor": 0.5}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.5, 4.0]}


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope(kind: str, section: str, spelling: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"rope_parameters": ..., "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    changes[section] = {key: value for key, value in LONG.items() if key != "rope_type"} | {spelling: kind}
    config = config_of(bent(tmp_path / "in", "phi3_longrope", changes))
    assert config.rotary_dim == 6
    for tokens, factors in ((16, LONG["short_factor"]), (17, LONG["long_factor"])):
        inverse, scale = rope_inverse_frequencies(config, tokens)
        wanted = [500.0 ** (-2 * j / 6) / factor for j, factor in enumerate(factors)]  # type: ignore[arg-type]
        assert np.allclose(inverse, wanted, rtol=1e-12)
        assert scale == pytest.approx(math.sqrt(1 + math.log(64 / 16) / math.log(16)), rel=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_unknown_scalings_are_named(name: str, tmp_path: Path) -> None:
    for key in ("rope_type", "type"):
        changes = {"rope_parameters": ..., "rope_scaling": {key: "xpos9", "factor": 2.0}}
        with pytest.raises(TranslationError, match="xpos9"):
            plan(bent(tmp_path / "in", name, changes))


def test_theta_of_each_type_of_layer(tmp_path: Path) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    near = {"rope_type": "default", "rope_theta": 700.0}
    new = {"rope_parameters": {"full_attention": full, "sliding_attention": near}}
    old = {
        "rope_parameters": ...,
        "rope_theta": 5e5,
        "rope_local_base_freq": 700.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    }
    first = config_of(bent(tmp_path / "new", "gemma3_six", new))
    assert first == config_of(bent(tmp_path / "old", "gemma3_six", old))
    exponents = np.arange(0, first.head_dim, 2) / first.head_dim
    assert np.allclose(rope_inverse_frequencies(first, 8, 5)[0], 5e5**-exponents / 8)
    assert np.allclose(rope_inverse_frequencies(first, 8, 0)[0], 700.0**-exponents)
    # The same theta is not the same positions when only full layers are scaled.
    same = {"rope_parameters": {"full_attention": full | {"rope_theta": 700.0}, "sliding_attention": near}}
    second = config_of(bent(tmp_path / "same", "gemma3_six", same))
    assert np.allclose(rope_inverse_frequencies(second, 8, 0)[0], 700.0**-exponents)
    one = config_of(bent(tmp_path / "one", "gemma3_six", {"rope_parameters": {"sliding_attention": near}}))
    assert (one.rope_theta, one.rope_scaling, one.sliding_rope_theta) == (1e6, None, 700.0)


@pytest.mark.parametrize(
    ("changes", "rotated", "theta"),
    [
        ({"rope_parameters": ..., "rotary_pct": 0.67, "rotary_emb_base": 77}, 8, 77.0),
        ({"rope_parameters": ..., "rotary_pct": 1.0}, None, 10000.0),
        (
            {"rope_parameters": {"rope_theta": 99.0, "partial_rotary_factor": 0.34}, "rotary_pct": ...},
            4,
            99.0,
        ),
    ],
)
def test_part_of_a_head(changes: dict[str, Any], rotated: int | None, theta: float, tmp_path: Path) -> None:
    config = config_of(bent(tmp_path / "in", "gpt_neox", changes))
    assert (config.rotary_dim, config.rope_theta) == (rotated, theta)


# Gemma's numbers


def test_scale_and_caps(tmp_path: Path) -> None:
    config = config_of(bent(tmp_path / "a", "gemma2", {"query_pre_attn_scalar": 40}))
    assert config.score_scale == pytest.approx(40**-0.5, rel=1e-15) and config.embedding_scale == 48**0.5
    left_out = {"attn_logit_softcapping": ..., "final_logit_softcapping": ...}
    config = config_of(bent(tmp_path / "b", "gemma2", left_out))
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    config = config_of(bent(tmp_path / "c", "gemma2", dict.fromkeys(left_out)))
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    config = config_of(bent(tmp_path / "d", "gemma3_six", left_out))
    assert (config.attention_softcap, config.logit_softcap) == (None, None)


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_model_of_one_that_sees(prefix: str, tied: bool, tmp_path: Path) -> None:
    config, tensors = golden("gemma3_six")
    head = "language_model.lm_head.weight" if prefix == "language_model.model" else "lm_head.weight"
    renamed = {key.replace("model.", f"{prefix}.", 1): value for key, value in tensors.items()}
    if not tied:
        renamed[head] = renamed[f"{prefix}.embed_tokens.weight"].copy()
    tower = {
        "vision_tower.vision_model.post_layernorm.weight": ones(8),
        "multi_modal_projector.mm_soft_emb_norm.weight": ones(8),
    }
    if prefix == "model.language_model":
        tower = {f"model.{key}": value for key, value in tower.items()}
    text = {
        key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")
    }
    text["model_type"] = "gemma3_text"
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": tied,
        "eos_token_id": [1, 106],
    }
    report = oazoo.convert(write_hf(tmp_path / "in", outer, renamed | tower), tmp_path / "m.oam")
    assert {name for name, _ in report.ignored} == set(tower)
    assert any("only its language model" in note for note in report.notes)
    params, typed = load_oam(tmp_path / "m.oam")
    ids, wanted = reference("gemma3_six")
    assert np.abs(logits(params, typed, ids[0]) - wanted[0]).max() < 5e-5
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "Gemma3ForCausalLM"
    ]
    odd = write_hf(tmp_path / "odd", outer, renamed | tower | {"audio_tower.weight": ones(8)})
    with pytest.raises(TranslationError, match="audio_tower"):
        plan(odd)


def test_published_configs_leave_settings_out(tmp_path: Path) -> None:
    """As Gemma 3's do: what is not there has transformers' defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    with pytest.raises(TranslationError, match="the checkpoint lacks"):  # 4 billion weights are not here
        plan(write_hf(tmp_path / "in", outer, {"x": ones(1)}))
    from oazoo.formats.detect import open_source
    from oazoo.translators.translator import choose, open_checkpoint

    with open_source(tmp_path / "in") as source:
        checkpoint = open_checkpoint(source)
        config = choose(checkpoint).translate(checkpoint).config
    assert isinstance(config, DecoderConfig) and config.rope_scaling is not None
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.max_positions, config.rope_theta, config.sliding_rope_theta) == (131072, 1e6, 10000.0)
    assert config.rope_scaling.factor == 8.0 and config.score_scale == 256**-0.5 and config.tied_embeddings
    assert [n for n in range(34) if not config.is_sliding(n)] == [5, 11, 17, 23, 29]


# Refused by name

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"hidden_act": "relu"}, "relu"),
    ("qwen3", {"num_experts": 8}, "num_experts"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ("qwen3", {"layer_types": ["full_attention"]}, "list the 2 layers"),
    ("qwen3", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("qwen3", {"rope_theta": 5.0}, "given twice"),
    ("phi3", {"hidden_act": "gelu"}, "gelu"),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supported for Phi-3"),
    ("phi3_longrope", {"rope_parameters": LONG | {"short_factor": [1.0]}} | HALF, "factors has 1"),
    ("phi3_longrope", {"rope_parameters": LONG | {"long_factor": None}} | HALF, "long_factor"),
    ("phi3_longrope", {"rope_parameters": LONG | {"long_factor": [1.0, 0.0, 1.0]}} | HALF, "positive"),
    ("phi3_longrope", {"rope_parameters": LONG | {"mscale": 2.0}} | HALF, "mscale"),
    ("phi3_longrope", {"partial_rotary_factor": 0.25}, "given twice"),
    ("gemma2", {"hidden_activation": "relu"}, "relu"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"sliding_window": None}, "sliding_window is null"),
    ("gemma2", {"attn_logit_softcapping": -1.0}, "attention_softcap"),
    ("gemma2", {"query_pre_attn_scalar": "16"}, "query_pre_attn_scalar"),
    ("gemma3_six", {"layer_types": ..., "_sliding_window_pattern": 0}, "sliding_window_pattern of 0"),
    ("gemma3_six", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding layers"),
    ("gemma3_six", {"rope_local_base_freq": 5.0}, "given twice"),
    ("olmo2", {"sliding_window": 8}, "sliding_window"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmo2", {"hidden_act": "gelu"}, "gelu"),
    ("gpt_neox", {"hidden_act": "relu"}, "relu"),
    ("gpt_neox", {"rotary_pct": 0.9}, "given twice"),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 1.5}, "rotary_pct": ...}, "between 0 and 1"),
    ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("gpt_neox", {"num_attention_heads": 5}, "num_attention_heads 5"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda n: "-".join([REFUSED[n][0], *REFUSED[n][1]]))
def test_refused(case: int, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(TranslationError, match=message):
        plan(bent(tmp_path / "in", name, changes))


def test_layers_without_positions_are_refused(tmp_path: Path) -> None:
    """SmolLM3: every fourth layer has no rotary positions, which the decoder cannot say."""
    config, tensors = golden("llama")
    folder = write_hf(tmp_path / "a", config | {"architectures": ["SmolLM3ForCausalLM"]}, tensors)
    with pytest.raises(TranslationError, match="SmolLM3ForCausalLM"):
        plan(folder)
    with pytest.raises(TranslationError, match="no_rope_layers"):
        plan(write_hf(tmp_path / "b", config | {"no_rope_layers": [1, 0]}, tensors))
