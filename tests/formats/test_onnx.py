"""ONNX files: every place where a tensor's values may lie, external data, and files made to mislead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_files import model_of, proto, read, write

from oazoo.errors import FormatError
from oazoo.formats.detect import open_source
from oazoo.formats.onnx import OnnxSource
from oazoo.formats.torch_zip import TorchSource

GOLDENS = ("nanogpt_script", "nanogpt_nobias_script", "nanogpt_dynamo")


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens_as_the_onnx_package_reads_them(name: str, data: Path) -> None:
    path = data / "onnx" / name / "model.onnx"
    expected = onnx.load(path)
    with open_source(path) as source:
        assert isinstance(source, OnnxSource) and source.notes == ()
        for tensor in expected.graph.initializer:
            assert np.array_equal(source[tensor.name].numpy(), numpy_helper.to_array(tensor)), tensor.name
        constants = [node for node in expected.graph.node if node.op_type == "Constant"]
        for node in constants:
            found = source[node.output[0]].numpy()
            assert np.array_equal(found, numpy_helper.to_array(node.attribute[0].t)), node.output[0]
        assert len(source) == len(expected.graph.initializer) + len(constants)
        for ours, theirs in zip(source.graph.nodes, expected.graph.node, strict=True):
            assert (ours.op, ours.inputs, ours.outputs) == (
                theirs.op_type,
                tuple(theirs.input),
                tuple(theirs.output),
            )
            for attribute in theirs.attribute:
                value = helper.get_attribute_value(attribute)
                if not isinstance(value, TensorProto):
                    found = ours.attributes[attribute.name]
                    assert found == (tuple(value) if isinstance(value, list) else value)


def test_weights_are_mapped_not_copied(data: Path) -> None:
    path = data / "onnx" / "nanogpt_script" / "model.onnx"
    with open_source(path) as source:
        raw = source["transformer.wte.weight"].mapped()
    assert not raw.flags.owndata and not raw.flags.writeable


NUMPY = {
    TensorProto.FLOAT: np.float32,
    TensorProto.UINT8: np.uint8,
    TensorProto.INT8: np.int8,
    TensorProto.UINT16: np.uint16,
    TensorProto.INT16: np.int16,
    TensorProto.INT32: np.int32,
    TensorProto.INT64: np.int64,
    TensorProto.BOOL: np.bool_,
    TensorProto.FLOAT16: np.float16,
    TensorProto.DOUBLE: np.float64,
    TensorProto.UINT32: np.uint32,
    TensorProto.UINT64: np.uint64,
    TensorProto.COMPLEX64: np.complex64,
    TensorProto.COMPLEX128: np.complex128,
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}


@pytest.mark.parametrize("kind", NUMPY, ids=TensorProto.DataType.Name)
@pytest.mark.parametrize("shape", [(3, 2), (5,), (), (0, 4)])
def test_every_type_as_raw_data(kind: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    dtype = np.dtype(NUMPY[kind])
    count = int(np.prod(shape))
    values = (np.arange(count) % 2 if kind == TensorProto.BOOL else np.arange(count) - 2).astype(dtype)
    values = values.reshape(shape)
    found = read(write(tmp_path / "m", proto("t", kind, list(shape), raw_data=values.tobytes())))
    assert found.dtype == dtype and found.shape == shape and found.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("kind", "field", "stored", "expected"),
    [
        (TensorProto.FLOAT, "float_data", [1.5, -2, 3e38], np.array([1.5, -2, 3e38], np.float32)),
        (TensorProto.COMPLEX64, "float_data", [1, 2, 3, -4], np.array([1 + 2j, 3 - 4j], np.complex64)),
        (TensorProto.DOUBLE, "double_data", [1e-300, 2.5], np.array([1e-300, 2.5])),
        (TensorProto.COMPLEX128, "double_data", [1, 2, 3, -4], np.array([1 + 2j, 3 - 4j])),
        (TensorProto.INT64, "int64_data", [-(2**63), 0, 2**63 - 1], np.array([-(2**63), 0, 2**63 - 1])),
        (TensorProto.UINT64, "uint64_data", [0, 127, 2**64 - 1], np.array([0, 127, 2**64 - 1], np.uint64)),
        (TensorProto.UINT32, "uint64_data", [0, 300, 2**32 - 1], np.array([0, 300, 2**32 - 1], np.uint32)),
        (TensorProto.INT32, "int32_data", [-(2**31), -1, 2**31 - 1], np.array([-(2**31), -1, 2**31 - 1], np.int32)),
        (TensorProto.INT16, "int32_data", [-32768, 5, 32767], np.array([-32768, 5, 32767], np.int16)),
        (TensorProto.UINT16, "int32_data", [0, 65535], np.array([0, 65535], np.uint16)),
        (TensorProto.INT8, "int32_data", [-128, 127], np.array([-128, 127], np.int8)),
        (TensorProto.UINT8, "int32_data", [0, 255], np.array([0, 255], np.uint8)),
        (TensorProto.BOOL, "int32_data", [1, 0, 1], np.array([True, False, True])),
        (TensorProto.FLOAT16, "int32_data", [15872, 0xC000, 1], np.array([1.5, -2, 2.0**-24], np.float16)),
        (TensorProto.BFLOAT16, "int32_data", [0x3FC0, 0xC000, 0x3F80], np.array([1.5, -2, 1], ml_dtypes.bfloat16)),
        (TensorProto.FLOAT8E4M3FN, "int32_data", [0x38, 0xC0], np.array([1, -2], ml_dtypes.float8_e4m3fn)),
        (TensorProto.FLOAT8E5M2, "int32_data", [0x3C, 0xC0], np.array([1, -2], ml_dtypes.float8_e5m2)),
    ],
)  # fmt: skip
def test_typed_fields(
    kind: int, field: str, stored: list[Any], expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """OX-06: 16-bit floats in int32_data are bit patterns, not numbers."""
    found = read(write(tmp_path / "m", proto("t", kind, [expected.size], **{field: stored})))
    assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def test_bf16_in_both_encodings(tmp_path: Path) -> None:
    bits = np.array([0x3FC0, 0xBF80, 0x0001], np.uint16)
    raw = read(write(tmp_path / "a", proto("t", TensorProto.BFLOAT16, [3], raw_data=bits.tobytes())))
    typed = read(write(tmp_path / "b", proto("t", TensorProto.BFLOAT16, [3], int32_data=bits.tolist())))
    assert raw.tobytes() == typed.tobytes() == bits.tobytes()


@pytest.mark.parametrize("place", ["raw_data", "int32_data"])
@pytest.mark.parametrize(
    ("kind", "packed", "expected"),
    [
        (TensorProto.INT4, [0x8F, 0x21, 0x07], np.array([-1, -8, 1, 2, 7], np.int8)),
        (TensorProto.UINT4, [0x8F, 0x21, 0xF7], np.array([15, 8, 1, 2, 7], np.uint8)),
        (TensorProto.FLOAT4E2M1, [0x71, 0x2F], np.array([0.5, 6, -6, 1], ml_dtypes.float8_e4m3fn)),
        (TensorProto.FLOAT4E2M1, [0x71, 0x0F], np.array([0.5, 6, -6], ml_dtypes.float8_e4m3fn)),
        (25, [0b11100100, 0b01], np.array([0, 1, 2, 3, 1], np.uint8)),
        (26, [0b11100100, 0b01], np.array([0, 1, -2, -1, 1], np.int8)),
    ],
)
def test_types_below_a_byte(
    place: str, kind: int, packed: list[int], expected: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """OX-06: low bits first, an odd count padded."""
    stored: Any = bytes(packed) if place == "raw_data" else packed
    found = read(write(tmp_path / "m", proto("t", kind, [expected.size], **{place: stored})))
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (proto("t", 1, [1], raw_data=bytes(4), float_data=[1.0]), "more than one place"),
        (proto("t", 1, [1], float_data=[1.0], int32_data=[1]), "more than one place"),
        (proto("t", 1, [2], raw_data=bytes(4)), "4 bytes.*takes 8"),
        (proto("t", 1, [2], float_data=[1.0]), "4 bytes.*takes 8"),
        (proto("t", 7, [2], int64_data=[1, 2, 3]), "3 numbers.*takes 2"),
        (proto("t", 1, [2]), "no values"),
        (proto("t", 1, [1], int32_data=[1]), "does not hold f32"),
        (proto("t", 10, [1], float_data=[1.0]), "does not hold f16"),
        (proto("t", 8, [1], string_data=[b"x"]), "texts"),
        (proto("t", 99, [1], raw_data=bytes(4)), "unknown data type 99"),
        (proto("t", 1, [-1], raw_data=bytes(4)), "negative"),
        (proto("t", 1, [2**40, 2**40], raw_data=bytes(4)), "2\\^63"),
        (proto("", 1, [1], raw_data=bytes(4)), "empty name"),
        (proto("a\0b", 1, [1], raw_data=bytes(4)), "NUL"),
        (proto("t", 1, [1] * 65, raw_data=bytes(4)), "dimensions"),
        (proto("t", 22, [5], raw_data=bytes(2)), "2 bytes.*takes 3"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_themselves(tensor: TensorProto, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        open_source(write(tmp_path / "m", tensor))


@pytest.mark.parametrize(("kind", "value"), [(10, 65536), (10, -1), (3, 128), (9, 2), (22, 256)])
def test_a_bit_pattern_out_of_range(kind: int, value: int, tmp_path: Path) -> None:
    with (
        open_source(write(tmp_path / "m", proto("t", kind, [1], int32_data=[value]))) as source,
        pytest.raises(FormatError, match=r"'t'.*out of the range"),
    ):
        source["t"].numpy()


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="two tensors are named 't'"):
        open_source(write(tmp_path / "m", *[proto("t", 1, [1], raw_data=bytes(4))] * 2))


def test_constants_of_every_form(tmp_path: Path) -> None:
    def constant(name: str, **attribute: Any) -> Any:
        return helper.make_node("Constant", [], [name], **attribute)

    nodes = [
        constant("a", value=numpy_helper.from_array(np.array([[1, 2]], np.int16))),
        constant("b", value_float=0.5),
        constant("c", value_ints=[3, -4]),
        constant("d", value_floats=[1.5, 2.5]),
        constant("e", value_int=-7),
        constant("f", value_string="a text is no tensor"),
    ]
    with open_source(write(tmp_path / "m", nodes=nodes)) as source:
        assert list(source) == ["a", "b", "c", "d", "e"]
        assert source["a"].numpy().tolist() == [[1, 2]] and source["b"].numpy() == 0.5
        assert source["c"].numpy().tolist() == [3, -4] and source["e"].numpy().shape == ()
        assert source["d"].numpy().dtype == np.float32 and source["e"].numpy() == -7


def test_an_attribute_of_another_type_than_it_says(tmp_path: Path) -> None:
    """Readers that go by the type and readers that go by the field would see two different models."""
    node = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(1, "f4")))
    node.attribute[0].type = onnx.AttributeProto.FLOAT
    with pytest.raises(FormatError, match=r"'value'.*something else than its type says"):
        open_source(write(tmp_path / "m", nodes=[node]))


def test_graphs_inside_nodes_are_read(tmp_path: Path) -> None:
    def branch(name: str) -> Any:
        weight = numpy_helper.from_array(np.full(3, len(name), np.float32), name)
        return helper.make_graph([], name, [], [], [weight])

    node = helper.make_node("If", ["x"], ["y"], then_branch=branch("one"), else_branch=branch("three"))
    with open_source(write(tmp_path / "m", nodes=[node])) as source:
        assert source["one"].numpy().tolist() == [3] * 3 and source["three"].numpy().tolist() == [5] * 3


# -- the file as a whole -----------------------------------------------------------------------------------------------


def test_a_file_over_two_gigabytes(tmp_path: Path) -> None:
    """OX-07: a sparse file whose graph states that length; nothing of that size is allocated."""
    size = 2_100_000_000 + 2**26
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        head = b"\x08\x08\x3a" + _varint(size)
        file.write(head)
        file.truncate(size + len(head))
    with pytest.raises(FormatError, match=r"external data: onnx\.save"):
        open_source(path)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x08\x08\x3a\x7f" + bytes(5), "127 bytes, but 5 are left"),
        (b"\x08\x08\x3a" + b"\xff" * 9 + b"\x01", "are left"),
        (b"\x08\x08\x3a" + b"\xff" * 10 + b"\x01", "longer than 10 bytes"),
        (b"\x08\x08\x3a\x00" + b"\x28" + b"\xff" * 9 + b"\x02", "64 bits"),
        (b"\x08\x08\x3a\x00\x3a\x00", "two graphs"),
        (b"\x08\x08\x12\x01x", "no graph"),
        (b"\x08\x08" + field(7, b"\x0b"), "wire type 3"),
        (b"\x08\x08" + field(7, b"\x00"), "out of range"),
        (b"\x08\x08" + field(7, field(1, b"")), "no operation"),
        (b"\x08\x08" + field(7, b"") + field(20, b""), "training"),
        (b"\x08\x08" + field(7, field(15, b"")), "sparse"),
    ],
)
def test_damaged_structure(content: bytes, words: str, tmp_path: Path) -> None:
    """OX-07."""
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=words):
        open_source(path)


def test_nesting(tmp_path: Path) -> None:
    """OX-07: graphs in attributes of nodes, 10 000 deep (built from the inside out, without recursion)."""
    pieces: list[bytes] = [b""]
    length = 0
    for _ in range(10_000):
        for number in (6, 5):  # attribute.g, node.attribute; then the operation, then graph.node
            pieces.append(_varint(number << 3 | 2) + _varint(length))
            length += len(pieces[-1])
        operation = b"\x22\x02If"
        pieces.append(b"\x0a" + _varint(length + len(operation)) + operation)
        length += len(pieces[-1])
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x08" + field(7, b"".join(reversed(pieces))))
    with pytest.raises(FormatError, match="nested deeper"):
        open_source(path)


def test_fields_in_another_order_are_a_model_all_the_same(tmp_path: Path) -> None:
    model = model_of(proto("t", 1, [1], raw_data=np.float32(7).tobytes()))
    graph = field(7, model.graph.SerializeToString())
    (tmp_path / "m").write_bytes(graph + b"\x08\x08")
    assert read(tmp_path / "m").tolist() == [7]


@pytest.mark.parametrize(
    "content", [b"\x08", b"\x08\x08", b"\x08\x00\x3a\x00", b"\x3a\x00", b":-) a text\n", os.urandom(0)]
)
def test_what_is_no_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(FormatError, match="supported are"):
        open_source(tmp_path / "m")


def test_containers_by_content(data: Path, tmp_path: Path) -> None:
    for original, kind in (("model.onnx", OnnxSource), ("ckpt.pt", TorchSource)):
        for name in ("x", "x.safetensors", "x.bin", "x.gguf"):
            (tmp_path / name).write_bytes((data / "onnx" / "nanogpt_script" / original).read_bytes())
            with open_source(tmp_path / name) as source:
                assert type(source) is kind
