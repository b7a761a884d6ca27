"""The configuration of Mamba-3, as published in the state-spaces/mamba repository."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from oazoo.configs.fields import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    StrictJson,
    check,
    check_parameter_count,
    check_ranges,
)

A_FORMS = ("heavy_tail", "softplus")
#: The module of the state-spaces repository, and that of OA 0.8.6.
VARIANTS = ("mamba3", "oa")
ROPE_FRACTIONS = (0.5, 1.0)
#: The feed-forward's width is rounded up to a multiple of this.
MLP_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba3Config(StrictJson):
    """A language model of Mamba-3 blocks, each optionally followed by a gated MLP.

    ``vocab_size``: rows of the embedding and logits, padded; ``used_vocab_size``: how many of them are tokens.
    ``inner_size`` E is the width of a block, made of heads of ``head_dim`` P; ``state_size`` N; ``num_groups`` G: groups of
    heads that share B and C. ``rope_fraction``: the share of the state that turns. ``mimo_rank`` R: None for SISO.
    ``output_norm``: RMSNorm over each head before the gate. ``mlp_size``: width of the MLP as asked for, 0 for none;
    see :attr:`mlp_width`. ``a_floor``: least decay. ``a_form``: how A follows from its raw value; checkpoints do not state
    it, and the reference has used ``"heavy_tail"`` since June 2026, ``"softplus"`` before.
    ``variant``: ``"oa"`` is the block as OA 0.8.6 has it: dt is clamped to ``dt_min`` … ``dt_max``, angles are raw,
    the norms of B and C have no weights, and neighbours turn together at every rank.
    ``dt_min``, ``dt_max``, ``dt_init_floor`` otherwise matter for initialisation only, ``chunk_size`` for evaluation only.
    """

    family: ClassVar[str] = "mamba3"

    vocab_size: int
    used_vocab_size: int
    hidden_size: int
    num_layers: int
    inner_size: int
    head_dim: int = 64
    state_size: int = 128
    num_groups: int = 1
    rope_fraction: float = 0.5
    mimo_rank: int | None = None
    output_norm: bool = False
    mlp_size: int = 0
    tied_embeddings: bool = True
    norm_eps: float = 1e-5
    a_floor: float = 1e-4
    a_form: str = "heavy_tail"
    variant: str = "mamba3"
    dt_min: float = 1e-3
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    chunk_size: int | None = None
    residual_in_f32: bool = True

    def __post_init__(self) -> None:
        limits = {
            "vocab_size": MAX_VOCAB,
            "used_vocab_size": self.vocab_size,
            "hidden_size": MAX_WIDTH,
            "num_layers": MAX_LAYERS,
            "inner_size": MAX_WIDTH,
            "head_dim": 8192,
            "state_size": MAX_WIDTH,
            "num_groups": MAX_HEADS,
        }
        check_ranges(self, limits)
        where = type(self).__name__
        for name, limit in (("mimo_rank", 256), ("chunk_size", 1 << 20)):
            value = getattr(self, name)
            check(
                value is None or 0 < value <= limit, where, f"{name} = {value} is out of range (1 to {limit})"
            )
        check(0 <= self.mlp_size <= MAX_WIDTH * 4, where, f"mlp_size = {self.mlp_size} is out of range")
        inner, dim = self.inner_size, self.head_dim
        check(inner % dim == 0, where, f"inner_size = {inner} must be a multiple of head_dim = {dim}")
        check(
            self.num_heads <= MAX_HEADS and self.num_heads % self.num_groups == 0,
            where,
            f"{self.num_heads} heads do not divide into num_groups = {self.num_groups}",
        )
        check(
            self.rope_fraction in ROPE_FRACTIONS,
            where,
            f"rope_fraction = {self.rope_fraction} must be one of {', '.join(map(str, ROPE_FRACTIONS))}",
        )
        check(
            self.a_form in A_FORMS,
            where,
            f"a_form {self.a_form[:64]!r} is not known; known: {', '.join(A_FORMS)}",
        )
        check(
            self.variant in VARIANTS,
            where,
            f"variant {self.variant[:64]!r} is not known; known: {', '.join(VARIANTS)}",
        )
        for name in ("a_floor", "dt_min", "dt_max", "dt_init_floor"):
            value = getattr(self, name)
            check(math.isfinite(value) and 0 < value <= 1e6, where, f"{name} = {value} is out of range")
        a_layer = self.hidden_size * (self.projected + inner + 3 * self.mlp_width)
        check_parameter_count(self, 2 * self.vocab_size * self.hidden_size + self.num_layers * a_layer)

    @property
    def num_heads(self) -> int:
        """Heads of a block."""
        return self.inner_size // self.head_dim

    @property
    def rank(self) -> int:
        """R: keys, queries and values of a head for each token; 1 for SISO."""
        return self.mimo_rank or 1

    @property
    def num_angles(self) -> int:
        """S: rotary angles of a token, common to all heads."""
        return int(self.state_size * self.rope_fraction) // 2

    @property
    def projected(self) -> int:
        """Rows of the input projection: z, x, B, C, dt, A, the trapezoid's share, angles."""
        keys = 2 * self.state_size * self.num_groups * self.rank
        return 2 * self.inner_size + keys + 3 * self.num_heads + self.num_angles

    @property
    def mlp_width(self) -> int:
        """Width of the MLP: ``mlp_size`` rounded up to a multiple of 128; 0 without one."""
        return -(-self.mlp_size // MLP_MULTIPLE) * MLP_MULTIPLE

    def block_parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter of a block, in file order, by the names that the specification gives them."""
        heads, rank, states = self.num_heads, self.rank, self.state_size
        hidden, inner, dim = self.hidden_size, self.inner_size, self.head_dim
        oa = self.variant == "oa"
        mimo = [(f"mimo_{name}", (heads, rank, dim)) for name in "xzo"] if self.mimo_rank is not None else []
        biases = (heads, states) if oa and rank == 1 else (heads, rank, states)
        shapes: list[tuple[str, tuple[int, ...]]] = [
            ("in_proj.weight", (self.projected, hidden)),
            ("dt_bias", (heads,)),
        ]
        if not oa:
            shapes += [("B_norm.weight", (states,)), ("C_norm.weight", (states,))]
        shapes += [("B_bias", biases), ("C_bias", biases)]
        if oa:
            shapes += [*mimo, ("D", (heads,)), ("out_proj.weight", (hidden, inner))]
            shapes += [("norm_weight", (heads, dim))] if self.output_norm else []
            return dict(shapes)
        shapes += [("D", (heads,)), *mimo]
        shapes += [("norm.weight", (inner,))] if self.output_norm else []
        return dict([*shapes, ("out_proj.weight", (hidden, inner))])

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in]."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes[f"{at}.norm.weight"] = (hidden,)
            shapes |= {f"{at}.mixer.{name}": shape for name, shape in self.block_parameters().items()}
            if self.mlp_width:
                shapes[f"{at}.mlp_norm.weight"] = (hidden,)
                shapes[f"{at}.mlp.gate.weight"] = (self.mlp_width, hidden)
                shapes[f"{at}.mlp.up.weight"] = (self.mlp_width, hidden)
                shapes[f"{at}.mlp.down.weight"] = (hidden, self.mlp_width)
        shapes["norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes
