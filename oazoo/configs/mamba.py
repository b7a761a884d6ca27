"""The configuration of Mamba (arXiv:2312.00752)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oazoo.configs.fields import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    StrictJson,
    check,
    check_parameter_count,
    check_ranges,
)

DECAYS = ("log", "direct")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(StrictJson):
    """A language model of Mamba blocks: selective state spaces with a short convolution.

    ``inner_size`` E: width of a block; ``state_size`` N: states of each of its channels; ``conv_kernel``: taps of the
    convolution; ``dt_rank``: width through which the step size is projected.
    ``decay``: how A is stored, ``"log"`` as ``A_log`` with A = −exp(A_log), ``"direct"`` as A itself (GGUF).
    ``bias``, ``conv_bias``: of the projections in and out, and of the convolution.
    """

    family: ClassVar[str] = "mamba"

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    norm_eps: float
    tied_embeddings: bool
    bias: bool = False
    conv_bias: bool = True
    decay: str = "log"

    def __post_init__(self) -> None:
        limits = {
            "vocab_size": MAX_VOCAB,
            "hidden_size": MAX_WIDTH,
            "inner_size": MAX_WIDTH,
            "num_layers": MAX_LAYERS,
            "state_size": MAX_WIDTH,
            "conv_kernel": 1 << 10,
            "dt_rank": MAX_WIDTH,
        }
        check_ranges(self, limits)
        where = type(self).__name__
        known = ", ".join(DECAYS)
        check(self.decay in DECAYS, where, f"decay {self.decay[:64]!r} is not known; known: {known}")
        a_layer = self.inner_size * (3 * self.hidden_size + 3 * self.state_size + 2 * self.dt_rank)
        check_parameter_count(self, 2 * self.vocab_size * self.hidden_size + self.num_layers * a_layer)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in]."""
        hidden, inner, states = self.hidden_size, self.inner_size, self.state_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes[f"{at}.norm.weight"] = (hidden,)
            shapes[f"{at}.mixer.in.weight"] = (2 * inner, hidden)
            if self.bias:
                shapes[f"{at}.mixer.in.bias"] = (2 * inner,)
            shapes[f"{at}.mixer.conv.weight"] = (inner, self.conv_kernel)
            if self.conv_bias:
                shapes[f"{at}.mixer.conv.bias"] = (inner,)
            shapes[f"{at}.mixer.x.weight"] = (self.dt_rank + 2 * states, inner)
            shapes[f"{at}.mixer.dt.weight"] = (inner, self.dt_rank)
            shapes[f"{at}.mixer.dt.bias"] = (inner,)
            shapes[f"{at}.mixer.{'a_log' if self.decay == 'log' else 'a'}"] = (inner, states)
            shapes[f"{at}.mixer.d"] = (inner,)
            shapes[f"{at}.mixer.out.weight"] = (hidden, inner)
            if self.bias:
                shapes[f"{at}.mixer.out.bias"] = (hidden,)
        shapes["norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes
