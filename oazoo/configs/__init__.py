"""Typed model configurations: what a translator derives from a checkpoint and what a model is built from.

A configuration is plain, frozen data. ``to_json()``/``from_json()`` are strict: an unknown, missing or
ill-typed field, or a value outside its range, is a :class:`~oazoo.errors.TranslationError` that names the
field. A configuration that exists is therefore safe to size buffers with.

``parameters()`` gives the name and shape of every parameter of the model, in file order; it is the one
place where the shapes are written down.
"""

from __future__ import annotations

from typing import Any

from oazoo.configs.decoder import DecoderConfig
from oazoo.configs.empyrealm import EmpyrealmConfig
from oazoo.configs.flow import FlowConfig
from oazoo.configs.mamba import MambaConfig
from oazoo.configs.mamba3 import Mamba3Config
from oazoo.configs.nanogpt import NanoGPTConfig
from oazoo.configs.recurrent import RecurrentConfig
from oazoo.configs.rope import RopeScaling
from oazoo.configs.transformer import TransformerConfig
from oazoo.errors import TranslationError

__all__ = [
    "DecoderConfig",
    "EmpyrealmConfig",
    "FlowConfig",
    "Mamba3Config",
    "MambaConfig",
    "ModelConfig",
    "NanoGPTConfig",
    "RecurrentConfig",
    "RopeScaling",
    "TransformerConfig",
    "config_from_json",
]

ModelConfig = (
    DecoderConfig
    | NanoGPTConfig
    | TransformerConfig
    | MambaConfig
    | Mamba3Config
    | RecurrentConfig
    | EmpyrealmConfig
    | FlowConfig
    | EmpyrealmConfig
    | RecurrentConfig
)

_FAMILIES: dict[str, type[ModelConfig]] = {
    cls.family: cls
    for cls in (
        DecoderConfig,
        NanoGPTConfig,
        TransformerConfig,
        MambaConfig,
        Mamba3Config,
        EmpyrealmConfig,
        FlowConfig,
        RecurrentConfig,
    )
}


def config_from_json(family: Any, data: Any) -> ModelConfig:
    """The typed configuration of a model family from the JSON object stored in an ``.oam``.

    Raises:
        TranslationError: an unknown family, or a configuration that is not valid for it.
    """
    if not isinstance(family, str) or family not in _FAMILIES:
        raise TranslationError(f"unknown model family {str(family)[:64]!r}; known: {', '.join(_FAMILIES)}")
    return _FAMILIES[family].from_json(data)
