"""Adapters between our layers and published modules: what is added is the same, and PEFT's own models say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import HF, NOT_GGUF, source_path
from reference_models import load_oam, logits

from oazoo.configs import ModelConfig
from oazoo.configs.mamba import MambaConfig
from oazoo.errors import FormatError, TranslationError, UsageError
from oazoo.formats.lora import Adapter, LoraPair, merge_delta, read_adapter, write_adapter
from oazoo.translators.convert import convert
from oazoo.translators.exporter import outgoing
from oazoo.translators.lora import (
    LoraMap,
    bind,
    choose_layers,
    linear_layers,
    lora_map,
    to_ours,
    to_published,
)
from oazoo.translators.rules import run

DATA = Path(__file__).parent.parent / "data" / "lora"
PEFT = ("llama", "qwen3", "phi3", "gpt_neox", "gpt2")
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The goldens as weights under our names, their configs, and their architectures; converted when asked for."""
    made: dict[str, tuple[dict[str, Array], ModelConfig, list[str]]] = {}

    def model(name: str) -> tuple[dict[str, Array], ModelConfig, list[str]]:
        if name not in made:
            path = tmp_path_factory.mktemp(name) / "model.oam"
            convert(source_path(name), path)
            declared = json.loads((source_path(name) / "config.json").read_text())["architectures"]
            made[name] = (*load_oam(path), declared)
        return made[name]

    return model


def random_pairs(where: LoraMap, ranks: tuple[int, ...] = (2,), rslora: bool = False) -> dict[str, LoraPair]:
    draw = np.random.default_rng(0)
    pairs = {}
    for number, (name, (out, width)) in enumerate(where.shapes.items()):
        rank = ranks[number % len(ranks)]
        a, b = draw.normal(size=(rank, width)), draw.normal(size=(out, rank))
        alpha = 1.0 + number % 5
        pairs[name] = LoraPair(a.astype(np.float32), b.astype(np.float32), alpha, rslora)
    return pairs


