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


def logits(
    params: Mapping[str, Array],
    config: ModelConfig,
    ids: Array,
    dtype: Any = np.float64,
    length: int | None = None,
) -> Array:
    """Logits [tokens, vocabulary] for token ids [tokens], computed in ``dtype``.

    ``length``: the longest sequence that rotary scaling prepares for, where that matters; the tokens if None.
    """
    cast = {name: np.asarray(value, dtype=dtype) for name, value in params.items()}
    if isinstance(config, DecoderConfig):
        return decoder_logits(cast, config, np.asarray(ids), length)
    assert isinstance(config, NanoGPTConfig)
    return nanogpt_logits(cast, config, np.asarray(ids))


def decoder_logits(p: Mapping[str, Array], c: DecoderConfig, ids: Array, length: int | None = None) -> Array:
    """The decoder and every field of its config; ``length`` is the longest sequence that rotary scaling prepares for."""
    tokens = len(ids)
    x = p["embed.weight"][ids]
    if c.embedding_scale is not None:
        x = x * c.embedding_scale
    for layer in range(c.num_layers):
        at = f"layers.{layer}"
        h = norm(p, c, f"{at}.attn_norm", x) if c.pre_norm else x
        attended = decoder_attention(p, c, layer, h, length or tokens)
        if c.post_norm:
            attended = norm(p, c, f"{at}.attn_post_norm", attended)
        after = x + attended
        h = x if c.parallel_residual else after
        h = norm(p, c, f"{at}.mlp_norm", h) if c.pre_norm else h
        fed = (
            mixture_of_experts(p, c, f"{at}.moe", h)
            if c.is_moe(layer)
            else feed_forward(p, c, f"{at}.mlp", h)
        )
        if c.post_norm:
            fed = norm(p, c, f"{at}.mlp_post_norm", fed)
        x = after + fed
    x = norm(p, c, "norm", x)
    return softcap(x @ p["embed.weight" if c.tied_embeddings else "head.weight"].T, c.logit_softcap)


def decoder_attention(p: Mapping[str, Array], c: DecoderConfig, layer: int, h: Array, length: int) -> Array:
    """Grouped-query attention with rotary positions, its output projection included."""
    tokens, at = len(h), f"layers.{layer}.attn"
    q, k, v = (linear(p, f"{at}.{name}", h) for name in "qkv")
    if c.qk_norm == "full":
        q, k = norm(p, c, f"{at}.q_norm", q, "rms"), norm(p, c, f"{at}.k_norm", k, "rms")
    q = q.reshape(tokens, c.num_heads, c.head_dim)
    k = k.reshape(tokens, c.num_kv_heads, c.head_dim)
    v = v.reshape(tokens, c.num_kv_heads, c.head_dim)
    if c.qk_norm == "head":
        q, k = norm(p, c, f"{at}.q_norm", q, "rms"), norm(p, c, f"{at}.k_norm", k, "rms")
    inverse, magnitude = rope_inverse_frequencies(c, length, layer)
    angle = (np.arange(tokens)[:, None] * inverse[None, :]).astype(h.dtype)
    cos, sin = np.cos(angle) * magnitude, np.sin(angle) * magnitude
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = c.num_heads // c.num_kv_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    mask = attention_mask(tokens, c.layer_window(layer))
    mixed = attention(q, k, v, mask, c.score_scale, c.attention_softcap)
    return linear(p, f"{at}.o", mixed.reshape(tokens, -1))


def feed_forward(p: Mapping[str, Array], c: DecoderConfig, at: str, h: Array) -> Array:
    """down(act(gate(h)) · up(h)), or down(act(up(h))) without a gate."""
    act = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu_erf}[c.activation]
    up = linear(p, f"{at}.up", h)
    inner = act(linear(p, f"{at}.gate", h)) * up if c.gated_mlp else act(up)
    return linear(p, f"{at}.down", inner)


def mixture_of_experts(p: Mapping[str, Array], c: DecoderConfig, at: str, h: Array) -> Array:
    """Each token through its most probable experts, weighted by the router's softmax; a shared expert for all.

    Sources: Mixtral (arXiv:2401.04088), Qwen1.5-MoE's shared expert with a sigmoid gate.
    """
    act = {"silu": silu, "gelu_tanh": gelu_tanh, "gelu": gelu_erf}[c.activation]
    probabilities = softmax(linear(p, f"{at}.router", h))
    y = np.zeros_like(h)
    for token, x in enumerate(h):
        chosen = np.argsort(-probabilities[token], kind="stable")[: c.experts_per_token]
        weights = probabilities[token, chosen]
        if c.normalize_experts:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up, down = (p[f"{at}.{name}.weight"][expert] for name in ("gate", "up", "down"))
            y[token] += weight * (down @ (act(gate @ x) * (up @ x)))
    if c.shared_expert_size:
        shared = feed_forward(p, c, f"{at}.shared", h)
        y = y + shared / (1 + np.exp(-linear(p, f"{at}.shared_gate", h)))
    return y


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


def norm(p: Mapping[str, Array], c: DecoderConfig, name: str, x: Array, kind: str | None = None) -> Array:
    """The decoder's norm of that name over the last axis, of the config's kind or the one given."""
    if (kind or c.norm) == "layer":
        return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], c.norm_eps)
    return rms_norm(x, p[f"{name}.weight"] + c.norm_offset, c.norm_eps)


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


def softcap(x: Array, cap: float | None) -> Array:
    """cap · tanh(x / cap), which keeps values within ± cap (arXiv:2408.00118); x itself without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: npt.NDArray[np.bool_],
    scale: float | None = None,
    cap: float | None = None,
) -> Array:
    """softmax(softcap(scale · q k^T)) v for [tokens, heads, d] arrays, one mask for all heads; scale is d^-0.5 if None."""
    scores = np.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = softmax(np.where(mask[None], softcap(scores, cap), -np.inf))
    return np.einsum("hqk,khd->qhd", weights, v)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of [tokens, heads, d]: components j and j + r/2 of a head's first r turn together by angle j."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rope_inverse_frequencies(
    c: DecoderConfig, tokens: int, layer: int = 0
) -> tuple[npt.NDArray[np.float64], float]:
    """Inverse frequencies [d/2] of a layer for a sequence of ``tokens``, and the factor on cos and sin.

    Sources: linear interpolation (arXiv:2306.15595), dynamic NTK scaling, YaRN (arXiv:2309.00071), LongRoPE
    (arXiv:2402.13753) as Phi-3's reference code has it, Llama 3.1's rule as its model card and reference code
    publish it.
    """
    d, theta, scaling = c.rotated, c.rope_theta, c.rope_scaling
    if c.sliding_rope_theta is not None and c.is_sliding(layer):
        theta, scaling = c.sliding_rope_theta, None
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
    if scaling.kind == "longrope":
        magnitude = scaling.attention_factor
        if magnitude is None:
            magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return inverse / np.array(scaling.factors if tokens <= original else scaling.long_factors), magnitude
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
