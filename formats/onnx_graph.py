"""The graph of an ONNX model: nodes, what they read and make, and the tensors among them.

Parsed from the file with the strict wire reader; every level of nesting and every count is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats import protobuf as pb
from oazoo.formats.messages import quoted
from oazoo.formats.onnx_tensors import TensorRecord, integers, parse_tensor

MAX_DEPTH = 32
MAX_NODES = 1 << 20
MAX_TENSORS = 1 << 18
MAX_ITEMS = 1 << 20
_DEFAULT_DOMAIN = ("", "ai.onnx")

#: Field of an AttributeProto → the AttributeType that it belongs to.
_FIELD_TYPES = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8, 10: 9, 11: 10, 22: 11, 23: 12, 14: 13, 15: 14}
#: Attributes of a Constant that give one tensor: data type, and the shape (None: that of a list).
_SCALARS = {"value_float": 1, "value_int": 7, "value_floats": 1, "value_ints": 7}


@dataclass(frozen=True, slots=True)
class ValueInfo:
    """An input or output of the graph; ``shape`` has a number, a name, or None for each dimension."""

    name: str
    data_type: int
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. Attributes: int, float, str, tuples of these, or :class:`TensorRecord`; others are None."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]

    @property
    def standard(self) -> bool:
        """Whether the operation is one of ONNX's own."""
        return self.domain in _DEFAULT_DOMAIN

    def __str__(self) -> str:
        return (
            f"{self.op} {quoted(self.name)}"
            if self.name
            else f"{self.op} that makes {quoted(self.outputs[:1])}"
        )


@dataclass
class OnnxGraph:
    """A graph. ``constants`` are the tensors of its Constant nodes by output name, ``initializers`` the stored weights."""

    name: str = ""
    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, TensorRecord] = field(default_factory=dict)
    constants: dict[str, TensorRecord] = field(default_factory=dict)
    inputs: list[ValueInfo] = field(default_factory=list)
    outputs: list[ValueInfo] = field(default_factory=list)
    #: Initialisers and constants of graphs inside nodes (branches and loop bodies).
    inner: dict[str, TensorRecord] = field(default_factory=dict)


