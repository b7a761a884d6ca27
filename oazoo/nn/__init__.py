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
from oazoo.nn.convolution import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from oazoo.nn.dropout import Dropout
from oazoo.nn.empyrealm import EmpyrealmCore
from oazoo.nn.feed_forward import FFN, SwiGLU
from oazoo.nn.flow import FlowBlock, FlowTimeEmbedding, FlowTransformer
from oazoo.nn.images import AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, MaxPool2d, Upsample
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
from oazoo.nn.mamba3 import Mamba3Block
from oazoo.nn.module import Buffer, Module, ModuleList, Parameter
from oazoo.nn.moe import MoE, RouteStatistics
from oazoo.nn.patches import PatchEmbed
from oazoo.nn.quantizer import Quantized, ResidualVectorQuantizer, VectorQuantizer
from oazoo.nn.recurrent import GRU, RNN, GRUCell, RecurrentCell, RNNCell
from oazoo.nn.rope import RoPE
from oazoo.runtime.ops.mamba3 import Mamba3States

__all__ = [
    "ELU",
    "FFN",
    "GELU",
    "GRU",
    "MLP",
    "RNN",
    "Adapter",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "Buffer",
    "ByteEmbedding",
    "ByteOutputHead",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "EmpyrealmCore",
    "FlowBlock",
    "FlowTimeEmbedding",
    "FlowTransformer",
    "GRUCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "Mamba3Block",
    "Mamba3States",
    "MaxPool2d",
    "Mish",
    "MoE",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "PatchEmbed",
    "Quantized",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "RecurrentCell",
    "ResidualVectorQuantizer",
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
    "Upsample",
    "VectorQuantizer",
    "gated_linear",
    "project",
]
