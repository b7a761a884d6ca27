"""ONNX: a strict reader of a model file, its tensors left in the file, its graph parsed.

A ModelProto is walked in place by :mod:`oazoo.formats.protobuf`; tensors are held against their shapes by
:mod:`oazoo.formats.onnx_tensors`, and external data is found by :mod:`oazoo.formats.onnx_external`.
Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from oazoo.errors import FormatError
from oazoo.formats import protobuf as pb
from oazoo.formats.mapped import MappedFile
from oazoo.formats.messages import quoted
from oazoo.formats.onnx_external import ExternalFiles
from oazoo.formats.onnx_graph import GraphParser, OnnxGraph
from oazoo.formats.onnx_tensors import DecodedTensor, TensorRecord, build_tensor, entry
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource

#: What a protobuf message may hold at most, by the format's own rule.
MAX_FILE = 2**31 - 1
_IR_VERSION, _GRAPH, _OPSET, _PROPERTY, _TRAINING, _FUNCTION = 1, 7, 8, 14, 20, 25
_TEXTS = {2: "producer_name", 3: "producer_version", 4: "domain"}
#: Field number → wire type of a ModelProto.
_KNOWN = {
    1: pb.VARINT,
    2: pb.BYTES,
    3: pb.BYTES,
    4: pb.BYTES,
    5: pb.VARINT,
    6: pb.BYTES,
    7: pb.BYTES,
    8: pb.BYTES,
    14: pb.BYTES,
    20: pb.BYTES,
    25: pb.BYTES,
    26: pb.BYTES,
}
_MAX_IR_VERSION = 1000
#: With what a ModelProto may begin: the tag of a field of it below 16.
FIRST_BYTES = frozenset(bytes([number << 3 | wire]) for number, wire in _KNOWN.items() if number < 16)


class GraphSource(WeightSource):
    """Tensors, and the graph that computes with them."""

    graph: OnnxGraph


class OnnxSource(GraphSource):
    """One ONNX model with its external data; the mapping holds initialisers and the tensors of Constant nodes.

    ``graph`` is the parsed graph. ``metadata`` has ``ir_version``, the producer, ``opsets`` (domain → version), ``inputs``
    and ``outputs`` (name → shape) and the model's own properties. ``notes`` tells of bytes in data files that nothing uses.

    Raises:
        FormatError: the file is damaged, over protobuf's 2 GiB, or refers to data outside its folder; sparse tensors,
            texts and segments are refused by name.
        UsageError: there is no such file.
    """

    format = "onnx"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        self._external = ExternalFiles(self.path)
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, FormatError) and not str(error).startswith(str(self.path)):
                raise FormatError(f"{self.path}: {error}") from error
            raise

    def _open(self) -> None:
        if self._file.size > MAX_FILE:
            raise FormatError(
                f"{self._file.size} bytes; a protobuf message has at most {MAX_FILE}, so this ONNX file is damaged, or its "
                "weights have to be stored as external data: onnx.save(MODEL, FILE, save_as_external_data=True)"
            )
        data = pb.FileMessage(self._file)
        parser = GraphParser(data)
        metadata, graph, notes = parse_model(data, parser)
        self.graph = graph
        records = {**graph.initializers, **graph.constants, **graph.inner}
        self._tensors: dict[str, SourceTensor] = {
            name: self._tensor(name, record, parser) for name, record in records.items()
        }
        self.metadata = MappingProxyType(metadata)
        self.files = (self.path, *self._external.paths)
        self.notes = (*notes, *self._external.notes())

    def _tensor(self, name: str, record: TensorRecord, parser: GraphParser) -> SourceTensor:
        literal = parser.literals.get(name)
        if literal is None:
            return build_tensor(record, self._file, self._external.find)
        info = TensorInfo(name, record.shape, "f32" if record.data_type == 1 else "i64", len(literal))
        return DecodedTensor(info, self._file, lambda: np.frombuffer(literal, np.uint8).copy())

    def constant(self, record: TensorRecord) -> SourceTensor:
        """Access to a tensor that is an attribute of a node (``ConstantOfShape``), not one of the mapping.

        Raises:
            FormatError: its values do not fit its shape.
        """
        return build_tensor(record, self._file, self._external.find)

    def close(self) -> None:
        self._file.close()
        self._external.close()


def looks_like_onnx(head: bytes, file: MappedFile | None = None) -> bool:
    """Whether a file begins like a ModelProto: the version of the format, then another field of it.

    Writers put fields in order, so that the version is first; a ``file`` whose fields come in another order is walked whole.
    """
    data = memoryview(head)
    try:
        first = next(iter(pb.fields(data, 0, len(data))), None)
        if first is not None and (first.number, first.wire) == (_IR_VERSION, pb.VARINT):
            tag, _ = pb.varint(data, first.stop, len(data))
            return 0 < first.value <= _MAX_IR_VERSION and _KNOWN.get(tag >> 3) == tag & 7
    except FormatError:
        pass
    if file is None or file.size > MAX_FILE or not file.size:
        return False
    return _is_model(pb.FileMessage(file))


def _is_model(data: pb.Message) -> bool:
    """Whether every field at the top is one of a ModelProto, version and graph among them."""
    seen = set()
    try:
        for item in pb.fields(data, 0, len(data)):
            if _KNOWN.get(item.number) != item.wire:
                return False
            seen.add(item.number)
    except FormatError:
        return False
    return {_IR_VERSION, _GRAPH} <= seen


def parse_model(
    message: bytes | pb.Message, parser: GraphParser | None = None
) -> tuple[dict[str, Any], OnnxGraph, list[str]]:
    """The metadata, the graph and notes of a serialised ModelProto, its tensors not yet held against their shapes.

    Raises:
        FormatError: it is damaged, or has what is not supported.
    """
    data = memoryview(message) if isinstance(message, bytes) else message
    parser = parser or GraphParser(data)
    graph: OnnxGraph | None = None
    opsets: dict[str, int] = {}
    properties: dict[str, str] = {}
    metadata: dict[str, Any] = {}
    functions = 0
    for item in pb.fields(data, 0, len(data)):
        number = item.number
        if number in _KNOWN:
            pb.expect(item, _KNOWN[number], f"field {number} of the model")
        if number == _IR_VERSION:
            metadata["ir_version"] = item.value
        elif number in _TEXTS:
            metadata[_TEXTS[number]] = pb.text(data, item, _TEXTS[number])
        elif number == _GRAPH:
            if graph is not None:
                raise FormatError("the model has two graphs")
            graph = parser.graph(item.start, item.stop)
        elif number == _OPSET:
            domain, version = _opset(data, item)
            opsets[domain] = version
        elif number == _PROPERTY:
            key, value = entry(data, item)
            if key in properties:
                raise FormatError(f"the model has the property {quoted(key)} twice")
            properties[key] = value
        elif number == _TRAINING:
            raise FormatError(
                "the model has training information, which is not supported; export it for inference"
            )
        elif number == _FUNCTION:
            functions += 1
    if graph is None:
        raise FormatError("the model has no graph")
    if not metadata.get("ir_version"):
        raise FormatError("the model states no version of the format (ir_version)")
    metadata["opsets"] = opsets
    metadata["inputs"] = {value.name: list(value.shape or ()) for value in graph.inputs}
    metadata["outputs"] = {value.name: list(value.shape or ()) for value in graph.outputs}
    if properties:
        metadata["properties"] = properties
    if functions:
        metadata["functions"] = functions
    notes = [f"{functions} functions of the model are not listed: constants inside them are no weights"]
    return metadata, graph, notes if functions else []


def _opset(data: pb.Message, item: pb.Field) -> tuple[str, int]:
    domain, version = "", 0
    for part in pb.fields(data, item.start, item.stop):
        if part.number == 1:
            domain = pb.text(data, part, "the domain of an operator set")
        elif part.number == 2:
            version = pb.expect(part, pb.VARINT, "the version of an operator set").signed
    return domain, version
