"""Ready models: one file an architecture, with its Module; the typed configs are in :mod:`oazoo.configs`."""

from __future__ import annotations

from oazoo.configs import DecoderConfig, Mamba3Config, MambaConfig, ModelConfig, NanoGPTConfig
from oazoo.models.session import CausalModel
from oazoo.runtime import Device


def why_not_run(config: ModelConfig) -> str | None:
    """Why a model of this configuration is kept as weights and not run yet; None if it runs."""
    if isinstance(config, DecoderConfig) and config.num_experts:
        return "its weights are kept; running a mixture of experts is not there yet"
    if isinstance(config, (MambaConfig, Mamba3Config)):
        return f"its weights are kept; running models of the family {config.family!r} is not there yet"
    return None


def build(config: ModelConfig, device: Device) -> CausalModel:
    """The module of a configuration, its parameters not loaded yet."""
    if isinstance(config, DecoderConfig):
        from oazoo.models.decoder import Decoder

        return Decoder(config, device)
    assert isinstance(config, NanoGPTConfig)
    from oazoo.models.nanogpt import NanoGPT

    return NanoGPT(config, device)


__all__ = ["CausalModel", "build", "why_not_run"]
