"""Checkpoints under GGUF names, described from their metadata as llama.cpp reads it.

What the layers have follows from the tensors that are there. Norms of Gemma are stored as what they multiply by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from oazoo.formats.source import WeightSource
from oazoo.translators.reference.description import Decoder, Experts, Frequencies, NoReferenceError
from oazoo.translators.reference.frequencies import linear, plain, yarn

_NAMES = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "qkv": "attn_qkv",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}
_KNOWN = (
    *("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe"),
    *("phi3", "gemma", "gemma2", "gemma3", "olmo2", "gpt2", "gptneox"),
)
#: Every how many layers one attends to everything, and layers of the model whose scores are scaled by width.
_PATTERNS, _WIDE = {"gemma2": 2, "gemma3": 6}, {"gemma2": 46, "gemma3": 62}


def describe(source: WeightSource, arch: str) -> Decoder:
    """The decoder of a GGUF file.

    Raises:
        NoReferenceError: an architecture, or a setting, that is not known here.
    """
    if arch not in _KNOWN:
        raise NoReferenceError(
            f"the check does not know the architecture {arch[:64]!r}; it knows {', '.join(_KNOWN)}"
        )
    meta = _Metadata(source.metadata, arch)
    width, heads = int(meta.need("embedding_length")), int(meta.need("attention.head_count"))
    layers, head_dim = int(meta.need("block_count")), int(meta.get("attention.key_length", width // heads))
    names = {role: name for role, name in _NAMES.items() if f"blk.0.{name}.weight" in source}
    if arch == "phi3":
        names["gate_up"] = names.pop("up")
    experts = _experts(source, meta, arch, layers)
    layer_norms = arch in ("gpt2", "gptneox")
    gemma = arch.startswith("gemma")
    scale = (width / heads if layers == _WIDE.get(arch) else head_dim) ** -0.5
    windows = _windows(meta, arch)
    return Decoder(
        layers=layers,
        heads=heads,
        kv_heads=int(meta.get("attention.head_count_kv", heads)),
        head_dim=head_dim,
        eps=float(
            meta.need("attention.layer_norm_epsilon" if layer_norms else "attention.layer_norm_rms_epsilon")
        ),
        layer="blk.{}.",
        names=names,
        embedding="token_embd",
        positions="position_embd" if "position_embd.weight" in source else None,
        final_norm="output_norm",
        head="output" if "output.weight" in source else "token_embd",
        rotary=None if arch == "gpt2" else _rotary(source, meta, head_dim, windows),
        interleaved=arch == "llama",
        layer_norms=layer_norms,
        experts=experts,
        activation=_activation(source, arch),
        parallel=arch == "gptneox" and bool(meta.get("use_parallel_residual", True)),
        window=windows,
        embedding_scale=width**0.5 if gemma else 1.0,
        attention_scale=scale,
        attention_cap=meta.get("attn_logit_softcapping", 50.0 if arch == "gemma2" else None),
        logit_cap=meta.get("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
    )


def _experts(source: WeightSource, meta: _Metadata, arch: str, layers: int) -> Experts | None:
    """Stacks of experts; llama.cpp divides by the sum of those chosen but for Qwen2-MoE."""
    count = int(meta.get("expert_count", 0))
    if not count:
        return None
    shared = {f"shared_{part}": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    shared["shared_scale"] = "ffn_gate_inp_shexp"
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in source for layer in range(min(layers, 4096))]
    has_shared = any(f"blk.{layer}.ffn_gate_shexp.weight" in source for layer in range(len(sparse)))
    return Experts(
        count=count,
        per_token=int(meta.need("expert_used_count")),
        normalized=bool(meta.get("expert_weights_norm", arch != "qwen2moe")),
        names={"router": "ffn_gate_inp"}
        | {part: f"ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
        | (shared if has_shared else {}),
        layers=lambda layer: sparse[layer],
    )


def _activation(source: WeightSource, arch: str) -> str:
    """llama.cpp computes the tanh form of GELU; exports of ours say where the model has the exact one."""
    if arch in ("gpt2", "gptneox"):
        return "gelu" if source.metadata.get("oazoo.activation") == "gelu" else "gelu_tanh"
    return "gelu_tanh" if arch.startswith("gemma") else "silu"


class _Metadata:
    """Keys of one architecture."""

    def __init__(self, values: Mapping[str, Any], arch: str) -> None:
        self._values, self._arch = values, arch

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(f"{self._arch}.{key}")
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise NoReferenceError(f"the check needs the setting {self._arch}.{key}")
        return value


def _windows(meta: _Metadata, arch: str) -> Callable[[int], int | None]:
    window = meta.get("attention.sliding_window", 4096 if arch == "gemma2" else 0) or None
    pattern = meta.get("attention.sliding_window_pattern", _PATTERNS.get(arch))

    def of(layer: int) -> int | None:
        if pattern is None:
            return window
        slides = bool(pattern[layer]) if hasattr(pattern, "__getitem__") else (layer + 1) % int(pattern) != 0
        return window if slides else None

    return of


def _rotary(
    source: WeightSource, meta: _Metadata, head_dim: int, windows: Callable[[int], int | None]
) -> Callable[[int, int], Frequencies]:
    width, theta = int(meta.get("rope.dimension_count", head_dim)), float(meta.get("rope.freq_base", 10000.0))
    frequencies, scale = _scaled(meta, theta, width)
    original = int(meta.get("rope.scaling.original_context_length", meta.get("context_length", 0)))
    factors = {
        name: source[f"{name}.weight"].numpy().astype(np.float64)
        for name in ("rope_freqs", "rope_factors_short", "rope_factors_long")
        if f"{name}.weight" in source
    }
    scale *= float(meta.get("rope.scaling.attn_factor", 1.0))
    local = meta.get(
        "rope.freq_base_swa", 10000.0 if source.metadata["general.architecture"] == "gemma3" else theta
    )

    def of(layer: int, tokens: int) -> Frequencies:
        if windows(layer) is not None and local != theta:
            return plain(float(local), width), scale
        name = "rope_factors_long" if tokens > original else "rope_factors_short"
        return frequencies / factors.get("rope_freqs", factors.get(name, 1.0)), scale

    return of


def _scaled(meta: _Metadata, theta: float, width: int) -> Frequencies:
    kind, factor = meta.get("rope.scaling.type", "none"), float(meta.get("rope.scaling.factor", 0.0) or 1.0)
    if kind == "none":
        old = float(meta.get("rope.scale_linear", 0.0) or 1.0)
        return linear(theta, width, old)
    if kind == "linear":
        return linear(theta, width, factor)
    if kind == "longrope":
        context, original = meta.get("context_length", 0), meta.get("rope.scaling.original_context_length", 0)
        if meta.get("rope.scaling.attn_factor") is None and original and context > original:
            return plain(theta, width), math.sqrt(1 + math.log(context / original) / math.log(original))
        return plain(theta, width), 1.0
    if kind == "yarn":
        return yarn(
            theta,
            width,
            factor=factor,
            original=float(meta.get("rope.scaling.original_context_length", meta.get("context_length", 0))),
            fast=float(meta.get("rope.scaling.yarn_beta_fast", 32.0)),
            slow=float(meta.get("rope.scaling.yarn_beta_slow", 1.0)),
        )
    raise NoReferenceError(f"the rotary scaling {str(kind)[:64]!r} is not known to the check")
