"""Mamba-3 from training to text: presets, LoRA under the published names, packing by measured sensitivity, commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_goldens import DATA
from safetensors.numpy import load_file

import oazoo
from oazoo.cli.main import main
from oazoo.configs import EmpyrealmConfig, Mamba3Config, ModelConfig
from oazoo.generation.text_model import TextModel
from oazoo.models import build
from oazoo.runtime import get_device
from oazoo.training.lora import LoraSettings
from oazoo.translators.lora import lora_map
from oazoo.zoo.presets import preset
from oazoo.zoo.sensitivity import measure
from oazoo.zoo.train import finetune, train
from oazoo.zoo.train_settings import TrainSettings

TEXT = "A ferry came in at noon, and the men who mended nets looked up from their work for a while. " * 12


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def logits(model: Path | TextModel) -> np.ndarray[Any, Any]:
    loaded = model if isinstance(model, TextModel) else oazoo.load(model)
    return loaded.logits(list(b"A ferry came in"))


def test_from_training_to_text(tmp_path: Path) -> None:
    """A preset trains; a correction beside its packed weights has the published names, runs beside them and inside them."""
    text, packed = tmp_path / "text.txt", tmp_path / "packed.oam"
    text.write_text(TEXT)
    settings = TrainSettings(steps=3, batch_size=2, context=32, validation=0.1, lr=1e-2)
    summary = train("mamba3-bytelm-tiny", [text], tmp_path / "run", settings).fit()
    assert summary.loss_last is not None and summary.loss_first is not None
    assert summary.loss_last < summary.loss_first - 0.1
    dense = tmp_path / "run" / "best.oam"
    oazoo.quantize(dense, packed, "q8", method="absmax")
    # What each tensor costs is measured through layers that run one by one, again and again, from the same beginning.
    costs = measure(dense, packed, TEXT[:80]).losses
    assert len(costs) == 16 and 0 < min(costs.values()) <= max(costs.values()) < 1e-3
    before = logits(packed)
    assert np.corrcoef(before.reshape(-1), logits(dense).reshape(-1))[0, 1] > 0.99
    finetune(packed, [text], tmp_path / "lora", settings, lora=LoraSettings(rank=2)).fit()
    adapter = load_file(tmp_path / "lora" / "adapter" / "adapter_model.safetensors")
    modules = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in adapter}
    layers = (f"backbone.layers.{n}." for n in range(3))
    parts = ("mixer.in_proj", "mixer.out_proj", "mlp.fc1", "mlp.fc2")
    assert modules == {at + part for at in layers for part in parts}
    beside = logits(oazoo.load(packed, adapter=tmp_path / "lora" / "adapter"))
    assert np.abs(beside - before).max() > 1e-3
    done = command(
        "merge", packed, tmp_path / "lora" / "adapter", "-o", tmp_path / "merged.oam", "--dtype", "f32"
    )
    assert done.exit_code == 0, done.output
    np.testing.assert_allclose(logits(tmp_path / "merged.oam"), beside, atol=1e-4)
    done = command("generate", packed, "--raw", "-p", "A ferry", "--max-tokens", 4, "--temperature", 0)
    assert done.exit_code == 0, done.output


def test_where_adapters_go() -> None:
    """The halves of fc1 are two layers here: values, then their gates."""
    where = lora_map(mimo_config())
    assert where.places["layers.1.mlp.up"].module == "backbone.layers.1.mlp.fc1"
    for part, first in (("up", 0), ("gate", 128)):
        rows = where.places[f"layers.0.mlp.{part}"].rows
        assert rows is not None and rows.tolist() == list(range(first, first + 128))
    assert where.places["layers.0.mixer.in_proj"].rows is None


def mimo_config() -> Mamba3Config:
    return Mamba3Config(
        vocab_size=64, used_vocab_size=61, hidden_size=32, num_layers=2, inner_size=64, head_dim=16, state_size=16,
        mimo_rank=2, output_norm=True, mlp_size=64, tied_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("config", [mimo_config(), EmpyrealmConfig.byte_mamba3()], ids=lambda c: c.family)
def test_what_decays(config: ModelConfig, optimizer: str) -> None:
    """Matrices that multiply; neither the biases and scales of the mixer nor norms, whatever their shape."""
    model = build(config, get_device()).initialize(get_device())
    named = [(name, parameter.tensor) for name, parameter in model.named_parameters()]
    groups = TrainSettings(optimizer=optimizer).make_optimizer(named, 1e-3).groups
    decayed = {p.name for p in groups[0].parameters}
    assert groups[0].options["weight_decay"] > 0 and groups[1].options["weight_decay"] == 0
    assert decayed == {
        name for name, shape in config.parameters().items() if name.endswith(".weight") and len(shape) == 2
    }
    if optimizer == "muon" and isinstance(config, EmpyrealmConfig):  # B_bias has two axes there
        assert groups[0].options["matrices"] and not groups[1].options["matrices"]


def test_presets_have_the_sizes_they_say() -> None:
    for name, count in {
        "mamba3-bytelm-tiny": 0.2,
        "mamba3-bytelm-small": 0.9,
        "mamba3-tiny": 0.5,
        "mamba3-small": 1.1,
    }.items():
        chosen = preset(name)
        shapes = chosen.config(chosen.vocab_size or 256, chosen.context).parameters().values()
        found = sum(int(np.prod(shape)) for shape in shapes)
        assert f"{count} M parameters" in chosen.about and round(found / 1e6, 1) == count


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    folder = DATA / "mamba3" / "lm_siso" / "model.safetensors"
    for given, code, message in (
        ("a_form", 2, "--set takes NAME=VALUE"),
        ("a_form=rational", 1, "one of heavy_tail, softplus"),
        ("rope=1", 1, "there is a_form"),
    ):
        done = command("convert", folder, "-o", tmp_path / "m.oam", "--set", given)
        assert message in done.output and done.exit_code in (code, 2)
    assert list(tmp_path.iterdir()) == []
