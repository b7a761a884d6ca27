"""How long work of the zoo tells how far it has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """How long work reports: ``label`` names the step, ``done`` of ``total`` (None: unknown) in ``unit``."""

    def __call__(self, label: str, done: int, total: int | None, unit: str = "bytes") -> None: ...


def no_progress(label: str, done: int, total: int | None, unit: str = "bytes") -> None:
    """The :class:`Progress` that shows nothing."""
