"""The configuration of the Llama family and its relatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from oazoo.configs.fields import (
    MAX_EXPERTS,
    MAX_POSITIONS,
    MAX_WIDTH,
    StrictJson,
    check,
    check_parameter_count,
    check_transformer_sizes,
)
from oazoo.configs.rope import RopeScaling

LAYER_TYPES = ("full", "sliding")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
NORMS = ("rms", "layer")
QK_NORMS = ("head", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(StrictJson):
    """A decoder with rotary positions and grouped-query attention; its fields tell the families apart.

    The defaults are Llama's: RMSNorm before each sublayer, gated MLP with SiLU (SwiGLU), whole heads rotated.

    ``sliding_window`` W: a token attends to itself and the W − 1 tokens before it, in the layers whose entry
    in ``layer_types`` is ``"sliding"`` (all layers when that is absent); see :meth:`layer_window`.

    What other families change:

    - ``norm``: ``"layer"`` for LayerNorm with weight and bias (GPT-NeoX).
    - ``norm_offset``: added to the weight of every RMSNorm (Gemma stores w and means 1 + w).
    - ``qk_norm``: RMSNorm on queries and keys before rotation, ``"head"`` over each head with one weight for
      all (Qwen3, Gemma 3), ``"full"`` over all heads' features at once (OLMo 2).
    - ``pre_norm``, ``post_norm``: a norm on a sublayer's input, and on its output before that is added to the
      residual stream (Gemma: both; OLMo 2: only after).
    - ``parallel_residual``: attention and MLP both read the residual stream, ``x + attn(x) + mlp(x)`` (GPT-NeoX).
    - ``gated_mlp``: false for ``down(activation(up(x)))``.
    - ``rotary_dim``: how many of a head's first components are rotated; the whole head if absent.
    - ``embedding_scale``, ``attention_scale``: factors on embeddings and on scores (absent: head_dim^-0.5).
    - ``attention_softcap``, ``logit_softcap``: scores and logits become ``cap tanh(x / cap)`` (Gemma 2).
    - ``sliding_rope_theta``: theta of the sliding layers, which then take no scaling (Gemma 3).
    - ``num_experts`` and what follows: mixture of experts in all layers but ``dense_layers``; each token goes to
      ``experts_per_token`` of them, whose weights are renormalised if ``normalize_experts``.
    """

    family: ClassVar[str] = "decoder"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    norm: str = "rms"
    norm_offset: float = 0.0
    qk_norm: str | None = None
    pre_norm: bool = True
    post_norm: bool = False
    parallel_residual: bool = False
    gated_mlp: bool = True
    rotary_dim: int | None = None
    embedding_scale: float | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_rope_theta: float | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_transformer_sizes(self)
        where = type(self).__name__
        check(
            0 < self.num_kv_heads <= self.num_heads and self.num_heads % self.num_kv_heads == 0,
            where,
            f"num_heads = {self.num_heads} must be a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        check(
            0 < self.head_dim <= 8192 and self.head_dim % 2 == 0,
            where,
            f"head_dim = {self.head_dim} must be even, positive and at most 8192",
        )
        check(self.num_heads * self.head_dim <= MAX_WIDTH, where, "num_heads × head_dim is too large")
        check(
            self.rotary_dim is None or (0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 2 == 0),
            where,
            f"rotary_dim = {self.rotary_dim} must be even, positive and at most head_dim = {self.head_dim}",
        )
        for name in ("rope_theta", "sliding_rope_theta"):
            theta = getattr(self, name)
            check(
                theta is None or (math.isfinite(theta) and 1 <= theta <= 1e15),
                where,
                f"{name} = {theta} is out of range (1 to 1e15)",
            )
        for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("qk_norm", QK_NORMS)):
            value = getattr(self, name)
            check(
                value in known or (value is None and name == "qk_norm"),
                where,
                f"{name} {str(value)[:64]!r} is not supported; supported: {', '.join(known)}",
            )
        for name in ("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            check(
                value is None or (math.isfinite(value) and 0 < value <= 1e9),
                where,
                f"{name} = {value} must be positive, at most 1e9",
            )
        check(
            math.isfinite(self.norm_offset)
            and abs(self.norm_offset) <= 1e3
            and (self.norm == "rms" or not self.norm_offset),
            where,
            f"norm_offset = {self.norm_offset} is out of range, or not for this norm",
        )
        check(self.pre_norm or self.post_norm, where, "one of pre_norm and post_norm is needed")
        check(
            not self.parallel_residual or (self.pre_norm and not self.post_norm),
            where,
            "parallel_residual goes with pre_norm alone",
        )
        self._check_layers(where)
        self._check_experts(where)
        if self.rope_scaling is not None:
            for name in ("factors", "long_factors"):
                factors = getattr(self.rope_scaling, name)
                check(
                    factors is None or len(factors) == self.rotated // 2,
                    where,
                    f"rope_scaling.{name} has {len(factors or ())} values; half the rotated width is {self.rotated // 2}",
                )
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        expert = self.num_experts * self.expert_size + self.shared_expert_size
        a_layer = hidden * (4 * heads + 3 * (self.intermediate_size + expert))
        check_parameter_count(self, 2 * self.vocab_size * hidden + self.num_layers * a_layer)

    def _check_layers(self, where: str) -> None:
        window = self.sliding_window
        check(
            window is None or 0 < window <= MAX_POSITIONS, where, f"sliding_window = {window} is out of range"
        )
        if self.layer_types is not None:
            check(
                len(self.layer_types) == self.num_layers,
                where,
                f"layer_types has {len(self.layer_types)} entries for num_layers = {self.num_layers}",
            )
            for kind in self.layer_types:
                check(
                    kind in LAYER_TYPES, where, f"layer type {kind[:64]!r}; known: {', '.join(LAYER_TYPES)}"
                )
            check(
                window is not None or "sliding" not in self.layer_types,
                where,
                "sliding layers need sliding_window",
            )
        check(
            self.sliding_rope_theta is None or window is not None,
            where,
            "sliding_rope_theta needs sliding_window",
        )

    def _check_experts(self, where: str) -> None:
        dense = self.dense_layers
        if self.num_experts == 0:
            others = (self.experts_per_token, self.expert_size, self.shared_expert_size)
            check(others == (0, 0, 0) and dense is None, where, "expert fields need num_experts")
            return
        check(0 < self.num_experts <= MAX_EXPERTS, where, f"num_experts = {self.num_experts} is out of range")
        check(
            0 < self.experts_per_token <= self.num_experts,
            where,
            f"experts_per_token = {self.experts_per_token} is out of range (1 to {self.num_experts})",
        )
        check(
            0 < self.expert_size <= MAX_WIDTH * 4, where, f"expert_size = {self.expert_size} is out of range"
        )
        check(
            0 <= self.shared_expert_size <= MAX_WIDTH * 4,
            where,
            f"shared_expert_size = {self.shared_expert_size} is out of range",
        )
        check(self.gated_mlp and not self.mlp_bias, where, "experts are gated MLPs without bias")
        check(
            dense is None
            or (tuple(sorted(set(dense))) == dense and all(0 <= n < self.num_layers for n in dense)),
            where,
            "dense_layers must be layer numbers in rising order",
        )

    @property
    def rotated(self) -> int:
        """How many components of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        """The factor on attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer attends through the sliding window."""
        if self.sliding_window is None:
            return False
        return self.layer_types is None or self.layer_types[layer] == "sliding"

    def is_moe(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.num_experts > 0 and layer not in (self.dense_layers or ())

    def layer_window(self, layer: int) -> int | None:
        """Attention window of a layer in tokens, the current one included; ``None`` for full attention."""
        return self.sliding_window if self.is_sliding(layer) else None

    def layer_rope(self, layer: int) -> tuple[float, RopeScaling | None]:
        """Theta and scaling of a layer's rotary positions."""
        if self.sliding_rope_theta is not None and self.is_sliding(layer):
            return self.sliding_rope_theta, None
        return self.rope_theta, self.rope_scaling

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in file order; linear weights are [out, in], experts' [experts, out, in]."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        def norm(name: str, width: int = hidden, layer_norm: bool = self.norm == "layer") -> None:
            shapes[f"{name}.weight"] = (width,)
            if layer_norm:
                shapes[f"{name}.bias"] = (width,)

        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            if self.pre_norm:
                norm(f"{at}.attn_norm")
            linear(f"{at}.attn.q", q_rows, hidden, self.attention_bias)
            linear(f"{at}.attn.k", kv_rows, hidden, self.attention_bias)
            linear(f"{at}.attn.v", kv_rows, hidden, self.attention_bias)
            if self.qk_norm is not None:
                norm(f"{at}.attn.q_norm", self.head_dim if self.qk_norm == "head" else q_rows, False)
                norm(f"{at}.attn.k_norm", self.head_dim if self.qk_norm == "head" else kv_rows, False)
            linear(f"{at}.attn.o", hidden, q_rows, self.attention_output_bias)
            if self.post_norm:
                norm(f"{at}.attn_post_norm")
            if self.pre_norm:
                norm(f"{at}.mlp_norm")
            if self.is_moe(layer):
                shapes[f"{at}.moe.router.weight"] = (self.num_experts, hidden)
                shapes[f"{at}.moe.gate.weight"] = (self.num_experts, self.expert_size, hidden)
                shapes[f"{at}.moe.up.weight"] = (self.num_experts, self.expert_size, hidden)
                shapes[f"{at}.moe.down.weight"] = (self.num_experts, hidden, self.expert_size)
                if self.shared_expert_size:
                    linear(f"{at}.moe.shared.gate", self.shared_expert_size, hidden)
                    linear(f"{at}.moe.shared.up", self.shared_expert_size, hidden)
                    linear(f"{at}.moe.shared.down", hidden, self.shared_expert_size)
                    linear(f"{at}.moe.shared_gate", 1, hidden)
            else:
                if self.gated_mlp:
                    linear(f"{at}.mlp.gate", inner, hidden, self.mlp_bias)
                linear(f"{at}.mlp.up", inner, hidden, self.mlp_bias)
                linear(f"{at}.mlp.down", hidden, inner, self.mlp_bias)
            if self.post_norm:
                norm(f"{at}.mlp_post_norm")
        norm("norm")
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, hidden)
        return shapes
