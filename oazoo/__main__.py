"""``python -m oazoo`` is the ``oazoo`` command."""

from __future__ import annotations

from oazoo.cli.main import main

if __name__ == "__main__":
    main(prog_name="oazoo")
