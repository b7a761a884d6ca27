"""Ready models: one file an architecture, with its Module; the typed configs are in :mod:`oazoo.configs`."""

from __future__ import annotations

from oazoo.configs import (
    DecoderConfig,
    EmpyrealmConfig,
    FlowConfig,
    Mamba3Config,
    MambaConfig,
    ModelConfig,
    NanoGPTConfig,
    RecurrentConfig,
    TransformerConfig,
)
from oazoo.errors import DeviceError
from oazoo.models.session import CausalModel
from oazoo.runtime import Device
from oazoo.runtime.ops.attention import MAX_HEAD_DIM


def why_not_run(config: ModelConfig) -> str | None:
    """Why a model of this configuration is kept as weights and not run yet; None if it runs."""
    attends = (FlowConfig, DecoderConfig, NanoGPTConfig, TransformerConfig)
    if isinstance(config, attends) and config.head_dim > MAX_HEAD_DIM:
        return f"its heads are {config.head_dim} wide; kernels hold heads of up to {MAX_HEAD_DIM}"
    if isinstance(config, MambaConfig):
        return f"its weights are kept; running models of the family {config.family!r} is not there yet"
    return None


def build(config: ModelConfig, device: Device) -> CausalModel:
    """The module of a configuration, its parameters not loaded yet.

    Raises:
        DeviceError: models of this configuration do not run, see :func:`why_not_run`, or are no language models.
    """
    if isinstance(config, FlowConfig):
        raise DeviceError(
            "a flow model is no language model; it is built with oazoo.models.flow.FlowDenoiser"
        )
    why = why_not_run(config)
    if why is not None:
        raise DeviceError(f"a {config.family} model that cannot run: {why}")
    if isinstance(config, DecoderConfig):
        from oazoo.models.decoder import Decoder

        return Decoder(config, device)
    if isinstance(config, TransformerConfig):
        from oazoo.models.transformer import Transformer

        return Transformer(config, device)
    if isinstance(config, Mamba3Config):
        from oazoo.models.mamba3 import Mamba3

        return Mamba3(config, device)
    if isinstance(config, EmpyrealmConfig):
        from oazoo.models.empyrealm import Empyrealm

        return Empyrealm(config, device)
    if isinstance(config, RecurrentConfig):
        from oazoo.models.recurrent import Recurrent

        return Recurrent(config, device)
    assert isinstance(config, NanoGPTConfig)
    from oazoo.models.nanogpt import NanoGPT

    return NanoGPT(config, device)


__all__ = ["CausalModel", "build", "why_not_run"]
