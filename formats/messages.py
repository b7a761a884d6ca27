"""Wording shared by the readers: names out of files, shown safely and shortly."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 200
_SHOWN = 8


def quoted(text: str) -> str:
    """``text`` in quotes for a message: control characters escaped, cut after 200 characters."""
    return repr(text) if len(text) <= _LONGEST else f"{text[:_LONGEST]!r}… ({len(text)} characters)"


def some(items: Sequence[str]) -> str:
    """The first few of ``items``, and how many more there are."""
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
