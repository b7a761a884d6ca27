"""Modules: names, traversal, states, first values, and what gets gradients."""

from __future__ import annotations

import numpy as np
import pytest

from oazoo import nn
from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.arithmetic import total
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.tape import GradientTape


class Statistics(nn.Module):
    """A module with everything: parameters and buffers of its own, and modules in attributes, lists and dictionaries."""

    def __init__(self) -> None:
        self.scale = nn.Parameter(3)
        self.mean = nn.Buffer(3)
        self.count = nn.Buffer(1, dtype="i32")
        self.head = nn.Linear(3, 2)
        self.branches = [nn.Linear(3, 3, bias=False), {"norm": nn.RMSNorm(3, offset=1.0)}]
        self.again = self.head
        self.drop = nn.Dropout(0.5)
        self.table = nn.ModuleList([nn.Embedding(5, 3)])

    def __call__(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_names_and_shared_parameters() -> None:
    module = Statistics()
    names = [
        "scale",
        "head.weight",
        "head.bias",
        "branches.0.weight",
        "branches.1.norm.weight",
        "table.0.weight",
    ]
    assert [name for name, _ in module.named_parameters()] == names
    assert [name for name, _ in module.named_buffers("m.")] == ["m.mean", "m.count"]
    assert len(module.parameters()) == len(names)
    sequential = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), lambda x: x, nn.Linear(3, 1, bias=False))
    assert [name for name, _ in sequential.named_parameters()] == ["0.weight", "0.bias", "3.weight"]
    sequential.initialize(get_device())
    assert sequential(Tensor.from_numpy(get_device(), np.ones((4, 2), np.float32))).shape == (4, 1)


def test_training_reaches_every_module() -> None:
    module = Statistics()
    assert not any(m.training for m in module.modules())
    module.train()
    assert all(m.training for m in module.modules()) and len(list(module.modules())) == 8
    module.eval()
    assert not any(m.training for m in module.modules())


def test_dropout_acts_in_training_only() -> None:
    layer = nn.Dropout(0.5)
    x = Tensor.from_numpy(get_device(), np.ones(1000, np.float32))
    assert layer(x) is x
    dropped = layer.train()(x).numpy()
    assert 350 < (dropped == 0).sum() < 650 and set(dropped.tolist()) == {0.0, 2.0}


def test_first_values() -> None:
    module = Statistics().initialize(get_device(), 7)
    state = module.state_dict()
    same = Statistics().initialize(get_device(), 7).state_dict()
    other = Statistics().initialize(get_device(), 8).state_dict()
    assert all(np.array_equal(state[name], same[name]) for name in state)
    assert not np.array_equal(state["head.weight"], other["head.weight"])
    assert (state["scale"] == 0).all() and (state["head.bias"] == 0).all() and (state["mean"] == 0).all()
    # A norm's weight is 1; files leave off its offset.
    assert (state["branches.1.norm.weight"] == 0).all()
    assert (module.branches[1]["norm"].weight.tensor.numpy() == 1).all()  # type: ignore[index]
    big = nn.Linear(300, 100).initialize(get_device(), 1).weight.tensor.numpy()
    bound = np.sqrt(6 / 400)
    assert np.abs(big).max() <= bound and abs(big.std() - bound / np.sqrt(3)) < bound / 50
    table = nn.ByteEmbedding(64).initialize(get_device(), 1).weight.tensor.numpy()
    assert 0.99 / 8 < np.abs(table).max() <= 1 / 8


def test_state_goes_out_and_in() -> None:
    device = get_device()
    module = Statistics().initialize(device, 1)
    state = {name: np.asarray(values + 1, values.dtype) for name, values in module.state_dict().items()}
    before = module.head.weight.tensor
    module.load_state_dict(state)
    assert module.head.weight.tensor is before  # a captured program sees the new values
    fresh = Statistics()
    fresh.load_state_dict(state, device)
    for held in (module, fresh):
        found = held.state_dict()
        assert found.keys() == state.keys() and found["count"].dtype == np.int32
        for name in state:
            np.testing.assert_allclose(found[name], state[name], atol=2e-7)
    assert (fresh.branches[1]["norm"].weight.tensor.numpy() == 2).all()  # type: ignore[index]


