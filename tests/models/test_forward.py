"""Models over batches of whole sequences: the logits of decoding, and gradients against float64 differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from model_goldens import HF, ONNX, reference
from oa_goldens import DATA, check_gradients, close, fill, golden, on_device
from reference_models import load_oam
from reference_models import logits as numpy_logits

import oazoo
from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig, TransformerConfig, config_from_json
from oazoo.errors import GenerationError
from oazoo.formats.detect import open_source
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.models import CausalModel, build
from oazoo.models import session as session_module
from oazoo.nn import Adapter, Linear
from oazoo.runtime import Tensor, get_device, random
from oazoo.runtime.ops.loss import cross_entropy
from oazoo.runtime.tape import GradientTape, by_rows, loss_by_rows

Converted = Callable[[str], Path]
Array = npt.NDArray[Any]

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 6,
    "norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_positions": 32,
    "tied_embeddings": False,
}
CONFIGS: dict[str, ModelConfig] = {
    "llama": DecoderConfig(**SMALL),
    "gemma": DecoderConfig(
        **{
            **SMALL,
            "tied_embeddings": True,
            "norm_offset": 1.0,
            "post_norm": True,
            "qk_norm": "head",
            "activation": "gelu_tanh",
            "embedding_scale": 3.0,
            "attention_scale": 0.7,
            "attention_softcap": 2.0,
            "logit_softcap": 1.5,
            "sliding_window": 3,
            "layer_types": ("sliding", "full"),
            "sliding_rope_theta": 10.0,
        }
    ),
    "olmo": DecoderConfig(**{**SMALL, "pre_norm": False, "post_norm": True, "qk_norm": "full"}),
    "neox": DecoderConfig(
        **{
            **SMALL,
            "norm": "layer",
            "parallel_residual": True,
            "gated_mlp": False,
            "activation": "gelu",
            "rotary_dim": 4,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
        }
    ),
    "experts": DecoderConfig(
        **{
            **SMALL,
            "num_experts": 5,
            "experts_per_token": 2,
            "expert_size": 6,
            "shared_expert_size": 8,
            "normalize_experts": False,
            "dense_layers": (1,),
        }
    ),
    "nanogpt": NanoGPTConfig(
        vocab_size=11,
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=2,
        norm_eps=1e-5,
        max_positions=8,
        tied_embeddings=True,
    ),
}
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 10]], np.int32)
TARGETS = np.array([1, 4, 1, 5, 0, 2, 6, 5, 10, 3], np.int32)


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def check_forward(model: CausalModel, ids: Array) -> None:
    """All sequences at once give what they give one by one through the cache, to 1e-4 of the largest logit."""
    rows = np.atleast_2d(ids).astype(np.int32)
    found = model.forward(Tensor.from_numpy(get_device(), rows)).numpy()
    wanted = model.logits(rows)
    assert found.shape == (rows.size, model.vocab_size)
    assert np.abs(found.reshape(wanted.shape) - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", [*HF, *ONNX])
def test_forward_gives_the_logits_of_decoding(name: str, converted: Converted) -> None:
    check_forward(oazoo.load(converted(name)).model, reference(name)[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("to", ["q8", "q4"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_forward_from_packed_weights(name: str, to: str, converted: Converted, tmp_path: Path) -> None:
    oazoo.quantize(converted(name), tmp_path / "packed.oam", to)
    check_forward(oazoo.load(tmp_path / "packed.oam").model, reference(name)[0])


def initialized(config: ModelConfig, seed: int = 5) -> CausalModel:
    """A model with random values everywhere: norms and biases are not where training starts."""
    model = build(config, get_device()).initialize(get_device(), seed)
    rng = np.random.default_rng(seed)
    state = {
        name: values + rng.normal(size=values.shape) * 0.3 for name, values in model.state_dict().items()
    }
    model.load_state_dict({name: values.astype(np.float32) for name, values in state.items()})
    return model


def numpy_loss(params: dict[str, Array], config: ModelConfig) -> float:
    """Cross entropy of the two sequences, in float64."""
    x = np.concatenate([numpy_logits(params, config, row) for row in IDS])
    top = x.max(1)
    lse = np.log(np.exp(x - top[:, None]).sum(1)) + top
    return float((lse - x[np.arange(len(x)), TARGETS]).mean())


def device_loss(model: CausalModel) -> Tensor:
    """The same on the device, gradients taken."""
    device = get_device()
    with GradientTape() as tape:
        logits = model.forward(Tensor.from_numpy(device, IDS))
        loss = cross_entropy(logits, Tensor.from_numpy(device, TARGETS))
    tape.backward(loss)
    return loss


def check_differences(
    params: dict[str, Array], config: ModelConfig, name: str, gradient: Array, where: Array
) -> None:
    """A gradient at some places (indices into ``params[name]``, flat) is what float64 differences give."""
    flat = params[name].reshape(-1)
    numeric = []
    for i in where:
        before = flat[i]
        flat[i] = before + 1e-5
        above = numpy_loss(params, config)
        flat[i] = before - 1e-5
        numeric.append((above - numpy_loss(params, config)) / 2e-5)
        flat[i] = before
    found = gradient.reshape(-1)[where]
    assert np.abs(found - numeric).max() <= 1e-4 * max(float(np.abs(gradient).max()), 1e-2), name


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_whole_models(name: str) -> None:
    config = CONFIGS[name]
    model = initialized(config)
    params = {n: values.astype(np.float64) for n, values in model.state_dict().items()}
    close(device_loss(model), np.array([numpy_loss(params, config)]))
    rng = np.random.default_rng(1)
    for parameter_name, parameter in model.named_parameters():
        gradient = parameter.tensor.grad
        assert gradient is not None, parameter_name
        where = rng.choice(gradient.numel, min(4, gradient.numel), replace=False)
        check_differences(params, config, parameter_name, gradient.numpy(), where)


class Matrix(Adapter):
    """An adapter as wide as what it adapts."""

    def __init__(self, layer: Linear) -> None:
        self.inner = Linear(layer.weight.shape[1], layer.out_features, bias=False)

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("encoding", ["f32", "q8"])
def test_adapters_learn_through_frozen_weights(encoding: str, converted: Converted, tmp_path: Path) -> None:
    """Loss and gradients of adapters on a model from a file are those of a model whose weights have them added."""
    path = converted("llama")
    if encoding != "f32":
        oazoo.quantize(path, tmp_path / "packed.oam", encoding)
        path = tmp_path / "packed.oam"
    params, config = load_oam(path)
    params = {n: v.astype(np.float64) for n, v in params.items()}
    model = oazoo.load(path).model
    names = ["layers.0.attn.q", "layers.1.attn.v", "layers.1.mlp.up", "layers.0.mlp.down", "head"]
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
    for index, name in enumerate(names):
        adapter = Matrix(linears[name]).initialize(get_device(), index)
        linears[name].adapter = adapter
        params[f"{name}.weight"] += adapter.inner.weight.values()
    close(device_loss(model), np.array([numpy_loss(params, config)]))
    check_forward(model, IDS)
    rng = np.random.default_rng(2)
    for name in names:
        learned = linears[name].adapter.inner.weight.tensor.grad  # type: ignore[union-attr]
        assert learned is not None and not linears[name].weight.requires_grad
        where = rng.choice(learned.numel, 3, replace=False)
        check_differences(params, config, f"{name}.weight", learned.numpy(), where)
    assert model.embed.weight.tensor.grad is None  # type: ignore[attr-defined]


def transformer_config(config: dict[str, Any]) -> TransformerConfig:
    """Ours, from a golden's."""
    return TransformerConfig(
        vocab_size=config["vocab"],
        hidden_size=config["model_width"],
        intermediate_size=config["hidden_width"],
        num_layers=config["layers"],
        num_heads=config["heads"],
        max_positions=config["context"],
    )


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["transformer", "bytetransformer"])
def test_transformers_of_the_reference(name: str) -> None:
    arrays, config = golden(name)
    ours = TransformerConfig.byte_transformer()
    if name == "transformer":
        ours = transformer_config(config)
    model = build(ours, get_device())
    assert {n: p.shape for n, p in model.named_parameters()} == ours.parameters()
    assert list(ours.parameters()) == [n for n, _ in model.named_parameters()]
    fill(model, {k: v for k, v in arrays.items() if "after" not in k})
    with GradientTape() as tape:
        logits = model.forward(on_device(arrays["tokens"]))
        loss = cross_entropy(logits, on_device(arrays["targets"]))
    close(logits, arrays["logits"])
    close(loss, arrays["loss"])
    tape.backward(loss)
    check_gradients(model, arrays)
    check_forward(model, arrays["tokens"])
    assert config_from_json("transformer", json.loads(json.dumps(ours.to_json()))) == ours


