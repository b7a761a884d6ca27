"""Fine-tuning by LoRA: corrections beside the linear layers of a frozen model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from oazoo.errors import UsageError
from oazoo.nn.layers import Linear
from oazoo.nn.lora import LoRA
from oazoo.nn.module import Module
from oazoo.runtime import Device


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """How corrections are made.

    Attributes:
        rank: their rank.
        alpha: strength; the correction is multiplied with ``alpha / rank``.
        dropout: share of inputs that are dropped in training.
        rank_stabilised: ``alpha / sqrt(rank)`` instead.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rank_stabilised: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def linear_layers(model: Module) -> dict[str, Linear]:
    """Every linear layer of a model by its dotted name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def attach(
    model: Module, names: Collection[str], settings: LoraSettings, device: Device, seed: int = 0
) -> dict[str, LoRA]:
    """Freeze a model and put corrections beside linear layers of it.

    Args:
        model: weights of any encoding.
        names: the layers.
        settings: of the corrections.
        device: where they go.
        seed: of their first values.

    Returns:
        The corrections by the layers' names, in the model's order; their parameters learn, and nothing else does.

    Raises:
        UsageError: no layers, a name that is none, a rank that a layer is too small for, or corrections already there.
    """
    layers = linear_layers(model)
    unknown = sorted(set(names) - set(layers))
    if unknown or not names:
        what = f"{unknown[0]!r} is no linear layer of this model" if unknown else "no layer would learn"
        raise UsageError(f"{what}; it has {', '.join(list(layers)[:12])}{' …' if len(layers) > 12 else ''}")
    made: dict[str, LoRA] = {}
    for name in (name for name in layers if name in names):
        layer = layers[name]
        if layer.adapter is not None:
            raise UsageError(f"{name} has an adapter already; merge it first (oazoo merge)")
        try:
            made[name] = LoRA(
                layer.weight.shape[1],
                layer.out_features,
                settings.rank,
                settings.alpha,
                settings.dropout,
                settings.rank_stabilised,
            )
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
    model.freeze()
    for index, (name, adapter) in enumerate(made.items()):
        # Each correction begins with numbers of its own.
        layers[name].adapter = adapter.initialize(device, seed + 1_000_003 * index)
    return made
