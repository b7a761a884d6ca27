"""Packages that only some commands need, and what to say where one is missing."""

from __future__ import annotations

from oazoo.errors import UsageError


def require_matplotlib(need: str) -> None:
    """Refuse before any work what could not be drawn after it.

    Args:
        need: who needs it, as the message begins: ``curves need matplotlib``.

    Raises:
        UsageError: matplotlib is missing; the message says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{need}, which cannot be imported ({error}): pip install 'oazoo[report]'"
        ) from error
