"""How a decoder is described in the terms of its checkpoint: sizes, names of tensors, and what its layers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from oazoo.errors import TranslationError

#: Angles: inverse frequencies [pairs] in float64, and a factor on cosine and sine.
Frequencies = tuple[npt.NDArray[np.float64], float]


class NoReferenceError(TranslationError):
    """Nothing is known here about what a checkpoint means, so nothing can be compared with it."""


def everywhere(layer: int) -> None:
    """No attention window in any layer."""


def all_layers(layer: int) -> bool:
    """Experts in every layer."""
    return True


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward layers that are mixtures of experts.

    ``names`` gives the tensors of such a layer by role, as :class:`Decoder` does: ``router gate up down`` (or ``gate_up``
    with gate's rows above up's), and of an expert for all tokens ``shared_gate shared_up shared_down``, its output times a
    sigmoid of ``shared_scale``. Experts' matrices are a tensor each, with ``{}`` in the name for the number, or a stack
    [experts, out, in] whose name ends with what the file has.
    """

    count: int
    per_token: int
    #: Whether the probabilities of those chosen are divided by their sum.
    normalized: bool
    names: Mapping[str, str]
    #: Which layers have them.
    layers: Callable[[int], bool] = field(default=all_layers)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder as its checkpoint states it.

    ``names`` gives the tensors of a layer by role, without ``layer`` (which has ``{}`` for the number) and without
    ``.weight``/``.bias``. Roles: ``attn_norm q k v`` (or ``qkv``) ``q_norm k_norm o attn_post_norm mlp_norm gate up`` (or
    ``gate_up``) ``down mlp_post_norm``. A norm that has no role is not there; a bias is added where the file has one.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layer: str
    names: Mapping[str, str]
    embedding: str
    final_norm: str
    #: Name of the head; that of the embedding if they are tied.
    head: str
    #: Learned positions, if any.
    positions: str | None = None
    #: Rotary frequencies of a layer for a sequence of some tokens, if positions are rotary.
    rotary: Callable[[int, int], Frequencies] | None = None
    #: Rotary pairs are neighbours (2j, 2j + 1), not half a head apart.
    interleaved: bool = False
    #: How a fused qkv product is ordered: ``"joined"`` all of q, of k, of v; ``"by_head"`` q, k, v of each head.
    qkv: str = "joined"
    #: Matrices of layers are stored [in, out].
    transposed: bool = False
    layer_norms: bool = False
    #: Added to the weight of every RMSNorm.
    norm_offset: float = 0.0
    activation: str = "silu"
    parallel: bool = False
    experts: Experts | None = None
    window: Callable[[int], int | None] = field(default=everywhere)
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
