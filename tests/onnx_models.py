"""NanoGPT as ONNX graphs of many forms: the same weights, written as different exporters write them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
VOCAB, WIDTH, HEADS, CONTEXT, INNER, LAYERS = 20, 12, 3, 9, 28, 2


def weights(seed: int = 0, bias: bool = True) -> dict[str, Array]:
    """Random weights under the names that an ``.oam`` uses."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, WIDTH),
        "positions.weight": (CONTEXT, WIDTH),
    }

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    for layer in range(LAYERS):
        at = f"layers.{layer}"
        add(f"{at}.attn_norm", WIDTH)
        add(f"{at}.attn.qkv", 3 * WIDTH, WIDTH)
        add(f"{at}.attn.o", WIDTH, WIDTH)
        add(f"{at}.mlp_norm", WIDTH)
        add(f"{at}.mlp.up", INNER, WIDTH)
        add(f"{at}.mlp.down", WIDTH, INNER)
    add("norm", WIDTH)
    shapes["head.weight"] = (VOCAB, WIDTH)
    return {name: random.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes.items()}


class Builder:
    """One graph. Options choose how each part is written; weights get names that say nothing."""

    def __init__(self, params: dict[str, Array], **options: Any) -> None:
        self.p, self.o = params, options
        self.nodes: list[Any] = []
        self.stored: list[TensorProto] = []
        self.names: dict[str, str] = {}

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        number = len(self.nodes)
        out = [f"v{number}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), out, **attributes))
        return out[0] if outputs == 1 else out

    def store(self, value: Array, name: str = "") -> str:
        """An initialiser with an anonymous name."""
        named = f"onnx::Value_{100 + len(self.stored)}"
        self.names[named] = name
        self.stored.append(numpy_helper.from_array(np.ascontiguousarray(value), named))
        return named

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """A number or list, in a Constant node."""
        named: str = self.node("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))
        return named

    def ints(self, *value: int) -> str:
        return self.constant(value, np.int64)

    def linear(self, x: str, name: str, columns: slice = slice(None)) -> str:
        weight = self.p[f"{name}.weight"][columns]
        bias = self.p.get(f"{name}.bias")
        form = self.o.get("linear", "matmul")
        if form.startswith("gemm"):
            transposed = int(form == "gemm_t")
            flat = self.node("Reshape", x, self.ints(-1, weight.shape[1]))
            inputs = [flat, self.store(weight if transposed else weight.T, name)]
            if bias is not None:
                inputs.append(self.store(bias[columns]))
            y = self.node("Gemm", *inputs, transB=transposed, alpha=self.o.get("alpha", 1.0))
            length = self.node("Shape", x)
            size = self.node(
                "Concat", self.node("Slice", length, self.ints(0), self.ints(2)), self.ints(-1), axis=0
            )
            return str(self.node("Reshape", y, size))
        if form == "transpose":
            stored = self.node("Transpose", self.node("Identity", self.store(weight, name)), perm=[1, 0])
        else:
            stored = self.store(weight.T, name)
        y = self.node("MatMul", x, stored)
        return y if bias is None else str(self.node("Add", self.store(bias[columns]), y))

    def norm(self, x: str, name: str) -> str:
        weight, bias = self.p[f"{name}.weight"], self.p.get(f"{name}.bias")
        if self.o.get("norm") != "parts":
            stored = [self.store(part, name) for part in (weight, bias) if part is not None]
            return str(self.node("LayerNormalization", x, *stored, epsilon=1e-5, axis=-1))
        centred = self.node("Sub", x, self.node("ReduceMean", x, axes=[-1]))
        squares = self.node("Pow", centred, self.constant(2.0))
        variance = self.node(
            "Add", self.node("ReduceMean", squares, axes=[-1]), self.constant(self.o.get("eps", 1e-5))
        )
        y = self.node("Div", centred, self.node("Sqrt", variance))
        y = self.node("Mul", y, self.store(weight, name))
        return y if bias is None else str(self.node("Add", y, self.store(bias)))

    def gelu(self, x: str) -> str:
        form, one, half = self.o.get("gelu", "erf"), self.constant(1.0), self.constant(0.5)
        if form == "erf":
            y = self.node("Erf", self.node("Mul", x, self.constant(1 / math.sqrt(2))))
            return str(self.node("Mul", self.node("Mul", x, half), self.node("Add", one, y)))
        if form == "tanh":
            cube = self.node("Mul", self.node("Pow", x, self.constant(3.0)), self.constant(0.044715))
            y = self.node("Mul", self.node("Add", x, cube), self.constant(math.sqrt(2 / math.pi)))
            return str(
                self.node("Mul", half, self.node("Mul", x, self.node("Add", self.node("Tanh", y), one)))
            )
        if form == "op":
            return str(self.node("Gelu", x, approximate="tanh"))
        return str(self.node("Relu", x))

    def attention(self, x: str, at: str) -> str:
        if self.o.get("qkv") == "split":
            parts = [self.linear(x, f"{at}.qkv", slice(k * WIDTH, (k + 1) * WIDTH)) for k in range(3)]
        elif self.o.get("qkv") == "slices":
            y = self.linear(x, f"{at}.qkv")
            ends = [self.ints(k * WIDTH) for k in range(4)]
            parts = [self.node("Slice", y, ends[k], ends[k + 1], self.ints(2)) for k in range(3)]
        else:
            y = self.linear(x, f"{at}.qkv")
            parts = self.node("Split", y, self.ints(WIDTH, WIDTH, WIDTH), outputs=3, axis=-1)
        if self.o.get("order"):
            parts = [parts[k] for k in self.o["order"]]
        heads = self.ints(1, -1, self.o.get("heads", HEADS), WIDTH // self.o.get("heads", HEADS))
        q, k, v = (self.node("Reshape", part, heads) for part in parts)
        q, v = (self.node("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, v))
        scale = self.o.get("scale", 1 / math.sqrt(WIDTH // HEADS))
        if self.o.get("mask") == "sdpa":
            k = self.node("Transpose", self.node("Transpose", k, perm=[0, 2, 1, 3]), perm=[0, 1, 3, 2])
            root = self.constant(math.sqrt(scale))
            scores = self.node("MatMul", self.node("Mul", q, root), self.node("Mul", k, root))
        else:
            k = self.node("Transpose", k, perm=[0, 2, 3, 1])
            scores = self.node("Mul", self.node("MatMul", q, k), self.constant(scale))
        shares = self.node("Softmax", self.masked(scores), axis=-1)
        if self.o.get("mask") == "sdpa":
            shares = self.node("Where", self.node("IsNaN", shares), self.constant(0.0), shares)
        mixed = self.node("Transpose", self.node("MatMul", shares, v), perm=[0, 2, 1, 3])
        return self.linear(self.node("Reshape", mixed, self.ints(1, -1, WIDTH)), f"{at}.o")

    def masked(self, scores: str) -> str:
        form = self.o.get("mask", "buffer")
        length = self.node("Gather", self.node("Shape", "ids"), self.constant(1, np.int64), axis=0)
        square = self.node("Concat", *[self.node("Unsqueeze", length, self.ints(0))] * 2, axis=0)
        if form == "none":
            return scores
        if form == "buffer":  # nanoGPT's own: a stored triangle, cut to the length
            triangle = np.tri(CONTEXT, k=self.o.get("diagonal", 0), dtype=np.float32)[None, None]
            stop = self.node("Unsqueeze", length, self.ints(0))
            cut = self.node("Slice", self.store(triangle), self.ints(0), stop, self.ints(2))
            cut = self.node("Slice", cut, self.ints(0), stop, self.ints(3))
            hidden = self.node("Equal", cut, self.constant(0.0))
            return str(self.node("Where", hidden, self.constant(-np.inf), scores))
        fill = helper.make_tensor("fill", TensorProto.FLOAT, [1], [-np.inf])
        full = self.node("ConstantOfShape", square, value=fill)
        return str(self.node("Add", scores, self.node("Trilu", full, self.constant(1, np.int64), upper=1)))

    def model(self) -> onnx.ModelProto:
        length = self.node("Gather", self.node("Shape", "ids"), self.constant(1, np.int64), axis=0)
        places = self.node(
            "Range", self.constant(self.o.get("first", 0), np.int64), length, self.constant(1, np.int64)
        )
        tokens = self.store(self.p["embed.weight"], "embed")
        x = self.node("Gather", tokens, "ids")
        x = self.node("Add", x, self.node("Gather", self.store(self.p["positions.weight"]), places))
        for layer in range(LAYERS):
            at = f"layers.{layer}"
            y = self.attention(self.norm(x, f"{at}.attn_norm"), f"{at}.attn")
            x = self.node("Add", y, x) if self.o.get("swapped") else self.node("Add", x, y)
            y = self.gelu(self.linear(self.norm(x, f"{at}.mlp_norm"), f"{at}.mlp.up"))
            x = self.node("Add", x, self.node("Identity", self.linear(y, f"{at}.mlp.down")))
        x = self.norm(x, "norm")
        if self.o.get("tied"):
            self.node("MatMul", x, self.node("Transpose", tokens, perm=[1, 0]))
        else:
            self.linear(x, "head")
        self.nodes[-1].output[0] = "logits"
        graph = helper.make_graph(
            self.nodes,
            "nanogpt",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, "n"])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "n", VOCAB])],
            self.stored,
        )
        opset = 17 if self.o.get("norm") == "parts" else 20
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
