"""Recurrent language models: an embedding, layers of RNN or GRU, a head. OA's ByteGru and ByteRnn are such.

A sequence's memory is one state a layer, however long it is: prompts run through the loop in a kernel, from the state that
the tokens before left, and decoding is one step of it.
"""

from __future__ import annotations

from oazoo.configs import RecurrentConfig
from oazoo.configs.fields import MAX_POSITIONS
from oazoo.models.cache import StateCache
from oazoo.models.sequences import Context, Sequences
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.dropout import Dropout
from oazoo.nn.layers import Embedding, Linear
from oazoo.nn.module import ModuleList
from oazoo.nn.recurrent import CELLS
from oazoo.runtime import Device, Tensor


class Block(Layer):
    """One layer."""

    def __init__(self, config: RecurrentConfig, layer: int) -> None:
        width = config.hidden_size if layer else config.embedding_size
        self.cell = CELLS[config.cell](width, config.hidden_size, config.bias)
        self.dropout = Dropout(0.0)
        self._layer = layer

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        """The states after each token, f32 [tokens, hidden]."""
        if isinstance(context, Sequences):
            return self.dropout(self.cell.sequence(x, batch=context.batch))
        assert isinstance(context, StateCache)
        state = context.layers[self._layer]["state"]
        return self.cell.sequence(x, state, into=state)


class Recurrent(CausalModel):
    """The whole model."""

    def __init__(self, config: RecurrentConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = MAX_POSITIONS
        self.embed = Embedding(config.vocab_size, config.embedding_size)
        self.layers = ModuleList([Block(config, layer) for layer in range(config.num_layers)])
        self.head = Linear(config.hidden_size, config.vocab_size)

    @property
    def constant_state(self) -> bool:
        return True

    def new_cache(self, capacity: int) -> StateCache:
        state = {"state": (1, self.config.hidden_size)}
        return StateCache(self.device, [state] * self.config.num_layers, capacity)

    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        return Sequences.create(self.device, batch, tokens)

    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        return self.embed(ids)

    def head_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
