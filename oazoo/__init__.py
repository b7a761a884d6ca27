"""oazoo: a model zoo with weight translation and quantization, on its own Vulkan runtime.

The public functions are imported when they are first used, so that ``import oazoo`` is quick and needs no driver:
:func:`load`, :func:`convert`, :func:`quantize`, :func:`evaluate`, :func:`export`, :func:`diff`, :func:`pull`,
:func:`train`, :func:`finetune`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oazoo.errors import OazooError
from oazoo.version import __version__

if TYPE_CHECKING:
    from oazoo.zoo.convert import convert
    from oazoo.zoo.diff import diff
    from oazoo.zoo.evaluate import evaluate
    from oazoo.zoo.export import export
    from oazoo.zoo.load import load
    from oazoo.zoo.pull import pull
    from oazoo.zoo.quantize import quantize
    from oazoo.zoo.train import finetune, train

__all__ = [
    "OazooError",
    "__version__",
    "convert",
    "diff",
    "evaluate",
    "export",
    "finetune",
    "load",
    "pull",
    "quantize",
    "train",
]

_HOMES = {
    "convert": "oazoo.zoo.convert",
    "diff": "oazoo.zoo.diff",
    "evaluate": "oazoo.zoo.evaluate",
    "export": "oazoo.zoo.export",
    "finetune": "oazoo.zoo.train",
    "load": "oazoo.zoo.load",
    "pull": "oazoo.zoo.pull",
    "quantize": "oazoo.zoo.quantize",
    "train": "oazoo.zoo.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'oazoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