def test_a_transformer_that_oa_wrote() -> None:
    """Its files name tensors by number, in the order in which our module has them."""
    arrays, config = golden("oam_transformer_muon")
    model = build(transformer_config(config), get_device())
    with open_source(DATA / "oam_transformer_muon.oam") as source:
        names = [name for name, _ in model.named_parameters()]
        values = {name: source[f"p{index}"].numpy() for index, name in enumerate(names)}
        model.load_state_dict(values, get_device())
    close(model.forward(on_device(arrays["tokens"])), arrays["logits"])


def test_a_transformer_in_a_file(tmp_path: Path) -> None:
    """It goes through a file, is packed, loaded and continued like every other model."""
    arrays, _ = golden("bytetransformer")
    config = TransformerConfig.byte_transformer()
    entries = [OamEntry(name, shape, "f32") for name, shape in config.parameters().items()]
    payload = json.dumps({"oazoo": 1, "family": "transformer", "model": config.to_json()}).encode()
    path = tmp_path / "model.oam"
    with OamWriter(path, config=OamConfig("transformer", payload=payload), entries=entries) as out:
        for index, entry in enumerate(entries):
            out.write(entry.name, arrays[f"param_{index}"])
    text_model = oazoo.load(path)
    close(text_model.logits(arrays["tokens"]), arrays["logits"])
    assert list(text_model.model.state_dict()) == list(config.parameters())
    oazoo.quantize(path, tmp_path / "packed.oam", "q8")
    packed = oazoo.load(tmp_path / "packed.oam").logits(arrays["tokens"])
    assert np.abs(packed.reshape(-1, 256) - arrays["logits"]).max() <= 0.02 * np.abs(arrays["logits"]).max()


