"""Decoder families in GGUF: names, rows and metadata as llama.cpp's converter writes them; and what GGUF cannot hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write_gguf, write_hf
from exported import gguf_values, oam_values, safetensors_bytes
from family_folders import Array, bent, golden
from gguf import GGUFReader
from model_goldens import reference, source_path
from reference_models import load_oam, logits

import oazoo
from oazoo.configs import DecoderConfig
from oazoo.errors import TranslationError
from oazoo.translators import plan
from oazoo.translators.exporter import config_differences

#: Hugging Face's names within a layer → GGUF's, where a family has the same weight.
COMMON = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
LAYERS = {
    "qwen3": COMMON,
    "phi3": COMMON,
    "phi3_longrope": COMMON,
    "gpt_neox": COMMON,
    "olmo2": COMMON | AFTER,
    "gemma2": COMMON | AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
    "gemma3_six": COMMON | AFTER | {"pre_feedforward_layernorm": "ffn_norm"},
}
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
WHOLE |= {"embed_in": "token_embd", "final_layer_norm": "output_norm", "embed_out": "output"}


def as_gguf(name: str) -> dict[str, Array]:
    """A golden's tensors as llama.cpp's converter stores them, from its published rules, written out by hand."""
    config, tensors = golden(name)
    result: dict[str, Array] = {}
    for key, value in tensors.items():
        stem, _, suffix = key.removeprefix("gpt_neox.").removeprefix("model.").rpartition(".")
        if stem.startswith("layers."):
            _, number, part = stem.split(".", 2)
            target = f"blk.{number}.{LAYERS[name][part]}.{suffix}"
        else:
            target = f"{WHOLE[stem]}.{suffix}"
        if part_of_every_head := "query_key_value" in key:
            heads, dim = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
            rows = [
                (3 * h + which) * dim + row for which in range(3) for h in range(heads) for row in range(dim)
            ]
            value = value[rows]
        assert part_of_every_head == (name == "gpt_neox" and ".attn_qkv." in target)
        if name.startswith("gemma") and key.endswith("norm.weight"):
            value = value.astype(np.float32) + np.float32(1)
        result[target] = value
    return result


METADATA: dict[str, dict[str, Any]] = {
    "qwen3": {"general.architecture": "qwen3", "qwen3.attention.key_length": 16, "qwen3.rope.freq_base": 1e6},
    "phi3": {"phi3.attention.sliding_window": 9, "phi3.rope.dimension_count": 12},
    "phi3_longrope": {
        "phi3.rope.dimension_count": 6,
        "phi3.rope.scaling.original_context_length": 16,
        "phi3.rope.scaling.attn_factor": float(np.float32(1.5**0.5)),
        "phi3.context_length": 64,
    },
    "gpt_neox": {
        "gptneox.use_parallel_residual": True,
        "gptneox.rope.dimension_count": 6,
        "gptneox.attention.layer_norm_epsilon": float(np.float32(1e-5)),
        "oazoo.activation": "gelu",
    },
    "olmo2": {"olmo2.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)), "olmo2.rope.freq_base": 5e5},
    "gemma2": {
        "gemma2.attention.sliding_window": 8,
        "gemma2.attn_logit_softcapping": 3.0,
        "gemma2.final_logit_softcapping": 5.0,
        "gemma2.attention.key_length": 16,
    },
    "gemma3_six": {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6},
}


@pytest.mark.parametrize("name", METADATA)
def test_names_rows_and_metadata(name: str, tmp_path: Path) -> None:
    oazoo.convert(source_path(name), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    found = {
        str(t.name): np.asarray(t.data).reshape([int(size) for size in reversed(t.shape)])
        for t in GGUFReader(tmp_path / "out.gguf").tensors
    }
    wanted = as_gguf(name)
    if name == "phi3_longrope":
        sections = golden(name)[0]["rope_parameters"]
        for kind in ("short", "long"):
            wanted[f"rope_factors_{kind}.weight"] = np.array(sections[f"{kind}_factor"], np.float32)
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert np.array_equal(found[key], value), key
    values = gguf_values(tmp_path / "out.gguf")
    for key, value in METADATA[name].items():
        assert values[key] == value, key


def metadata(name: str, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes for a golden, by hand; ``__`` stands for the dot, None takes a key away."""
    config, _ = golden(name)
    arch = {"gemma3_six": "gemma3", "gpt_neox": "gptneox", "phi3_longrope": "phi3"}.get(name, name)
    norm = "layer_norm_epsilon" if arch == "gptneox" else "layer_norm_rms_epsilon"
    values: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        f"attention.{norm}": config.get("layer_norm_eps", config.get("rms_norm_eps")),
    }
    if arch == "gptneox":
        values |= {"rope.dimension_count": 6, "use_parallel_residual": True}
    else:
        values["attention.head_count_kv"] = config["num_key_value_heads"]
    if "head_dim" in config and arch != "gptneox":
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if arch in ("qwen3", "olmo2"):
        values["rope.freq_base"] = 1e6 if arch == "qwen3" else 5e5
    if arch in ("gemma2", "gemma3", "phi3"):
        values["attention.sliding_window"] = config["sliding_window"] or 0
    if arch == "gemma2":
        values |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    if arch == "gemma3":
        values["rope.freq_base"] = 1e6
    if name == "phi3_longrope":
        values |= {"rope.dimension_count": 6, "rope.scaling.original_context_length": 16}
        values["rope.scaling.attn_factor"] = 1.5**0.5
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    at = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": arch, "tokenizer.ggml.model": "none", **at}