@pytest.mark.parametrize("name", PEFT)
def test_merged_weights_give_the_logits_of_pefts_model(models: Any, name: str) -> None:
    weights, config, _ = models(name)
    pairs = bind(read_adapter(DATA / name), config)
    merged = dict(weights)
    for layer, pair in pairs.items():
        assert np.abs(pair.delta()).max() > 1e-3
        merged[f"{layer}.weight"] = merge_delta(weights[f"{layer}.weight"].astype(np.float32), pair).astype(
            np.float64
        )
    (ids,) = np.load(source_path(name) / "reference.npz")["ids"][:1]
    (wanted,) = np.load(DATA / name / "reference.npz")["logits"]
    assert np.abs(logits(weights, config, ids) - wanted).max() > 0.05  # the adapter does something
    np.testing.assert_allclose(logits(merged, config, ids), wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", HF)
def test_what_is_added_to_the_published_weights_is_the_same(models: Any, name: str, rslora: bool) -> None:
    """The family's map takes the changed published weights to our changed ones, for every linear layer."""
    _, config, declared = models(name)
    where = lora_map(config, declared)
    assert set(where.places) == set(linear_layers(config)) and where.architecture in declared
    pairs = random_pairs(where, (2, 3, 1), rslora)
    changed = {}
    for module, pair in to_published(pairs, where).items():
        delta = pair.delta()
        changed[f"{module}.weight"] = delta.T if where.fan_in_fan_out and module != "lm_head" else delta
    out = outgoing(config, "hf", declared)
    ours = run([rule for rule in out.rules if rule.target.removesuffix(".weight") in pairs], changed)
    for layer, pair in pairs.items():
        np.testing.assert_allclose(ours[f"{layer}.weight"], pair.delta(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HF)
def test_round_trip_through_a_file_adds_the_same(models: Any, name: str, tmp_path: Path) -> None:
    _, config, declared = models(name)
    where = lora_map(config, declared)
    pairs = random_pairs(where, (2, 1))
    adapter = Adapter(to_published(pairs, where), where.fan_in_fan_out, {"name": name})
    write_adapter(tmp_path / "a", adapter, linear_modules=where.modules)
    back = to_ours(read_adapter(tmp_path / "a"), where)
    assert set(back) == set(pairs)
    for layer, pair in pairs.items():
        np.testing.assert_allclose(back[layer].delta(), pair.delta(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in HF if name not in NOT_GGUF])
def test_what_is_added_to_the_weights_of_gguf_is_the_same(models: Any, name: str) -> None:
    """Queries and keys of Llama are in another order there, and so are the rows of their adapters' B."""
    _, config, _ = models(name)
    where = lora_map(config, naming="gguf")
    pairs = random_pairs(where, (2, 3, 1))
    published = to_published(pairs, where)
    changed = {f"{module}.weight": pair.delta() for module, pair in published.items()}
    rules = [rule for rule in outgoing(config, "gguf").rules if rule.target.removesuffix(".weight") in pairs]
    for rule in rules:
        added = run([rule], changed)[rule.target]
        np.testing.assert_allclose(
            added, pairs[rule.target.removesuffix(".weight")].delta(), rtol=1e-5, atol=1e-5
        )
    assert len(rules) == len(pairs) and set(where.places) == set(linear_layers(config))
    if where.architecture == "llama":
        q, ours = published["blk.0.attn_q"], pairs["layers.0.attn.q"]
        assert (q.b != ours.b).any() and (q.a == ours.a).all()


def test_separate_modules_keep_their_bits(models: Any) -> None:
    _, config, _ = models("llama")
    where = lora_map(config)
    pairs = random_pairs(where)
    published = to_published(pairs, where)
    assert published["model.layers.1.self_attn.q_proj"] is pairs["layers.1.attn.q"]
    assert where.architecture == "LlamaForCausalLM" and not where.fan_in_fan_out


def test_fused_modules_have_the_sum_of_the_ranks(models: Any) -> None:
    _, config, declared = models("phi3")
    where = lora_map(config, declared)
    pairs = {f"layers.0.attn.{part}": random_pairs(where)[f"layers.0.attn.{part}"] for part in "qv"}
    (module,) = to_published(pairs, where)
    joined = to_published(pairs, where)[module]
    assert module == "model.layers.0.self_attn.qkv_proj" and joined.rank == 4
    back = bind(Adapter({module: joined}), config)
    assert set(back) == {"layers.0.attn.q", "layers.0.attn.k", "layers.0.attn.v"}
    assert not back["layers.0.attn.k"].delta().any()  # keys have none: their rows are zero


def test_every_module_must_find_its_layer(models: Any) -> None:
    _, config, _ = models("llama")
    where = lora_map(config)
    good = to_published(random_pairs(where), where)
    q = good["model.layers.0.self_attn.q_proj"]
    with pytest.raises(
        FormatError, match=r"here: 1 of 2 .* none of this model .*layers\.9\.self_attn\.q_proj"
    ):
        to_ours(
            Adapter({"model.layers.0.self_attn.q_proj": q, "model.layers.9.self_attn.q_proj": q}),
            where,
            "here",
        )
    with pytest.raises(FormatError, match=r"k_proj.* is for a weight of shape .* this model's has"):
        to_ours(Adapter({"model.layers.0.self_attn.k_proj": q}), where)
    with pytest.raises(FormatError, match="no linear layer of this model"):
        to_published({"layers.0.attn.x": q}, where)
    with pytest.raises(FormatError, match="are not for a weight of shape"):
        to_published({"layers.0.attn.k": q}, where)


def test_targets_by_our_names_and_by_published_ones(models: Any) -> None:
    _, config, _ = models("llama")
    places = lora_map(config).places
    default = choose_layers(config)
    assert "head" not in default and "layers.0.attn.q" in default and len(default) == 7 * config.num_layers
    assert choose_layers(config, ["attn.q"]) == choose_layers(config, ["q_proj"], places)
    assert choose_layers(config, ["layers.0.*"]) == [name for name in default if name.startswith("layers.0.")]
    assert choose_layers(config, ["head", "layers.1.mlp.up"]) == ["layers.1.mlp.up", "head"]
    with pytest.raises(
        UsageError, match=r"called 'x_proj'; there are attn\.q, attn\.k, attn\.v, attn\.o, mlp\.gate"
    ):
        choose_layers(config, ["q_proj", "x_proj"], places)


def test_mamba_has_other_layers_and_says_which() -> None:
    config = MambaConfig(
        vocab_size=32,
        hidden_size=16,
        inner_size=32,
        num_layers=2,
        state_size=4,
        conv_kernel=4,
        dt_rank=1,
        norm_eps=1e-5,
        tied_embeddings=False,
    )
    assert choose_layers(config)[:4] == [f"layers.0.mixer.{part}" for part in ("in", "x", "dt", "out")]
    with pytest.raises(
        UsageError, match=r"mamba model is called 'q_proj'; there are mixer\.in, mixer\.x, mixer\.dt"
    ):
        choose_layers(config, ["q_proj", "v_proj"])
    where = lora_map(config)
    assert where.places["layers.1.mixer.in"].module == "backbone.layers.1.mixer.in_proj"
    pairs = random_pairs(where)
    back = to_ours(Adapter(to_published(pairs, where)), where)
    assert all((back[name].delta() == pair.delta()).all() for name, pair in pairs.items())


def test_a_model_without_a_published_form_says_so() -> None:
    config = MambaConfig(
        vocab_size=32, hidden_size=16, inner_size=32, num_layers=1, state_size=4, conv_kernel=4, dt_rank=1,
        norm_eps=1e-5, tied_embeddings=False,
        decay="direct",
    )  # fmt: skip
    with pytest.raises(TranslationError, match="no architecture expresses this model"):
        lora_map(config)
