"""The arithmetic of decoder layers in NumPy, as it is published."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight, over the last axis."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    return normed


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Normalised by mean and biased variance over the last axis, then weight and bias."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + np.float32(eps))
    normed: Array = centred / deviation * weight
    return normed if bias is None else normed + bias


def silu(x: Array) -> Array:
    """x · sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and the quotient 0, as it should be
        y: Array = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Array) -> Array:
    """GELU by its approximation with tanh."""
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    y: Array = 0.5 * x * (1 + np.tanh(inner))
    return y


def gelu(x: Array) -> Array:
    """GELU with erf."""
    erf = np.vectorize(math.erf, otypes=[np.float32])
    y: Array = 0.5 * x * (1 + erf(x * np.float32(1 / math.sqrt(2))))
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu}


def softcap(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap); x itself without a cap."""
    return x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotary embedding of the first 2 · pairs components of x [tokens, heads, d]; cos and sin are [tokens, pairs].

    Component 2j turns with 2j + 1 if ``interleaved``, else j with j + pairs.
    """
    pairs = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    result = np.empty_like(turned)
    if interleaved:
        first, second = (slice(0, None, 2), slice(1, None, 2))
    else:
        first, second = (slice(0, pairs), slice(pairs, None))
    a, b = turned[..., first], turned[..., second]
    result[..., first], result[..., second] = a * cos - b * sin, b * cos + a * sin
    return np.concatenate([result, rest], axis=-1)


def attention(q: Array, k: Array, v: Array, scale: float, window: int | None, cap: float | None) -> Array:
    """Causal attention: q [tokens, heads, d], k and v [tokens, kv_heads, d] to [tokens, heads · d]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores: Any = softcap(np.einsum("qhd,khd->hqk", q, k) * np.float32(scale), cap)
    distance = np.arange(len(q))[:, None] - np.arange(len(q))[None, :]
    seen = (distance >= 0) & (distance < (window or len(q)))
    scores = np.where(seen[None], scores, np.float32(-np.inf))
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", shares, v)
    return mixed.reshape(len(q), -1)