def written(path: Path, name: str, tensors: Mapping[str, Array] | None = None, **changes: Any) -> Path:
    """A golden as a GGUF file made by the gguf package."""
    values = dict(as_gguf(name)) | dict(tensors or {})
    if name == "phi3_longrope":
        sections = golden(name)[0]["rope_parameters"]
        for kind in ("short", "long"):
            values[f"rope_factors_{kind}.weight"] = np.array(sections[f"{kind}_factor"], np.float32)
    return write_gguf(path, metadata(name, **changes), values)


@pytest.mark.parametrize("name", METADATA)
def test_files_of_the_converters_kind_come_in(name: str, tmp_path: Path) -> None:
    """From a file whose every byte comes from the gguf package and the rules above, the same logits."""
    changes = {"oazoo__activation": None} if name != "gpt_neox" else {}
    path = written(tmp_path / "in.gguf", name, **changes)
    report = oazoo.convert(path, tmp_path / "m.oam")
    assert not report.rounded and not any("not known" in note for note in report.notes)
    params, config = load_oam(tmp_path / "m.oam")
    ids, wanted = reference(name)
    error = max(np.abs(logits(params, config, s) - w).max() for s, w in zip(ids, wanted, strict=True))
    # GGUF does not say which form of GELU: llama.cpp's is taken, which is not quite that of the golden.
    assert (1e-5 < error < 1e-2) if name == "gpt_neox" else error < 5e-5
    assert isinstance(config, DecoderConfig) and config.norm_offset == 0.0


# Gemma's norms


def test_sums_are_measured(tmp_path: Path) -> None:
    exact = np.array([0.5, -0.25, 0.0, 1.0] * 12, np.float32)
    tiny = exact.copy()
    tiny[1] = 1e-20

    def norms(value: Array) -> Any:
        def change(tensors: dict[str, Array]) -> None:
            tensors.update({key: value for key in tensors if key.endswith("norm.weight")})

        return change

    for value, error in ((exact, 0.0), (tiny, float(np.float32(1e-20)))):
        oazoo.convert(bent(tmp_path / "in", "gemma2", None, norms(value)), tmp_path / "m.oam", overwrite=True)
        report = oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf", overwrite=True)
        assert report.max_error == error
        assert {t.transform for t in report.tensors if t.target.endswith("norm.weight")} == {"Offset(+1)"}
        assert {t.target for t in report.rounded} == {
            t.target for t in report.tensors if error and t.target.endswith("norm.weight")
        }
    # In bfloat16 the sum needs more bits than the type has, but GGUF holds vectors in float32.
    half = np.array([2.0**-9] * 48).astype(ml_dtypes.bfloat16)
    oazoo.convert(bent(tmp_path / "in", "gemma2", None, norms(half)), tmp_path / "m.oam", overwrite=True)
    report = oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf", overwrite=True)
    assert not report.rounded


