"""The parts of a language model as ONNX nodes: norms, products, activations, rotary positions, attention.

Written out in operators that any runtime has. Sequences are taken whole: [batch, sequence, width] throughout.
"""

from __future__ import annotations

import math

import numpy as np

from oazoo.configs import RopeScaling
from oazoo.configs.frequencies import inverse_frequencies
from oazoo.translators.onnx_out_nodes import GraphWriter

TOKENS, LENGTH, POSITIONS = "input_ids", "length", "positions"
#: A masked score: the lowest float32, whose exponential under a softmax is zero.
_MASKED = float(np.finfo(np.float32).min)


def positions(g: GraphWriter) -> None:
    """``length``: the length of the sequence, a scalar; ``positions``: 0, 1, 2 … int64 [sequence]."""
    g.op("shape", "Shape", TOKENS)
    g.op(LENGTH, "Gather", "shape", g.whole(1))
    g.op(POSITIONS, "Range", g.whole(0), LENGTH, g.whole(1))


def masks(g: GraphWriter, window: int | None) -> None:
    """``mask.causal`` and, with a window, ``mask.window``: bool [query, key], true where a query may look."""
    rows = g.op("mask.queries", "Unsqueeze", POSITIONS, g.axes(1))
    columns = g.op("mask.keys", "Unsqueeze", POSITIONS, g.axes(0))
    distance = g.op("mask.distance", "Sub", rows, columns)
    g.op("mask.causal", "GreaterOrEqual", distance, g.whole(0))
    if window is not None:
        near = g.op("mask.near", "Less", distance, g.whole(window))
        g.op("mask.window", "And", "mask.causal", near)


def embedding(g: GraphWriter, name: str, weight: str, ids: str) -> str:
    """Rows of a table, cast after they are taken."""
    return g.widened(weight, g.op(name, "Gather", weight, ids))


def linear(g: GraphWriter, at: str, x: str, name: str = "") -> str:
    """x Wᵀ + b, the bias if there is one."""
    name = name or at
    biased = g.has(f"{at}.bias")
    product = matmul(g, f"{name}.product" if biased else name, x, f"{at}.weight")
    return g.op(name, "Add", product, g.weight(f"{at}.bias")) if biased else product


def matmul(g: GraphWriter, name: str, x: str, weight: str) -> str:
    """x Wᵀ of a weight that is stored as [out, in]."""
    turned = g.op(f"{weight}.T", "Transpose", g.weight(weight), perm=[1, 0])
    return g.op(name, "MatMul", x, turned)


def layer_norm(g: GraphWriter, at: str, x: str, eps: float) -> str:
    """Normalised by mean and variance, then weight and, if there is one, bias."""
    bias = [g.weight(f"{at}.bias")] if g.has(f"{at}.bias") else []
    return g.op(at, "LayerNormalization", x, g.weight(f"{at}.weight"), *bias, axis=-1, epsilon=eps)


def rms_norm(g: GraphWriter, at: str, x: str, eps: float, offset: float = 0.0) -> str:
    """x / sqrt(mean(x²) + eps) · (weight + offset)."""
    square = g.op(f"{at}.square", "Mul", x, x)
    mean = g.op(f"{at}.mean", "ReduceMean", square, axes=[-1], keepdims=1)
    root = g.op(f"{at}.root", "Sqrt", g.op(f"{at}.eps", "Add", mean, g.number(eps)))
    weight = g.weight(f"{at}.weight")
    if offset:
        weight = g.op(f"{at}.scale", "Add", weight, g.number(offset))
    return g.op(at, "Mul", g.op(f"{at}.normal", "Div", x, root), weight)


