"""The table of faults in tests/README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def test_every_test_that_the_table_names_exists() -> None:
    rows = [line for line in (TESTS / "README.md").read_text("utf-8").splitlines() if "::test_" in line]
    assert len(rows) > 30
    for row in rows:
        file = ""
        for path, name in re.findall(r"`([\w/.]*)::(\w+)`", row):
            file = path or file
            assert re.search(rf"^def {name}\(", (TESTS / file).read_text("utf-8"), re.MULTILINE), (file, name)
