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
from oazoo.nn.empyrealm import EmpyrealmCore
from oazoo.nn.feed_forward import FFN, SwiGLU
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
    "Buffer",
    "ByteEmbedding",
    "ByteOutputHead",
    "Dropout",
    "Embedding",
    "EmpyrealmCore",
    "GRUCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "Mamba3Block",
    "Mamba3States",
    "Mish",
    "Module",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "RecurrentCell",
    "RoPE",
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
