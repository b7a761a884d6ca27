"""The command line: ``oazoo COMMAND``. One file a command; :mod:`oazoo.cli.main` finds and loads them."""

from __future__ import annotations

from oazoo.cli.main import main as main

__all__ = ["main"]
