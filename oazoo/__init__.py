"""oazoo: a model zoo with weight translation and quantization, on its own Vulkan runtime."""

from __future__ import annotations

__version__ = "0.1.0"
