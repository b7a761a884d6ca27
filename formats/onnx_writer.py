"""Writing ONNX: a graph, and the weights streamed into the file or into a data file beside it, atomically.

A protobuf message may be written in any order of its fields, but its length comes first. So everything but the weights is
serialised by the onnx package, the lengths of the weights follow from their shapes, and their bytes are passed through
piece by piece. Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy.typing as npt

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats.atomic import atomic_file
from oazoo.formats.messages import quoted
from oazoo.formats.onnx import MAX_FILE
from oazoo.formats.onnx_external import checked_location
from oazoo.formats.onnx_graph import Node, ValueInfo
from oazoo.formats.onnx_tensors import MAX_TEXT
from oazoo.formats.source import TensorInfo
from oazoo.formats.streamed import StreamedTensor

if TYPE_CHECKING:  # the package takes a good part of a second to import
    from onnx import ModelProto, TensorProto

#: Our encoding → TensorProto.DataType, of what weights in a graph are stored as.
DATA_TYPES = {"f32": 1, "f16": 10, "f64": 11, "bf16": 16}
#: Where a tensor may begin in a data file: at whole pages, so that a runtime can map it.
ALIGNMENT = 4096
_GRAPH, _INITIALIZER, _RAW_DATA = (bytes([number << 3 | 2]) for number in (7, 5, 9))


@dataclass(frozen=True)
class GraphPlan:
    """A graph as data: all but the weights. ``constants`` are small tensors of its own; ``opset`` is that of ONNX itself."""

    name: str
    nodes: Sequence[Node]
    constants: Mapping[str, npt.NDArray[Any]]
    inputs: Sequence[ValueInfo]
    outputs: Sequence[ValueInfo]
    opset: int
    ir_version: int


def model_bytes(graph: GraphPlan, properties: Mapping[str, str]) -> bytes:
    """The serialised model without its weights."""
    whole: bytes = _model(graph, properties).SerializeToString()
    return whole


def write_onnx(
    path: Path | str,
    graph: GraphPlan,
    properties: Mapping[str, str],
    tensors: Sequence[StreamedTensor],
    *,
    external: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a model, without holding more than its graph and a piece of a tensor.

    Args:
        path: the file.
        graph: the model without its weights.
        properties: the model's metadata.
        tensors: the weights, which become initialisers in this order.
        external: put the weights into ``<name of the file>.data`` beside it, which is written first.
        overwrite: replace existing files.

    Raises:
        FormatError: a name that comes twice, an encoding that is not for weights, more than 2 GiB without ``external``, or a
            file name that cannot stand in a model.
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`.
    """
    target = Path(path)
    names = [*graph.constants, *(tensor.info.name for tensor in tensors)]
    if len(set(names)) != len(names):
        raise FormatError(f"the tensor {quoted(next(n for n in names if names.count(n) > 1))} comes twice")
    model = _model(graph, properties)
    if external:
        data = target.with_name(data_name(target.name))
        model.graph.initializer.extend(_placed([tensor.info for tensor in tensors], data.name))
        with atomic_file(data, overwrite=overwrite) as file:
            for tensor in tensors:
                file.write(bytes(-file.tell() % ALIGNMENT))
                _stream(tensor, file)
        with atomic_file(target, overwrite=overwrite) as file:
            file.write(model.SerializeToString())
        return
    head, frames = _frames(model, tensors)
    size = len(head) + sum(len(f) + t.info.nbytes for f, t in zip(frames, tensors, strict=True))
    if size > MAX_FILE:
        raise FormatError(
            f"{target}: {size:,} bytes, more than the 2 GiB of an ONNX file: its weights must lie outside"
        )
    with atomic_file(target, overwrite=overwrite) as file:
        file.write(head)
        for frame, tensor in zip(frames, tensors, strict=True):
            file.write(frame)
            _stream(tensor, file)


def data_name(name: str) -> str:
    """What the data file of a model file is called.

    Raises:
        FormatError: the name cannot stand in a model.
    """
    return checked_location(f"{name}.data")


def _model(graph: GraphPlan, properties: Mapping[str, str]) -> ModelProto:
    from onnx import helper, numpy_helper

    for key, text in properties.items():
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
            raise FormatError(
                f"{quoted(key)}: {len(text)} characters, too long for a text of a model's metadata"
            )
    inputs, outputs = (
        [helper.make_tensor_value_info(v.name, v.data_type, v.shape) for v in values]
        for values in (graph.inputs, graph.outputs)
    )
    nodes = [
        helper.make_node(n.op, n.inputs, n.outputs, n.name, domain=n.domain, **n.attributes)
        for n in graph.nodes
    ]
    constants = [numpy_helper.from_array(values, name) for name, values in graph.constants.items()]
    model = helper.make_model(
        helper.make_graph(nodes, graph.name, inputs, outputs, constants),
        opset_imports=[helper.make_opsetid("", graph.opset)],
        ir_version=graph.ir_version,
        producer_name="oazoo",
    )
    # A text that is no Unicode (half a pair of surrogates) cannot stand in a protobuf.
    helper.set_model_props(
        model, {key: text.encode("utf-8", "replace").decode("utf-8") for key, text in properties.items()}
    )
    return model


def _stream(tensor: StreamedTensor, file: BinaryIO) -> None:
    for piece in tensor.stored():
        file.write(piece.data)


def _described(info: TensorInfo) -> TensorProto:
    from onnx import TensorProto

    if info.encoding not in DATA_TYPES:
        raise FormatError(f"tensor {quoted(info.name)}: a graph has no weights of the type {info.encoding}")
    if encodings.get(info.encoding).bytes_for(info.shape) != info.nbytes:
        raise FormatError(f"tensor {quoted(info.name)}: {info.nbytes} bytes do not follow from its shape")
    return TensorProto(name=info.name, data_type=DATA_TYPES[info.encoding], dims=info.shape)


def _placed(infos: Sequence[TensorInfo], location: str) -> list[TensorProto]:
    """The initialisers of a model whose values lie in the file ``location``."""
    placed, position = [], 0
    for info in infos:
        tensor = _described(info)
        position += -position % ALIGNMENT
        tensor.data_location = 1  # external
        for key, value in (("location", location), ("offset", position), ("length", info.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        placed.append(tensor)
        position += info.nbytes
    return placed


def _frames(model: ModelProto, tensors: Sequence[StreamedTensor]) -> tuple[bytes, list[bytes]]:
    """All bytes before the first tensor, and those that stand before the values of each."""
    frames, size = [], 0
    for tensor in tensors:
        nbytes = tensor.info.nbytes
        inner = _described(tensor.info).SerializeToString() + _RAW_DATA + _varint(nbytes)
        frames.append(_INITIALIZER + _varint(len(inner) + nbytes) + inner)
        size += len(frames[-1]) + nbytes
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    return model.SerializeToString() + _GRAPH + _varint(len(graph) + size) + graph, frames


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
