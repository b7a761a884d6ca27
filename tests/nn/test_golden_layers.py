"""Every layer against the reference numbers of OA: output, loss, gradients of parameters and input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oa_goldens import Arrays, check_layer, close, fill, golden, on_device

from oazoo import nn
from oazoo.runtime import Tensor
from oazoo.runtime.ops import unary
from oazoo.runtime.ops.activation import activate_gated, swiglu
from oazoo.runtime.ops.loss import binary_cross_entropy, cross_entropy, l1, mse, smooth_l1
from oazoo.runtime.tape import GradientTape


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def attention(config: dict[str, Any]) -> nn.MultiHeadAttention:
    causal = config.get("mode", "Causal") == "Causal"
    return nn.MultiHeadAttention(
        config["model_width"], config["num_heads"], causal=causal, bias=config.get("bias", True)
    )


MODULES: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "linear": lambda c: nn.Linear(c["in_features"], c["out_features"]),
    "linear_3d": lambda c: nn.Linear(c["in_features"], c["out_features"]),
    "linear_nobias": lambda c: nn.Linear(c["in_features"], c["out_features"], bias=False),
    "byte_head": lambda c: nn.ByteOutputHead(4),
    "embedding": lambda c: nn.Embedding(c["num"], c["dim"]),
    "byte_embedding": lambda c: nn.ByteEmbedding(c["dim"]),
    "layernorm": lambda c: nn.LayerNorm(c["dim"], c["epsilon"]),
    "layernorm_eps": lambda c: nn.LayerNorm(c["dim"], c["epsilon"]),
    "layernorm_channel": lambda c: nn.LayerNorm(c["dim"], c["epsilon"]),
    "layernorm_channel_relu": lambda c: nn.LayerNorm(c["dim"], c["epsilon"]),
    "rmsnorm": lambda c: nn.RMSNorm(c["dim"], c["epsilon"]),
    "rmsnorm_eps": lambda c: nn.RMSNorm(c["dim"], c["epsilon"]),
    "swiglu": lambda c: nn.SwiGLU(c["in_features"], c["intermediate"]),
    "swiglu_nobias": lambda c: nn.SwiGLU(c["in_features"], c["intermediate"], bias=False),
    "ffn": lambda c: nn.FFN(c["model_width"], c["hidden"], c["epsilon"]),
    "rope_100": lambda c: nn.RoPE(c["num_heads"], c["head_dim"], c["theta_base"]),
    "rope_10000": lambda c: nn.RoPE(c["num_heads"], c["head_dim"], c["theta_base"]),
    "mha_bidirectional_standard": attention,
    "mha_causal_flash": attention,
    "mha_causal_nobias": attention,
    "mha_causal_standard": attention,
    "mha_masked": attention,
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", MODULES)
def test_layers(name: str) -> None:
    arrays, config = golden(name)
    module = MODULES[name](config)
    fill(module, arrays)
    form: Callable[..., Tensor] = module  # type: ignore[assignment]
    if name.startswith("mha"):
        mask = on_device(arrays["additive_mask"]) if "additive_mask" in arrays else None
        check_layer(module, arrays, lambda x: form(x, config["batch"], mask=mask))
    elif isinstance(module, nn.LayerNorm) and "channel" in name:
        over = module.over_channels
        check_layer(module, arrays, (lambda x: unary.relu(over(x))) if "relu" in name else over)
    else:
        check_layer(module, arrays, form, of="indices" if "indices" in arrays else "x")


def test_parameters_have_the_reference_order() -> None:
    for name in ("swiglu", "ffn", "mha_causal_standard"):
        arrays, config = golden(name)
        found = [
            n.replace(".", "_") if name == "swiglu" else n
            for n, _ in MODULES[name](config).named_parameters()
        ]
        assert str(found).replace("'", '"') == str(arrays["param_names"])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["causal", "masked", "bidirectional"])
def test_transformer_block(case: str) -> None:
    arrays, config = golden("transformer_block")
    block = nn.TransformerBlock(
        config["model_width"],
        config["hidden_width"],
        config["num_heads"],
        eps=config["epsilon"],
        causal=case == "causal",
    )
    assert str([name for name, _ in block.named_parameters()]).replace("'", '"') == str(arrays["param_names"])
    fill(block, arrays)
    mask = on_device(arrays["additive_mask"]) if case == "masked" else None
    check_layer(
        block,
        arrays,
        lambda x: block(x, config["batch"], mask=mask),
        output=case,
        loss=f"loss_{case}",
        gradient=f"grad_input_{case}",
    )


ACTIVATIONS: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "mish": nn.Mish(),
    "softplus": nn.Softplus(),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "leaky_relu_0.01": nn.LeakyReLU(),
    "leaky_relu_0.2": nn.LeakyReLU(0.2),
    "elu_1": nn.ELU(),
    "elu_0.5": nn.ELU(0.5),
    "softmax": nn.Softmax(),
    "log_softmax": nn.LogSoftmax(),
}


def squares(y: Tensor) -> Tensor:
    return mse(y, on_device(np.zeros(y.shape, np.float32)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    arrays, _ = golden("act_softmax" if "softmax" in name else "activations")
    form: Callable[[Tensor], Tensor] = ACTIVATIONS[name]  # type: ignore[assignment]
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        y = form(x)
        loss = squares(y)
    tape.backward(loss)
    close(y, arrays[name])
    close(x.grad, arrays[f"mse0grad_{name}"])


def test_gates() -> None:
    arrays, _ = golden("act_silu_mul")
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        loss = squares(activate_gated(x))
    tape.backward(loss)
    close(loss, arrays["loss"])
    close(x.grad, arrays["grad_x"])
    arrays, _ = golden("act_swiglu")
    left, right = on_device(arrays["left"], grad=True), on_device(arrays["right"], grad=True)
    with GradientTape() as tape:
        y = swiglu(left, right)
        loss = squares(y)
    tape.backward(loss)
    close(y, arrays["output"])
    close(left.grad, arrays["grad_left"])
    close(right.grad, arrays["grad_right"])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": mse,
    "l1": l1,
    "smooth_l1": smooth_l1,
    "bce_extreme": binary_cross_entropy,
    "bce_logits_range": binary_cross_entropy,
    "bce_probabilities": binary_cross_entropy,
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    arrays, _ = golden(f"loss_{name}")
    x = on_device(arrays["left"], grad=True)
    with GradientTape() as tape:
        loss = LOSSES[name](x, on_device(arrays["right"]))
    tape.backward(loss)
    close(loss, arrays["loss"])
    close(x.grad, arrays["grad_left"])


@pytest.mark.usefixtures("kernels")
def test_cross_entropies() -> None:
    arrays, _ = golden("loss_cross_entropy")
    check_entropy(arrays, "logits", "loss", "grad_logits")
    arrays, config = golden("loss_masked_cross_entropy")
    mask = on_device(arrays["mask"])
    for count in config["valid_counts"]:
        check_entropy(arrays, "logits", f"loss_valid{count}", f"grad_valid{count}", mask=mask, count=count)


def check_entropy(arrays: Arrays, logits: str, loss: str, gradient: str, **options: Any) -> None:
    x = on_device(arrays[logits], grad=True)
    with GradientTape() as tape:
        found = cross_entropy(x, on_device(arrays["targets"]), **options)
    tape.backward(found)
    close(found, arrays[loss])
    close(x.grad, arrays[gradient])
