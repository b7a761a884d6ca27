"""Models of awkward sizes from Q4 and Q8: every linear layer, embedding, table of positions and head, with biases.

In prompts and in decoding, against float64 on the very weights that the file holds.

No row is a multiple of 32 long here, so blocks run across rows and the last one is short. What stays dense is stated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter

DECODER: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 35,
    "intermediate_size": 45,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 14,
    "max_positions": 40,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
NANOGPT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 42,
    "intermediate_size": 71,
    "num_layers": 2,
    "num_heads": 3,
    "max_positions": 37,
    "norm_eps": 1e-5,
    "bias": True,
}
#: What is packed and what is not, by the last parts of its name.
DENSE_BY_RANK = ("bias", "norm.weight", "attn_norm.weight", "mlp_norm.weight")


def config_of(family: str, tied: bool) -> ModelConfig:
    if family == "decoder":
        return DecoderConfig(**DECODER, tied_embeddings=tied)
    return NanoGPTConfig(**NANOGPT, tied_embeddings=tied)


def write_model(path: Path, config: ModelConfig) -> None:
    rng = np.random.default_rng(7)
    payload = {"oazoo": 1, "family": config.family, "model": config.to_json()}
    shapes = config.parameters()
    entries = [OamEntry(name, shape, "f32") for name, shape in shapes.items()]
    oam = OamConfig(config.family, payload=json.dumps(payload).encode())
    with OamWriter(path, config=oam, entries=entries) as writer:
        for name, shape in shapes.items():
            values = rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.1)
            if "norm" in name and name.endswith("weight"):
                values += 1
            writer.write(name, values.astype(np.float32))


@pytest.mark.parametrize("to", ["q8", "q4"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["decoder", "nanogpt"])
def test_prompts_and_decoding(family: str, tied: bool, to: str, tmp_path: Path) -> None:
    config = config_of(family, tied)
    write_model(tmp_path / "dense.oam", config)
    path = tmp_path / "packed.oam"
    oazoo.quantize(tmp_path / "dense.oam", path, to, method="absmax")
    with OamSource(path) as source:
        encodings = {name: tensor.info.encoding for name, tensor in source.items()}
        for name, tensor in source.items():
            if len(tensor.info.shape) > 1:
                assert tensor.info.shape[-1] % 32 != 0, name  # what this test is about
    packed = {name for name, encoding in encodings.items() if encoding == to}
    assert packed == {name for name, shape in config.parameters().items() if len(shape) == 2}
    assert {"embed.weight", "layers.1.mlp.down.weight"} <= packed
    assert ("head.weight" in packed) is not tied
    assert ("positions.weight" in packed) is (family == "nanogpt")
    for name in set(encodings) - packed:
        assert name.endswith(DENSE_BY_RANK) and encodings[name] == "f32", name

    params, _ = load_oam(path)
    ids = np.random.default_rng(3).integers(0, config.vocab_size, 37)  # type: ignore[attr-defined]
    wanted = numpy_logits(params, config, ids)
    scale = np.abs(wanted).max()
    model = oazoo.load(path).model
    assert np.abs(model.logits(ids) - wanted).max() <= 2e-5 * scale  # type: ignore[arg-type]
    # Prompts of every kind of kernel (single rows, few rows, many), then token by token.
    for prompt in (1, 2, 5, 9, 36):
        session = model.new_session(37)
        assert (
            np.abs(session.prefill(ids[:prompt].astype(np.int32)) - wanted[prompt - 1]).max() <= 2e-5 * scale
        )
        for at in range(prompt, 37):
            assert np.abs(session.decode(int(ids[at])) - wanted[at]).max() <= 2e-5 * scale
        session.close()


@pytest.mark.parametrize("family", ["decoder", "nanogpt"])
def test_a_mix_of_encodings_in_one_model(family: str, tmp_path: Path) -> None:
    """Query, key and value, or gate and up, in different encodings: Q4 first, then Q8 for most of what was kept dense."""
    config = config_of(family, False)
    dense, mixed, path = (tmp_path / f"{name}.oam" for name in ("dense", "mixed", "packed"))
    write_model(dense, config)
    keep = ["*.mlp.up.*", "*.mlp.down.*", "embed*", "*.1.*"]
    keep.append("*.attn.v.*" if family == "decoder" else "positions*")
    oazoo.quantize(dense, mixed, "q4", keep=keep, method="absmax")
    oazoo.quantize(mixed, path, "q8", keep=["*.1.mlp.*", "head.weight"], method="absmax")
    with OamSource(path) as source:
        used = {t.info.encoding for t in source.values() if len(t.info.shape) == 2}
    assert used == {"f32", "q8", "q4"}
    params, _ = load_oam(path)
    ids = np.arange(20) * 4
    wanted = numpy_logits(params, config, ids)
    model = oazoo.load(path).model
    assert np.abs(model.logits(ids) - wanted).max() <= 2e-5 * np.abs(wanted).max()  # type: ignore[arg-type]
    session = model.new_session(20)
    for at, token in enumerate(ids):
        assert np.abs(session.decode(int(token)) - wanted[at]).max() <= 2e-5 * np.abs(wanted).max()
