"""Adapters in PEFT's layout: written, read back, and refused where they mean something else."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.lora import Adapter, LoraPair, merge_delta, read_adapter, write_adapter

GOLDEN = Path(__file__).parent.parent / "data" / "lora"
Array = npt.NDArray[Any]
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"


def pair(
    rank: int, out: int, width: int, alpha: float = 8.0, seed: int = 0, rslora: bool = False
) -> LoraPair:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(rank, width)), draw.normal(size=(out, rank))
    return LoraPair(a.astype(np.float32), b.astype(np.float32), alpha, rslora)


def bent(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Array | None] | None = None,
    name: str = "llama",
) -> Path:
    """A golden adapter with settings and tensors changed; None takes a tensor away."""
    shutil.copytree(GOLDEN / name, folder)
    document = json.loads((folder / "adapter_config.json").read_text()) | dict(config or {})
    (folder / "adapter_config.json").write_text(json.dumps(document))
    values = load_file(folder / "adapter_model.safetensors") | dict(tensors or {})
    save_file({k: v for k, v in values.items() if v is not None}, folder / "adapter_model.safetensors")
    return folder


def test_delta_and_merge_are_the_formula() -> None:
    for rslora, scale in ((False, 8 / 4), (True, 8 / 2)):
        one = pair(4, 6, 5, rslora=rslora)
        assert one.scale == scale
        weight = np.random.default_rng(9).normal(size=(6, 5)).astype(np.float32)
        exact = weight.astype(np.float64) + scale * (one.b.astype(np.float64) @ one.a.astype(np.float64))
        merged = merge_delta(weight, one)
        assert merged.dtype == np.float32
        np.testing.assert_allclose(merged, exact, rtol=0, atol=4e-6)
        assert (merged == weight + np.float32(scale) * (one.b @ one.a)).all()
    with pytest.raises(FormatError, match=r"\[6, 5\] is not for a weight of shape \[5, 6\]"):
        merge_delta(weight.T, one)


def test_round_trip(tmp_path: Path) -> None:
    pairs = {Q: pair(4, 8, 6), V: pair(2, 3, 6, alpha=3.5, seed=1), "lm_head": pair(4, 20, 6, seed=2)}
    wrote = Adapter(pairs, True, {"name": "tiny", "weights": "00ff", "encoding": "q4"}, 0.1)
    write_adapter(tmp_path / "out", wrote)
    read = read_adapter(tmp_path / "out")
    assert (read.fan_in_fan_out, read.dropout, read.base) == (True, 0.1, wrote.base)
    assert set(read.pairs) == set(pairs)
    for name, one in pairs.items():
        other = read.pairs[name]
        assert (other.a == one.a).all() and (other.b == one.b).all()
        assert (other.alpha, other.rank, other.scale) == (one.alpha, one.rank, one.scale)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["target_modules"] == ["lm_head", "q_proj", "v_proj"]
    assert config["rank_pattern"] == {"v_proj": 2} and config["alpha_pattern"] == {"v_proj": 3.5}
    with pytest.raises(UsageError, match="exists already"):
        write_adapter(tmp_path / "out", wrote)
    write_adapter(tmp_path / "out", Adapter({Q: pairs[Q]}), overwrite=True)
    assert set(read_adapter(tmp_path / "out").pairs) == {Q}


def test_names_stand_for_all_layers_only_where_all_have_one(tmp_path: Path) -> None:
    modules = [f"model.layers.{i}.self_attn.{m}" for i in range(2) for m in ("q_proj", "v_proj")]
    pairs = {name: pair(2, 4, 4) for name in modules if name != modules[3]}
    write_adapter(tmp_path / "out", Adapter(pairs), linear_modules=modules)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.self_attn.v_proj", "q_proj"]


def test_one_file_is_enough_when_its_config_is_inside(tmp_path: Path) -> None:
    write_adapter(tmp_path / "out", Adapter({Q: pair(4, 8, 6, alpha=12)}))
    shutil.copy(tmp_path / "out" / "adapter_model.safetensors", tmp_path / "alone.safetensors")
    assert read_adapter(tmp_path / "alone.safetensors").pairs[Q].alpha == 12
    (tmp_path / "out" / "adapter_config.json").unlink()
    assert read_adapter(tmp_path / "out").pairs[Q].alpha == 12


def test_a_missing_config_is_said_with_what_would_be_assumed(tmp_path: Path) -> None:
    folder = bent(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(
        UsageError, match=r"adapter_config\.json is missing.*rank 3, but the scale \(lora_alpha"
    ):
        read_adapter(folder)


def test_ranks_and_scales_of_patterns_are_those_of_peft() -> None:
    read = read_adapter(GOLDEN / "qwen3").pairs
    assert read["model.layers.0.self_attn.k_proj"].rank == 2
    assert read["model.layers.1.mlp.up_proj"].rank == 5 and read["model.layers.0.mlp.up_proj"].rank == 4
    assert read["model.layers.0.self_attn.o_proj"].scale == pytest.approx(3 / 2)
    assert read["model.layers.1.self_attn.o_proj"].scale == pytest.approx(8 / 2)
    assert read["model.layers.1.mlp.up_proj"].scale == pytest.approx(8 / 5**0.5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is .*IA3"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = all"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base model's weights"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": 4.0}, "r must be a whole number"),
        ({"r": True}, "r must be a whole number"),
        ({"r": 4}, "lora_A has the rank 3, lora_B 3, and .* says 4"),
        ({"rank_pattern": {"q_proj": 7}}, "says 7"),
        ({"rank_pattern": {"(a+)+$": 7}}, "no plain name"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern: .*must be a number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    ],
)
def test_configs_that_mean_more_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_adapter(bent(tmp_path / "a", config))


ONES = np.ones((3, 48), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"base_model.model.{Q}.lora_A.weight": None}, "q_proj.lora_A.weight is missing"),
        ({f"base_model.model.{Q}.lora_B.weight": None}, "q_proj.lora_B.weight is missing"),
        ({f"base_model.model.{Q}.lora_magnitude_vector": ONES[0]}, "none of a LoRA of linear layers"),
        ({"base_model.model.lm_head.weight": ONES}, "1 tensors are none of a LoRA"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": ONES}, "lora_embedding_A"),
        ({f"{Q}.lora_A.weight": ONES}, "none of a LoRA"),
        ({f"base_model.model.{Q}.lora_A.weight": ONES[:2]}, "lora_A has the rank 2, lora_B 3"),
        ({f"base_model.model.{Q}.lora_A.weight": ONES[0]}, "a matrix of floats is needed"),
        ({f"base_model.model.{Q}.lora_A.weight": ONES.astype(np.int32)}, "is i32 of shape"),
        ({f"base_model.model.{Q}.lora_A.weight": ONES * np.nan}, "not finite"),
    ],
)
def test_tensors_that_are_none_of_it_are_named(
    tmp_path: Path, tensors: dict[str, Array | None], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        read_adapter(bent(tmp_path / "a", None, tensors))


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        read_adapter(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"has no adapter_model\.safetensors"):
        read_adapter(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(UsageError, match="as a pickle"):
        read_adapter(tmp_path / "empty")
    pickle = tmp_path / "pickle.safetensors"
    pickle.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(OazooError):
        read_adapter(pickle)
    folder = bent(tmp_path / "a")
    (folder / "adapter_config.json").write_text('{"r": 3, "r": 4}')
    with pytest.raises(FormatError, match="comes twice"):
        read_adapter(folder)
    with pytest.raises(UsageError, match="no layers"):
        write_adapter(tmp_path / "b", Adapter({}))


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_files_are_refused_or_are_adapters(tmp_path: Path, file: str) -> None:
    draw = random.Random(1)
    folder = bent(tmp_path / "a")
    good = (folder / file).read_bytes()
    head = len(good) if file.endswith("json") else 2500
    accepted = 0
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 3)):
            place = draw.randrange(head)
            if draw.random() < 0.5:
                data[place] = draw.randrange(256)
            else:
                del data[place : place + draw.randrange(1, 9)]
        (folder / file).write_bytes(data)
        try:
            found = read_adapter(folder)
        except OazooError:
            continue
        accepted += 1
        for one in found.pairs.values():
            assert np.isfinite(one.delta()).all()
    assert accepted < 290
