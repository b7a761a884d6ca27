"""Writing down an ONNX graph: nodes, constants and the weights that it reads, under readable names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.formats.onnx_graph import Node, ValueInfo
from oazoo.formats.onnx_writer import GraphPlan

#: Of ONNX's operators: old enough for the runtimes in use, new enough for LayerNormalization (17) and bfloat16 (13).
OPSET = 17
#: The version of the file format that came with that operator set (ONNX 1.12).
IR_VERSION = 8
FLOAT, INT64 = 1, 7


class GraphWriter:
    """A graph in the making. A value is named like the node that makes it.

    ``encodings``: weight → what it is stored as; what is not f32 is cast where it is used, so that nothing is rounded.
    """

    def __init__(self, encodings: Mapping[str, str]) -> None:
        self.encodings = encodings
        self._nodes: list[Node] = []
        self._made: set[str] = set()
        self._constants: dict[str, npt.NDArray[Any]] = {}

    def op(self, name: str, kind: str, *inputs: str, **attributes: Any) -> str:
        """The value ``name``, made by one node. Attributes are int, float, or lists of these."""
        self._node(name, kind, inputs, (name,), attributes)
        return name

    def split(self, name: str, x: str, sizes: tuple[int, ...]) -> list[str]:
        """``x`` cut along its last axis into parts of these sizes."""
        parts = tuple(f"{name}.{number}" for number in range(len(sizes)))
        cut = self.constant(f"sizes.{'_'.join(map(str, sizes))}", np.array(sizes, np.int64))
        self._node(name, "Split", (x, cut), parts, {"axis": -1})
        return list(parts)

    def _node(
        self,
        name: str,
        kind: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        attributes: Mapping[str, Any],
    ) -> None:
        held = {key: _stored(value) for key, value in sorted(attributes.items())}
        self._nodes.append(Node(kind, "", name, inputs, outputs, held))
        self._made.update(outputs)

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """A small tensor of the graph's own; the same name means the same values."""
        self._constants.setdefault(name, values)
        return name

    def number(self, value: float) -> str:
        """A float32 scalar."""
        narrow = np.float32(value)
        return self.constant(f"number.{narrow!s}", np.array(narrow))

    def whole(self, value: int) -> str:
        """An int64 scalar."""
        return self.constant(f"whole.{value}", np.array(value, np.int64))

    def axes(self, *axes: int) -> str:
        """Axes, as an operator takes them."""
        return self.constant(f"axes.{'_'.join(map(str, axes))}", np.array(axes, np.int64))

    def shape(self, *sizes: int) -> str:
        """A shape; 0 keeps the size that there is, -1 follows from the others."""
        return self.constant(f"shape.{'_'.join(map(str, sizes))}", np.array(sizes, np.int64))

    def has(self, name: str) -> bool:
        """Whether the model has this weight."""
        return name in self.encodings

    def weight(self, name: str) -> str:
        """A weight in float32."""
        return self.widened(name, name)

    def widened(self, name: str, x: str) -> str:
        """``x``, which has the type of the weight ``name``, in float32."""
        if self.encodings[name] == "f32":
            return x
        cast = f"{x}.f32"
        return cast if cast in self._made else self.op(cast, "Cast", x, to=FLOAT)

    def graph(self, name: str, inputs: list[ValueInfo], outputs: list[ValueInfo]) -> GraphPlan:
        """What has been written down."""
        return GraphPlan(name, self._nodes, self._constants, inputs, outputs, OPSET, IR_VERSION)


def _stored(value: Any) -> Any:
    """An attribute as a file gives it back: floats have 32 bits, lists are tuples."""
    if isinstance(value, float):
        return float(np.float32(value))
    return tuple(value) if isinstance(value, list) else value
