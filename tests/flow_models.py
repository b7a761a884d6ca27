"""Small flow models with first values, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from oazoo.configs import FlowConfig
from oazoo.generation.flow_model import FlowModel
from oazoo.models.flow import FlowDenoiser
from oazoo.runtime import get_device

#: Images of 4 × 4 pixels in two colours of three channels, as four patches.
IMAGES = FlowConfig(
    tokens=4,
    token_size=12,
    predicted_values=12,
    hidden_size=16,
    frequency_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=1,
    num_classes=3,
    image_height=4,
    image_width=4,
    image_channels=3,
    patch=2,
    data_offset=(100.0,),
    data_scale=(50.0,),
    clip=True,
)
#: Sequences of five frames of three values, told a vector of two.
SEQUENCES = FlowConfig(
    tokens=5,
    token_size=3,
    predicted_values=3,
    hidden_size=16,
    frequency_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=1,
    condition_features=2,
    data_offset=(1.0, 2.0, 3.0),
    data_scale=(0.5, 1.0, 2.0),
)


def flow_model(config: FlowConfig, seed: int = 1, **changes: Any) -> FlowModel:
    """A model whose modulations are not zero, so that its condition matters."""
    config = replace(config, **changes)
    model = FlowDenoiser(config, get_device())
    model.initialize(get_device(), seed)
    rng = np.random.default_rng(seed)
    for name, parameter in model.named_parameters():
        if "modulation" in name or name.startswith("output_proj"):
            parameter.assign((rng.standard_normal(parameter.shape) * 0.2).astype(np.float32))
    return FlowModel(model, {"name": "small"})
