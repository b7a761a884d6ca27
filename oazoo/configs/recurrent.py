"""The configuration of recurrent language models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from oazoo.configs.fields import MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, StrictJson, check, check_parameter_count

#: Kinds of cells, and how many gates each has.
GATES = {"rnn": 1, "gru": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(StrictJson):
    """An embedding, recurrent layers one on the other, and a head of its own with a bias; no norms, no residuals.

    ``cell``: ``"rnn"`` (tanh) or ``"gru"``. ``embedding_size``: width of the embedding; ``hidden_size``: units of a layer;
    ``bias``: whether the layers have their two biases.
    """

    family: ClassVar[str] = "recurrent"

    cell: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    num_layers: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        where = type(self).__name__
        check(self.cell in GATES, where, f"cell {self.cell[:64]!r} is not known; known: {', '.join(GATES)}")
        limits = {
            "vocab_size": MAX_VOCAB,
            "embedding_size": MAX_WIDTH,
            "hidden_size": MAX_WIDTH,
            "num_layers": MAX_LAYERS,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            check(0 < value <= limit, where, f"{name} = {str(value)[:40]} is out of range (1 to {limit})")
        a_layer = 2 * GATES[self.cell] * self.hidden_size**2
        check_parameter_count(
            self,
            self.vocab_size * (self.embedding_size + self.hidden_size)
            + GATES[self.cell] * self.hidden_size * self.embedding_size
            + self.num_layers * a_layer,
        )

    @classmethod
    def byte_model(cls, cell: str) -> Self:
        """OA's ByteGru and ByteRnn: one layer of 64 units over embeddings of 32 numbers of the 256 bytes."""
        return cls(cell=cell, vocab_size=256, embedding_size=32, hidden_size=64)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order in which OA's files have them; weights are [out, in]."""
        wide = GATES[self.cell] * self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, self.embedding_size)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}.cell"
            shapes[f"{at}.input.weight"] = (wide, self.hidden_size if layer else self.embedding_size)
            shapes[f"{at}.state.weight"] = (wide, self.hidden_size)
            if self.bias:
                shapes[f"{at}.input.bias"] = shapes[f"{at}.state.bias"] = (wide,)
        shapes["head.weight"] = (self.vocab_size, self.hidden_size)
        shapes["head.bias"] = (self.vocab_size,)
        return shapes
