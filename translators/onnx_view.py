"""An ONNX graph as the patterns see it: what makes each value, and its linear layers.

The patterns of :mod:`oazoo.translators.onnx_arithmetic` and :mod:`oazoo.translators.onnx_match` build on it. A function
takes the name of a value and says what makes it, or raises :class:`Unproven`. Names of weights play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

from oazoo.formats.messages import quoted
from oazoo.formats.onnx import OnnxSource
from oazoo.formats.onnx_graph import Node
from oazoo.translators.onnx_values import Values

_FLOATS = (1, 10, 11, 16)
#: Steps that a search takes at most.
DEEPEST = 48


class Unproven(Exception):
    """A value is not what a pattern asks for; ``progress`` is how much of the pattern had been found."""

    def __init__(self, what: str, progress: int = 0) -> None:
        super().__init__(what)
        self.progress = progress


@dataclass(frozen=True)
class Linear:
    """``input · W + bias``; ``weight`` is stored as [in, out], or as [out, in] if ``out_first``."""

    input: str
    weight: str
    out_first: bool
    bias: str | None
    rows: int
    columns: int


@dataclass(frozen=True)
class Norm:
    """LayerNorm of ``input``."""

    input: str
    weight: str
    bias: str | None
    eps: float


class GraphView:
    """One graph: its values, what makes them, and its linear layers."""

    def __init__(self, source: OnnxSource) -> None:
        self.source = source
        self.values = Values(source)
        self.makers: dict[str, Node] = {}
        for node in source.graph.nodes:
            for name in node.outputs:
                if name and name in self.makers:
                    raise Unproven(f"two nodes make the value {quoted(name)}")
                self.makers[name] = node

    # -- small steps ---------------------------------------------------------------------------------------------------

    def maker(self, name: str) -> Node | None:
        """The node of ONNX's own set that makes a value; None for inputs, weights and foreign operations."""
        node = self.makers.get(name)
        return node if node is not None and node.standard else None

    def resolve(self, name: str) -> str:
        """The value behind nodes that change nothing: Identity, Dropout, casts between floats."""
        for _ in range(DEEPEST):
            node = self.maker(name)
            if node is None or not (
                node.op in ("Identity", "Dropout")
                or (node.op == "Cast" and node.attributes.get("to") in _FLOATS)
            ):
                break
            name = node.inputs[0]
        return name

    def weight(self, name: str) -> tuple[str, bool] | None:
        """The stored tensor behind a value, and whether it was transposed on the way."""
        flipped = False
        for _ in range(DEEPEST):
            name = self.resolve(name)
            node = self.maker(name)
            if node is None or node.op == "Constant":
                return (name, flipped) if name in self.source else None
            if node.op != "Transpose" or node.attributes.get("perm", (1, 0)) != (1, 0):
                return None
            flipped, name = not flipped, node.inputs[0]
        return None

    def vector(self, name: str) -> str | None:
        """The stored tensor of rank 1 behind a value."""
        found = self.weight(name)
        return found[0] if found is not None and len(self.source[found[0]].info.shape) == 1 else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value; Unproven if it does not follow from the graph."""
        found = self.values.shapes.get(name)
        if found is None:
            raise Unproven(f"the shape of {self.describe(name)} does not follow from the graph")
        return found

    def describe(self, name: str) -> str:
        """A value and what makes it, for messages."""
        node = self.makers.get(name)
        what = (
            f"{node.domain + '::' if node.domain else ''}{node.op}" if node is not None else "input or weight"
        )
        return f"{quoted(name)} ({what})"

    def flat(self, name: str) -> str:
        """The value behind reshapes that keep the last axis (a product in two dimensions)."""
        for _ in range(DEEPEST):
            name = self.resolve(name)
            node = self.maker(name)
            if node is None or node.op != "Reshape":
                break
            before, after = self.values.shapes.get(node.inputs[0]), self.values.shapes.get(name)
            if before is None or after is None or before[-1:] != after[-1:]:
                break
            name = node.inputs[0]
        return name

    # -- patterns ------------------------------------------------------------------------------------------------------

    def linear(self, name: str) -> Linear:
        """A product with a stored matrix, and the addition of a stored vector if there is one."""
        name = self.flat(name)
        node, bias = self.maker(name), None
        if node is not None and node.op == "Add":
            for one, other in (node.inputs, node.inputs[::-1]):
                bias = self.vector(one)
                if bias is not None:
                    node = self.maker(self.flat(other))
                    break
        if node is None or node.op not in ("MatMul", "Gemm"):
            raise Unproven(f"{self.describe(name)} is no product with a weight")
        found = self.weight(node.inputs[1])
        if found is None or len(self.source[found[0]].info.shape) != 2:
            raise Unproven(f"{self.describe(name)} is a product, but not with a stored matrix")
        stored, out_first = found
        if node.op == "Gemm":
            self._check_gemm(node, stored)
            out_first ^= bool(node.attributes.get("transB", 0))
            if len(node.inputs) > 2 and node.inputs[2]:
                added = self.vector(node.inputs[2])
                if bias is not None or added is None:
                    raise Unproven(f"{node}: what it adds is no stored vector")
                bias = added
        shape = self.source[stored].info.shape
        rows, columns = shape if out_first else shape[::-1]
        if bias is not None and self.source[bias].info.shape != (rows,):
            raise Unproven(f"{node}: the bias {quoted(bias)} does not have {rows} entries")
        return Linear(self.flat(node.inputs[0]), stored, out_first, bias, rows, columns)

    def _check_gemm(self, node: Node, stored: str) -> None:
        for key, wanted in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)):
            value = node.attributes.get(key, wanted)
            if value != wanted:
                raise Unproven(
                    f"{node} with {quoted(stored)} has {key} = {value}, which is not supported", 99
                )
