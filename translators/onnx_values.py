"""What is known of an ONNX graph's values without running it: shapes, and the values that follow from constants alone.

One pass over the nodes, in their order, for a short sequence of tokens. Shapes, positions, masks and scales are computed by
exporters from the input's shape; here they come out as numbers, so that a pattern can be proven by what a value *is*
rather than by which nodes happen to make it. Every array is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from oazoo.formats.onnx import OnnxSource
from oazoo.formats.onnx_graph import Node
from oazoo.formats.onnx_tensors import ENCODINGS, TensorRecord
from oazoo.translators.onnx_kernels import ELEMENTWISE, Array, broadcast, numbers

#: Elements of one value, and of all values together.
MAX_ELEMENTS = 1 << 22
MAX_TOTAL = 1 << 25
_TOKENS = 3
_INTEGERS = (6, 7)
#: What NumPy and Python raise for arguments that do not fit together.
FAULTS = (ValueError, IndexError, TypeError, OverflowError, ZeroDivisionError, KeyError, AttributeError)

Shape = tuple[int, ...]


class Values:
    """Shapes and known values of a graph, by value name.

    ``tokens``: the name of the graph's one integer input of rank 2, or None; ``length`` its number of tokens here, which is
    what the graph was exported for, or a small number where it takes any.
    """

    def __init__(self, source: OnnxSource) -> None:
        self.source = source
        self.shapes: dict[str, Shape] = {name: tensor.info.shape for name, tensor in source.items()}
        self.known: dict[str, Array] = {}
        self._total = 0
        self.tokens: str | None = None
        self.length = _TOKENS
        self._inputs()
        for node in source.graph.nodes:
            if node.standard:
                self._visit(node)

    def value(self, name: str) -> Array | None:
        """The value of ``name`` where it follows from constants and shapes; floats in float64."""
        found = self.known.get(name)
        if found is None and name in self.source:
            found = self._load(name)
        return found

    def scalar(self, name: str) -> float | None:
        """The one number that ``name`` is."""
        value = self.value(name)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def _inputs(self) -> None:
        stored = self.source.graph.initializers
        given = [value for value in self.source.graph.inputs if value.name not in stored]
        for value in given:
            if value.data_type in _INTEGERS and value.shape is not None and len(value.shape) == 2:
                if self.tokens is not None:
                    self.tokens = None  # several: which one holds the tokens is not told
                    return
                self.tokens = value.name
                batch, length = value.shape
                self.length = length if isinstance(length, int) and length > 0 else _TOKENS
                self.shapes[value.name] = (batch if isinstance(batch, int) and batch > 0 else 1, self.length)

    def _load(self, name: str) -> Array | None:
        tensor = self.source[name]
        if tensor.info.numel > MAX_ELEMENTS or self._total + tensor.info.numel > MAX_TOTAL:
            return None
        return self._keep(name, numbers(tensor.numpy()))

    def _keep(self, name: str, value: Array) -> Array | None:
        if value.size > MAX_ELEMENTS or self._total + value.size > MAX_TOTAL:
            return None
        self._total += value.size
        self.known[name] = value
        self.shapes[name] = value.shape
        return value

    def _visit(self, node: Node) -> None:
        rule = _SHAPES.get(node.op)
        try:
            with np.errstate(all="ignore"):
                value = self._compute(node)
                if value is not None:
                    self._keep(node.outputs[0], value)
                    return
                shapes = rule(self, node) if rule is not None else None
        except FAULTS:
            return  # what does not fit together stays unknown, and nothing can be proven with it
        for name, shape in zip(node.outputs, shapes or (), strict=False):
            if shape is not None and all(type(size) is int and 0 <= size < 1 << 40 for size in shape):
                self.shapes[name] = shape

    def _compute(self, node: Node) -> Array | None:
        """The value of a node whose inputs are known; None if they are not, or the result would be large."""
        if node.op == "Shape":
            shape = self.shapes[node.inputs[0]]
            start, end = node.attributes.get("start", 0), node.attributes.get("end")
            return np.array(shape[start:end], np.int64)
        kernel = _KERNELS.get(node.op) or ELEMENTWISE.get(node.op)
        if kernel is None or not node.inputs:
            return None
        computed = [name for name in node.inputs if name and name not in self.source]
        if any(name not in self.known for name in computed):
            return None  # before a weight is loaded for nothing
        inputs = [self.value(name) if name else None for name in node.inputs]
        if any(value is None and name for value, name in zip(inputs, node.inputs, strict=True)):
            return None
        if node.op in ELEMENTWISE:
            if math.prod(broadcast(*[v.shape for v in inputs if v is not None])) > MAX_ELEMENTS:
                return None
            return numbers(np.asarray(kernel(node, *inputs)))
        result = kernel(self, node, *inputs)
        return None if result is None else numbers(np.asarray(result))

    def fill(self, node: Node) -> Any:
        """The value of ConstantOfShape."""
        record = node.attributes.get("value")
        if not isinstance(record, TensorRecord):
            return np.float64(0)
        return numbers(self.source.constant(record).numpy()).reshape(-1)[0]


# -- values ------------------------------------------------------------------------------------------------------------


def _axes(node: Node, given: Array | None) -> tuple[int, ...] | None:
    axes = given if given is not None else node.attributes.get("axes")
    return None if axes is None else tuple(int(axis) for axis in axes)


def _bounded(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise ValueError("too large to be computed")
    return sizes


def _slice(_: Values, node: Node, data: Array, *rest: Array | None) -> Array:
    return data[slices(node, data.shape, rest)]


def slices(node: Node, shape: Shape, rest: Sequence[Array | None]) -> tuple[slice, ...]:
    """The index of a Slice of a value of ``shape``, from its inputs starts, ends, axes, steps (attributes in old models)."""
    given: list[Any] = [*rest, *[None] * (4 - len(rest))]
    starts = given[0] if given[0] is not None else node.attributes["starts"]
    ends = given[1] if given[1] is not None else node.attributes["ends"]
    axes = _axes(node, given[2])
    steps = given[3] if given[3] is not None else [1] * len(starts)
    index = [slice(None)] * len(shape)
    for axis, start, end, step in zip(axes or range(len(starts)), starts, ends, steps, strict=True):
        size = shape[axis]
        if int(step) < 1:
            raise ValueError("a backward slice")
        low, high = (min(max(int(n) + (size if n < 0 else 0), 0), size) for n in (start, end))
        index[axis] = slice(low, high, int(step))
    return tuple(index)


def _unsqueeze(_: Values, node: Node, data: Array, axes: Array | None = None) -> Array:
    return np.expand_dims(data, _axes(node, axes) or ())


def _squeeze(_: Values, node: Node, data: Array, axes: Array | None = None) -> Array:
    return np.squeeze(data, _axes(node, axes))


def _range(_: Values, node: Node, start: Array, limit: Array, step: Array) -> Array:
    low, high, delta = (part.reshape(-1)[0] for part in (start, limit, step))
    _bounded([max(0, math.ceil((float(high) - float(low)) / float(delta)))])
    return np.arange(low, high, delta)


def _gather(_: Values, node: Node, data: Array, index: Array) -> Array:
    axis = node.attributes.get("axis", 0)
    _bounded([*index.shape, data.size // max(1, data.shape[axis])])
    return np.take(data, index.astype(np.int64), axis)


def _trilu(_: Values, node: Node, data: Array, k: Array | None = None) -> Array:
    by = 0 if k is None else int(k.reshape(-1)[0])
    return np.triu(data, by) if node.attributes.get("upper", 1) else np.tril(data, by)


def _expand(_: Values, node: Node, data: Array, shape: Array) -> Array:
    return np.broadcast_to(data, _bounded(broadcast(data.shape, tuple(int(n) for n in shape)))).copy()


def _cast(_: Values, node: Node, data: Array) -> Array:
    kind = ENCODINGS[node.attributes["to"]]
    if kind.startswith(("f", "bf")):
        return data.astype(np.float64)
    return data.astype(np.bool_ if kind == "bool" else np.int64)


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "Identity": lambda _v, _n, data: data,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": lambda _v, node, *parts: np.concatenate(parts, node.attributes["axis"]),
    "Range": _range,
    "ConstantOfShape": lambda v, node, shape: np.full(_bounded(shape), v.fill(node)),
    "Trilu": _trilu,
    "Expand": _expand,
    "Reshape": lambda _v, _n, data, shape: data.reshape(reshaped(data.shape, shape)),
    "Transpose": lambda _v, node, data: data.transpose(node.attributes.get("perm")),
}


# -- shapes ------------------------------------------------------------------------------------------------------------


def reshaped(shape: Shape, target: Array) -> Shape:
    """The shape that Reshape makes of ``shape``: 0 keeps a size, -1 stands for what is left."""
    sizes = [shape[k] if size == 0 else int(size) for k, size in enumerate(target)]
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = math.prod(shape) // rest
    if math.prod(sizes) != math.prod(shape):
        raise ValueError("sizes do not agree")
    return tuple(sizes)


def _same(v: Values, node: Node) -> list[Shape | None]:
    return [v.shapes[node.inputs[0]]]


def _product(v: Values, node: Node) -> list[Shape | None]:
    a, b = (v.shapes[name] for name in node.inputs[:2])
    if a[-1] != b[-2]:
        raise ValueError("sizes do not agree")
    return [(*broadcast(a[:-2], b[:-2]), a[-2], b[-1])]


def _gemm(v: Values, node: Node) -> list[Shape | None]:
    a, b = (v.shapes[name] for name in node.inputs[:2])
    rows = a[1] if node.attributes.get("transA", 0) else a[0]
    return [(rows, b[0] if node.attributes.get("transB", 0) else b[1])]


def _split(v: Values, node: Node) -> list[Shape | None]:
    shape, axis = v.shapes[node.inputs[0]], node.attributes.get("axis", 0)
    sizes = split_sizes(v, node)
    axis %= len(shape)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def split_sizes(v: Values, node: Node) -> list[int]:
    """The sizes of the parts that a Split makes."""
    given = (
        v.value(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else node.attributes.get("split")
    )
    size = v.shapes[node.inputs[0]][node.attributes.get("axis", 0)]
    if given is None:
        each = -(-size // len(node.outputs))
        sizes = [each] * (len(node.outputs) - 1)
        sizes.append(size - sum(sizes))
    else:
        sizes = [int(part) for part in given]
    if sum(sizes) != size or len(sizes) != len(node.outputs):
        raise ValueError("sizes do not agree")
    return sizes


def _gathered(v: Values, node: Node) -> list[Shape | None]:
    data, axis = v.shapes[node.inputs[0]], node.attributes.get("axis", 0)
    axis %= len(data)
    return [(*data[:axis], *v.shapes[node.inputs[1]], *data[axis + 1 :])]


def _reshape(v: Values, node: Node) -> list[Shape | None]:
    target = v.value(node.inputs[1])
    return [None if target is None else reshaped(v.shapes[node.inputs[0]], target)]


def _transposed(v: Values, node: Node) -> list[Shape | None]:
    shape = v.shapes[node.inputs[0]]
    return [tuple(shape[axis] for axis in node.attributes.get("perm", range(len(shape))[::-1]))]


def _sliced(v: Values, node: Node) -> list[Shape | None]:
    shape = v.shapes[node.inputs[0]]
    rest = [v.value(name) if name else None for name in node.inputs[1:]]
    index = slices(node, shape, rest)
    return [tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))]


def _elementwise(v: Values, node: Node) -> list[Shape | None]:
    return [broadcast(*[v.shapes[name] for name in node.inputs if name])]


def _reduced(v: Values, node: Node) -> list[Shape | None]:
    shape = v.shapes[node.inputs[0]]
    given = v.value(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    axes = {axis % len(shape) for axis in _axes(node, given) or range(len(shape))}
    keep = node.attributes.get("keepdims", 1)
    return [tuple(1 if k in axes else size for k, size in enumerate(shape) if keep or k not in axes)]


_SHAPES: Mapping[str, Callable[[Values, Node], list[Shape | None]]] = {
    **dict.fromkeys(
        ("Identity", "Cast", "Dropout", "LayerNormalization", "Softmax", "Trilu", "IsNaN"), _same
    ),
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "ReduceMean": _reduced,
    "MatMul": _product,
    "Gemm": _gemm,
    "Split": _split,
    "Gather": _gathered,
    "Reshape": _reshape,
    "Transpose": _transposed,
    "Slice": _sliced,
}
