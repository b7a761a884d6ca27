"""Causal self-attention in an ONNX graph: heads, mask and scale proven, the three projections found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from oazoo.formats.onnx_graph import Node
from oazoo.translators.onnx_arithmetic import Arithmetic
from oazoo.translators.onnx_kernels import Array
from oazoo.translators.onnx_values import slices, split_sizes
from oazoo.translators.onnx_view import Linear, Unproven

#: A masked score: as good as minus infinity under a softmax.
_MASKED = -1e4


@dataclass(frozen=True)
class Piece:
    """Columns ``start`` to ``stop`` of what a linear layer makes."""

    linear: Linear
    start: int
    stop: int


@dataclass(frozen=True)
class Attention:
    """Causal attention over ``heads`` heads."""

    q: Piece
    k: Piece
    v: Piece
    heads: int


class Matcher(Arithmetic):
    """All patterns over one graph."""

    def attention(self, name: str) -> Attention:
        """softmax(q kᵀ / sqrt(d) + causal mask) v, its heads side by side in the last axis."""
        name = self.resolve(name)
        joined = self.maker(name)
        if joined is None or joined.op != "Reshape":
            raise Unproven(f"{self.describe(name)} does not join the heads of an attention")
        mixed, before, scale, perm = self._heads(joined.inputs[0])
        product = self.maker(mixed)
        if product is None or product.op != "MatMul" or perm != (0, 2, 1, 3) or scale != 1 or before != mixed:
            raise Unproven(f"{self.describe(name)} does not join the heads of an attention", 1)
        shape = self.shape(mixed)
        if len(shape) != 4 or self.shape(name) != (shape[0], shape[2], shape[1] * shape[3]):
            raise Unproven(f"{self.describe(name)} joins {list(shape)} to {list(self.shape(name))}", 1)
        heads, dim = shape[1], shape[3]
        scores, scale = self._softmax(product.inputs[0])
        product_qk = self.maker(scores)
        if product_qk is None or product_qk.op != "MatMul":
            raise Unproven(f"{self.describe(scores)} are not the scores q·k of an attention", 3)
        pieces = []
        wanted = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
        for value, order in zip((*product_qk.inputs[:2], product.inputs[1]), wanted, strict=True):
            split, made, factor, perm = self._heads(value)
            scale *= factor
            if perm != order or self.shape(made)[2:] != (heads, dim) or split == made:
                raise Unproven(f"{self.describe(value)} is not cut into {heads} heads of {dim}", 4)
            pieces.append(self._piece(split))
        if abs(scale * math.sqrt(dim) - 1) > 1e-4:
            raise Unproven(
                f"the scores are scaled by {scale:.6g}, not by 1/sqrt({dim}) (the head's width)", 5
            )
        q, k, v = pieces
        return Attention(q, k, v, heads)

    def _softmax(self, name: str) -> tuple[str, float]:
        """The product under a softmax with a causal mask, and its scale."""
        name = self.resolve(name)
        node = self.maker(name)
        if node is not None and node.op == "Where":  # rows without any key: NaN becomes 0
            guard = self.maker(node.inputs[0])
            if guard is not None and guard.op == "IsNaN" and guard.inputs[0] == node.inputs[2]:
                node = self.maker(self.resolve(node.inputs[2]))
        if node is None or node.op != "Softmax" or node.attributes.get("axis", -1) not in (-1, 3):
            raise Unproven(f"{self.describe(name)} is no softmax over the keys", 1)
        scores, scale, masked = self.resolve(node.inputs[0]), 1.0, False
        for _ in range(8):
            step = self.maker(scores)
            if step is None or step.op not in ("Add", "Mul", "Div", "Where"):
                break
            if step.op == "Where":
                scores, mask = self._where(step)
            elif step.op == "Add":
                scores, mask = self._known_operand(step)
            else:
                scores, factor = self._scaled(step)
                scale *= factor
                continue
            if masked or not self._is_causal(mask):
                raise Unproven(f"{step}: the mask of the attention is not the causal one", 2)
            masked = True
        if not masked:
            raise Unproven(f"{self.describe(name)}: the attention has no causal mask", 2)
        return scores, scale

    def _where(self, node: Node) -> tuple[str, Array]:
        """What a Where keeps, and the mask to add that it stands for."""
        condition, one, other = node.inputs
        chosen = self.values.value(condition)
        if chosen is not None:
            for fill, kept, where in ((one, other, chosen), (other, one, ~chosen.astype(bool))):
                number = self.values.scalar(fill)
                if number is not None and number <= _MASKED:
                    return self.resolve(kept), np.where(where, -np.inf, 0.0)
        raise Unproven(f"{node}: its condition does not follow from the graph", 2)

    def _known_operand(self, node: Node) -> tuple[str, Array]:
        for one, other in (node.inputs, node.inputs[::-1]):
            value = self.values.value(self.resolve(one))
            if value is not None:
                return self.resolve(other), value
        raise Unproven(f"{node}: what it adds to the scores does not follow from the graph", 2)

    def _scaled(self, node: Node) -> tuple[str, float]:
        for position, other in ((1, 0), (0, 1)):
            number = self.values.scalar(self.resolve(node.inputs[position]))
            if number and (node.op == "Mul" or position == 1):
                return self.resolve(node.inputs[other]), number if node.op == "Mul" else 1 / number
        raise Unproven(f"{node}: its factor does not follow from the graph", 3)

    def _is_causal(self, mask: Array) -> bool:
        length = self.values.length
        if length < 2 or mask.ndim < 2 or mask.shape[-2:] != (length, length) or mask.size != length * length:
            return False
        square = mask.reshape(length, length)
        future = np.triu(np.ones((length, length), bool), 1)
        return bool((square[future] <= _MASKED).all() and (square[~future] == 0).all())

    def _heads(self, name: str) -> tuple[str, str, float, tuple[int, ...]]:
        """Behind transposes and scales of four axes: the value before the Reshape (if there is one), the reshaped value, the
        scale, and the order of its axes.
        """
        perm, scale = (0, 1, 2, 3), 1.0
        for _ in range(8):
            name = self.resolve(name)
            node = self.maker(name)
            if node is not None and node.op == "Transpose" and len(node.attributes.get("perm", ())) == 4:
                inner = node.attributes["perm"]
                perm = tuple(inner[axis] for axis in perm)
                name = node.inputs[0]
            elif node is not None and node.op in ("Mul", "Div"):
                name, factor = self._scaled(node)
                scale *= factor
            elif node is not None and node.op == "Reshape" and len(self.shape(name)) == 4:
                return self.resolve(node.inputs[0]), name, scale, perm
            else:
                break
        return name, name, scale, perm

    def _piece(self, name: str) -> Piece:
        """A part of a linear layer's result, cut along the last axis."""
        node = self.maker(name)
        if node is not None and node.op == "Split":
            whole = self.shape(node.inputs[0])
            if node.attributes.get("axis", 0) not in (-1, len(whole) - 1):
                raise Unproven(f"{node} does not split along the last axis", 4)
            sizes = split_sizes(self.values, node)
            number = node.outputs.index(name)
            start = sum(sizes[:number])
            return Piece(self.linear(node.inputs[0]), start, start + sizes[number])
        if node is not None and node.op == "Slice":
            whole = self.shape(node.inputs[0])
            parts = slices(
                node, whole, [self.values.value(part) if part else None for part in node.inputs[1:]]
            )
            cut = parts[-1]
            others = [range(size)[part] == range(size) for part, size in zip(parts[:-1], whole, strict=False)]
            if not all(others) or cut.step not in (None, 1):
                raise Unproven(f"{node} does not cut along the last axis", 4)
            start, stop, _ = cut.indices(whole[-1])
            return Piece(self.linear(node.inputs[0]), start, stop)
        linear = self.linear(name)
        return Piece(linear, 0, linear.rows)
