"""Fine-tuning by LoRA: which linear layers of a model get a correction, and how the corrections are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from oazoo.errors import UsageError
from oazoo.nn.layers import Linear
from oazoo.nn.lora import LoRA
from oazoo.nn.module import Module
from oazoo.runtime import Device

#: What learns if nothing is said: every linear layer of attention and feed-forward, whatever the family calls them.
DEFAULT_TARGETS = ("layers.*",)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """How corrections are made.

    Attributes:
        rank: their rank.
        alpha: strength; the correction is multiplied with ``alpha / rank``.
        dropout: share of inputs that are dropped in training.
        targets: shell-style patterns of linear layers' names (``*.attn.q``, ``layers.3.*``).
        rank_stabilised: ``alpha / sqrt(rank)`` instead.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = DEFAULT_TARGETS
    rank_stabilised: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "dropout": self.dropout,
            "targets": list(self.targets),
            "rank_stabilised": self.rank_stabilised,
        }


def linear_layers(model: Module) -> dict[str, Linear]:
    """Every linear layer of a model by its dotted name."""
    return {name: layer for name, layer in named_modules(model) if isinstance(layer, Linear)}


def named_modules(model: Module, prefix: str = "") -> list[tuple[str, Module]]:
    """Every module below ``model`` with its dotted name."""
    found: list[tuple[str, Module]] = []
    for name, child in model.children():
        if isinstance(child, Module):
            found.append((prefix + name, child))
            found += named_modules(child, f"{prefix}{name}.")
    return found


def targeted(model: Module, targets: Sequence[str]) -> dict[str, Linear]:
    """The linear layers that patterns name.

    Raises:
        UsageError: a pattern that names none; the message lists what there is.
    """
    layers = linear_layers(model)
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in layers):
            kinds = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in layers})
            raise UsageError(
                f"{pattern!r} names no linear layer of this model, so nothing would learn; it has {', '.join(kinds)}"
            )
    return {
        name: layer for name, layer in layers.items() if any(fnmatchcase(name, pattern) for pattern in targets)
    }


def attach(model: Module, settings: LoraSettings, device: Device, seed: int = 0) -> dict[str, LoRA]:
    """Freeze a model and put corrections beside its linear layers.

    Returns:
        The corrections by the layers' names; their parameters learn, and nothing else does.

    Raises:
        UsageError: see :func:`targeted`; also for a rank that a layer is too small for, and where there are corrections already.
    """
    chosen = targeted(model, settings.targets)
    made: dict[str, LoRA] = {}
    for name, layer in chosen.items():
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
        # Each correction begins with numbers of its own, whichever others there are.
        adapter.initialize(device, seed + 1_000_003 * index)
        chosen[name].adapter = adapter
    return made


def detach_all(model: Module) -> None:
    """Take all corrections away again."""
    for layer in linear_layers(model).values():
        layer.adapter = None