def test_norms_there_and_back(tmp_path: Path) -> None:
    """From GGUF's sums to Hugging Face's weights, in every type: what is written is what the report says."""
    path = written(tmp_path / "in.gguf", "gemma2")
    sums = {k: v for k, v in as_gguf("gemma2").items() if k.endswith("norm.weight")}
    for dtype, cast in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        oazoo.convert(path, tmp_path / "m.oam", dtype=dtype, overwrite=True)
        report = oazoo.export(tmp_path / "m.oam", tmp_path / dtype)
        stored = {t.target: t for t in report.tensors}
        key = "model.layers.0.input_layernorm.weight"
        kind, shape, data = safetensors_bytes(tmp_path / dtype)[key]
        wanted = (sums["blk.0.attn_norm.weight"].astype(cast).astype(np.float32) - 1).astype(cast)
        assert (kind, shape, data) == (dtype.upper(), (48,), wanted.tobytes())
        again = wanted.astype(np.float64) + 1
        before = sums["blk.0.attn_norm.weight"].astype(cast).astype(np.float64)
        assert stored[key].max_error == np.abs(again - before).max()
        assert stored[key].rounded == bool((again != before).any())
        oazoo.convert(tmp_path / dtype, tmp_path / "again.oam", overwrite=True)
        ids, golden_logits = reference("gemma2")
        params, config = load_oam(tmp_path / "again.oam")
        assert isinstance(config, DecoderConfig) and config.norm_offset == 1.0
        tolerance = {"f32": 5e-5}.get(dtype, 0.3)
        assert np.abs(logits(params, config, ids[0]) - golden_logits[0]).max() < tolerance
    assert oazoo.diff(path, source_path("gemma2")).equal


# Settings that GGUF states, and those that follow


def types(path: Path) -> list[str]:
    with plan(path) as planned:
        config = planned.config
        assert isinstance(config, DecoderConfig)
        return ["sliding" if config.is_sliding(layer) else "full" for layer in range(config.num_layers)]


def test_windows_of_gemma(tmp_path: Path) -> None:
    def made(name: str, **changes: Any) -> list[str]:
        return types(written(tmp_path / "in.gguf", name, **changes))

    s, f = "sliding", "full"
    assert made("gemma2") == [s, f] and made("gemma3_six") == [s] * 5 + [f]
    assert made("gemma3_six", attention__sliding_window_pattern=2) == [s, f] * 3
    listed = [True, False, False, True, True, False]
    assert made("gemma3_six", attention__sliding_window_pattern=listed) == [s, f, f, s, s, f]
    assert made("gemma3_six", attention__sliding_window=None) == [f] * 6
    assert made("gemma2", attention__sliding_window=None) == [s, f]
    with plan(written(tmp_path / "in.gguf", "gemma2", attention__sliding_window=None)) as planned:
        assert planned.config.to_json()["sliding_window"] == 4096  # llama.cpp's, for files of the first days
    for odd in (0, [True] * 3, [True] * 5 + [True, True]):
        with pytest.raises(TranslationError, match="sliding_window_pattern"):
            made("gemma3_six", attention__sliding_window_pattern=odd)


def test_the_scale_of_the_largest_gemma(tmp_path: Path) -> None:
    """27B: 46 layers, scores scaled by hidden size over heads, not by the head's width."""
    config, tensors = golden("gemma2")
    layers = {key: value for key, value in tensors.items() if ".layers.0." in key}
    for number in range(1, 46):
        tensors |= {key.replace(".layers.0.", f".layers.{number}."): value for key, value in layers.items()}
    config |= {"num_hidden_layers": 46, "layer_types": None, "query_pre_attn_scalar": 12}
    oazoo.convert(write_hf(tmp_path / "in", config, tensors), tmp_path / "m.oam")
    oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    with plan(tmp_path / "out.gguf") as planned:
        assert isinstance(planned.config, DecoderConfig)
        assert planned.config.score_scale == pytest.approx(12**-0.5, rel=1e-12)
    oazoo.convert(
        write_hf(tmp_path / "in", config | {"query_pre_attn_scalar": 16}, tensors),
        tmp_path / "m.oam",
        overwrite=True,
    )
    with pytest.raises(TranslationError, match=r"scales scores by 12\^-0.5"):
        oazoo.export(tmp_path / "m.oam", tmp_path / "other.gguf")


