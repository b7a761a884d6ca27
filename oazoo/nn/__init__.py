"""Modules and layers: what ready models are made of."""

from __future__ import annotations

from oazoo.nn.activations import (
    ELU,
    GELU,
    LeakyReLU,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from oazoo.nn.attention import MultiHeadAttention
from oazoo.nn.blocks import MLP, Sequential, TransformerBlock
from oazoo.nn.dropout import Dropout
from oazoo.nn.feed_forward import FFN, SwiGLU
from oazoo.nn.flow import FlowBlock, FlowTimeEmbedding, FlowTransformer
from oazoo.nn.layers import (
    Adapter,
    ByteEmbedding,
    ByteOutputHead,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    gated_linear,
    project,
)
from oazoo.nn.module import Buffer, Module, ModuleList, Parameter
from oazoo.nn.moe import MoE, RouteStatistics
from oazoo.nn.patches import PatchEmbed
from oazoo.nn.rope import RoPE

__all__ = [
    "ELU",
    "FFN",
    "GELU",
    "MLP",
    "Adapter",
    "Buffer",
    "ByteEmbedding",
    "ByteOutputHead",
    "Dropout",
    "Embedding",
    "FlowBlock",
    "FlowTimeEmbedding",
    "FlowTransformer",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "Mish",
    "MoE",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "PatchEmbed",
    "RMSNorm",
    "ReLU",
    "RoPE",
    "RouteStatistics",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SwiGLU",
    "Tanh",
    "TransformerBlock",
    "gated_linear",
    "project",
]