def activation(g: GraphWriter, name: str, kind: str, x: str) -> str:
    """silu: x · sigmoid(x). gelu: 0.5 x (1 + erf(x / √2)). gelu_tanh: 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    if kind == "silu":
        return g.op(name, "Mul", x, g.op(f"{name}.sigmoid", "Sigmoid", x))
    if kind == "gelu":
        bent = g.op(f"{name}.erf", "Erf", g.op(f"{name}.argument", "Div", x, g.number(math.sqrt(2))))
    else:
        cube = g.op(f"{name}.cube", "Mul", g.op(f"{name}.square", "Mul", x, x), x)
        inner = g.op(f"{name}.inner", "Add", x, g.op(f"{name}.cubic", "Mul", cube, g.number(0.044715)))
        bent = g.op(
            f"{name}.tanh", "Tanh", g.op(f"{name}.argument", "Mul", inner, g.number(math.sqrt(2 / math.pi)))
        )
    half = g.op(f"{name}.half", "Mul", x, g.number(0.5))
    return g.op(name, "Mul", half, g.op(f"{name}.gate", "Add", bent, g.number(1.0)))


def softcap(g: GraphWriter, name: str, x: str, cap: float) -> str:
    """cap · tanh(x / cap)."""
    bent = g.op(f"{name}.tanh", "Tanh", g.op(f"{name}.argument", "Div", x, g.number(cap)))
    return g.op(name, "Mul", bent, g.number(cap))


def rotary_tables(g: GraphWriter, name: str, width: int, theta: float, scaling: RopeScaling | None) -> None:
    """``NAME.cos`` and ``NAME.sin``: float32 [sequence, width / 2] of position times inverse frequency."""
    inverse, magnitude = _inverse(g, name, width, theta, scaling)
    column = g.op(f"{name}.positions", "Unsqueeze", POSITIONS, g.axes(1))
    angle = g.op(f"{name}.angle", "Mul", g.op(f"{name}.float", "Cast", column, to=1), inverse)
    for part, kind in (("cos", "Cos"), ("sin", "Sin")):
        plain = magnitude == 1
        made = g.op(f"{name}.{part}" if plain else f"{name}.{part}.plain", kind, angle)
        if not plain:
            g.op(f"{name}.{part}", "Mul", made, g.number(magnitude))


def _inverse(
    g: GraphWriter, name: str, width: int, theta: float, scaling: RopeScaling | None
) -> tuple[str, float]:
    """The inverse frequencies, and the factor on cosine and sine; two scalings depend on the length of the sequence."""
    kind, original = (scaling.kind, scaling.original_max_positions) if scaling is not None else ("", None)
    values, magnitude = inverse_frequencies(width, theta, scaling)
    inverse = g.constant(f"{name}.inverse", values)
    if kind == "longrope":
        assert original is not None
        longer, _ = inverse_frequencies(width, theta, scaling, original + 1)
        beyond = g.op(f"{name}.beyond", "Greater", LENGTH, g.whole(original))
        inverse = g.op(f"{name}.chosen", "Where", beyond, g.constant(f"{name}.inverse.long", longer), inverse)
    elif kind == "dynamic" and width > 2:
        assert scaling is not None and original is not None
        # growth = 1 + factor · (longest / original - 1), which is exactly 1 for sequences that are not longer.
        length = g.op(f"{name}.length", "Cast", LENGTH, to=1)
        longest = g.op(f"{name}.longest", "Max", length, g.number(original))
        ratio = g.op(f"{name}.ratio", "Div", longest, g.number(original))
        excess = g.op(f"{name}.excess", "Sub", ratio, g.number(1.0))
        growth = g.op(
            f"{name}.growth",
            "Add",
            g.op(f"{name}.scaled", "Mul", excess, g.number(scaling.factor)),
            g.number(1.0),
        )
        powers = (-2 * np.arange(width // 2, dtype=np.float64) / (width - 2)).astype(np.float32)
        slower = g.op(f"{name}.slower", "Pow", growth, g.constant(f"{name}.powers", powers))
        inverse = g.op(f"{name}.grown", "Mul", inverse, slower)
    return inverse, magnitude


def rotate(g: GraphWriter, name: str, x: str, table: str, width: int, rotated: int) -> str:
    """Components j and j + r/2 of a head's first r turn together; x is [batch, heads, sequence, width]."""
    half = rotated // 2
    rest = (width - rotated,) if rotated < width else ()
    first, second, *others = g.split(f"{name}.parts", x, (half, half, *rest))
    cos, sin = f"{table}.cos", f"{table}.sin"
    turned = [
        g.op(
            f"{name}.first",
            "Sub",
            g.op(f"{name}.first.cos", "Mul", first, cos),
            g.op(f"{name}.second.sin", "Mul", second, sin),
        ),
        g.op(
            f"{name}.second",
            "Add",
            g.op(f"{name}.second.cos", "Mul", second, cos),
            g.op(f"{name}.first.sin", "Mul", first, sin),
        ),
    ]
    return g.op(f"{name}.rotated", "Concat", *turned, *others, axis=-1)


def heads(g: GraphWriter, name: str, x: str, count: int, width: int) -> str:
    """[batch, sequence, heads · width] → [batch, sequence, heads, width]."""
    return g.op(f"{name}.heads", "Reshape", x, g.shape(0, 0, count, width))


def heads_first(g: GraphWriter, name: str, x: str) -> str:
    """[batch, sequence, heads, width] → [batch, heads, sequence, width]."""
    return g.op(f"{name}.turned", "Transpose", x, perm=[0, 2, 1, 3])


def repeat_heads(g: GraphWriter, name: str, x: str, kv_heads: int, times: int, width: int) -> str:
    """Every head of [batch, heads, sequence, width] ``times`` times, side by side."""
    if times == 1:
        return x
    apart = g.op(f"{name}.apart", "Unsqueeze", x, g.axes(2))
    repeated = g.op(f"{name}.repeated", "Expand", apart, g.shape(1, 1, times, 1, 1))
    return g.op(f"{name}.all", "Reshape", repeated, g.shape(0, kv_heads * times, -1, width))


def attention(
    g: GraphWriter,
    at: str,
    q: str,
    k: str,
    v: str,
    *,
    mask: str,
    scale: float,
    width: int,
    cap: float | None = None,
) -> str:
    """softmax(softcap(scale · q kᵀ)) v of [batch, heads, sequence, head] → [batch, sequence, width]."""
    keys = g.op(f"{at}.k.columns", "Transpose", k, perm=[0, 1, 3, 2])
    scores = g.op(f"{at}.scores", "Mul", g.op(f"{at}.dots", "MatMul", q, keys), g.number(scale))
    if cap is not None:
        scores = softcap(g, f"{at}.scores.capped", scores, cap)
    masked = g.op(f"{at}.masked", "Where", mask, scores, g.number(_MASKED))
    weights = g.op(f"{at}.weights", "Softmax", masked, axis=-1)
    mixed = g.op(f"{at}.mixed", "MatMul", weights, v)
    side = g.op(f"{at}.mixed.turned", "Transpose", mixed, perm=[0, 2, 1, 3])
    return g.op(f"{at}.joined", "Reshape", side, g.shape(0, 0, width))
