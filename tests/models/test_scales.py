"""Models whose packed weights' scales learn: the gradients of whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference_models import logits as numpy_logits

from oazoo.configs import DecoderConfig
from oazoo.models import CausalModel, build
from oazoo.nn import Embedding, Linear
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.loss import divergence
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.tape import GradientTape

#: Widths of no multiple of 32: blocks run across rows.
TIED: dict[str, Any] = {
    "vocab_size": 45,
    "hidden_size": 20,
    "intermediate_size": 37,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
    "norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_positions": 32,
    "tied_embeddings": True,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_size": 9,
    "shared_expert_size": 8,
    "dense_layers": (1,),
}
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 44]], np.int32)
F64 = npt.NDArray[np.float64]


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def packed_model(config: DecoderConfig, encoding: str) -> CausalModel:
    """Random weights, the matrices packed; only scales of linear layers and of the table learn."""
    device = get_device()
    model = build(config, device).initialize(device, 5)
    for parameter in model.parameters():
        if len(parameter.shape) > 1:
            parameter.shards = (pack(parameter.tensor, encoding),)
    model.freeze()
    for tensor in learning(model).values():
        tensor.learn_scales()
    return model


def learning(model: CausalModel) -> dict[str, Tensor]:
    """The packed weights of linear layers and tables, by name."""
    return {
        f"{name}.weight": module.weight.tensor
        for name, module in model.named_modules()
        if isinstance(module, (Embedding, Linear))
    }


def blocks(values: F64) -> F64:
    """Flattened values in blocks, f64 [blocks, 32], filled up with zeros."""
    flat = np.zeros(-(-values.size // 32) * 32)
    flat[: values.size] = values.reshape(-1)
    return flat.reshape(-1, 32)


def backward(model: CausalModel, teacher: Tensor) -> Tensor:
    model.zero_grad()
    with GradientTape() as tape:
        loss = divergence(teacher, model.forward(Tensor.from_numpy(get_device(), IDS)))
    tape.backward(loss)
    return loss


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("encoding", ["q4", "q8"])
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_scales_get_the_weights_gradients_block_by_block(encoding: str, more: dict[str, Any]) -> None:
    """Those of a dense model of the same values, times the codes; also when layers are computed anew on the way back."""
    config = DecoderConfig(**TIED, **more)
    model = packed_model(config, encoding)
    teacher = Tensor.from_numpy(
        get_device(), np.random.default_rng(2).normal(size=(10, 45)).astype(np.float32)
    )
    scales = {name: weight.scales for name, weight in learning(model).items()}
    assert {"embed.weight", "layers.1.mlp.down.weight", "layers.0.attn.q.weight"} <= scales.keys()

    dense = build(config, get_device()).initialize(get_device(), 1)
    dense.load_state_dict(model.state_dict())
    wanted = backward(dense, teacher)
    weights = learning(dense)
    for checkpointing in (False, True):
        model.train().checkpointing = checkpointing
        for mine in scales.values():
            assert mine is not None
            mine.grad = None
        np.testing.assert_allclose(backward(model, teacher).numpy(), wanted.numpy(), rtol=1e-5)
        for name, mine in scales.items():
            assert mine is not None and mine.grad is not None, name
            gradient = weights[name].grad
            assert gradient is not None
            codes = np.round(blocks(weights[name].numpy().astype(np.float64)) / mine.numpy()[:, None])
            of_scales = (blocks(gradient.numpy().astype(np.float64)) * codes).sum(axis=1)
            assert np.abs(mine.grad.numpy() - of_scales).max() <= 1e-4 * np.abs(of_scales).max(), name
    for name, parameter in model.named_parameters():
        assert parameter.tensor.grad is None, name


def test_a_scale_moves_the_loss_as_its_gradient_says() -> None:
    """Against differences of the float64 model; the table is used twice."""
    config = DecoderConfig(**TIED)
    model = packed_model(config, "q4")
    teacher = np.random.default_rng(3).normal(size=(10, 45)).astype(np.float32)
    backward(model, Tensor.from_numpy(get_device(), teacher))
    params = {name: values.astype(np.float64) for name, values in model.state_dict().items()}

    def loss() -> float:
        p = teacher.astype(np.float64)
        q = np.concatenate([numpy_logits(params, config, row) for row in IDS])
        p, q = (x - x.max(1, keepdims=True) for x in (p, q))
        p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
        return float((np.exp(p) * (p - q)).sum(1).mean())

    for name, block in (("embed.weight", 6), ("layers.0.mlp.up.weight", 22), ("layers.1.attn.q.weight", 3)):
        scales = learning(model)[name].scales
        assert scales is not None and scales.grad is not None
        flat = params[name].reshape(-1)[32 * block : 32 * block + 32]
        before, found = flat.copy(), []
        for h in (1e-4, -1e-4):
            flat[:] = before * (1 + h)
            found.append(loss())
        flat[:] = before
        numeric = (found[0] - found[1]) / (2e-4 * float(scales.numpy()[block]))
        largest = float(np.abs(scales.grad.numpy()).max())
        assert abs(float(scales.grad.numpy()[block]) - numeric) <= 1e-3 * largest, name
