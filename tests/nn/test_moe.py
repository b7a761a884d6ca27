"""The mixture of experts against OA's numbers: outputs, losses, gradients, balancing; sparse and dense the same."""

from __future__ import annotations

import numpy as np
import pytest
from oa_goldens import Arrays, check_gradients, close, fill, golden, on_device

from oazoo import nn
from oazoo.configs import TransformerConfig
from oazoo.errors import DeviceError, GenerationError, TranslationError, UsageError
from oazoo.models.transformer import Transformer
from oazoo.nn.moe import RouteStatistics
from oazoo.runtime import get_device
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.loss import cross_entropy, mse
from oazoo.runtime.tape import GradientTape

NAMES = ("moe", "moe_dense", "moe_top1", "moe_shared", "moe_aux", "moe_zloss")
MODELS = {
    "bytemoetransformer": TransformerConfig.byte_moe_transformer(),
    "transformer_moe": TransformerConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=10,
        num_layers=2,
        num_heads=2,
        max_positions=6,
        num_experts=4,
        experts_per_token=2,
    ),
}


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def layer(name: str) -> tuple[nn.MoE, Arrays]:
    arrays, c = golden(name)
    sizes = c["model_width"], c["hidden_width"], c["num_experts"], c["experts_per_token"]
    module = nn.MoE(*sizes, shared=c["num_shared_experts"], eps=c["epsilon"])
    fill(module, arrays)
    module.train()
    module.balance, module.z, module.counting = c["aux_loss_alpha"], c["router_z_loss_beta"], True
    return module, arrays


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, sparse: bool) -> None:
    module, arrays = layer(name)
    module.sparse = sparse
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        y = module(x)
        loss = mse(y, on_device(arrays["target"]))
        if module.loss is not None:
            close(module.loss, arrays["aux_loss"])
            loss = add(loss, module.loss)
    assert (module.loss is not None) == ("aux_loss" in arrays)
    close(y, arrays["output"])
    close(loss, arrays["loss"])
    tape.backward(loss)
    close(x.grad, arrays["grad_input_x"])
    check_gradients(module, arrays)
    found = module.statistics()
    assert np.array_equal(found.loads, arrays["selection_mask"].sum(axis=0))
    np.testing.assert_allclose(
        [found.entropy, found.max_load_ratio, found.dead],
        [arrays["entropy"], arrays["max_load_ratio"], arrays["dead_experts"]],
        rtol=1e-5,
    )


def test_few_tokens_without_gradients_are_the_same() -> None:
    """Nothing is sorted where each expert has a row or two."""
    module, arrays = layer("moe")
    module.eval()
    module.counting = False
    close(module(on_device(arrays["x"][:1])), arrays["output"][:1])
    close(module(on_device(arrays["x"])), arrays["output"])


def test_the_bias_evens_out_loads_and_is_kept() -> None:
    module, arrays = layer("moe_balanced")
    x = on_device(arrays["x"])
    for step in (1, 2, 3):
        module(x)
        assert np.array_equal(module.statistics().loads, arrays[f"mask_before_update{step}"].sum(axis=0))
        module.update_routing_bias(0.3)
        np.testing.assert_allclose(
            module.routing_bias.values(), arrays[f"routing_bias_{step}"].reshape(-1), atol=1e-6
        )
    close(module(x), arrays["output"])
    again = nn.MoE(6, 10, 4, 2)
    again.load_state_dict(module.state_dict(), get_device())
    close(again(x), arrays["output"])


def test_statistics_of_extremes() -> None:
    assert RouteStatistics.of(np.zeros(4, np.uint32)).entropy == 0
    one = RouteStatistics.of(np.array([0, 9, 0], np.uint32))
    assert (one.entropy, one.max_load_ratio, one.dead) == (0, 3, 2)
    even = RouteStatistics.of(np.full(3, 5, np.uint32))
    np.testing.assert_allclose([even.entropy, even.max_load_ratio, even.dead], [1, 1, 0])


def test_what_cannot_be() -> None:
    for top in (0, 5):
        with pytest.raises(UsageError, match=f"tokens cannot go to {top} of 4 experts"):
            nn.MoE(6, 10, 4, top)
    with pytest.raises(UsageError, match="has counted no loads"):
        nn.MoE(6, 10, 4, 2).initialize(get_device()).update_routing_bias(0.1)
    with pytest.raises(UsageError, match="has no bias for the choice"):
        nn.MoE(6, 10, 4, 2, routing_bias=False).initialize(get_device()).update_routing_bias(0.1)
    small = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1}
    for fields in (
        {"num_experts": 4},
        {"num_experts": 4, "experts_per_token": 5},
        {"num_experts": 0, "experts_per_token": 0},
        {"num_experts": 1 << 20, "experts_per_token": 1},
        {"experts_per_token": 1},
        {"routing_bias": True},
    ):
        with pytest.raises(TranslationError, match="experts"):
            TransformerConfig(max_positions=4, **small, **fields)  # type: ignore[arg-type]


def test_first_values() -> None:
    module = nn.MoE(16, 8, 4, 2).initialize(get_device(), 1)
    for part, inputs in ((module.gate_up, 16), (module.down, 8)):
        values = part.weight.values()
        assert 0.9 * inputs**-0.5 < np.abs(values).max() <= inputs**-0.5 and not part.bias.values().any()
    assert not module.routing_bias.values().any() and (module.norm.weight.values() == 1).all()


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    arrays, _ = golden(name)
    model = Transformer(MODELS[name], get_device())
    assert {n: p.shape for n, p in model.named_parameters()} == MODELS[name].parameters()
    fill(model, arrays)
    tokens = arrays["tokens"].astype(np.int32)
    with GradientTape() as tape:
        logits = model.forward(on_device(tokens))
        loss = cross_entropy(logits, on_device(arrays["targets"].astype(np.int32)))
    close(logits, arrays["logits"])
    close(loss, arrays["loss"])
    tape.backward(loss)
    for index, (parameter, found) in enumerate(model.named_parameters()):
        if not parameter.endswith("attn.k.bias"):  # it is 0 up to rounding
            close(found.tensor.grad, arrays[f"grad_{index}"])
    np.testing.assert_allclose(
        model.logits(tokens).reshape(arrays["logits"].shape), arrays["logits"], rtol=1e-4, atol=1e-5
    )
    session = model.new_session(tokens.shape[1])
    for place, token in enumerate(tokens[0]):
        np.testing.assert_allclose(session.decode(int(token)), arrays["logits"][place], rtol=1e-4, atol=1e-5)


def test_losses_of_routers_are_part_of_a_models_loss_in_training() -> None:
    arrays, _ = golden("transformer_moe")
    model = Transformer(MODELS["transformer_moe"], get_device())
    fill(model, arrays)
    ids = on_device(arrays["tokens"].astype(np.int32))
    targets = on_device(arrays["targets"].astype(np.int32))
    model.set_router_losses(balance=0.1, z=0.01)
    close(model.loss(ids, targets), arrays["loss"])
    model.train()
    found = model.loss(ids, targets)
    parts = [mixture.loss for mixture in model.mixtures()]
    assert len(parts) == 2
    extra = sum(float(part.numpy()[0]) for part in parts if part is not None)
    assert extra > 0.1
    close(found, arrays["loss"] + extra)
    model.checkpointing = True
    with pytest.raises(GenerationError, match="do not go with checkpointing"):
        model.loss(ids, targets)
    model.set_router_losses()
    close(model.loss(ids, targets), arrays["loss"])
    with pytest.raises(DeviceError, match="bias"):
        model.mixtures()[0].router.bias.assign(np.zeros(5))
