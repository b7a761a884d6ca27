"""Modules and layers: what ready models are made of."""

from __future__ import annotations

from oazoo.nn.layers import Embedding, LayerNorm, Linear, RMSNorm, gated_linear, project
from oazoo.nn.module import Module, ModuleList, Parameter

__all__ = [
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "gated_linear",
    "project",
]
