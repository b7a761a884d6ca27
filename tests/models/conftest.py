"""Converted golden checkpoints, once for the session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from model_goldens import source_path

from oazoo.translators.convert import convert


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The `.oam` of a golden, by name: those of ``tests/data/hf`` and ``onnx``, or ``F32`` … of ``tests/data/gguf``."""
    folder = tmp_path_factory.mktemp("goldens")

    def make(name: str) -> Path:
        path = folder / f"{name.replace('/', '-')}.oam"
        if not path.exists():
            convert(source_path(name), path)
        return path

    return make
