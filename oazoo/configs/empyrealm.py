"""The configuration of OA's language models of one Mamba-3 mixer: ByteMamba3 and Empyrealm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from oazoo.configs.fields import StrictJson
from oazoo.configs.mamba3 import Mamba3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpyrealmConfig(StrictJson):
    """``head(e + mixer(e))`` with ``e`` the embedding of the tokens: no norm, a head of its own with a bias.

    The mixer is OA's variant of Mamba-3; its fields are those of :class:`oazoo.configs.Mamba3Config`.
    """

    family: ClassVar[str] = "empyrealm"

    vocab_size: int
    hidden_size: int
    inner_size: int
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1
    rope_fraction: float = 0.5
    mimo_rank: int | None = None
    output_norm: bool = False
    norm_eps: float = 1e-5
    a_floor: float = 1e-4
    a_form: str = "heavy_tail"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4

    def __post_init__(self) -> None:
        self.mixer()  # checks every field

    @classmethod
    def byte_mamba3(cls, vocab_size: int = 256) -> Self:
        """OA's ByteMamba3, which is its ByteEmpyrealm: 16 values a head and a state of 32; 25,800 parameters over bytes."""
        return cls(
            vocab_size=vocab_size, hidden_size=32, inner_size=64, head_dim=16, state_size=32, output_norm=True
        )

    @property
    def num_layers(self) -> int:
        """One mixer."""
        return 1

    def mixer(self) -> Mamba3Config:
        """The mixer as a model of its own would have it."""
        return Mamba3Config(
            used_vocab_size=self.vocab_size,
            num_layers=1,
            variant="oa",
            tied_embeddings=False,
            **self.to_json(),
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order in which OA's files have them; linear weights are [out, in]."""
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, self.hidden_size)}
        shapes |= {f"layers.0.mixer.{n}": shape for n, shape in self.mixer().block_parameters().items()}
        shapes["head.weight"] = (self.vocab_size, self.hidden_size)
        shapes["head.bias"] = (self.vocab_size,)
        return shapes
