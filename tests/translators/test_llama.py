"""The Llama family: settings read from every spelling, features refused by name, ties, windows, rotary scaling."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_folder, llama_metadata, llama_tensors, write_gguf, write_hf
from reference_models import attention_mask, load_oam, logits, rope_inverse_frequencies

from oazoo.configs import DecoderConfig
from oazoo.errors import OazooError, TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan
from oazoo.translators.plan import Plan


def planned(tmp_path: Path, changes: dict[str, Any] | None = None) -> tuple[DecoderConfig, Plan]:
    """Config and plan of a tiny Llama folder with some settings changed."""
    with plan(llama_folder(tmp_path / "hf", changes)) as found:
        assert isinstance(found.config, DecoderConfig)
        return found.config, found


def test_defaults_follow_the_published_ones(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"num_key_value_heads": ..., "rope_theta": ..., "rms_norm_eps": ...})
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.rope_theta == 10000.0
    assert config.norm_eps == 1e-6


def test_a_declared_head_size_wins(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"head_dim": 16})
    assert config.head_dim == 16
    assert config.parameters()["layers.0.attn.q.weight"] == (64, 32)


def test_biases_come_from_the_config(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"attention_bias": True, "mlp_bias": True})
    assert config.attention_bias and config.attention_output_bias and config.mlp_bias


def test_qwen2_has_qkv_biases_only(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"architectures": ["Qwen2ForCausalLM"]})
    assert config.attention_bias and not config.attention_output_bias and not config.mlp_bias


def test_mistral(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": 4})
    assert config.sliding_window == 4 and not config.attention_bias


# ---------------------------------------------------------------------------------------------- tied
# embeddings


def test_tied_without_head(tmp_path: Path) -> None:
    config, _ = planned(tmp_path, {"tie_word_embeddings": True})
    assert config.tied_embeddings and "head.weight" not in config.parameters()


def test_untied_without_head_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    del tensors["lm_head.weight"]
    with pytest.raises(TranslationError, match=r"lm_head\.weight"):
        plan(write_hf(tmp_path / "hf", LLAMA, tensors))


def test_tie_unset_takes_the_family_default_and_says_so(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    with plan(write_hf(tmp_path / "with", config, tensors)) as found:
        assert not found.config.tied_embeddings
        assert any("tie_word_embeddings" in note for note in found.notes)
    del tensors["lm_head.weight"]
    with pytest.raises(TranslationError, match="tie_word_embeddings"):
        plan(write_hf(tmp_path / "without", config, tensors))


def test_a_stored_copy_of_the_tied_head_is_checked(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    tensors = llama_tensors(LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    report = convert(write_hf(tmp_path / "same", config, tensors), tmp_path / "m.oam")
    assert [name for name, _ in report.ignored] == ["lm_head.weight"]
    with open_source(tmp_path / "m.oam") as source:
        assert "head.weight" not in source
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(TranslationError, match="differ"):
        convert(write_hf(tmp_path / "other", config, tensors), tmp_path / "n.oam")
    assert not (tmp_path / "n.oam").exists()


# ------------------------------------------------------------------------------------------------ rotary
# scaling


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_llama3_scaling_equals_the_published_formula(tmp_path: Path, section: str, spelling: str) -> None:
    config, _ = planned(
        tmp_path,
        {
            "rope_theta": 500000.0,
            "head_dim": 16,
            section: {
                spelling: "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    )
    found, scale = rope_inverse_frequencies(config, 10)
    assert scale == 1.0
    for index in range(8):
        # Straight from the published code: three ranges of wavelength.
        frequency = 500000.0 ** (-2 * index / 16)
        wavelength = 2 * math.pi / frequency
        if wavelength < 32 / 4.0:
            expected = frequency
        elif wavelength > 32 / 1.0:
            expected = frequency / 8.0
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
        assert found[index] == pytest.approx(expected, rel=1e-12)


def test_theta_may_stand_inside_rope_parameters(tmp_path: Path) -> None:
    config, _ = planned(
        tmp_path, {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    )
    assert config.rope_theta == 77.0 and config.rope_scaling is None


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "linear", "factor": 2.0}, "linear"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}, "yarn"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0, "beta_fast": 16}, "yarn"),
    ],
)
def test_known_scalings(tmp_path: Path, scaling: dict[str, Any], kind: str) -> None:
    config, _ = planned(tmp_path, {"rope_scaling": scaling})
    assert config.rope_scaling is not None and config.rope_scaling.kind == kind
    assert config.rope_scaling.factor == scaling["factor"]
    if kind in ("dynamic", "yarn"):
        original = scaling.get("original_max_position_embeddings", 64)
        assert config.rope_scaling.original_max_positions == original


@pytest.mark.parametrize("none", [None, {"rope_type": "default"}, {"type": "none"}])
def test_no_scaling(tmp_path: Path, none: Any) -> None:
    assert planned(tmp_path, {"rope_scaling": none})[0].rope_scaling is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "xpos9", "factor": 2.0}}, "xpos9"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "disagree"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "wobble": 1}}, "wobble"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": 3}}, "type"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "differs",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_other_scalings_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TranslationError, match=named):
        planned(tmp_path, changes)


# ------------------------------------------------------------------------------------------------ sliding
# window


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 4}, [4, 4]),
        ({"sliding_window": 4, "use_sliding_window": False}, [None, None]),
        ({"sliding_window": 4, "use_sliding_window": True}, [4, 4]),
        ({"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}, [None, 4]),
        ({"sliding_window": 4, "layer_types": ["full_attention", "full_attention"]}, [None, None]),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, [4, 4]),
        ({"layer_types": ["full_attention"] * 2}, [None, None]),
    ],
)
def test_effective_window(tmp_path: Path, changes: dict[str, Any], windows: list[int | None]) -> None:
    config, found = planned(tmp_path, changes)
    assert [config.layer_window(layer) for layer in range(2)] == windows
    if changes.get("sliding_window") and windows == [None, None]:
        assert any("attention is full" in note for note in found.notes)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 4}, [None, None]),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, [None, 4]),
        ({"sliding_window": 4, "use_sliding_window": True}, [None, None]),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, [4, 4]),
    ],
)
def test_qwen2_windows(tmp_path: Path, changes: dict[str, Any], windows: list[int | None]) -> None:
    config, _ = planned(tmp_path, {"architectures": ["Qwen2ForCausalLM"], **changes})
    assert [config.layer_window(layer) for layer in range(2)] == windows


def test_the_window_counts_the_token_itself() -> None:
    mask = attention_mask(6, 3)
    assert mask[5].tolist() == [False, False, False, True, True, True]
    assert mask[1].tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"sliding_window": "4"}, "sliding_window"),
        ({"sliding_window": -4}, "sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"hidden_size": 33}, "hidden_size"),
    ],
)
def test_unsupported_features_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = write_hf(tmp_path / "hf", LLAMA | changes, llama_tensors(LLAMA))
    with pytest.raises(TranslationError, match=named):
        plan(folder)


# --------------------------------------------------------------------------------------------------------
# GGUF


def test_gguf_and_hf_give_the_same_model(tmp_path: Path) -> None:
    """Grouped heads, at positions beyond the first: the q/k order shows only there."""
    tensors = llama_tensors(LLAMA)
    convert(write_hf(tmp_path / "hf", LLAMA, tensors), tmp_path / "a.oam")
    convert(write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(tensors)), tmp_path / "b.oam")
    (first, a), (second, b) = load_oam(tmp_path / "a.oam"), load_oam(tmp_path / "b.oam")
    for name, value in first.items():
        assert np.array_equal(second[name], value), name
    ids = np.arange(9) * 3 % 40
    # GGUF keeps the epsilon in float32.
    assert np.abs(logits(first, a, ids) - logits(second, b, ids)).max() < 1e-6


def test_gguf_biases_of_q_and_k_are_permuted_too(tmp_path: Path) -> None:
    config = LLAMA | {"attention_bias": True}
    tensors = llama_tensors(config)
    report = convert(
        write_gguf(tmp_path / "m.gguf", llama_metadata(), gguf_names(tensors)), tmp_path / "m.oam"
    )
    assert isinstance(report.config, DecoderConfig)
    assert report.config.attention_bias and report.config.attention_output_bias
    with open_source(tmp_path / "m.oam") as source:
        for part in "qkv":
            expected = tensors[f"model.layers.1.self_attn.{part}_proj.bias"]
            assert np.array_equal(source[f"layers.1.attn.{part}.bias"].numpy(), expected)


def test_gguf_qwen2_is_not_permuted(tmp_path: Path) -> None:
    config = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
    tensors = llama_tensors(config)
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(arch="qwen2"), gguf_names(tensors, permute=False))
    convert(path, tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        for part in "qk":
            expected = tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
            assert np.array_equal(source[f"layers.0.attn.{part}.weight"].numpy(), expected)


def test_gguf_without_output_is_tied(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors(LLAMA | {"tie_word_embeddings": True}))
    with plan(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors)) as found:
        assert found.config.tied_embeddings
        assert any("output.weight" in note for note in found.notes)


def test_gguf_frequency_factors(tmp_path: Path) -> None:
    tensors = gguf_names(llama_tensors(LLAMA))
    tensors["rope_freqs.weight"] = np.array([1, 1, 2, 8], np.float32)
    with plan(write_gguf(tmp_path / "m.gguf", llama_metadata(), tensors)) as found:
        assert isinstance(found.config, DecoderConfig)
        scaling = found.config.rope_scaling
        assert scaling is not None and scaling.factors == (1, 1, 2, 8)
        assert dict(found.checked.ignored)["rope_freqs.weight"].startswith("rotary")
        expected = 10000.0 ** (-np.arange(4) / 4) / [1, 1, 2, 8]
        assert np.allclose(rope_inverse_frequencies(found.config, 5)[0], expected)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, "linear"),
        ({"llama.rope.scale_linear": 4.0}, "linear"),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 16,
            },
            "yarn",
        ),
        ({"llama.rope.scaling.type": "none"}, None),
    ],
)
def test_gguf_rope_scaling(tmp_path: Path, extra: dict[str, Any], kind: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata() | extra, gguf_names(llama_tensors(LLAMA)))
    with plan(path) as found:
        assert isinstance(found.config, DecoderConfig)
        scaling = found.config.rope_scaling
    assert (scaling.kind if scaling else None) == kind
    if scaling:
        assert scaling.factor == 4.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "LongRoPE"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.attention.value_length": 16}, "attention.value_length"),
        ({"llama.expert_count": 8}, "expert_used_count is missing"),
        ({"llama.attention.scale": 0.5}, "attention.scale"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.attention.causal": False}, "attention.causal"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
        ({"llama.attention.head_count": 0}, "heads"),
        ({"llama.block_count": 3}, "blk.2"),
        ({"llama.block_count": 1}, "blk.1"),
        ({"llama.feed_forward_length": 47}, "ffn_gate"),
        ({"llama.vocab_size": 41}, "token_embd"),
        ({"llama.embedding_length": "32"}, "embedding_length"),
    ],
)
def test_gguf_misfits_are_refused_by_name(tmp_path: Path, extra: dict[str, Any], named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata() | extra, gguf_names(llama_tensors(LLAMA)))
    with pytest.raises(OazooError, match=named):
        convert(path, tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()


def test_an_unknown_gguf_setting_is_reported(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", llama_metadata() | {"llama.surprise": 3}, gguf_names(llama_tensors(LLAMA))
    )
    with plan(path) as found:
        assert any("llama.surprise" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_rows_move_as_whole_blocks(tmp_path: Path, kind: str) -> None:
    """q and k of 32 columns: one block a row, permuted without decoding."""
    import gguf

    tensors = llama_tensors(LLAMA)
    # 48 is not a multiple of the block size, so the GGUF cannot hold it quantised.
    config = LLAMA | {"intermediate_size": 64}
    tensors = llama_tensors(config)
    metadata = llama_metadata() | {"llama.feed_forward_length": 64}
    convert(write_gguf(tmp_path / "m.gguf", metadata, gguf_names(tensors), kind), tmp_path / "m.oam")
    number = gguf.GGMLQuantizationType[kind]
    with open_source(tmp_path / "m.oam") as source:
        for part in "qkv":
            value = tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
            expected = gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
            tensor = source[f"layers.1.attn.{part}.weight"]
            assert tensor.info.encoding == {"Q4_0": "q4", "Q8_0": "q8"}[kind]
            assert np.array_equal(tensor.numpy(), expected)
