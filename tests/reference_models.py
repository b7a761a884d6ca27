"""Forward passes of the ready models in NumPy: what every other implementation is measured against.

Plain functions of a dictionary of arrays under the names that an ``.oam`` uses, and a typed config. Written
for reading, in the order of the published definitions; nothing here is imported by the product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig, config_from_json
from oazoo.formats.detect import open_source

Array = npt.NDArray[Any]


def load_oam(path: Path | str) -> tuple[dict[str, Array], ModelConfig]:
    """All weights of an ``.oam`` as float32 arrays, and its typed config."""
    with open_source(path) as source:
        config = config_from_json(source.metadata["family"], source.metadata["model"])
        return {name: np.array(tensor.numpy(), dtype=np.float32) for name, tensor in source.items()}, config


def logits(params: Mapping[str, Array], config: ModelConfig, ids: Array, dtype: Any = np.float64) -> Array:
    """Logits [tokens, vocabulary] for token ids [tokens], computed in ``dtype``."""
    cast = {name: np.asarray(value, dtype=dtype) for name, value in params.items()}
    run = decoder_logits if isinstance(config, DecoderConfig) else nanogpt_logits
    return run(cast, config, np.asarray(ids))  # type: ignore[arg-type]


def decoder_logits(p: Mapping[str, Array], c: DecoderConfig, ids: Array) -> Array:
    """The Llama family: RMSNorm, half-split rotary pairs, grouped-query attention, SwiGLU."""
    tokens = len(ids)
    x = p["embed.weight"][ids]
    positions = np.arange(tokens)
    inverse, scale = rope_inverse_frequencies(c, tokens)
    angle = (positions[:, None] * inverse[None, :]).astype(x.dtype)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        h = rms_norm(x, p[f"{at}.attn_norm.weight"], c.norm_eps)
        q = linear(p, f"{at}.attn.q", h).reshape(tokens, c.num_heads, c.head_dim)
        k = linear(p, f"{at}.attn.k", h).reshape(tokens, c.num_kv_heads, c.head_dim)
        v = linear(p, f"{at}.attn.v", h).reshape(tokens, c.num_kv_heads, c.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = c.num_heads // c.num_kv_heads
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        mixed = attention(q, k, v, attention_mask(tokens, c.layer_window(layer)))
        x = x + linear(p, f"{at}.attn.o", mixed.reshape(tokens, -1))
        h = rms_norm(x, p[f"{at}.mlp_norm.weight"], c.norm_eps)
        x = x + linear(
            p, f"{at}.mlp.down", silu(linear(p, f"{at}.mlp.gate", h)) * linear(p, f"{at}.mlp.up", h)
        )
    x = rms_norm(x, p["norm.weight"], c.norm_eps)
    return x @ p["embed.weight" if c.tied_embeddings else "head.weight"].T


def nanogpt_logits(p: Mapping[str, Array], c: NanoGPTConfig, ids: Array) -> Array:
    """GPT-2: LayerNorm, learned positions, fused qkv, GELU in the form that the config names."""
    gelu = {"gelu_tanh": gelu_tanh, "gelu": gelu_erf}[c.activation]
    tokens = len(ids)
    x = p["embed.weight"][ids] + p["positions.weight"][:tokens]
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        h = layer_norm(x, p[f"{at}.attn_norm.weight"], p.get(f"{at}.attn_norm.bias"), c.norm_eps)
        qkv = linear(p, f"{at}.attn.qkv", h).reshape(tokens, 3, c.num_heads, c.head_dim)
        mixed = attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], attention_mask(tokens, None))
        x = x + linear(p, f"{at}.attn.o", mixed.reshape(tokens, -1))
        h = layer_norm(x, p[f"{at}.mlp_norm.weight"], p.get(f"{at}.mlp_norm.bias"), c.norm_eps)
        x = x + linear(p, f"{at}.mlp.down", gelu(linear(p, f"{at}.mlp.up", h)))
    x = layer_norm(x, p["norm.weight"], p.get("norm.bias"), c.norm_eps)
    return x @ p["embed.weight" if c.tied_embeddings else "head.weight"].T


def linear(p: Mapping[str, Array], name: str, x: Array) -> Array:
    """x W^T + b, the bias if there is one."""
    y = x @ p[f"{name}.weight"].T
    bias = p.get(f"{name}.bias")
    return y if bias is None else y + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Normalised by mean and biased variance, then weight and bias."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    y = centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def silu(x: Array) -> Array:
    """x · sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    """0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    """0.5 x (1 + erf(x / sqrt(2)))."""
    return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2)))


def attention_mask(tokens: int, window: int | None) -> npt.NDArray[np.bool_]:
    """[query, key]: True where a query may look; the window counts the query's own position."""
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    allowed = distance >= 0
    return allowed if window is None else allowed & (distance < window)


def attention(q: Array, k: Array, v: Array, mask: npt.NDArray[np.bool_]) -> Array:
    """softmax(q k^T / sqrt(d)) v for [tokens, heads, d] arrays, one mask for all heads."""
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(mask[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of [tokens, heads, d]: rows j and j + d/2 of a head turn together by angle j."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_inverse_frequencies(c: DecoderConfig, tokens: int) -> tuple[npt.NDArray[np.float64], float]:
    """Inverse frequencies [d/2] for a sequence of ``tokens``, and the factor on cos and sin.

    Sources: linear interpolation (arXiv:2306.15595), dynamic NTK scaling, YaRN (arXiv:2309.00071), Llama
    3.1's rule as its model card and reference code publish it.
    """
    d, theta, scaling = c.head_dim, c.rope_theta, c.rope_scaling
    exponent = np.arange(0, d, 2, dtype=np.float64) / d
    inverse = theta**-exponent
    if scaling is None:
        return inverse, 1.0
    factor, original = scaling.factor, scaling.original_max_positions
    if scaling.kind == "linear":
        return inverse / factor, 1.0
    if scaling.kind == "factors":
        return inverse / np.array(scaling.factors), 1.0
    assert original is not None
    if scaling.kind == "dynamic":
        length = max(tokens, original)
        grown = theta * (factor * length / original - (factor - 1)) ** (d / (d - 2))
        return grown**-exponent, 1.0
    if scaling.kind == "llama3":
        assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
        wavelength = 2 * math.pi / inverse
        ratio = original / wavelength
        blend = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * inverse / factor + blend * inverse, 1.0
    assert scaling.kind == "yarn" and scaling.beta_fast is not None and scaling.beta_slow is not None

    def dimension(rotations: float) -> float:
        return d * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    high = high + 0.001 if low == high else high
    extrapolated = 1 - np.clip((np.arange(d // 2) - low) / (high - low), 0, 1)
    scale = scaling.attention_factor
    if scale is None:

        def mscale(m: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

        if scaling.mscale and scaling.mscale_all_dim:
            scale = mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
        else:
            scale = mscale(1.0)
    return inverse / factor * (1 - extrapolated) + inverse * extrapolated, scale
