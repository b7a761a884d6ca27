"""LayerNorm and GELU in an ONNX graph, as one operation or as the arithmetic that exporters take them apart into."""

from __future__ import annotations

import math

import numpy as np

from oazoo.formats.onnx_graph import Node
from oazoo.translators.onnx_kernels import ELEMENTWISE, Array, gelu_erf, gelu_tanh, numbers
from oazoo.translators.onnx_view import DEEPEST, GraphView, Norm, Unproven


class Arithmetic(GraphView):
    """Patterns that are proven by evaluating them."""

    def norm(self, name: str) -> Norm:
        """LayerNormalization, or the arithmetic that it stands for."""
        name = self.flat(name)
        node = self.maker(name)
        if node is not None and node.op == "LayerNormalization":
            rank = len(self.shape(node.inputs[0]))
            weight, bias = self.vector(node.inputs[1]), None
            if len(node.inputs) > 2 and node.inputs[2]:
                bias = self.vector(node.inputs[2])
                if bias is None:
                    raise Unproven(f"{node}: its bias is no stored vector")
            if node.attributes.get("axis", -1) not in (-1, rank - 1) or weight is None:
                raise Unproven(f"{node} is not over the last axis with a stored weight")
            return Norm(self.flat(node.inputs[0]), weight, bias, _short(node.attributes.get("epsilon", 1e-5)))
        return self._norm_parts(name)

    def _norm_parts(self, name: str) -> Norm:
        bias: str | None = None
        rest, bias = self._peel(name, "Add")
        rest, weight = self._peel(rest, "Mul")
        if weight is None:
            raise Unproven(f"{self.describe(name)} is no LayerNorm with a stored weight")
        for leaf in self._means(rest):
            eps = self._normalises(rest, leaf)
            if eps is not None:
                return Norm(self.flat(leaf), weight, bias, eps)
        raise Unproven(f"{self.describe(name)} is not the arithmetic of a LayerNorm")

    def _peel(self, name: str, op: str) -> tuple[str, str | None]:
        """Take off the addition of, or product with, a stored vector."""
        name = self.resolve(name)
        node = self.maker(name)
        if node is not None and node.op == op:
            for one, other in (node.inputs, node.inputs[::-1]):
                stored = self.vector(one)
                if stored is not None and self.source[stored].info.numel > 1:
                    return self.resolve(other), stored
        return name, None

    def _means(self, name: str) -> list[str]:
        """Inputs of the means that a value is computed from."""
        found: list[str] = []
        todo, seen = [(name, 0)], {name}
        while todo:
            value, depth = todo.pop()
            node = self.maker(self.resolve(value))
            if node is None or depth > 12 or not (node.op in ELEMENTWISE or node.op == "ReduceMean"):
                continue
            if node.op == "ReduceMean":
                found.append(self.resolve(node.inputs[0]))
            for part in node.inputs:
                if part and part not in seen:
                    seen.add(part)
                    todo.append((part, depth + 1))
        return found

    def _normalises(self, name: str, leaf: str) -> float | None:
        """The epsilon with which ``name`` is the normalised ``leaf``; None if it is not."""
        random = np.random.default_rng(0)
        # The smaller the spread, the more of the result is epsilon.
        small = random.normal(size=(4, 64)) * 1e-3
        result = self.cone(name, leaf, small)
        centred = small - small.mean(-1, keepdims=True)
        if result is None or result.shape != small.shape or not np.all(result):
            return None
        eps = float(np.median((centred / result) ** 2 - (centred**2).mean(-1, keepdims=True)))
        for scale in (1e-3, 1.0, 50.0):
            x = random.normal(size=(3, 48)) * scale + scale
            centred = x - x.mean(-1, keepdims=True)
            wanted = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
            result = self.cone(name, leaf, x)
            if result is None or result.shape != x.shape or not np.allclose(result, wanted, 1e-6, 1e-6):
                return None
        return _short(eps) if 0 <= eps < 1 else None

    def cone(self, name: str, leaf: str, sample: Array) -> Array | None:
        """The value of ``name`` if ``leaf`` were ``sample``: None if it depends on anything but that and single numbers."""
        computed: dict[str, Array | None] = {leaf: sample}

        def run(value: str, depth: int) -> Array | None:
            value = self.resolve(value)
            if value in computed:
                return computed[value]
            computed[value] = None  # also for what leads back to itself
            single = self.values.value(value)
            if single is not None and single.size == 1:
                computed[value] = single.reshape(())
                return computed[value]
            node = self.maker(value)
            if node is None or depth > DEEPEST:
                return None
            if node.op == "ReduceMean":
                return self._mean(node, run(node.inputs[0], depth + 1), computed, value)
            if node.op not in ELEMENTWISE or "" in node.inputs:
                return None
            parts = [run(part, depth + 1) for part in node.inputs]
            if any(part is None for part in parts):
                return None
            try:
                with np.errstate(all="ignore"):
                    computed[value] = numbers(np.asarray(ELEMENTWISE[node.op](node, *parts)))
            except (ValueError, TypeError):
                return None
            return computed[value]

        return run(name, 0)

    def _mean(
        self, node: Node, data: Array | None, computed: dict[str, Array | None], value: str
    ) -> Array | None:
        axes = self.values.value(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = np.array(node.attributes.get("axes", ())) if axes is None else axes
        rank = len(self.values.shapes.get(node.inputs[0], ()))
        last = axes.size == 1 and int(axes.reshape(-1)[0]) in (-1, rank - 1) and rank > 0
        if data is None or not last or not node.attributes.get("keepdims", 1):
            return None
        computed[value] = data.mean(-1, keepdims=True)
        return computed[value]

    def gelu(self, name: str) -> tuple[str, str]:
        """Which form of GELU (``gelu`` or ``gelu_tanh``) of which value."""
        name = self.flat(name)
        leaf = self._leaf(name)
        x = np.linspace(-9, 9, 721)
        result = self.cone(name, leaf, x) if leaf is not None else None
        if leaf is not None and result is not None and result.shape == x.shape:
            for form, function in (("gelu", gelu_erf), ("gelu_tanh", gelu_tanh)):
                if np.abs(result - function(x)).max() < 1e-5:
                    return form, leaf
        raise Unproven(f"{self.describe(name)} is not GELU of one value, in its exact or tanh form")

    def _leaf(self, name: str) -> str | None:
        """The one value that is not made element by element, or from a stored vector, of which ``name`` is computed."""
        leaves: set[str] = set()
        todo, seen = [name], {name}
        while todo:
            value = self.resolve(todo.pop())
            known = self.values.value(value)
            if known is not None and known.size == 1:
                continue
            node = self.maker(value)
            if (
                node is None
                or node.op not in ELEMENTWISE
                or any(self.vector(part) for part in self._wide(node))
            ):
                leaves.add(value)
                continue
            for part in node.inputs:
                if part not in seen and len(seen) < 256:
                    seen.add(part)
                    todo.append(part)
        return leaves.pop() if len(leaves) == 1 else None

    def _wide(self, node: Node) -> list[str]:
        """Inputs that are more than one number."""
        return [part for part in node.inputs if math.prod(self.values.shapes.get(part, (2,))) != 1]


def _short(value: float) -> float:
    """A number that was stored in 32 bits, in its shortest decimal form: 1e-05, not 9.999999747378752e-06."""
    return float(f"{np.float32(value):.6g}")
