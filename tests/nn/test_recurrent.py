"""RNN and GRU cells and stacks against the reference numbers of OA, and stacks against their own single steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from oa_goldens import Arrays, close, golden, on_device

from oazoo import nn
from oazoo.errors import DeviceError
from oazoo.nn import Module
from oazoo.runtime import get_device
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.tape import GradientTape

STACKS: dict[str, type[Any]] = {"rnn": nn.RNN, "gru": nn.GRU}
CELLS: dict[str, type[Any]] = {"rnn": nn.RNNCell, "gru": nn.GRUCell}
#: OA's names of a layer's parameters, in its order, and ours.
NAMES = {
    "weight_ih": "input.weight",
    "weight_hh": "state.weight",
    "bias_ih": "input.bias",
    "bias_hh": "state.bias",
}


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def given(module: Module, config: dict[str, Any], arrays: Arrays) -> list[str]:
    """Fill a module from a golden file; the names of its parameters in the file's order."""
    ours = []
    for name, _, _ in config["params"]:
        stem, _, layer = name.partition("_l")
        ours.append(f"layers.{layer}.{NAMES[stem]}" if layer else NAMES[stem])
    module.load_state_dict({name: arrays[f"param_{i}"] for i, name in enumerate(ours)}, get_device())
    module.requires_grad_()
    return ours


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name", [f"{kind}{what}" for kind in STACKS for what in ("", "_2layer", "_nobias", "_cell")]
)
def test_goldens(name: str) -> None:
    arrays, config = golden(name)
    kind, _, what = name.partition("_")
    sizes = config["input_size"], config["hidden_size"]
    module = (
        CELLS[kind](*sizes) if what == "cell" else STACKS[kind](*sizes, config["num_layers"], config["bias"])
    )
    names = given(module, config, arrays)
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        y = module(x, on_device(arrays["hidden"])) if what == "cell" else module(x)[0]
        loss = mse(y, on_device(arrays["target"]))
    close(y, arrays["output"])
    close(loss, arrays["loss"])
    tape.backward(loss)
    close(x.grad, arrays["grad_input_x"])
    found = dict(module.named_parameters())
    assert len(found) == len(names)
    for i, own in enumerate(names):
        close(found[own].tensor.grad, arrays[f"grad_{i}"])


@pytest.mark.parametrize("kind", STACKS)
def test_steps_are_the_sequence(kind: str) -> None:
    """Token by token, from the zero state on, and from the state after the first half."""
    module = STACKS[kind](6, 16, 3).initialize(get_device(), 4)
    x = np.random.default_rng(1).standard_normal((2, 5, 6)).astype(np.float32)
    y, last = module.forward(on_device(x))
    wanted, state = y.numpy(), module.zero_state(2)
    for t in range(5):
        out, state = module.step(on_device(np.ascontiguousarray(x[:, t])), state)
        np.testing.assert_allclose(out.numpy(), wanted[:, t], rtol=1e-5, atol=1e-6)
    for one, other in zip(state, last, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    _, half = module(on_device(np.ascontiguousarray(x[:, :3])))
    rest, _ = module(on_device(np.ascontiguousarray(x[:, 3:])), half)
    np.testing.assert_allclose(rest.numpy(), wanted[:, 3:], rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_states() -> None:
    """What is cut in two with the state handed on has the gradients of the whole."""
    module = nn.GRU(3, 8, 2).initialize(get_device(), 4)
    x = np.random.default_rng(1).standard_normal((2, 6, 3)).astype(np.float32)
    found = []
    for cuts in ([0, 6], [0, 2, 6]):
        module.zero_grad()
        with GradientTape() as tape:
            state = None
            for start, stop in pairwise(cuts):
                _, state = module(on_device(np.ascontiguousarray(x[:, start:stop])), state)
            assert state is not None
            loss = mse(state[-1], on_device(np.ones((2, 8), np.float32)))
        tape.backward(loss)
        found.append([p.tensor.grad.numpy() for p in module.parameters() if p.tensor.grad is not None])
    assert len(found[0]) == 8
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)


def test_misuse() -> None:
    module = nn.RNN(3, 4, 2).initialize(get_device())
    with pytest.raises(DeviceError, match=r"\[batch, tokens, features\]"):
        module(on_device(np.zeros((2, 3), np.float32)))
    with pytest.raises(DeviceError, match="1 states for 2"):
        module.step(on_device(np.zeros((2, 3), np.float32)), module.zero_state(2)[:1])
    with pytest.raises(DeviceError, match="0 recurrent layers"):
        nn.GRU(3, 4, 0)
