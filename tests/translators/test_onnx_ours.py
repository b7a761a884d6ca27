"""Graphs that claim to be ours: read back if they are, refused at the first thing that is not as we write it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from exported import oam_bytes, random_oam
from model_goldens import source_path
from onnx import helper, numpy_helper
from reference_models import load_oam

from oazoo.configs import DecoderConfig
from oazoo.errors import FormatError, OazooError, TokenizerError, TranslationError
from oazoo.formats.oam import OamSource
from oazoo.translators import convert
from oazoo.translators.export import export
from oazoo.zoo.diff import diff

CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    norm_eps=1e-5, rope_theta=1e4, max_positions=64, tied_embeddings=False, sliding_window=4,
)  # fmt: skip


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    random_oam(tmp_path / "m.oam", CONFIG)
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(found for found in model.graph.node if found.name == name)


def tensor(model: onnx.ModelProto, name: str) -> onnx.TensorProto:
    return next(found for found in model.graph.initializer if found.name == name)


def claims(model: onnx.ModelProto, **changes: object) -> None:
    for entry in model.metadata_props:
        if entry.key == "oazoo.model":
            entry.value = json.dumps(json.loads(entry.value) | changes)


def other_operation(m: onnx.ModelProto) -> None:
    node(m, "layers.1.attended").op_type = "Sub"


def other_input(m: onnx.ModelProto) -> None:
    node(m, "layers.1.attn.q").input[1] = "layers.0.attn.q.weight.T"


def other_attribute(m: onnx.ModelProto) -> None:
    node(m, "layers.1.attn.weights").attribute[0].i = -2


def more_attributes(m: onnx.ModelProto) -> None:
    node(m, "layers.1.attended").attribute.append(helper.make_attribute("axis", 1))


def other_domain(m: onnx.ModelProto) -> None:
    node(m, "layers.1.attended").domain = "com.example"


def another_node(m: onnx.ModelProto) -> None:
    m.graph.node.append(helper.make_node("Neg", ["logits"], ["other"]))


def one_node_less(m: onnx.ModelProto) -> None:
    del m.graph.node[-1]


def other_order(m: onnx.ModelProto) -> None:
    first = m.graph.node[0]
    del m.graph.node[0]
    m.graph.node.append(first)


def a_window_of_five(m: onnx.ModelProto) -> None:
    constant = next(t for t in m.graph.initializer if t.name == "whole.4")
    constant.CopyFrom(numpy_helper.from_array(np.array(5), "whole.4"))


def a_constant_of_another_type(m: onnx.ModelProto) -> None:
    values = numpy_helper.to_array(tensor(m, "rope.full.inverse"))
    tensor(m, "rope.full.inverse").CopyFrom(numpy_helper.from_array(values.view("i4"), "rope.full.inverse"))


def a_constant_less(m: onnx.ModelProto) -> None:
    m.graph.initializer.remove(tensor(m, "rope.full.inverse"))


def another_input(m: onnx.ModelProto) -> None:
    m.graph.input.append(helper.make_tensor_value_info("norm.weight", onnx.TensorProto.FLOAT, [32]))


def another_output(m: onnx.ModelProto) -> None:
    m.graph.output[0].name = "layers.1"


def a_function(m: onnx.ModelProto) -> None:
    opset = [helper.make_opsetid("", 17)]
    body = [helper.make_node("Sub", ["A", "B"], ["C"])]
    m.functions.append(helper.make_function("", "Add", ["A", "B"], ["C"], body, opset))


def other_operators(m: onnx.ModelProto) -> None:
    m.opset_import[0].version = 18


CHANGES: dict[Callable[[onnx.ModelProto], None], str] = {
    other_operation: r"node \d+ is Sub 'layers.1.attended', not Add",
    other_input: "differs from it in inputs or attributes",
    other_attribute: "differs from it in inputs or attributes",
    more_attributes: "differs from it in inputs or attributes",
    other_domain: "differs from it in inputs or attributes",
    another_node: r"it has \d+ nodes, not \d+",
    one_node_less: r"it has \d+ nodes, not \d+",
    other_order: "node 0 is",
    a_window_of_five: "the constant 'whole.4' has other values",
    a_constant_of_another_type: "the constant 'rope.full.inverse' has other values",
    a_constant_less: "it lacks the constant 'rope.full.inverse'",
    another_input: "its inputs or outputs are others",
    another_output: "its inputs or outputs are others",
    a_function: "it is not of operator set 17 alone",
    other_operators: "it is not of operator set 17 alone",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_graph_that_is_not_what_it_claims(
    change: Callable[[onnx.ModelProto], None], exported: Path, tmp_path: Path
) -> None:
    model = onnx.load(exported)
    change(model)
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(TranslationError, match=CHANGES[change]) as caught:
        convert(tmp_path / "bad.onnx", tmp_path / "bad.oam")
    assert "--arch raw" in str(caught.value) and not (tmp_path / "bad.oam").exists()
    convert(tmp_path / "bad.onnx", tmp_path / "raw.oam", arch="raw")


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"num_heads": 2}, "not what oazoo writes"),
        ({"rope_theta": 500.0}, "'rope.full.inverse' has other values"),
        ({"sliding_window": 5}, "not what oazoo writes"),
        ({"norm_eps": 1e-6}, "not what oazoo writes"),
        ({"norm_offset": 1.0}, "not what oazoo writes"),
        ({"embedding_scale": 2.0}, "not what oazoo writes"),
        ({"activation": "gelu"}, "not what oazoo writes"),
        ({"num_layers": 3}, "lacks the weights layers.2.attn_norm.weight"),
        ({"num_layers": 4096}, "lacks the weights .* and [0-9]+ more"),
        ({"hidden_size": 64}, "the tensors do not fit"),
        ({"vocab_size": 1 << 30}, "vocab_size = 1073741824 is out of range"),
        ({"num_experts": 4, "experts_per_token": 1, "expert_size": 8}, "lacks the weights"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_claims_that_the_graph_does_not_bear_out(
    claim: dict[str, object], message: str, exported: Path, tmp_path: Path
) -> None:
    model = onnx.load(exported)
    claims(model, **claim)
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(TranslationError, match=message):
        convert(tmp_path / "bad.onnx", tmp_path / "bad.oam")


def test_what_the_graph_does_not_depend_on_may_be_claimed(exported: Path, tmp_path: Path) -> None:
    """The longest sequence is no part of the computation."""
    model = onnx.load(exported)
    claims(model, max_positions=128)
    onnx.save(model, tmp_path / "longer.onnx")
    convert(tmp_path / "longer.onnx", tmp_path / "longer.oam")
    config = load_oam(tmp_path / "longer.oam")[1]
    assert config.max_positions == 128
    found = diff(tmp_path / "m.oam", tmp_path / "longer.onnx")
    assert found.names == "translated" and not found.differing and not found.equal
    assert found.config == (("max_positions", 64, 128),)


@pytest.mark.parametrize("key", ("graph", "family", "model", "generation", "special_tokens", "source"))
def test_odd_metadata_is_our_error_or_no_matter(key: str, exported: Path, tmp_path: Path) -> None:
    odd = (
        "",
        "2",
        "[]",
        "{}",
        "null",
        "{",
        '{"a":1,"a":2}',
        "[" * 5000,
        '{"eos_ids": [40]}',
        '{"eos_ids": "x"}',
    )
    for value in odd:
        model = onnx.load(exported)
        kept = [(e.key, e.value) for e in model.metadata_props if e.key != f"oazoo.{key}"]
        helper.set_model_props(model, {**dict(kept), f"oazoo.{key}": value})
        onnx.save(model, tmp_path / "odd.onnx")
        try:
            convert(tmp_path / "odd.onnx", tmp_path / "odd.oam", overwrite=True)
        except OazooError as error:
            assert str(error) and key != "source"
        else:
            assert oam_bytes(tmp_path / "odd.oam") == oam_bytes(tmp_path / "m.oam")
            assert key not in ("graph", "family", "model")


def test_weights_of_other_types_and_names(exported: Path, tmp_path: Path) -> None:
    model = onnx.load(exported)
    values = numpy_helper.to_array(tensor(model, "norm.weight"))
    tensor(model, "norm.weight").CopyFrom(numpy_helper.from_array(values.view("i4"), "norm.weight"))
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(TranslationError, match=r"of types that oazoo does not write: norm.weight \(i32\)"):
        convert(tmp_path / "bad.onnx", tmp_path / "bad.oam")
    model = onnx.load(exported)
    model.graph.initializer.append(numpy_helper.from_array(values, "more.weight"))
    onnx.save(model, tmp_path / "bad.onnx")
    with pytest.raises(TranslationError, match=r"has no use for 1 tensor: 'more.weight'"):
        convert(tmp_path / "bad.onnx", tmp_path / "bad.oam")


def test_damaged_files(exported: Path, tmp_path: Path) -> None:
    """Cut short or with bytes changed anywhere: one of our errors, or another weight."""
    data = exported.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(60):
        bad = bytearray(data)
        bad[random.integers(len(bad) // 3)] ^= 1 << random.integers(8)
        if random.integers(3) == 0:
            del bad[random.integers(len(bad)) :]
        (tmp_path / "bad.onnx").write_bytes(bad)
        try:
            convert(tmp_path / "bad.onnx", tmp_path / "bad.oam", overwrite=True)
        except OazooError as error:
            assert str(error)


def test_external_weights_that_are_gone_or_elsewhere(exported: Path, tmp_path: Path) -> None:
    export(tmp_path / "m.oam", tmp_path / "out.onnx", external=True, overwrite=True)
    data = tmp_path / "out.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(
        FormatError, match=r"external data takes bytes \d+ to \d+ of 'out.onnx.data', which has"
    ):
        convert(tmp_path / "out.onnx", tmp_path / "bad.oam")
    data.unlink()
    with pytest.raises(FormatError, match="external data is missing"):
        convert(tmp_path / "out.onnx", tmp_path / "bad.oam")


def test_the_tokenizer_travels_beside_the_model(tmp_path: Path) -> None:
    convert(source_path("F32"), tmp_path / "m.oam")
    (tmp_path / "out").mkdir()
    report = export(tmp_path / "m.oam", tmp_path / "out" / "m.onnx")
    names = {"generation_config.json", "m.onnx", "tokenizer.json", "tokenizer_config.json"}
    assert set(report.files) == names == {path.name for path in (tmp_path / "out").iterdir()}
    convert(tmp_path / "out" / "m.onnx", tmp_path / "again.oam")
    with OamSource(tmp_path / "m.oam") as first, OamSource(tmp_path / "again.oam") as second:
        for name in ("asset/tokenizer.json", "asset/chat_template.jinja"):
            assert first.asset(name) == second.asset(name)
        assert first.asset("asset/tokenizer.json") is not None
        for section in ("family", "model", "generation", "tokenizer"):
            assert first.metadata[section] == second.metadata[section]
        record = second.metadata["source"]
        assert record["name"] == first.metadata["source"]["name"] and record["format"] == "onnx"
        assert [file["name"] for file in record["files"]] == ["m.onnx", "tokenizer.json"]
    assert diff(tmp_path / "m.oam", tmp_path / "out" / "m.onnx").equal
    assert not diff(tmp_path / "m.oam", tmp_path / "out" / "m.onnx").options


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    convert(source_path("F32"), tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "m.onnx")
    (tmp_path / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(TokenizerError, match=r"is not the tokenizer that was exported with m.onnx"):
        convert(tmp_path / "m.onnx", tmp_path / "again.oam")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        TokenizerError, match=r"no such file; the model was exported with this file beside it"
    ):
        convert(tmp_path / "m.onnx", tmp_path / "again.oam")
    convert(tmp_path / "m.onnx", tmp_path / "again.oam", with_tokenizer=False)
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(tmp_path / "m.oam")
    export(tmp_path / "m.oam", tmp_path / "bare.onnx", with_tokenizer=False, overwrite=True)
    shutil.copy(source_path("llama") / "config.json", tmp_path / "tokenizer.json")  # of no concern to it
    convert(tmp_path / "bare.onnx", tmp_path / "bare.oam")
    with OamSource(tmp_path / "bare.oam") as source:
        assert source.asset("asset/tokenizer.json") is None
