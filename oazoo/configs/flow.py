"""The configuration of flow models: Transformers that turn noise into images or sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from oazoo.configs.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    StrictJson,
    check,
    check_parameter_count,
    check_ranges,
)

STYLES = ("oa", "dit")
PREDICTIONS = ("velocity", "sit_velocity", "noise")
MAX_CLASSES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig(StrictJson):
    """A flow model over ``tokens`` tokens of ``token_size`` values: patches of an image row by row, or frames of a sequence.

    ``style``: ``"oa"`` is OA's FlowDenoiser: learned positions, a condition that is the sum of time embedding and what is
    projected or looked up, norms with parameters. ``"dit"`` is DiT's and SiT's: the time embedding, of width
    ``frequency_size``, goes through an MLP, the condition through SiLU, norms have no parameters, and the last one is
    modulated. ``norm_eps``: of all norms.

    ``condition_features``: width of a vector that the model is told, 0 for none. ``num_classes``: 0 for none; the table has
    one row more, of no class at all. ``prediction``: what the network says: ``"velocity"`` is noise less data, at times from
    0 (data) to 1 (noise); ``"sit_velocity"`` is data less noise, at times from 0 (noise) to 1 (data); ``"noise"`` is DiT's,
    at steps from 0 (data) to 999, which is not integrated here. ``predicted_values``: values the network says for a token;
    the first ``token_size`` of them are the prediction.

    ``image_height``, ``image_width``, ``image_channels`` in pixels and ``patch``: 0 for sequences. ``time_period`` and
    ``time_scale``: of the time embedding. ``num_experts``: 0 for a dense feed-forward layer, else experts of
    ``intermediate_size``, ``experts_per_token`` of which a token uses. The model sees ``(data - data_offset) / data_scale``,
    one number each for all values, or one a channel (of an image) or value (of a token); with ``clip``, what is generated is
    kept within ± 1 of that.
    """

    family: ClassVar[str] = "flow"

    tokens: int
    token_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    style: str = "oa"
    prediction: str = "velocity"
    predicted_values: int
    condition_features: int = 0
    num_classes: int = 0
    frequency_size: int
    time_period: float = 10_000.0
    time_scale: float = 1_000.0
    norm_eps: float = 1e-5
    image_height: int = 0
    image_width: int = 0
    image_channels: int = 0
    patch: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    data_offset: tuple[float, ...] = (0.0,)
    data_scale: tuple[float, ...] = (1.0,)
    clip: bool = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_ranges(
            self,
            {
                "tokens": MAX_POSITIONS,
                "token_size": MAX_WIDTH,
                "hidden_size": MAX_WIDTH,
                "intermediate_size": MAX_WIDTH * 4,
                "num_layers": MAX_LAYERS,
                "num_heads": MAX_HEADS,
                "frequency_size": MAX_WIDTH,
                "predicted_values": MAX_WIDTH * 4,
            },
        )
        for name, limit in (
            ("condition_features", MAX_WIDTH),
            ("num_classes", MAX_CLASSES),
            ("num_experts", MAX_EXPERTS),
            ("experts_per_token", self.num_experts),
            ("image_height", MAX_WIDTH),
            ("image_width", MAX_WIDTH),
            ("image_channels", MAX_WIDTH),
            ("patch", MAX_WIDTH),
        ):
            value = getattr(self, name)
            check(0 <= value <= limit, where, f"{name} = {value} is out of range (0 to {limit})")
        for name, known in (("style", STYLES), ("prediction", PREDICTIONS)):
            value = getattr(self, name)
            check(value in known, where, f"{name} {value[:40]!r} is not known; known: {', '.join(known)}")
        check(
            self.hidden_size % self.num_heads == 0,
            where,
            f"hidden_size = {self.hidden_size} must be a multiple of num_heads = {self.num_heads}",
        )
        check(self.frequency_size % 2 == 0, where, f"frequency_size = {self.frequency_size} must be even")
        check(
            self.style == "dit" or self.frequency_size == self.hidden_size,
            where,
            "frequency_size must be hidden_size: the time embedding is the condition itself",
        )
        check(self.predicted_values >= self.token_size, where, "predicted_values are fewer than token_size")
        check(
            not (self.condition_features and self.num_classes),
            where,
            "condition_features and num_classes exclude each other",
        )
        check(
            (self.num_experts == 0) == (self.experts_per_token == 0),
            where,
            f"{self.experts_per_token} of {self.num_experts} experts a token",
        )
        check(self.style == "oa" or not self.num_experts, where, "style dit has no experts")
        for name in ("time_period", "time_scale"):
            value = getattr(self, name)
            check(
                math.isfinite(value) and 0 < value <= 1e9,
                where,
                f"{name} = {value} is out of range (0 to 1e9)",
            )
        channels = self.image_channels if self.is_image else self.token_size
        for name in ("data_offset", "data_scale"):
            values = getattr(self, name)
            check(
                len(values) in (1, channels) and all(math.isfinite(v) and abs(v) < 1e30 for v in values),
                where,
                f"{name} must have 1 or {channels} finite numbers",
            )
        check(all(v > 0 for v in self.data_scale), where, "data_scale must be positive")
        if self.is_image:
            self._check_image(where)
        else:
            check(
                self.image_height == self.image_width == self.image_channels == 0,
                where,
                "an image without patches",
            )
        hidden = self.hidden_size
        inner = (3 * self.num_experts if self.num_experts else 2) * self.intermediate_size
        a_layer = hidden * (10 * hidden + inner)
        ends = self.tokens + 3 * self.predicted_values + self.num_classes + self.condition_features
        check_parameter_count(self, self.num_layers * a_layer + hidden * (ends + 4 * hidden))

    def _check_image(self, where: str) -> None:
        patch, height, width = self.patch, self.image_height, self.image_width
        check(
            height > 0 and width > 0 and height % patch == 0 and width % patch == 0,
            where,
            f"{height} × {width} pixels do not divide into patches of {patch}",
        )
        grid = (height // patch) * (width // patch)
        check(self.tokens == grid, where, f"tokens = {self.tokens}, but there are {grid} patches")
        values = patch * patch * self.image_channels
        check(
            values == self.token_size,
            where,
            f"token_size = {self.token_size}, but a patch has {values} values",
        )

    @property
    def is_image(self) -> bool:
        """Whether tokens are patches of an image."""
        return self.patch > 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def vocab_size(self) -> int:
        """No tokens of a vocabulary."""
        return 0

    @property
    def max_positions(self) -> int:
        """Tokens, all of which there always are."""
        return self.tokens

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every parameter, in the order in which OA's files have them; linear weights are [out, in]."""
        hidden, inner, dit = self.hidden_size, self.intermediate_size, self.style == "dit"
        shapes: dict[str, tuple[int, ...]] = {"position": (self.tokens, hidden)}

        def add(name: str, *shape: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

        add("input_proj", hidden, self.token_size)
        if dit:
            add("time_mlp.up", hidden, self.frequency_size)
            add("time_mlp.down", hidden, hidden)
        if self.condition_features:
            add("condition_proj", hidden, self.condition_features)
        if self.num_classes:
            shapes["class_embedding.weight"] = (self.num_classes + 1, hidden)
        for layer in range(self.num_layers):
            at = f"blocks.{layer}"
            if not dit:
                add(f"{at}.norm1", hidden)
            for name in "qkvo":
                add(f"{at}.attn.{name}", hidden, hidden)
            if self.num_experts:
                count = self.num_experts
                shapes[f"{at}.moe.gate_up.weight"] = (count, 2 * inner, hidden)
                shapes[f"{at}.moe.gate_up.bias"] = (count, 2 * inner)
                shapes[f"{at}.moe.down.weight"] = (count, hidden, inner)
                shapes[f"{at}.moe.down.bias"] = (count, hidden)
                shapes[f"{at}.moe.norm.weight"] = (hidden,)
                add(f"{at}.moe.router", count, hidden)
            else:
                if not dit:
                    add(f"{at}.norm2", hidden)
                add(f"{at}.ffn.up", inner, hidden)
                add(f"{at}.ffn.down", hidden, inner)
            add(f"{at}.modulation", 6 * hidden, hidden)
        if dit:
            add("final_modulation", 2 * hidden, hidden)
        else:
            add("final_norm", hidden)
        add("output_proj", self.predicted_values, hidden)
        return shapes