@pytest.mark.parametrize("name", ["gemma", "nanogpt"])
def test_checkpointing_changes_no_bit(name: str) -> None:
    """Neither do captured programs: the gradients of a replay are those of the eager step."""
    results = []
    device = get_device()
    for keeping in (True, False):
        model = initialized(CONFIGS[name]).train()
        model.set_dropout(0.3)
        model.checkpointing = not keeping
        random.seed(device, 4)
        loss = device_loss(model)
        results.append([loss.numpy(), *(p.tensor.grad.numpy() for p in model.parameters())])  # type: ignore[union-attr]
        model.zero_grad()
        model = initialized(CONFIGS[name]).train()  # whose tables are made during the capture
        model.set_dropout(0.3)
        model.checkpointing = not keeping
        random.seed(device, 4)
        ids, targets = Tensor.from_numpy(device, IDS), Tensor.from_numpy(device, TARGETS)
        with device.capture() as program:
            with GradientTape() as tape:
                loss = cross_entropy(model.forward(ids), targets)
            tape.backward(loss)
        program.run()
        results.append([loss.numpy(), *(p.tensor.grad.numpy() for p in model.parameters())])  # type: ignore[union-attr]
        program.run()
        assert (loss.numpy() != results[-1][0]).any()  # other values are dropped
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)