class GraphParser:
    """Reads GraphProto messages; counts are over all graphs of the model."""

    def __init__(self, data: pb.Message) -> None:
        self._data = data
        self._nodes = self._tensors = 0
        #: Values that Constant nodes state as plain numbers, by tensor name.
        self.literals: dict[str, bytes] = {}

    def graph(self, start: int, stop: int, depth: int = 0) -> OnnxGraph:
        """The GraphProto in ``[start, stop)``.

        Raises:
            FormatError: it is damaged, nested too deep, or too large; names are repeated.
        """
        if depth > MAX_DEPTH:
            raise FormatError(f"graphs nested deeper than {MAX_DEPTH}")
        data, graph = self._data, OnnxGraph()
        for item in pb.fields(data, start, stop):
            number = item.number
            if number in (1, 5, 11, 12, 15):
                pb.expect(item, pb.BYTES, "a part of the graph")
            if number == 1:
                self._node(item, graph, depth)
            elif number == 2:
                graph.name = pb.text(data, item, "the name of the graph")
            elif number == 5:
                self._add(graph, graph.initializers, parse_tensor(data, item.start, item.stop))
            elif number in (11, 12):
                values = graph.inputs if number == 11 else graph.outputs
                values.append(_value_info(data, item))
                if len(values) > MAX_ITEMS:
                    raise FormatError("the graph has too many inputs or outputs")
            elif number == 15:
                raise FormatError("the graph has sparse initialisers, which are not supported")
        return graph

    def _add(self, graph: OnnxGraph, to: dict[str, TensorRecord], record: TensorRecord) -> None:
        self._tensors += 1
        if self._tensors > MAX_TENSORS:
            raise FormatError(f"the model has more than {MAX_TENSORS} tensors")
        if not record.name:
            raise FormatError("a tensor has an empty name")
        if any(record.name in known for known in (graph.initializers, graph.constants, graph.inner)):
            raise FormatError(f"two tensors are named {quoted(record.name)}")
        to[record.name] = record

    def _node(self, item: pb.Field, graph: OnnxGraph, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise FormatError(f"the model has more than {MAX_NODES} nodes")
        data = self._data
        texts = {3: "", 4: "", 7: ""}
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Any] = {}
        for part in pb.fields(data, item.start, item.stop):
            if part.number == 1:
                inputs.append(pb.text(data, part, "an input of a node"))
            elif part.number == 2:
                outputs.append(pb.text(data, part, "an output of a node"))
            elif part.number in texts:
                texts[part.number] = pb.text(data, part, "a name of a node")
            elif part.number == 5:
                name, value = self._attribute(part, graph, depth)
                if name in attributes:
                    raise FormatError(f"a node at byte {item.start} has the attribute {quoted(name)} twice")
                attributes[name] = value
        if not texts[4]:
            raise FormatError(f"the node at byte {item.start} has no operation")
        node = Node(texts[4], texts[7], texts[3], tuple(inputs), tuple(outputs), attributes)
        graph.nodes.append(node)
        if node.op == "Constant" and node.standard and len(outputs) == 1:
            record = self._constant(node)
            if record is not None:
                self._add(graph, graph.constants, record)

    def _constant(self, node: Node) -> TensorRecord | None:
        """The tensor of a Constant node under the name of its output; None for texts."""
        name = node.outputs[0]
        for key, value in node.attributes.items():
            if isinstance(value, TensorRecord):
                value.name = name
                return value
            if key in _SCALARS and value is not None:
                array = np.asarray(value, encodings.get("f32" if _SCALARS[key] == 1 else "i64").dtype)
                self.literals[name] = array.tobytes()
                return TensorRecord(name, array.shape, _SCALARS[key])
        return None

    def _attribute(self, item: pb.Field, graph: OnnxGraph, depth: int) -> tuple[str, Any]:
        data = self._data
        pb.expect(item, pb.BYTES, "an attribute")
        name, kind = "", 0
        value: Any = None
        floats: list[float] = []
        ints: list[int] = []
        held: set[int] = set()
        for part in pb.fields(data, item.start, item.stop):
            number = part.number
            if number == 1:
                name = pb.text(data, part, "the name of an attribute")
            elif number == 2:
                pb.expect(part, pb.FIXED32, "a number")
                value = float(np.frombuffer(data[part.start : part.stop], "<f4")[0])
            elif number == 3:
                value = pb.expect(part, pb.VARINT, "a number").signed
            elif number == 4:
                pb.expect(part, pb.BYTES, "a text")
                value = bytes(data[part.start : min(part.stop, part.start + 4096)]).decode("utf-8", "replace")
            elif number == 5:
                pb.expect(part, pb.BYTES, "a tensor")
                value = parse_tensor(data, part.start, part.stop)
            elif number in (6, 11):
                pb.expect(part, pb.BYTES, "a graph")
                inner = self.graph(part.start, part.stop, depth + 1)
                for record in (
                    *inner.initializers.values(),
                    *inner.constants.values(),
                    *inner.inner.values(),
                ):
                    self._add(graph, graph.inner, record)
            elif number == 7:
                if part.wire not in (pb.FIXED32, pb.BYTES) or (part.stop - part.start) % 4:
                    raise FormatError(f"the numbers of an attribute at byte {part.start} are damaged")
                if (part.stop - part.start) // 4 > MAX_ITEMS:
                    raise FormatError(f"the attribute at byte {item.start} has too many numbers")
                floats += np.frombuffer(data[part.start : part.stop], "<f4").tolist()
            elif number == 8:
                ints += integers(data, part, "the numbers of an attribute")
            elif number == 20:
                kind = pb.expect(part, pb.VARINT, "the type of an attribute").value
            if number in _FIELD_TYPES:
                held.add(number)
            if len(floats) + len(ints) > MAX_ITEMS:
                raise FormatError(f"the attribute {quoted(name)} has too many numbers")
        if kind and any(_FIELD_TYPES[number] != kind for number in held):
            raise FormatError(
                f"the attribute {quoted(name)} at byte {item.start} holds something else than its type says"
            )
        if kind == 6 or floats:
            value = tuple(floats)
        elif kind == 7 or ints:
            value = tuple(ints)
        elif value is None and kind in (1, 2, 3):
            value = {1: 0.0, 2: 0, 3: ""}[kind]  # what is zero may be left out
        return name, value


def _value_info(data: pb.Message, item: pb.Field) -> ValueInfo:
    name, data_type = "", 0
    shape: tuple[int | str | None, ...] | None = None
    for part in pb.fields(data, item.start, item.stop):
        if part.number == 1:
            name = pb.text(data, part, "the name of an input or output")
        elif part.number == 2:
            for kind in pb.fields(data, part.start, pb.expect(part, pb.BYTES, "a type").stop):
                if kind.number != 1:
                    continue
                for piece in pb.fields(data, kind.start, pb.expect(kind, pb.BYTES, "a tensor type").stop):
                    if piece.number == 1:
                        data_type = pb.expect(piece, pb.VARINT, "an element type").value
                    elif piece.number == 2:
                        shape = _shape(data, pb.expect(piece, pb.BYTES, "a shape"))
    return ValueInfo(name, data_type, shape)


def _shape(data: pb.Message, item: pb.Field) -> tuple[int | str | None, ...]:
    sizes: list[int | str | None] = []
    for part in pb.fields(data, item.start, item.stop):
        if part.number != 1:
            continue
        size: int | str | None = None
        for piece in pb.fields(data, part.start, pb.expect(part, pb.BYTES, "a dimension").stop):
            if piece.number == 1:
                size = pb.expect(piece, pb.VARINT, "a dimension").signed
            elif piece.number == 2:
                size = pb.text(data, piece, "the name of a dimension")
        sizes.append(size)
        if len(sizes) > 64:
            raise FormatError("an input or output has more than 64 dimensions")
    return tuple(sizes)