def test_states_that_do_not_fit_change_nothing() -> None:
    module = Statistics().initialize(get_device(), 1)
    state = module.state_dict()
    for bad, message in (
        ({**state, "more": np.zeros(1)}, "1 unknown, the first is 'more'"),
        ({n: v for n, v in state.items() if n != "scale"}, "1 missing, the first is 'scale'"),
        ({**state, "mean": np.zeros(4), "scale": np.ones(3)}, r"mean has shape \[4\]; the module's is \[3\]"),
    ):
        with pytest.raises(DeviceError, match=message):
            module.load_state_dict(bad)
    assert (module.state_dict()["scale"] == 0).all()
    with pytest.raises(DeviceError, match="say on which device"):
        Statistics().load_state_dict(state)
    with pytest.raises(DeviceError, match="is not loaded"):
        Statistics().state_dict()


def test_what_gets_gradients() -> None:
    device = get_device()
    module = Statistics().initialize(device, 1)
    x = Tensor.from_numpy(device, np.ones((2, 3), np.float32))
    with GradientTape() as tape:
        loss = total(module(x))
    tape.backward(loss)
    assert module.head.weight.tensor.grad is not None and module.scale.tensor.grad is None
    assert not any(buffer.tensor.requires_grad for _, buffer in module.named_buffers())
    module.zero_grad()
    assert module.head.weight.tensor.grad is None
    module.freeze()
    assert not any(p.requires_grad for p in module.parameters())
    module.head.requires_grad_()
    assert [n for n, p in module.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("encoding", ["q8", "q4"])
def test_packed_weights_are_frozen_until_they_are_f32(encoding: str) -> None:
    device = get_device()
    layer = nn.Linear(32, 8, bias=False).initialize(device, 1)
    dense = layer.weight.tensor
    packed = pack(dense, encoding)
    layer.load(lambda name, parameter: [packed])
    layer.requires_grad_()
    assert not layer.weight.requires_grad
    values = layer.state_dict()["weight"].astype(np.float32)
    assert np.abs(values - dense.numpy()).max() < 0.1
    with pytest.raises(DeviceError, match="make it f32 first"):
        layer.load_state_dict({"weight": values})
    layer.to_f32().requires_grad_()
    assert layer.weight.requires_grad
    np.testing.assert_array_equal(layer.weight.tensor.numpy(), values)


class Twice(nn.Adapter):
    """An adapter that learns a matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.matrix = nn.Linear(inputs, outputs, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.matrix(x)


@pytest.mark.parametrize("gated", [False, True])
def test_adapters_add_to_what_linear_layers_give(gated: bool) -> None:
    """In every fused form: several layers at once, a folded norm, GELU, a residual, a gate."""
    device, rng = get_device(), np.random.default_rng(0)
    x, residual = (Tensor.from_numpy(device, rng.standard_normal((5, 32)).astype(np.float32)) for _ in "ab")
    norm = nn.RMSNorm(32).initialize(device)
    layers = [nn.Linear(32, 16).initialize(device, seed) for seed in (1, 2)]
    adapter = Twice(32, 16).initialize(device, 3)
    merged = nn.Linear(32, 16).initialize(device, 2)
    merged.weight.assign(layers[1].weight.values() + adapter.matrix.weight.values())
    layers[1].adapter = adapter
    if gated:
        found = nn.gated_linear(x, *layers, norm=norm).numpy()
        wanted = nn.gated_linear(x, layers[0], merged, norm=norm).numpy()
    else:
        found = nn.project(x, layers, norm=norm, residual=residual, gelu=True).numpy()
        wanted = nn.project(x, [layers[0], merged], norm=norm, residual=residual, gelu=True).numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert [name for name, _ in layers[1].named_parameters()] == ["weight", "bias", "adapter.matrix.weight"]
    layers[1].freeze()
    adapter.requires_grad_()
    with GradientTape() as tape:
        loss = total(nn.project(x, layers, norm=norm))
    tape.backward(loss)
    assert adapter.matrix.weight.tensor.grad is not None and layers[1].weight.tensor.grad is None
