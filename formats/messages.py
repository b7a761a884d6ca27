"""Wording shared by the readers: values out of files, shown safely and shortly."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 200
_SHOWN = 8


def quoted(value: object) -> str:
    """``repr(value)`` for a message: control characters escaped, cut after 200 characters."""
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]!r}… ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]}…"


def some(items: Sequence[str]) -> str:
    """The first few of ``items``, and how many more there are."""
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
