"""Operations on tensors: each checks its arguments, chooses a kernel that suits the device, and records its run."""

from __future__ import annotations

from oazoo.runtime.ops.activation import activate, activate_gated, softcap
from oazoo.runtime.ops.attention import attention, rope_and_cache, rotary_attention
from oazoo.runtime.ops.elementwise import add, argmax, dequantize
from oazoo.runtime.ops.embedding import embedding
from oazoo.runtime.ops.linear import gated, linear
from oazoo.runtime.ops.norm import layer_norm, query_key_norm, rms_norm
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.scoring import divergence_rows, score_rows

__all__ = [
    "activate",
    "activate_gated",
    "add",
    "argmax",
    "attention",
    "dequantize",
    "divergence_rows",
    "embedding",
    "gated",
    "layer_norm",
    "linear",
    "pack",
    "query_key_norm",
    "rms_norm",
    "rope_and_cache",
    "rotary_attention",
    "score_rows",
    "softcap",
]
