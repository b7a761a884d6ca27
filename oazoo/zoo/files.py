"""Opening the model files that commands take by path."""

from __future__ import annotations

from pathlib import Path

from oazoo.errors import UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.source import WeightSource


def open_file(path: str | Path) -> WeightSource:
    """As :func:`oazoo.formats.detect.open_source`, with a way on for who gives a name of the zoo in place of a file."""
    if not Path(path).exists():
        from oazoo.zoo.cards import card_names

        name = str(path).lower()
        if name in card_names():
            raise UsageError(
                f"{name} is a name of the zoo, and a file is needed: make one with 'oazoo convert {name} -o {name}.oam' "
                f"('oazoo show {name}' tells about the model)"
            )
    return open_source(path)
