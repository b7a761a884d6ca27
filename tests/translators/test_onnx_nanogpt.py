"""GPT-2 from ONNX graphs: the goldens, every way of writing a layer that is known, and what must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_models import CONTEXT, HEADS, INNER, LAYERS, VOCAB, WIDTH, Builder, weights
from reference_models import load_oam, logits

from oazoo.cli import main
from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan

DATA = Path(__file__).resolve().parent.parent / "data"
GOLDENS = ("nanogpt_script", "nanogpt_nobias_script", "nanogpt_dynamo")
WORDS = {
    "transformer.": "",
    "wte": "embed",
    "wpe": "positions",
    "ln_f": "norm",
    "h.": "layers.",
    "ln_1": "attn_norm",
    "ln_2": "mlp_norm",
    "attn.c_attn": "attn.qkv",
    "attn.c_proj": "attn.o",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
    "lm_head": "head",
}


@pytest.mark.parametrize("file", ["model.onnx", "ckpt.pt"])
@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_through_the_command_line(name: str, file: str, tmp_path: Path) -> None:
    folder, out = DATA / "onnx" / name, tmp_path / "m.oam"
    result = CliRunner().invoke(main, ["convert", str(folder / file), "-o", str(out)])
    assert result.exit_code == 0, result.output
    params, config = load_oam(out)
    assert isinstance(config, NanoGPTConfig) and config.num_heads == 4 and config.activation == "gelu"
    assert config.norm_eps == 1e-5 and config.bias == ("nobias" not in name) and config.has_norm_bias
    reference = np.load(folder / "reference.npz")
    assert np.abs(logits(params, config, reference["ids"][0]) - reference["logits"][0]).max() < 1e-3
    for key in set(reference.files) - {"ids", "logits"}:
        ours = key.replace("/", ".")
        for old, new in WORDS.items():
            ours = ours.replace(old, new)
        expected = reference[key]
        if ours == "head.weight" and config.tied_embeddings:
            ours = "embed.weight"
        if ours == "positions.weight":
            expected = expected[: config.max_positions]  # an export for a fixed length has no more
        assert np.array_equal(params[ours], expected), ours


FORMS: list[dict[str, Any]] = [
    {},
    {"linear": "gemm"},
    {"linear": "gemm_t"},
    {"linear": "transpose"},
    {"qkv": "split"},
    {"qkv": "split", "linear": "gemm_t"},
    {"qkv": "split", "linear": "transpose"},
    {"qkv": "slices"},
    {"norm": "parts"},
    {"norm": "parts", "linear": "gemm", "gelu": "tanh", "qkv": "split"},
    {"gelu": "tanh"},
    {"gelu": "op"},
    {"mask": "sdpa"},
    {"mask": "trilu"},
    {"swapped": True},
    {"tied": True},
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms(form: dict[str, Any], bias: bool, convert_model: Callable[..., Any]) -> None:
    """OX-04: no weight has a name that says anything, several have the same shape, some are stored transposed."""
    params = weights(bias=bias)
    model = Builder(params, **form).model()
    found, config = convert_model(model)
    tanh = form.get("gelu") in ("tanh", "op")
    assert config == NanoGPTConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        norm_eps=1e-5,
        max_positions=CONTEXT,
        tied_embeddings=bool(form.get("tied")),
        bias=bias,
        norm_bias=bias,
        activation="gelu_tanh" if tanh else "gelu",
    )
    if form.get("tied"):
        del params["head.weight"]
    assert found.keys() == params.keys()
    for name, value in params.items():
        assert np.array_equal(found[name], value), name
    ids = np.array([[3, 1, 4, 1, 5, 9, 2]])
    (wanted,) = ReferenceEvaluator(model).run(None, {"ids": ids})
    assert np.abs(logits(found, config, ids[0]) - wanted[0]).max() < 1e-4


@pytest.fixture
def convert_model(tmp_path: Path) -> Callable[[onnx.ModelProto], Any]:
    """Parameters and config of what a model converts to."""

    def run(model: onnx.ModelProto) -> Any:
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        convert(tmp_path / "m.onnx", tmp_path / "m.oam", overwrite=True)
        return load_oam(tmp_path / "m.oam")

    return run


def test_a_transposed_copy_of_the_embedding_is_a_tied_head(convert_model: Callable[..., Any]) -> None:
    params = weights()
    params["head.weight"] = params["embed.weight"].copy()
    found, config = convert_model(Builder(params).model())
    assert config.tied_embeddings and "head.weight" not in found
    params["head.weight"][-1, -1] += 1
    found, config = convert_model(Builder(params).model())
    assert not config.tied_embeddings and np.array_equal(found["head.weight"], params["head.weight"])


def test_logits_of_the_last_position_only(convert_model: Callable[..., Any]) -> None:
    params = weights()
    model = Builder(params).model()
    head = model.graph.node[-1]
    assert head.op_type == "MatMul"
    index = numpy_helper.from_array(np.array([-1]), "last")
    model.graph.initializer.append(index)
    model.graph.node.insert(
        len(model.graph.node) - 1, helper.make_node("Gather", [head.input[0], "last"], ["x"], axis=1)
    )
    head.input[0] = "x"
    found, _ = convert_model(model)
    assert np.array_equal(found["head.weight"], params["head.weight"])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"linear": "gemm", "alpha": 0.5}, "alpha = 0.5"),
        ({"gelu": "relu"}, "GELU"),
        ({"mask": "none"}, "no causal mask"),
        ({"diagonal": 1}, "not the causal one"),
        ({"diagonal": -1}, "not the causal one"),
        ({"scale": 0.3}, "scaled by 0.3"),
        ({"order": (1, 0, 2)}, "in this order"),
        ({"order": (0, 2, 1)}, "in this order"),
        ({"first": 1}, "positions|shape"),
        ({"heads": 2}, "scaled by"),
    ],
)
def test_models_of_another_kind_are_refused(form: dict[str, Any], words: str, tmp_path: Path) -> None:
    """OX-04: what cannot be proven is refused, with the weights that have no role, and their shapes."""
    (tmp_path / "m.onnx").write_bytes(Builder(weights(), **form).model().SerializeToString())
    with pytest.raises(TranslationError, match=words) as caught:
        plan(tmp_path / "m.onnx")
    assert "--arch raw" in str(caught.value)
    if form != {"first": 1} and "order" not in form:
        assert f"[{INNER}, {WIDTH}]" in str(caught.value) or f"[{WIDTH}, {INNER}]" in str(caught.value)


def test_two_products_of_equal_shape(tmp_path: Path) -> None:
    """OX-04: nothing tells which is which, so nothing is guessed."""
    stored = [numpy_helper.from_array(np.eye(4, dtype="f4"), f"onnx::MatMul_{n}") for n in (10, 11)]
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_10"], ["y"]),
        helper.make_node("MatMul", ["y", "onnx::MatMul_11"], ["z"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "z")]
    model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], stored))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(TranslationError) as caught:
        plan(tmp_path / "m.onnx")
    assert "onnx::MatMul_10 [4, 4], onnx::MatMul_11 [4, 4]" in str(caught.value)


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    model = Builder(weights(), linear="matmul").model()
    norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
    for attribute in norms[2].attribute:
        if attribute.name == "epsilon":
            attribute.f = 1e-3
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(TranslationError, match=r"layer 1 differs from the others in: norm_eps"):
        plan(tmp_path / "m.onnx")


def test_malformed_nodes_are_refused(tmp_path: Path) -> None:
    """Inputs taken away, one node at a time: refused or, where the input is optional, converted; never a crash."""
    whole = Builder(weights(), norm="parts").model()
    for number in range(len(whole.graph.node)):
        model = onnx.ModelProto()
        model.CopyFrom(whole)
        del model.graph.node[number].input[-1:]
        del model.graph.node[number].attribute[:]
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        with open_source(tmp_path / "m.onnx") as source:
            try:
                plan(source)
            except TranslationError as error:
                assert str(tmp_path) in str(error)


def test_everything_left_out_has_a_reason() -> None:
    with plan(DATA / "onnx" / "nanogpt_dynamo" / "model.onnx") as planned:
        reasons = dict(planned.checked.ignored)
        assert set(reasons) == {"val_18", "triu", "val_39", "val_31", "val_46", "val_49", "val_51"}
        assert all(reasons.values()) and any("exported for 16 tokens" in note for note in planned.notes)
