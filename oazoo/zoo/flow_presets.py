"""Flow models to train from nothing, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oazoo.configs import FlowConfig
from oazoo.errors import UsageError
from oazoo.training.flow_data import FlowData


@dataclass(frozen=True)
class FlowPreset:
    """A flow model to train from nothing; its tokens follow from the data.

    Attributes:
        about: a line on it.
        hidden, layers, heads, inner: its sizes.
        patch: side of a patch of images.
        style: as the configuration has it.
        digits: whether it learns scikit-learn's digits unless other data is named.
        experts, per_token: experts in place of the feed-forward layer, and how many of them a token goes to; 0 for none.
        settings: training settings that differ from the general ones.
    """

    about: str
    hidden: int
    layers: int
    heads: int
    inner: int
    patch: int = 2
    style: str = "oa"
    digits: bool = False
    experts: int = 0
    per_token: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, data: FlowData) -> FlowConfig:
        """The configuration for data.

        Raises:
            UsageError: images that do not divide into patches.
        """
        common: dict[str, Any] = {
            "hidden_size": self.hidden,
            "frequency_size": self.hidden,
            "intermediate_size": self.inner,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "style": self.style,
            "num_experts": self.experts,
            "experts_per_token": self.per_token,
            "num_classes": 0 if data.labels is None else int(data.labels.max()) + 1,
            "condition_features": 0 if data.conditions is None else data.conditions.shape[1],
        }
        if not data.is_image:
            _, tokens, values = data.values.shape
            flat = data.values.reshape(-1, values)
            if data.mask is not None:
                flat = flat[data.mask.reshape(-1) != 0]
            spread = flat.std(axis=0)
            return FlowConfig(
                tokens=tokens,
                token_size=values,
                predicted_values=values,
                data_offset=tuple(flat.mean(axis=0).tolist()),
                data_scale=tuple(np.where(spread > 1e-6, spread, 1.0).tolist()),
                **common,
            )
        _, height, width, channels = data.values.shape
        patch = self.patch
        if height % patch or width % patch:
            raise UsageError(
                f"{data.where}: images of {height} × {width} pixels do not divide into patches of {patch}"
            )
        assert data.low is not None and data.high is not None
        values = patch * patch * channels
        return FlowConfig(
            tokens=(height // patch) * (width // patch),
            token_size=values,
            predicted_values=values,
            image_height=height,
            image_width=width,
            image_channels=channels,
            patch=patch,
            data_offset=((data.low + data.high) / 2,),
            data_scale=((data.high - data.low) / 2,),
            clip=True,
            **common,
        )


FLOW_PRESETS: dict[str, FlowPreset] = {
    "flow-digits": FlowPreset(
        "digits of 8 × 8 pixels, or images and sequences of yours; 0.9 M parameters: minutes",
        hidden=128,
        layers=4,
        heads=4,
        inner=256,
        digits=True,
        settings={
            "batch_size": 64,
            "epochs": 130.0,
            "lr": 1.5e-3,
            "min_lr": 0.02,
            "weight_decay": 0.01,
        },
    ),
    "flow-tiny": FlowPreset(
        "images and sequences, 0.1 M parameters: for trying", hidden=64, layers=2, heads=2, inner=128
    ),
    "flow-moe-tiny": FlowPreset(
        "the same with four experts, two a token",
        hidden=64,
        layers=2,
        heads=2,
        inner=64,
        experts=4,
        per_token=2,
    ),
}


def flow_preset(name: str) -> FlowPreset:
    """The preset of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in FLOW_PRESETS:
        raise UsageError(f"there is no flow preset {name[:60]!r}; there are {', '.join(FLOW_PRESETS)}")
    return FLOW_PRESETS[name]