def test_checkpointing_takes_less_memory() -> None:
    device, found = get_device(), []
    config = NanoGPTConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=256,
        num_layers=6,
        num_heads=2,
        norm_eps=1e-5,
        max_positions=64,
        tied_embeddings=True,
    )
    model = build(config, device).initialize(device)
    ids = Tensor.from_numpy(device, np.zeros((16, 64), np.int32))
    for model.checkpointing in (False, True):
        model.zero_grad()
        with device.capture() as program:
            with GradientTape() as tape:
                loss = model.loss(ids, ids.view(1024))
            tape.backward(loss)
        found.append(program.nbytes)
    assert 0 < found[1] < 0.5 * found[0]


def test_files_get_back_what_they_gave(converted: Converted) -> None:
    """Gemma's norms are stored less their offset: a state has what the file has."""
    path = converted("gemma3")
    params, config = load_oam(path)
    assert isinstance(config, DecoderConfig) and config.norm_offset == 1
    state = oazoo.load(path).model.state_dict()
    assert sorted(state) == sorted(params)
    for name, values in state.items():
        np.testing.assert_allclose(values, params[name], atol=2e-7)


def test_batches_that_do_not_fit() -> None:
    model = initialized(CONFIGS["nanogpt"])
    for shape in ((1, 9), (4,), (0, 3)):
        with pytest.raises(GenerationError, match=r"must be \[batch, tokens\] with 1 to 8 tokens"):
            model.forward(Tensor.from_numpy(get_device(), np.zeros(shape, np.int32)))
    for batch in range(1, 12):  # tables of old shapes are given back
        model.forward(Tensor.from_numpy(get_device(), np.zeros((batch, 2), np.uint8)))
    assert len(vars(model)["_kept_sequences"]) == 8


@pytest.mark.parametrize("kind", [np.int32, np.uint8])
def test_a_loss_by_rows_is_that_of_all_rows(kind: type[np.integer], monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_device()
    ids, targets = Tensor.from_numpy(device, IDS), Tensor.from_numpy(device, TARGETS.astype(kind))
    mask = Tensor.from_numpy(device, np.array([1, 0, 1, 1, 0.5, 1, 1, 0, 1, 1], np.float32))
    results = []
    for logits in (1 << 20, 4 * 11):  # all ten rows, or four at a time
        monkeypatch.setattr(session_module, "_LOSS_LOGITS", logits)
        model = initialized(CONFIGS["gemma"])
        with GradientTape() as tape:
            loss = model.loss(ids, targets, mask=mask, count=7.5)
        tape.backward(loss)
        results.append([loss, *(p.tensor.grad for p in model.parameters())])
        close(model.loss(ids, targets), device_loss(model).numpy())
        model.freeze()
        with GradientTape() as tape:
            model.loss(ids, targets, mask=mask)
    for whole, by_parts in zip(*results, strict=True):
        assert whole is not None
        close(by_parts, whole.numpy(), 1e-6)


def test_a_loss_that_goes_back_at_once_is_the_same_bit_by_bit() -> None:
    device = get_device()
    ids, targets = Tensor.from_numpy(device, IDS), Tensor.from_numpy(device, TARGETS.astype(np.int32))
    results = []
    for way in (by_rows, loss_by_rows):
        model = initialized(CONFIGS["gemma"])

        def some(part: Tensor, start: int, stop: int, model: CausalModel = model) -> Tensor:
            return cross_entropy(model.head_logits(part), targets.rows(start, stop), count=10)

        with GradientTape() as tape:
            loss = way(some, model.sequence_hidden(ids), 4)
        tape.backward(loss)
        results.append([loss, *(p.tensor.grad for p in model.parameters())])
        # Without a tape, and where the rows themselves need no gradient, it is the plain sum.
        close(way(some, model.sequence_hidden(ids), 4), loss.numpy(), 0.0)
    for later, at_once in zip(*results, strict=True):
        assert later is not None and at_once is not None
        close(at_once, later.numpy(), 0.0)
