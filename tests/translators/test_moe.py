"""Expert stacks: their weights from every form that publishes them, there and back."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import write_gguf, write_hf
from expert_models import FAMILIES, PARTS, config_of, tensors
from exported import gguf_bytes, oam_bytes, oam_values, packed_oam, safetensors_bytes

import oazoo
from oazoo.errors import TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan
from oazoo.translators.engine import Measured, stream
from oazoo.translators.export import export
from oazoo.translators.rules import Rule, invert
from oazoo.translators.stack import Stack

Array = npt.NDArray[Any]


def joined(source: dict[str, Array], experts: int = 5) -> dict[str, Array]:
    """The same weights with all experts of a layer in one tensor, gate above up, as transformers 5 holds them."""
    result = {name: value for name, value in source.items() if ".experts." not in name}
    for layer in range(3):
        at, end = f"model.layers.{layer}", ".weight"
        name = "block_sparse_moe" if f"{at}.block_sparse_moe.gate.weight" in source else "mlp"
        if f"{at}.{name}.gate.weight" not in source:
            continue
        gate, up, down = (
            np.stack(
                [source[f"{at}.{name}.experts.{n}.{PARTS[p][name == 'mlp']}{end}"] for n in range(experts)]
            )
            for p in PARTS
        )
        result[f"{at}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        result[f"{at}.mlp.experts.down_proj"] = down
        result[f"{at}.mlp.gate.weight"] = result.pop(f"{at}.{name}.gate.weight")
    return result


def expected_experts(family: str, source: dict[str, Array], layer: int, part: str) -> Array:
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    name = PARTS[part][family != "mixtral"]
    return np.stack([source[f"model.layers.{layer}.{block}.experts.{n}.{name}.weight"] for n in range(5)])


@pytest.mark.parametrize("form", ["separate", "joined"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values(family: str, form: str, tmp_path: Path) -> None:
    config = config_of(family)
    source = tensors(family, config)
    convert(
        write_hf(tmp_path / "hf", config, joined(source) if form == "joined" else source), tmp_path / "m.oam"
    )
    found = oam_values(tmp_path / "m.oam")
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    for layer in range(3):
        at, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for part in PARTS:
            assert np.array_equal(
                found[f"{at}.moe.{part}.weight"], expected_experts(family, source, layer, part)
            )
        assert np.array_equal(found[f"{at}.moe.router.weight"], source[f"{theirs}.{block}.gate.weight"])
        if family == "qwen2":
            for part in PARTS:
                wanted = source[f"{theirs}.mlp.shared_expert.{part}_proj.weight"]
                assert np.array_equal(found[f"{at}.moe.shared.{part}.weight"], wanted)
            wanted = source[f"{theirs}.mlp.shared_expert_gate.weight"]
            assert np.array_equal(found[f"{at}.moe.shared_gate.weight"], wanted)
            assert np.array_equal(found[f"{at}.attn.k.bias"], source[f"{theirs}.self_attn.k_proj.bias"])
        if family == "qwen3":
            wanted = source[f"{theirs}.self_attn.k_norm.weight"]
            assert np.array_equal(found[f"{at}.attn.k_norm.weight"], wanted)


def test_configs(tmp_path: Path) -> None:
    for family, expected in {
        "mixtral": {
            "expert_size": 48,
            "shared_expert_size": 0,
            "normalize_experts": True,
            "attention_bias": False,
        },
        "qwen2": {
            "expert_size": 8,
            "shared_expert_size": 16,
            "normalize_experts": False,
            "attention_bias": True,
        },
        "qwen3": {"expert_size": 8, "shared_expert_size": 0, "normalize_experts": True, "qk_norm": "head"},
    }.items():
        config = config_of(family)
        with plan(write_hf(tmp_path / family, config, tensors(family, config))) as planned:
            found = planned.config
            assert (found.num_experts, found.experts_per_token) == (5, 2)  # type: ignore[union-attr]
            assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, dtype: Any, tmp_path: Path) -> None:
    config = config_of(family)
    source = {name: value.astype(dtype) for name, value in tensors(family, config).items()}
    folder = write_hf(tmp_path / "hf", config, source)
    convert(folder, tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "back")
    assert safetensors_bytes(tmp_path / "back") == safetensors_bytes(folder)
    export(tmp_path / "m.oam", tmp_path / "m.gguf")
    stored = gguf_bytes(tmp_path / "m.gguf")
    assert stored["blk.1.ffn_up_exps.weight"][1] == expected_experts(family, source, 1, "up").shape
    assert stored["blk.1.ffn_up_exps.weight"][2] == expected_experts(family, source, 1, "up").tobytes()
    assert ("blk.0.ffn_gate_inp_shexp.weight" in stored) is (family == "qwen2")
    for other in ("back", "m.gguf"):
        convert(tmp_path / other, tmp_path / "again.oam", overwrite=True)
        if dtype == np.float32:
            assert oam_bytes(tmp_path / "again.oam") == oam_bytes(tmp_path / "m.oam")
        assert oazoo.diff(tmp_path / "m.oam", tmp_path / "again.oam").equal


@pytest.mark.parametrize("setting", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts(setting: dict[str, Any], tmp_path: Path) -> None:
    dense = [1] if "mlp_only_layers" in setting else [0, 2]
    config = config_of("qwen3") | setting
    source = tensors("qwen3", config | {"mlp_only_layers": dense})
    folder = write_hf(tmp_path / "hf", config, source)
    report = convert(folder, tmp_path / "m.oam")
    assert report.config.dense_layers == tuple(dense)  # type: ignore[union-attr]
    export(tmp_path / "m.oam", tmp_path / "back")
    assert safetensors_bytes(tmp_path / "back") == safetensors_bytes(folder)
    with pytest.raises(TranslationError, match="qwen3moe: all its layers have experts"):
        export(tmp_path / "m.oam", tmp_path / "m.gguf")


def test_experts_of_different_types_become_f32(tmp_path: Path) -> None:
    config = config_of("qwen3")
    source = tensors("qwen3", config)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    source[name] = source[name].astype(np.float16)
    report = convert(write_hf(tmp_path / "hf", config, source), tmp_path / "m.oam")
    stored = next(t for t in report.tensors if t.target == "layers.0.moe.up.weight")
    assert stored.encoding == "f32" and not stored.rounded
    wanted = expected_experts("qwen3", source, 0, "up")
    assert np.array_equal(oam_values(tmp_path / "m.oam")["layers.0.moe.up.weight"], wanted)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gguf(kind: str, tmp_path: Path) -> None:
    """Mixtral is a llama there: its q and k rows are reordered, its experts are one tensor a layer."""
    config = config_of("mixtral")
    source = tensors("mixtral", config)
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # pairs of neighbours, taken apart
    at = "llama."
    meta = {
        "general.architecture": "llama",
        at + "context_length": 64,
        at + "embedding_length": 32,
        at + "block_count": 3,
        at + "feed_forward_length": 48,
        at + "attention.head_count": 4,
        at + "attention.head_count_kv": 2,
        at + "attention.layer_norm_rms_epsilon": 1e-5,
        at + "vocab_size": 40,
        at + "expert_count": 5,
        at + "expert_used_count": 2,
    }
    # A matrix that Q8_0 holds exactly: one scale for all, and whole numbers.
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> Array:
        values = random.integers(-127, 128, size=shape).astype(np.float32)
        values[..., 0::32] = 127
        return values

    stored: dict[str, Array] = {
        "token_embd.weight": matrix(40, 32),
        "output.weight": matrix(40, 32),
        "output_norm.weight": source["model.norm.weight"],
    }
    for n in range(3):
        stored |= {
            f"blk.{n}.attn_norm.weight": source["model.norm.weight"],
            f"blk.{n}.ffn_norm.weight": source["model.norm.weight"],
            f"blk.{n}.attn_q.weight": matrix(32, 32),
            f"blk.{n}.attn_k.weight": matrix(16, 32),
            f"blk.{n}.attn_v.weight": matrix(16, 32),
            f"blk.{n}.attn_output.weight": matrix(32, 32),
            f"blk.{n}.ffn_gate_inp.weight": matrix(5, 32),
            f"blk.{n}.ffn_gate_exps.weight": matrix(5, 64, 32),
            f"blk.{n}.ffn_up_exps.weight": matrix(5, 64, 32),
            f"blk.{n}.ffn_down_exps.weight": matrix(5, 32, 64),
        }
    meta[at + "feed_forward_length"] = 64
    path = write_gguf(tmp_path / "m.gguf", meta, stored, kind)
    convert(path, tmp_path / "m.oam")
    found = oam_values(tmp_path / "m.oam")
    for part in PARTS:
        assert np.array_equal(found[f"layers.2.moe.{part}.weight"], stored[f"blk.2.ffn_{part}_exps.weight"])
    rows = np.concatenate([8 * head + order for head in range(4)])
    assert np.array_equal(found["layers.1.attn.q.weight"], stored["blk.1.attn_q.weight"][rows])
    with open_source(tmp_path / "m.oam") as source_oam:
        wanted = "q8" if kind == "Q8_0" else "f32"
        assert source_oam["layers.0.moe.down.weight"].info.encoding == wanted
        assert source_oam.metadata["model"]["normalize_experts"] is True
    export(tmp_path / "m.oam", tmp_path / "back.gguf")
    assert (
        gguf_bytes(tmp_path / "back.gguf")["blk.1.ffn_down_exps.weight"]
        == gguf_bytes(path)["blk.1.ffn_down_exps.weight"]
    )


@pytest.mark.parametrize("inner", [8, 5])
def test_packed_experts_go_out_one_by_one(inner: int, tmp_path: Path) -> None:
    """Blocks of 32 run over the whole stack: with 5 × 30 values an expert begins inside one."""
    config = config_of("qwen3", moe_intermediate_size=inner, hidden_size=32 if inner == 8 else 24)
    config["head_dim"] = config["hidden_size"] // 4
    convert(write_hf(tmp_path / "hf", config, tensors("qwen3", config)), tmp_path / "m.oam")
    packed_oam(tmp_path / "m.oam", tmp_path / "q.oam", "q8")
    export(tmp_path / "q.oam", tmp_path / "back", dtype="f32")
    values = oam_values(tmp_path / "q.oam")
    for name, (_, shape, data) in safetensors_bytes(tmp_path / "back").items():
        if ".experts." in name:
            layer, number, part = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
            stack = values[f"layers.{layer}.moe.{part.removesuffix('_proj')}.weight"]
            assert np.array_equal(np.frombuffer(data, np.float32).reshape(shape), stack[number]), name


def test_memory_is_that_of_an_expert(tmp_path: Path) -> None:
    config = config_of("qwen3", num_experts=64, moe_intermediate_size=128, hidden_size=128, head_dim=32)
    folder = write_hf(tmp_path / "hf", config, tensors("qwen3", config))
    with plan(folder, dtype="bf16") as planned:
        tensor = next(t for t in planned.tensors if t.target == "layers.0.moe.up.weight")
        whole = 64 * 128 * 128 * 4
        tracemalloc.start()
        try:
            total = sum(p.nbytes for p in stream(tensor, planned.checkpoint.source, Measured()))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert total == tensor.nbytes == whole // 2
        assert peak < whole // 8


def test_stacks_run_backwards() -> None:
    rules = [Rule("t", ("a", "b", "c"), Stack(3))]
    arrays = {name: np.full((2, 3), n) for n, name in enumerate("abc")}
    stacked = rules[0].transform.apply([arrays[name] for name in "abc"])
    back = invert(rules)
    assert [rule.target for rule in back] == ["a", "b", "c"]
    for rule in back:
        assert rule.transform.shape([stacked.shape]) == (2, 3)
        assert np.array_equal(rule.transform.apply([stacked]), arrays[rule.target])
    with pytest.raises(TranslationError, match="shapes differ"):
        Stack(2).shape([(1, 2), (2, 2)])
    with pytest.raises(TranslationError, match="takes 3 sources, got 2"):
        Stack(3).shape([(1, 2), (1, 2)])
    with pytest.raises(TranslationError, match=r"Unstack\(3\)"):
        back[0].transform.shape([(2, 5, 5)])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 6}, "the checkpoint has 76 tensors|lacks .*experts.5.w1"),
        ("mixtral", {"num_local_experts": 4096}, "the checkpoint has"),
        ("qwen3", {"num_experts": None}, "num_experts is missing"),
        ("qwen3", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be positive"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types other than full_attention"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window is not supported"),
        ("qwen2", {"num_experts_per_tok": 9}, "experts_per_token = 9 is out of range"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"shared_expert_intermediate_size": 15}, "the config asks for"),
    ],
)
def test_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = config_of(family)
    folder = write_hf(tmp_path / "hf", config | changes, tensors(family, config))
    with pytest.raises(TranslationError, match=message):
        convert(folder, tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_runs_them_as_published(family: str, tmp_path: Path) -> None:
    """From a folder with a tensor for each expert, one with a tensor for all of a layer, and GGUF."""
    config = config_of(family)
    source = tensors(family, config)
    write_hf(tmp_path / "hf", config, source)
    report = oazoo.convert(tmp_path / "hf", tmp_path / "m.oam", check=True)
    assert report.check is not None and report.check.passed and report.check.max_difference < 1e-4
    export(tmp_path / "m.oam", tmp_path / "m.gguf")
    report = oazoo.convert(tmp_path / "m.gguf", tmp_path / "again.oam", check=True)
    assert report.check is not None and report.check.passed and report.check.compared


def test_routers_are_never_packed(tmp_path: Path) -> None:
    for family in FAMILIES:
        config = config_of(family)
        folder = write_hf(tmp_path / family, config, tensors(family, config))
        for arch in ("auto", "raw"):
            convert(folder, tmp_path / "m.oam", arch=arch, overwrite=True)
            plan = oazoo.quantize(tmp_path / "m.oam", None, "q4", dry_run=True)
            kept = {t.name for t in plan.tensors if t.reason.startswith("never packed: routes tokens")}
            assert len(kept) == (6 if family == "qwen2" else 3), kept
            packed = {t.name for t in plan.tensors if not t.reason}
            experts = ("moe.gate.", "moe.up.", "moe.down.", ".experts.")
            assert sum(any(e in n for e in experts) for n in packed) == (9 if arch == "auto" else 45)
