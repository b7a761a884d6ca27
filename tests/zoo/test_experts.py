"""Models with experts in the zoo: statistics and packing by expert, and adapters beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import reference, source_path
from reference_models import load_oam

import oazoo
from oazoo.errors import UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.models import CausalModel
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.linear import observing
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.tape import GradientTape
from oazoo.training.lora import LoraSettings, attach
from oazoo.translators.lora import choose_layers
from oazoo.zoo.calibrate import Gathered
from oazoo.zoo.statistics import Statistics, load_statistics, save_statistics

FACTS = {"model": "m", "weights": "", "text": "t", "text_sha256": ""}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "mixtral.oam"
    oazoo.convert(source_path("mixtral"), path)
    return path


def gathered(path: Path) -> tuple[Statistics, npt.NDArray[np.int64]]:
    ids = reference("mixtral")[0][0]
    with oazoo.load(path) as model:
        assert isinstance(model.model, CausalModel)
        sums = Gathered(model.model, False)
        with observing(sums):
            model.logits(ids)
        return sums.statistics(FACTS, ids.size), ids


def test_moments_of_each_expert(mixtral: Path, tmp_path: Path) -> None:
    """Every token counts for the experts that it goes to: together, as often as there are of them."""
    found, _ = gathered(mixtral)
    for layer in range(2):
        at = f"layers.{layer}.moe"
        gate, down = found.moment(f"{at}.gate.weight", 48), found.moment(f"{at}.down.weight", 48)
        router = found.moment(f"{at}.router.weight", 48)
        assert gate is not None and down is not None and router is not None
        assert gate.shape == down.shape == (4, 48)
        np.testing.assert_allclose(gate.sum(axis=0), 2 * router, rtol=1e-4)
        assert found.shares[f"{at}.up.weight"] == found.shares[f"{at}.gate.weight"]
        assert (gate > 0).all()
    save_statistics(found, tmp_path / "s.safetensors")
    again = load_statistics(tmp_path / "s.safetensors")
    assert all(np.array_equal(again.moments[name], value) for name, value in found.moments.items())


def test_experts_that_no_token_went_to(mixtral: Path) -> None:
    """They count as the others do on the average."""
    ids = reference("mixtral")[0][0]
    with oazoo.load(mixtral) as model:
        assert isinstance(model.model, CausalModel)
        sums = Gathered(model.model, False)
        with observing(sums):
            model.logits(ids[:1])
        gate = sums.statistics(FACTS, 1).moment("layers.0.moe.gate.weight", 48)
    assert gate is not None
    same = [i for i in range(4) if np.array_equal(gate[i], gate[0])]
    assert len(same) == 4 and gate[0].any()  # one token: its two experts see the same, and so all do


def test_packed_with_weights_of_each_expert(mixtral: Path, tmp_path: Path) -> None:
    found, _ = gathered(mixtral)
    out = tmp_path / "q4.oam"
    oazoo.quantize(mixtral, out, "q4", method="weighted", statistics=found)
    name = "layers.1.moe.down.weight"
    dense, _ = load_oam(mixtral)
    moments = found.moment(name, 48)
    assert moments is not None
    with OamSource(out) as source:
        values = quant.decode(np.frombuffer(source[name].raw(), np.uint8), "q4", 4 * 48 * 48).reshape(
            4, 48, 48
        )
    for expert in range(4):
        weights = np.maximum(moments[expert] / moments[expert].mean(), np.float32(1e-6)).astype(np.float32)
        one = Tensor.from_numpy(get_device(), np.ascontiguousarray(dense[name][expert], np.float32))
        packed = pack(one, "q4", method="search", weights=Tensor.from_numpy(get_device(), weights))
        assert np.array_equal(
            values[expert].reshape(-1), quant.decode(packed.bytes(), "q4", 48 * 48).reshape(-1)
        )
    other = Statistics(**FACTS, tokens=1, shares={name: name}, moments={name: np.ones((3, 48), np.float32)})
    with pytest.raises(UsageError, match="has 3 experts"):
        oazoo.quantize(mixtral, out, "q4", method="weighted", statistics=other, overwrite=True)


def test_adapters_and_gradients_beside_packed_experts(mixtral: Path, tmp_path: Path) -> None:
    """Attention gets corrections, routers only where they are named; gradients pass through Q4 stacks."""
    packed = tmp_path / "q4.oam"
    oazoo.quantize(mixtral, packed, "q4", method="absmax")
    loaded = oazoo.load(packed)
    model, config = loaded.model, loaded.info["config"]
    assert isinstance(model, CausalModel)
    names = choose_layers(config)
    assert names == [f"layers.{n}.attn.{part}" for n in range(2) for part in "qkvo"]
    assert choose_layers(config, ["moe.router"]) == [f"layers.{n}.moe.router" for n in range(2)]
    model.freeze()
    adapters = attach(model, [*names, "layers.0.moe.router"], LoraSettings(rank=2), model.device, 0)
    for adapter in adapters.values():
        adapter.b.assign(np.random.default_rng(0).standard_normal(adapter.b.shape) * 0.1)
    ids = reference("mixtral")[0].astype(np.int32)
    given = Tensor.from_numpy(model.device, ids)
    with GradientTape() as tape:
        loss = model.loss(given, given.view(ids.size))
    tape.backward(loss)
    grads = {name: adapter.a.tensor.grad for name, adapter in adapters.items()}
    assert all(g is not None and np.abs(g.numpy()).max() > 0 for g in grads.values())
    # A step against the gradient of the first layer's correction lowers the loss by what the gradient says.
    adapter = adapters["layers.0.attn.v"]
    slope = adapter.a.tensor.grad
    assert slope is not None
    direction = slope.numpy() / np.linalg.norm(slope.numpy())
    values, h = adapter.a.values(), 1e-3  # so little that no token goes to another expert
    around = []
    for sign in (1, -1):
        adapter.a.assign(values + sign * h * direction)
        around.append(float(model.loss(given, given.view(ids.size)).numpy()[0]))
    found = (around[0] - around[1]) / (2 * h)
    assert abs(found - np.linalg.norm(slope.numpy())) <= 0.05 * np.linalg.norm(slope.numpy()) + 1e-4
