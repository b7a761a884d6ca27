"""The decoder with every field of its config, as the families combine them: device logits against the float64 reference.

Weights are random, so nothing hides behind training; the reference itself is held against transformers by the goldens.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.configs import DecoderConfig, RopeScaling
from oazoo.errors import DeviceError
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.models import build
from oazoo.models import session as session_module
from oazoo.runtime import get_device

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_positions": 512,
    "tied_embeddings": False,
}
ALTERNATING = ("sliding", "full", "sliding", "full")
GEMMA: dict[str, Any] = {
    "tied_embeddings": True,
    "norm_offset": 1.0,
    "post_norm": True,
    "activation": "gelu_tanh",
    "embedding_scale": 8.0,
    "attention_scale": 24**-0.5,
    "sliding_window": 7,
}
LONGROPE = RopeScaling(
    kind="longrope",
    original_max_positions=32,
    factors=tuple(1 + 0.1 * j for j in range(12)),
    long_factors=tuple(2.0 + j for j in range(12)),
    attention_factor=1.19,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head", "rope_theta": 1e6},
    "gemma2": {
        **GEMMA,
        "attention_softcap": 5.0,
        "logit_softcap": 3.0,
        "layer_types": ALTERNATING,
    },
    "gemma3": {
        **GEMMA,
        "num_kv_heads": 1,
        "qk_norm": "head",
        "rope_theta": 1e6,
        "rope_scaling": RopeScaling(kind="linear", factor=8.0),
        "sliding_rope_theta": 1e4,
        "layer_types": ("sliding", "sliding", "sliding", "full"),
    },
    "gemma3-wide": {
        **GEMMA,
        "head_dim": 256,
        "qk_norm": "head",
        "num_heads": 2,
        "num_kv_heads": 1,
        "num_layers": 1,
    },
    "olmo2": {"qk_norm": "full", "pre_norm": False, "post_norm": True, "num_kv_heads": 4, "head_dim": 16},
    "olmo2-grouped": {"qk_norm": "full", "pre_norm": False, "post_norm": True},
    "gpt-neox": {
        "norm": "layer",
        "norm_eps": 1e-5,
        "parallel_residual": True,
        "gated_mlp": False,
        "activation": "gelu",
        "num_kv_heads": 4,
        "head_dim": 16,
        "rotary_dim": 4,
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    "gpt-neox-serial": {"norm": "layer", "gated_mlp": False, "activation": "gelu_tanh", "rotary_dim": 8},
    "phi3": {"rotary_dim": 24, "rope_scaling": LONGROPE},
    "phi3-mini": {"num_layers": 2, "head_dim": 96, "num_heads": 2, "sliding_window": 30},
    # What no family has, but the fields allow: each meets others than in the families.
    "mixture-1": {
        "norm": "layer",
        "post_norm": True,
        "qk_norm": "head",
        "activation": "gelu",
        "rotary_dim": 16,
        "embedding_scale": 0.5,
        "attention_softcap": 2.0,
        "sliding_window": 1,
        "layer_types": ALTERNATING,
        "sliding_rope_theta": 100.0,
        "mlp_bias": True,
        "attention_bias": True,
    },
    "mixture-2": {
        "head_dim": 20,
        "hidden_size": 48,
        "intermediate_size": 50,
        "parallel_residual": True,
        "norm_offset": -0.5,
        "qk_norm": "full",
        "gated_mlp": False,
        "rotary_dim": 10,
        "logit_softcap": 1.0,
        "attention_scale": 0.1,
        "rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_positions=16),
        "attention_output_bias": True,
    },
    "mixture-3": {
        "pre_norm": False,
        "post_norm": True,
        "norm": "layer",
        "gated_mlp": True,
        "activation": "silu",
        "tied_embeddings": True,
        "logit_softcap": 1e9,
        "attention_softcap": 1e9,
        "rope_scaling": RopeScaling(
            kind="yarn", factor=4.0, original_max_positions=16, beta_fast=32.0, beta_slow=1.0
        ),
        "rotary_dim": 20,
    },
}


def config_of(family: str) -> DecoderConfig:
    return DecoderConfig(**{**SMALL, **FAMILIES[family]})


def write_model(path: Path, config: DecoderConfig, seed: int = 0) -> Path:
    """An `.oam` of random f32 weights; vectors of norms lie where their family has them, around 1 less the offset."""
    rng = np.random.default_rng(seed)
    entries = [OamEntry(name, shape, "f32") for name, shape in config.parameters().items()]
    payload = json.dumps({"oazoo": 1, "family": "decoder", "model": config.to_json()}).encode()
    with OamWriter(path, config=OamConfig("decoder", payload=payload), entries=entries) as out:
        for entry in entries:
            values = rng.normal(size=entry.shape) * (0.3 if len(entry.shape) == 1 else 0.15)
            if entry.name.endswith("norm.weight"):
                values += 1 - config.norm_offset
            out.write(entry.name, values.astype(np.float32))
    return path


def check(path: Path, ids: npt.NDArray[np.int32]) -> None:
    """Prompt and decoding by single steps agree with float64 to 2e-5 of the largest logit."""
    params, config = load_oam(path)
    model = oazoo.load(path).model
    wanted = numpy_logits(params, config, ids)
    tolerance = 2e-5 * np.abs(wanted).max()
    assert np.abs(model.logits(ids) - wanted).max() <= tolerance
    session = model.new_session(ids.size)
    steps = np.stack([session.decode(int(token)) for token in ids])
    assert np.abs(steps - wanted).max() <= tolerance
    session.truncate(0)
    assert np.abs(session.prefill(ids[:11]) - wanted[10]).max() <= tolerance
    assert np.abs(session.prefill(ids[11:-1]) - wanted[-2]).max() <= tolerance
    assert np.abs(session.decode(int(ids[-1])) - wanted[-1]).max() <= tolerance


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("encoding", ["f32", "q8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, encoding: str, tmp_path: Path) -> None:
    config = config_of(family)
    path = write_model(tmp_path / "dense.oam", config)
    if encoding != "f32":
        oazoo.quantize(path, tmp_path / "packed.oam", encoding, method="absmax")
        path = tmp_path / "packed.oam"
    ids = (
        np.random.default_rng(zlib.crc32(family.encode())).integers(0, config.vocab_size, 40).astype(np.int32)
    )
    check(path, ids)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "phi3", "mixture-1"])
def test_prompts_in_chunks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and positions that reach over from one chunk into the next."""
    monkeypatch.setattr(session_module, "CHUNK", 6)
    config = config_of(family)
    check(write_model(tmp_path / "m.oam", config), np.arange(3, 43, dtype=np.int32))


