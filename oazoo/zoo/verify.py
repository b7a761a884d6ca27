"""Checking a model file: its structure, and every checksum that it carries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oazoo.formats.oam import OamSource
from oazoo.zoo.files import open_file

if TYPE_CHECKING:
    from oazoo.zoo.progress import Progress


@dataclass(frozen=True)
class Verified:
    """What was checked: the container, its tensors, and how many bytes stand under a checksum (0 if it has none)."""

    path: str
    format: str
    tensors: int
    checked_bytes: int


def verify(path: str | Path, progress: Progress | None = None) -> Verified:
    """Check a file's structure and checksums.

    Opening any container checks its whole structure. An `.oam` carries checksums, which are all computed; SafeTensors and
    GGUF carry none.

    Raises:
        FormatError: the first fault.
    """
    with open_file(path) as source:
        checked = 0
        if isinstance(source, OamSource):
            total = source.checked_bytes

            def report(step: int) -> None:
                nonlocal checked
                checked += step
                if progress is not None:
                    progress("verifying", checked, total)

            source.verify(report)
        return Verified(str(path), source.format, len(source), checked)
