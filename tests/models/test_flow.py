"""Flow models against the reference numbers of OA: output, loss, gradients of parameters, sample and condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oa_goldens import DATA, Arrays, check_gradients, close, fill, golden, on_device

from oazoo.configs import FlowConfig
from oazoo.errors import DeviceError
from oazoo.models.flow import FlowDenoiser
from oazoo.nn import FlowTimeEmbedding, FlowTransformer
from oazoo.nn.moe import MoE
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.ops.arithmetic import reshaped
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.tape import GradientTape


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def mixture(config: dict[str, Any]) -> MoE:
    return MoE(
        config["model_width"],
        config["hidden_width"],
        config["num_experts"],
        config["experts_per_token"],
        eps=config["epsilon"],
        routing_bias=False,
    )


def inputs(arrays: Arrays, *names: str) -> list[Tensor | None]:
    return [on_device(arrays[n], grad=f"grad_input_{n}" in arrays) if n in arrays else None for n in names]


TRANSFORMERS = [
    "plain",
    "masked",
    "conditioned",
    "conditioned_masked",
    "adaptive_unconditioned",
    "moe_conditioned",
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str) -> None:
    arrays, config = golden(f"flow_transformer_{name}")
    module = FlowTransformer(
        config["model_width"],
        config["hidden_width"],
        config["heads"],
        config["layers"],
        eps=config["epsilon"],
        adaptive=config["adaptive_conditioning"],
        experts=(lambda: mixture(config)) if config["num_experts"] else None,
    )
    names = [
        n.replace("expert_gate_up_", "gate_up.").replace("expert_down_", "down.")
        for n, _, _ in config["params"]
    ]
    assert [n for n, _ in module.named_parameters()] == names
    fill(module, arrays)
    x, condition, keep = inputs(arrays, "tokens", "condition", "token_mask")
    assert x is not None
    batch, tokens, width = x.shape
    with GradientTape() as tape:
        y = module(reshaped(x, batch * tokens, width), batch, condition, keep=keep)
        loss = mse(y, on_device(arrays["target"].reshape(-1, width)))
    close(y, arrays["output"])
    close(loss, arrays["loss"])
    tape.backward(loss)
    close(x.grad, arrays["grad_input_tokens"])
    if condition is not None:
        close(condition.grad, arrays["grad_input_condition"])
    for index, parameter in enumerate(module.parameters()):
        if f"grad_{index}" in arrays:
            close(parameter.tensor.grad, arrays[f"grad_{index}"])
        else:
            assert parameter.tensor.grad is None  # the modulation, where there is no condition


def denoiser(config: dict[str, Any]) -> FlowDenoiser:
    return FlowDenoiser(
        FlowConfig(
            tokens=config["sequence_length"],
            token_size=config["input_dim"],
            predicted_values=config["input_dim"],
            hidden_size=config["model_width"],
            frequency_size=config["model_width"],
            intermediate_size=config["hidden_width"],
            num_layers=config["layers"],
            num_heads=config["heads"],
            condition_features=config["condition_dim"],
            norm_eps=config["epsilon"],
            time_period=config["time_max_period"],
            time_scale=config["time_scale"],
        ),
        get_device(),
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["", "_conditioned", "_conditioned_masked"])
def test_denoisers(name: str) -> None:
    arrays, config = golden(f"flow_denoiser{name}")
    module = denoiser(config)
    assert [n for n, _ in module.named_parameters()] == [n for n, _, _ in config["params"]]
    shapes = {n: tuple(shape) for n, _, shape in config["params"]}
    assert module.config.parameters() == shapes
    fill(module, arrays)
    sample, time, condition, keep = inputs(arrays, "sample", "time", "condition", "token_mask")
    assert sample is not None
    for module.checkpointing in (False, True):
        module.zero_grad()
        sample.grad = None
        with GradientTape() as tape:
            y = module(sample, time, condition, keep=keep)
            loss = mse(y, on_device(arrays["target"]))
        close(y, arrays["output"])
        close(loss, arrays["loss"])
        tape.backward(loss)
        close(sample.grad, arrays["grad_input_sample"])
        check_gradients(module, arrays)
    close(module(sample), arrays["forward_plain"])
    if condition is None:
        return
    close(condition.grad, 2 * arrays["grad_input_condition"])  # of both passes
    with_it = module(sample, time, condition, keep=keep)
    without = module(sample, time, on_device(np.zeros_like(arrays["condition"])), keep=keep)
    both = on_device(np.concatenate([with_it.numpy(), without.numpy()]))
    for scale in ("0", "1", "2.5"):
        close(ops.guide(both, on_device(np.array([float(scale)], np.float32)), 0), arrays[f"guided_{scale}"])


@pytest.mark.parametrize("encoding", ["q8", "q4"])
def test_quantized_weights(encoding: str) -> None:
    """As exact as the weights: the same model with the values that the packed weights stand for."""
    arrays, config = golden("flow_denoiser_conditioned")
    packed, plain = denoiser(config), denoiser(config)
    for module in (packed, plain):
        fill(module, arrays)
    for (name, one), (_, other) in zip(packed.named_parameters(), plain.named_parameters()):
        if len(one.shape) == 2:
            one.shards = (pack(one.tensor, encoding),)
            other.assign(one.values())
            assert name == "position" or one.tensor.dtype == encoding
    sample, time, condition = inputs(arrays, "sample", "time", "condition")
    assert sample is not None
    close(packed(sample, time, condition), plain(sample, time, condition).numpy())


def test_time_embedding() -> None:
    with np.load(DATA / "flow_time_embedding.npz") as arrays:
        for index in range(3):
            width, period, scale = arrays[f"args_{index}"]
            module = FlowTimeEmbedding(int(width), float(period), float(scale))
            found = module(on_device(arrays["time"])).numpy()
            np.testing.assert_allclose(found, arrays[f"embedding_{index}"], atol=5e-5)


def test_paths() -> None:
    arrays, _ = golden("flow_ops")
    state, velocity = ops.linear_match(*(on_device(arrays[n]) for n in ("clean", "noise", "time")))
    close(state, arrays["match_state"])
    close(velocity, arrays["match_velocity"])


def test_a_model_with_experts_has_the_parameters_of_its_configuration() -> None:
    config = replace(denoiser(golden("flow_denoiser")[1]).config, num_experts=4, experts_per_token=2)
    module = FlowDenoiser(config, get_device())
    assert {n: p.shape for n, p in module.named_parameters()} == config.parameters()


def test_wrong_inputs_are_refused() -> None:
    module = denoiser(golden("flow_denoiser")[1])
    module.initialize(get_device())
    with pytest.raises(DeviceError, match=r"the model's are \[sequences, 4, 5\]"):
        module(on_device(np.zeros((2, 5, 4), np.float32)))
    with pytest.raises(DeviceError, match="takes none"):
        time = on_device(np.zeros(2, np.float32))
        module(on_device(np.zeros((2, 4, 5), np.float32)), time, time)
