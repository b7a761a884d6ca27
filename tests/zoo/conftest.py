"""What several tests of the zoo use."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from model_goldens import source_path

import oazoo


@pytest.fixture(scope="session")
def oamref() -> ModuleType:
    """The independent strict reader of the `.oam` container."""
    path = Path(__file__).parent.parent / "data" / "oamref.py"
    spec = importlib.util.spec_from_file_location("oamref", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The F32 golden, a tiny Llama with a tokenizer, as an `.oam` file."""
    path = tmp_path_factory.mktemp("dense") / "dense.oam"
    oazoo.convert(source_path("F32"), path)
    return path
