"""OA's ByteMamba3 and Empyrealm language models: one Mamba-3 mixer between an embedding and a head, without norms."""

from __future__ import annotations

from oazoo.configs import EmpyrealmConfig
from oazoo.configs.fields import MAX_POSITIONS
from oazoo.models.cache import StateCache
from oazoo.models.mamba3 import mixed, state_shapes
from oazoo.models.sequences import Context, Sequences
from oazoo.models.session import CausalModel, Layer
from oazoo.nn.layers import Embedding, Linear
from oazoo.nn.mamba3 import Mamba3Block
from oazoo.nn.module import ModuleList
from oazoo.runtime import Device, Tensor


class Mixer(Layer):
    """The mixer on its flat residual (:class:`oazoo.nn.EmpyrealmCore`)."""

    def __init__(self, config: EmpyrealmConfig) -> None:
        self.mixer = Mamba3Block.from_config(config.mixer())

    def __call__(self, x: Tensor, context: Context) -> Tensor:
        return mixed(self.mixer, x, x, context, 0)


class Empyrealm(CausalModel):
    """The whole model."""

    def __init__(self, config: EmpyrealmConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_positions = MAX_POSITIONS
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = ModuleList([Mixer(config)])
        self.head = Linear(config.hidden_size, config.vocab_size)

    @property
    def constant_state(self) -> bool:
        return True

    def new_cache(self, capacity: int) -> StateCache:
        return StateCache(self.device, [state_shapes(self.config.mixer())], MAX_POSITIONS)

    def new_sequences(self, batch: int, tokens: int) -> Sequences:
        return Sequences.create(self.device, batch, tokens)

    def embed_tokens(self, ids: Tensor, context: Context) -> Tensor:
        return self.embed(ids)

    def head_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)
