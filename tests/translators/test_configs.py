"""Typed configurations: strict JSON, ranges, parameter shapes, windows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oazoo.configs import DecoderConfig, NanoGPTConfig, RopeScaling, config_from_json
from oazoo.errors import TranslationError

DECODER: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_positions": 128,
    "tied_embeddings": False,
}
NANOGPT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "norm_eps": 1e-5,
    "max_positions": 64,
    "tied_embeddings": True,
}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_positions": 32,
}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
        {"rope_scaling": {"kind": "factors", "factors": [1.0] * 8}},
        {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 32, "beta_fast": 32.0}},
        {"sliding_window": 4, "layer_types": ["full", "sliding"]},
        {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    ],
)
def test_decoder_round_trip(extra: dict[str, Any]) -> None:
    config = DecoderConfig.from_json(DECODER | extra)
    text = json.dumps(config.to_json(), allow_nan=False)
    assert config_from_json("decoder", json.loads(text)) == config
    assert hash(config) == hash(DecoderConfig.from_json(json.loads(text)))


def test_nanogpt_round_trip() -> None:
    config = NanoGPTConfig.from_json(NANOGPT)
    assert config_from_json("nanogpt", json.loads(json.dumps(config.to_json()))) == config
    assert config.head_dim == 12


def test_a_whole_number_may_stand_for_a_float_only() -> None:
    assert DecoderConfig.from_json(DECODER | {"rope_theta": 10000}).rope_theta == 10000.0
    assert isinstance(DecoderConfig.from_json(DECODER | {"rope_theta": 10000}).rope_theta, float)
    with pytest.raises(TranslationError, match="num_layers"):
        DecoderConfig.from_json(DECODER | {"num_layers": 2.0})


BAD: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "surprise"),
    ({"vocab_size": None}, "vocab_size"),
    ({"vocab_size": "160"}, "vocab_size"),
    ({"vocab_size": True}, "vocab_size"),
    ({"vocab_size": 0}, "vocab_size"),
    ({"vocab_size": -160}, "vocab_size"),
    ({"vocab_size": 1 << 62}, "vocab_size"),
    ({"vocab_size": 10**500}, "vocab_size"),
    ({"hidden_size": 1 << 40}, "hidden_size"),
    ({"num_layers": 10**9}, "num_layers"),
    ({"num_layers": 0}, "num_layers"),
    ({"num_heads": 3}, "num_heads"),
    ({"num_kv_heads": 0}, "num_kv_heads"),
    ({"num_kv_heads": 8}, "num_kv_heads"),
    ({"num_kv_heads": 3}, "num_kv_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"head_dim": 0}, "head_dim"),
    ({"head_dim": 1 << 20}, "head_dim"),
    ({"norm_eps": -1.0}, "norm_eps"),
    ({"norm_eps": float("nan")}, "norm_eps"),
    ({"norm_eps": 10**400}, "norm_eps"),
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"rope_theta": float("inf")}, "rope_theta"),
    ({"max_positions": 1 << 40}, "max_positions"),
    ({"tied_embeddings": 1}, "tied_embeddings"),
    ({"activation": "relu"}, "relu"),
    ({"sliding_window": 0}, "sliding_window"),
    ({"layer_types": ["full"]}, "layer_types"),
    ({"layer_types": ["full", "diagonal"]}, "diagonal"),
    ({"layer_types": ["full", "sliding"]}, "sliding_window"),
    ({"layer_types": "fs"}, "layer_types"),
    ({"layer_types": [1, 2]}, "layer_types"),
    ({"rope_scaling": "llama3"}, "rope_scaling"),
    ({"rope_scaling": {"kind": "xpos9"}}, "xpos9"),
    ({"rope_scaling": {"kind": "linear", "factor": -2.0}}, "factor"),
    ({"rope_scaling": {"kind": "linear", "factor": 1e30}}, "factor"),
    ({"rope_scaling": {"kind": "linear", "speed": 2.0}}, "speed"),
    ({"rope_scaling": {"kind": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "original_max_positions"),
    ({"rope_scaling": {"kind": "factors", "factors": []}}, "factors"),
    ({"rope_scaling": {"kind": "factors", "factors": [1.0] * 7}}, "factors"),
    ({"rope_scaling": {"kind": "factors", "factors": [0.0] * 8}}, "factors"),
    ({"rope_scaling": {"kind": "linear", "factors": [1.0] * 8}}, "factors"),
    # 2 × 16M × 1M parameters in the embedding alone.
    ({"vocab_size": 1 << 24, "hidden_size": 1 << 20}, "parameters"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_values_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TranslationError, match=named):
        DecoderConfig.from_json(DECODER | change)


@pytest.mark.parametrize("name", DECODER)
def test_missing_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(TranslationError, match=name):
        DecoderConfig.from_json({key: value for key, value in DECODER.items() if key != name})


@pytest.mark.parametrize("data", [None, [], "x", 3, True])
def test_only_objects_are_configs(data: Any) -> None:
    with pytest.raises(TranslationError):
        DecoderConfig.from_json(data)


@pytest.mark.parametrize("family", [None, 3, "Decoder", "gpt5", ["decoder"]])
def test_unknown_family(family: Any) -> None:
    with pytest.raises(TranslationError, match="decoder, nanogpt"):
        config_from_json(family, DECODER)


def test_nanogpt_heads_divide_the_width() -> None:
    with pytest.raises(TranslationError, match="num_heads"):
        NanoGPTConfig.from_json(NANOGPT | {"num_heads": 5})


def test_decoder_parameters() -> None:
    shapes = DecoderConfig.from_json(DECODER | {"attention_bias": True}).parameters()
    assert shapes["embed.weight"] == (160, 64)
    assert shapes["layers.1.attn.q.weight"] == (64, 64)
    assert shapes["layers.1.attn.k.weight"] == (32, 64)
    assert shapes["layers.1.attn.k.bias"] == (32,)
    assert shapes["layers.0.mlp.down.weight"] == (64, 96)
    assert shapes["head.weight"] == (160, 64)
    assert "layers.0.attn.o.bias" not in shapes
    assert len(shapes) == 3 + 2 * 12
    assert "head.weight" not in DecoderConfig.from_json(DECODER | {"tied_embeddings": True}).parameters()


def test_nanogpt_parameters() -> None:
    shapes = NanoGPTConfig.from_json(NANOGPT).parameters()
    assert shapes["layers.0.attn.qkv.weight"] == (144, 48)
    assert shapes["layers.0.attn.qkv.bias"] == (144,)
    assert shapes["positions.weight"] == (64, 48)
    assert len(shapes) == 4 + 2 * 12
    bare = NanoGPTConfig.from_json(NANOGPT | {"bias": False, "tied_embeddings": False}).parameters()
    assert not any(name.endswith(".bias") for name in bare)
    assert bare["head.weight"] == (160, 48)


def test_window_per_layer() -> None:
    plain = DecoderConfig.from_json(DECODER)
    assert [plain.layer_window(layer) for layer in range(2)] == [None, None]
    everywhere = DecoderConfig.from_json(DECODER | {"sliding_window": 4})
    assert [everywhere.layer_window(layer) for layer in range(2)] == [4, 4]
    mixed = DecoderConfig.from_json(DECODER | {"sliding_window": 4, "layer_types": ["full", "sliding"]})
    assert [mixed.layer_window(layer) for layer in range(2)] == [None, 4]


def test_a_config_cannot_be_changed() -> None:
    config = DecoderConfig.from_json(DECODER)
    with pytest.raises(AttributeError):
        config.vocab_size = 5  # type: ignore[misc]
    with pytest.raises(TranslationError):
        RopeScaling(kind="su")
