"""The configuration of a file that holds tensors and no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class RawConfig:
    """Tensors by name, without a model.

    ``shapes``: name → shape, in file order. The sizes that a model would have are zero.
    """

    family: ClassVar[str] = "raw"
    hidden_size: ClassVar[int] = 0
    num_layers: ClassVar[int] = 0
    vocab_size: ClassVar[int] = 0

    shapes: Mapping[str, tuple[int, ...]]

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor."""
        return dict(self.shapes)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return {"tensors": len(self.shapes)}
