"""Operations on tensors: each checks its arguments, chooses a kernel that suits the device, and records its run."""

from __future__ import annotations

from oazoo.runtime.ops.activation import gelu_erf, gelu_tanh, silu_mul
from oazoo.runtime.ops.attention import attention, rope_and_cache, rotary_attention
from oazoo.runtime.ops.elementwise import add, argmax, dequantize
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.norm import layer_norm, rms_norm
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.scoring import divergence_rows, score_rows

__all__ = [
    "add",
    "argmax",
    "attention",
    "dequantize",
    "divergence_rows",
    "embedding",
    "gated",
    "gelu_erf",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "pack",
    "rms_norm",
    "rope_and_cache",
    "rotary_attention",
    "score_rows",
    "silu_mul",
]
