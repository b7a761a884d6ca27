"""Models as ONNX graphs: what they compute, against the float64 reference, in the evaluator of the onnx package."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported import oam_bytes, packed_oam, random_oam
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from reference_models import load_oam, logits

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig, RopeScaling
from oazoo.errors import TranslationError
from oazoo.translators import convert
from oazoo.translators.export import export

LLAMA = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    norm_eps=1e-5, rope_theta=1e4, max_positions=64, tied_embeddings=False,
)  # fmt: skip
NANOGPT = NanoGPTConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, norm_eps=1e-5, max_positions=24,
    tied_embeddings=True,
)  # fmt: skip


def _scaled(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": RopeScaling(original_max_positions=12, **fields)}


_FACTORS = (1.0, 1.5, 2.0, 4.0)
#: What the families change, and every field alone where no family has it.
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tied_embeddings": True},
    "qwen2": {"attention_bias": True, "num_kv_heads": 1},
    "all biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16, "num_kv_heads": 4},
    "mistral": {"sliding_window": 5},
    "qwen3": {"qk_norm": "head", "head_dim": 16},
    "olmo2": {"qk_norm": "full", "pre_norm": False, "post_norm": True},
    "gemma2": {
        "post_norm": True, "norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 32**0.5,
        "attention_scale": 0.2, "attention_softcap": 2.0, "logit_softcap": 3.0, "sliding_window": 4,
        "layer_types": ("sliding", "full"), "tied_embeddings": True,
    },
    "gemma3": {
        "post_norm": True, "norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 32**0.5,
        "qk_norm": "head", "sliding_window": 4, "layer_types": ("sliding", "full"), "sliding_rope_theta": 100.0,
        "rope_theta": 1e6, **_scaled(kind="linear", factor=8.0),
    },
    "gptneox": {
        "norm": "layer", "parallel_residual": True, "gated_mlp": False, "activation": "gelu", "rotary_dim": 4,
        "attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "num_kv_heads": 4,
    },
    "plain mlp": {"gated_mlp": False},
    "gelu": {"activation": "gelu"},
    "partial rotary": {"rotary_dim": 6},
    "one pair": {"rotary_dim": 2, **_scaled(kind="linear", factor=2.0)},
    "linear": _scaled(kind="linear", factor=4.0),
    "dynamic": _scaled(kind="dynamic", factor=3.0),
    "llama3": _scaled(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": _scaled(kind="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0),
    "factors": {"rope_scaling": RopeScaling(kind="factors", factors=_FACTORS)},
    "phi3": _scaled(
        kind="longrope", factors=_FACTORS, long_factors=(8.0, 4.0, 2.0, 1.0), attention_factor=1.2
    ),
    "no epsilon": {"norm_eps": 0.0},
}  # fmt: skip
NANOGPTS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "no bias": {"bias": False},
    "bias in norms alone": {"bias": False, "norm_bias": True},
    "bias in layers alone": {"norm_bias": False},
    "exact gelu": {"activation": "gelu"},
    "head of its own": {"tied_embeddings": False},
}
CONFIGS: dict[str, ModelConfig] = {
    **{f"decoder {name}": dataclasses.replace(LLAMA, **fields) for name, fields in DECODERS.items()},
    **{f"nanogpt {name}": dataclasses.replace(NANOGPT, **fields) for name, fields in NANOGPTS.items()},
}


def run_graph(path: Path, ids: Any) -> Any:
    """Logits of an ONNX file, in the evaluator of the onnx package."""
    return ReferenceEvaluator(str(path)).run(None, {"input_ids": np.asarray(ids, np.int64)})[0]


def check_graph(path: Path, oam: Path, tolerance: float = 2e-4) -> None:
    """The file is sound, and computes for sequences of several lengths what the reference computes."""
    onnx.checker.check_model(path, full_check=True)
    params, config = load_oam(oam)
    random = np.random.default_rng(1)
    for batch, length in ((1, 1), (2, 9), (1, 17)):
        ids = random.integers(0, config.vocab_size, (batch, length))
        found = run_graph(path, ids)
        assert found.dtype == np.float32 and found.shape == (batch, length, config.vocab_size)
        for row, sequence in zip(found, ids, strict=True):
            wanted = logits(params, config, sequence)
            assert np.abs(wanted).max() > 0.5
            assert np.abs(row - wanted).max() < tolerance, (batch, length)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_field_of_the_configs(name: str, tmp_path: Path) -> None:
    random_oam(tmp_path / "m.oam", CONFIGS[name])
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    check_graph(tmp_path / "m.onnx", tmp_path / "m.oam")
    convert(tmp_path / "m.onnx", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(tmp_path / "m.oam")
    assert load_oam(tmp_path / "again.oam")[1] == CONFIGS[name]


def test_every_field_is_covered() -> None:
    """A field that the config gains has to be written into the graph, or refused."""
    for default, configs in ((LLAMA, DECODERS), (NANOGPT, NANOGPTS)):
        changed = {field for fields in configs.values() for field in fields}
        sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions"}
        experts = {
            "num_experts",
            "experts_per_token",
            "expert_size",
            "shared_expert_size",
            "normalize_experts",
        }
        fields = {field.name for field in dataclasses.fields(default)}
        assert fields - changed - sizes - experts - {"dense_layers"} <= {"norm_eps"}


@pytest.mark.parametrize("encoding", ("f16", "bf16", "f64"))
@pytest.mark.parametrize("name", ("decoder gemma3", "decoder gptneox", "nanogpt gpt2"))
def test_weights_keep_their_type(name: str, encoding: str, tmp_path: Path) -> None:
    """Stored as they are, cast where they are used."""
    random_oam(tmp_path / "m.oam", CONFIGS[name], encoding)
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    check_graph(tmp_path / "m.onnx", tmp_path / "m.oam", 3e-4)
    stored = oam_bytes(tmp_path / "m.oam")
    kinds = {
        "f16": onnx.TensorProto.FLOAT16,
        "bf16": onnx.TensorProto.BFLOAT16,
        "f64": onnx.TensorProto.DOUBLE,
    }
    weights = {t.name: t for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    for key, (_, shape, data) in stored.items():
        assert weights[key].data_type == kinds[encoding] and tuple(weights[key].dims) == shape
        assert weights[key].raw_data == data
    convert(tmp_path / "m.onnx", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == stored


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("nanogpt")])
def test_the_matcher_of_foreign_graphs_reads_ours(name: str, tmp_path: Path) -> None:
    """Without a word in its metadata the graph is proven step by step, as one of PyTorch's would be."""
    random_oam(tmp_path / "m.oam", CONFIGS[name], "f16")
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "bare.onnx")
    convert(tmp_path / "bare.onnx", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(tmp_path / "m.oam")
    found, wanted = load_oam(tmp_path / "again.oam")[1], CONFIGS[name]
    assert isinstance(found, NanoGPTConfig) and isinstance(wanted, NanoGPTConfig)
    assert found.norm_eps == pytest.approx(wanted.norm_eps) and found.has_norm_bias == wanted.has_norm_bias
    same = {"norm_eps": wanted.norm_eps, "norm_bias": wanted.norm_bias}
    assert dataclasses.replace(found, **same) == wanted


def test_names_and_shapes_are_readable(tmp_path: Path) -> None:
    random_oam(tmp_path / "m.oam", LLAMA)
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    model = onnx.load(tmp_path / "m.onnx")
    (given,), (made,) = model.graph.input, model.graph.output
    assert given.name == "input_ids" and made.name == "logits"
    assert [d.dim_param or d.dim_value for d in made.type.tensor_type.shape.dim] == ["batch", "sequence", 40]
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)] and model.ir_version == 8
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names) and "layers.1.attn.weights" in names
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    params, _ = load_oam(tmp_path / "m.oam")
    assert all(np.array_equal(values[name], value) for name, value in params.items())
    assert sum(value.nbytes for name, value in values.items() if name not in params) < 400
    shapes = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph.value_info
    found = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in shapes}
    assert found["layers.1.attn.weights"][:2] == ["batch", 4] and found["layers.1"][::2] == ["batch", 32]


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16"))
def test_packed_weights_are_decoded(dtype: str, tmp_path: Path) -> None:
    random_oam(tmp_path / "dense.oam", dataclasses.replace(LLAMA, intermediate_size=64))
    packed_oam(tmp_path / "dense.oam", tmp_path / "m.oam", "q8")
    report = export(tmp_path / "m.oam", tmp_path / "m.onnx", dtype=dtype)
    assert any(f"become {dtype}; the precision that packing took" in note for note in report.notes)
    assert bool(report.rounded) == (dtype != "f32")
    check_graph(tmp_path / "m.onnx", tmp_path / "m.oam", {"f32": 2e-4, "f16": 2e-2, "bf16": 0.2}[dtype])


def test_experts_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_size": 16}
    random_oam(tmp_path / "m.oam", dataclasses.replace(LLAMA, **experts))
    with pytest.raises(
        TranslationError, match=r"decoder: layers with a mixture of experts are not written as"
    ):
        export(tmp_path / "m.oam", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()
