"""Helpers of the format tests: the independent ``.oam`` reader, and how a damaged file has to be met."""

from __future__ import annotations

import importlib.util
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oazoo.errors import FormatError
from oazoo.formats.source import WeightSource

DATA = Path(__file__).resolve().parent.parent / "data"

Case = tuple[str, bytes]
#: What a reader may use on top of a multiple of the file's size: code objects, caches, one read-ahead buffer.
SLACK = 3 << 20
FACTOR = 40


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of reference files."""
    return DATA


@pytest.fixture(scope="session")
def oamref() -> ModuleType:
    """The independent strict reader and plain writer of ``.oam``."""
    spec = importlib.util.spec_from_file_location("oamref", DATA / "oamref.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read_everything(source: WeightSource) -> None:
    for tensor in source.values():
        assert tensor.raw().nbytes == tensor.info.nbytes
        try:
            values = tensor.numpy()
        except FormatError:
            continue
        assert values.shape == tensor.info.shape
    verify: Any = getattr(source, "verify", None)
    if verify is not None:
        verify()


@pytest.fixture
def refuses(tmp_path: Path) -> Callable[[Callable[[Path], WeightSource], Iterable[Case]], int]:
    """Check that a reader meets every case with FormatError that names the file, in memory bounded by its size."""

    def check(open_it: Callable[[Path], WeightSource], cases: Iterable[Case]) -> int:
        path = tmp_path / "damaged"
        count = 0
        accepted, silent, greedy = [], [], []
        tracemalloc.start()
        try:
            for label, content in cases:
                count += 1
                path.write_bytes(content)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                try:
                    source = open_it(path)
                    source.close()
                    accepted.append(label)
                except FormatError as error:
                    if str(path) not in str(error) or len(str(error)) > 2000:
                        silent.append((label, str(error)[:300]))
                used = tracemalloc.get_traced_memory()[1] - before
                if used > SLACK + FACTOR * len(content):
                    greedy.append((label, used, len(content)))
        finally:
            tracemalloc.stop()
        assert not accepted and not silent and not greedy, (accepted, silent, greedy)
        return count

    return check


@pytest.fixture
def survives(tmp_path: Path) -> Callable[[Callable[[Path], WeightSource], Iterable[bytes]], int]:
    """Check that a reader either refuses a file with FormatError, or reads all of it; returns how many it refused."""

    def check(open_it: Callable[[Path], WeightSource], contents: Iterable[bytes]) -> int:
        path = tmp_path / "mutated"
        refused = 0
        for content in contents:
            path.write_bytes(content)
            try:
                with open_it(path) as source:
                    _read_everything(source)
            except FormatError:
                refused += 1
        return refused

    return check