TYPES = ["full_attention", "sliding_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gemma3", {}, "scales scores"),
    ("gemma3_six", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "full in every 6th layer"),
    ("gemma3_six", {"rope_local_base_freq": 500.0, "rope_parameters": ...}, "theta of its sliding layers is 10000"),
    ("gemma2", {"attn_logit_softcapping": None}, "caps scores and logits"),
    ("gemma2", {"tie_word_embeddings": False}, "its head shares the embedding"),
    ("olmo2", {"tie_word_embeddings": True}, "a head of its own"),
    ("gpt_neox", {"tie_word_embeddings": True}, "a head of its own"),
    ("qwen3", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}, "no frequency factors for 'qwen3'"),
    ("olmo2", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}, "no frequency factors for 'olmo2'"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": TYPES}, "same attention window"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)), ids=lambda n: "-".join([REFUSED[n][0], *REFUSED[n][1]]))
def test_what_llama_cpp_does_not_compute_is_refused(case: int, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]

    def heads(tensors: dict[str, Array]) -> None:
        for head, embed in (("lm_head", "model.embed_tokens"), ("embed_out", "gpt_neox.embed_in")):
            if f"{embed}.weight" in tensors and "tie_word_embeddings" in changes:
                tensors.pop(f"{head}.weight", None)
                if not changes["tie_word_embeddings"]:
                    tensors[f"{head}.weight"] = tensors[f"{embed}.weight"] + 1

    oazoo.convert(bent(tmp_path / "in", name, changes, heads), tmp_path / "m.oam")
    with pytest.raises(TranslationError, match=message):
        oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    oazoo.export(tmp_path / "m.oam", tmp_path / "out")  # Hugging Face's config can say it
    oazoo.convert(tmp_path / "out", tmp_path / "again.oam")
    assert load_oam(tmp_path / "again.oam")[1] == load_oam(tmp_path / "m.oam")[1]


# The form of GELU


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_the_form_of_gelu_travels(name: str, activation: str, tmp_path: Path) -> None:
    key = "activation_function" if name == "gpt2" else "hidden_act"
    folder = bent(tmp_path / "in", name, {key: activation})
    oazoo.convert(folder, tmp_path / "m.oam")
    form = "gelu" if activation == "gelu" else "gelu_tanh"
    assert load_oam(tmp_path / "m.oam")[1].to_json()["activation"] == form
    oazoo.export(tmp_path / "m.oam", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())[key] == activation
    report = oazoo.export(tmp_path / "m.oam", tmp_path / "out.gguf")
    exact = activation == "gelu"
    assert any("GELU in its tanh form" in note for note in report.notes) == exact
    assert gguf_values(tmp_path / "out.gguf").get("oazoo.activation") == ("gelu" if exact else None)
    for number, output in enumerate(("hf", "out.gguf")):
        again = tmp_path / f"{number}.oam"
        oazoo.convert(tmp_path / output, again)
        assert not config_differences(load_oam(again)[1], load_oam(tmp_path / "m.oam")[1])
        first, second = oam_values(tmp_path / "m.oam"), oam_values(again)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_an_unknown_form_of_gelu(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "in.gguf", metadata("gpt_neox") | {"oazoo.activation": "quick"}, as_gguf("gpt_neox")
    )
    with pytest.raises(TranslationError, match="quick"):
        plan(path)


def test_nanogpts_own_checkpoint_goes_out(tmp_path: Path) -> None:
    """The exact form of GELU, biases everywhere: GPT-2's containers hold it."""
    path = source_path("nanogpt_script/ckpt.pt")
    oazoo.convert(path, tmp_path / "m.oam")
    params, config = load_oam(tmp_path / "m.oam")
    assert config.to_json()["activation"] == "gelu"
    for number, output in enumerate(("hf", "out.gguf")):
        oazoo.export(tmp_path / "m.oam", tmp_path / output)
        oazoo.convert(tmp_path / output, tmp_path / f"{number}.oam")
        again, same = load_oam(tmp_path / f"{number}.oam")
        assert not config_differences(same, config) and again.keys() == params.keys()
        assert all(np.array_equal(again[key], params[key]) for key in params)
    oazoo.convert(source_path("nanogpt_nobias_script/ckpt.pt"), tmp_path / "bare.oam")
    for output in ("bare", "bare.gguf"):
        with pytest.raises(TranslationError, match="bias in every linear layer"):
            oazoo.export(tmp_path / "bare.oam", tmp_path / output)
