"""Ready models: one file an architecture, with its Module; the typed configs are in :mod:`oazoo.configs`."""

from __future__ import annotations

from oazoo.configs import DecoderConfig, ModelConfig, NanoGPTConfig
from oazoo.models.session import CausalModel
from oazoo.runtime import Device


def build(config: ModelConfig, device: Device) -> CausalModel:
    """The module of a configuration, its parameters not loaded yet."""
    if isinstance(config, DecoderConfig):
        from oazoo.models.decoder import Decoder

        return Decoder(config, device)
    assert isinstance(config, NanoGPTConfig)
    from oazoo.models.nanogpt import NanoGPT

    return NanoGPT(config, device)


__all__ = ["CausalModel", "build"]