def test_a_prompt_longer_than_a_chunk(tmp_path: Path) -> None:
    config = config_of("gemma3")
    path = write_model(tmp_path / "m.oam", replace(config, num_layers=2, layer_types=("sliding", "full")))
    ids = np.random.default_rng(3).integers(0, config.vocab_size, session_module.CHUNK + 30).astype(np.int32)
    params, loaded = load_oam(path)
    wanted = numpy_logits(params, loaded, ids)
    model = oazoo.load(path).model
    assert np.abs(model.logits(ids) - wanted).max() <= 2e-5 * np.abs(wanted).max()
    last = model.new_session(ids.size).prefill(ids)
    assert np.abs(last - wanted[-1]).max() <= 2e-5 * np.abs(wanted).max()


def test_longrope_follows_the_room_of_a_session(tmp_path: Path) -> None:
    """Short factors while a session has room for no more than the original positions, long ones for more."""
    path = write_model(tmp_path / "m.oam", config_of("phi3"))
    params, config = load_oam(path)
    model = oazoo.load(path).model
    ids = np.arange(20, dtype=np.int32)
    found = {}
    for room in (20, 32, 33, 200):
        wanted = numpy_logits(params, config, ids, length=room)[-1]
        found[room] = model.new_session(room).prefill(ids)
        assert np.abs(found[room] - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert np.array_equal(found[20], found[32]) and np.array_equal(found[33], found[200])
    assert np.abs(found[32] - found[33]).max() > 1e-2


def test_huge_scores_are_capped(tmp_path: Path) -> None:
    """Scores in the tens of thousands, which a cap of 30 turns into a softmax over ties, and logits all but at their cap."""
    config = replace(config_of("gemma2"), attention_softcap=30.0, logit_softcap=2.0, attention_scale=1000.0)
    path = write_model(tmp_path / "m.oam", config)
    params, loaded = load_oam(path)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, 30).astype(np.int32)
    wanted = numpy_logits(params, loaded, ids)
    assert np.abs(wanted).max() > 1.9
    got = oazoo.load(path).model.logits(ids)
    assert np.isfinite(got).all() and np.abs(got).max() <= 2.0
    uncapped = numpy_logits(params, replace(loaded, attention_softcap=None), ids)
    assert np.abs(uncapped - wanted).max() > 0.1
    # Scores of 10⁴ are known to 10⁴ · 2^-24 only, and the cap passes that on where it bends.
    assert np.abs(got - wanted).max() <= 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_config(family: str) -> None:
    config = config_of(family)
    model = build(config, get_device())
    assert {name: p.shape for name, p in model.named_parameters()} == config.parameters()
    offsets = {p.offset for name, p in model.named_parameters() if name.endswith("norm.weight")}
    assert offsets == {config.norm_offset}
    assert all(not p.offset for name, p in model.named_parameters() if not name.endswith("norm.weight"))


def test_mixtures_of_experts_are_packed(tmp_path: Path) -> None:
    """Stacks lose little as Q8, and the model runs from them."""
    config = DecoderConfig(
        **{
            **SMALL,
            "num_experts": 4,
            "experts_per_token": 2,
            "expert_size": 32,
            "shared_expert_size": 16,
            "dense_layers": (0,),
        }
    )
    path = write_model(tmp_path / "moe.oam", config)
    packed = tmp_path / "packed.oam"
    oazoo.quantize(path, packed, "q8", method="absmax")
    dense, _ = load_oam(path)
    values, loaded = load_oam(packed)
    assert loaded == config
    experts = values["layers.1.moe.down.weight"]
    assert experts.shape == (4, 64, 32)
    assert 0 < np.abs(experts - dense["layers.1.moe.down.weight"]).max() < 0.01
    ids = np.arange(9) % config.vocab_size
    np.testing.assert_allclose(
        oazoo.load(packed).logits(ids), numpy_logits(values, config, ids), rtol=1e-4, atol=1e-4
    )


def test_heads_too_wide_are_refused() -> None:
    with pytest.raises(DeviceError, match="its heads are 258 wide; kernels hold heads of up to 256"):
        build(DecoderConfig(**{**SMALL, "head_dim": 258}), get_device())
