"""Rules that hold for every file: no paths of one machine, no registry's host name, nothing too long to read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
#: Written in pieces, or this file would break the rule that it checks.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:"
    + "|".join(["work", "home/[a-z]", "Users/[a-z]"])
    + r")(?:/|\b)",
    "a registry's host": "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("files", "pythonhosted", "org"),
            ("deb", "debian", "org"),
            ("archive", "ubuntu", "com"),
            ("registry", "npmjs", "org"),
        )
    ),
    "work left for later": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
}
LONGEST = 600


def files() -> list[Path]:
    """Every file that is or would be committed; all files of a copy without git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = (
            subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        )
    except (OSError, subprocess.CalledProcessError):
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [ROOT / name for name in sorted(listed) if name and (ROOT / name).is_file()]


def texts() -> list[tuple[str, str]]:
    """Name and text of every file that is text."""
    found = []
    for path in files():
        data = path.read_bytes()
        if b"\0" in data:
            continue
        try:
            found.append((path.relative_to(ROOT).as_posix(), data.decode("utf-8")))
        except UnicodeDecodeError:
            continue
    return found


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    hits = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts()
        if not name.startswith("tests/data/")
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not hits, f"{what}:\n" + "\n".join(hits)


def test_python_files_can_be_read_in_one_sitting() -> None:
    long = {
        name: text.count("\n")
        for name, text in texts()
        if name.endswith(".py") and text.count("\n") > LONGEST
    }
    assert not long, f"longer than {LONGEST} lines: {long}"


def test_text_files_end_with_a_newline_and_use_unix_line_ends() -> None:
    bad = [
        name
        for name, text in texts()
        if not name.startswith(("tests/data/", "tests/fuzz/corpus/"))
        and text
        and (not text.endswith("\n") or "\r" in text)
    ]
    assert not bad


def test_nothing_large_is_committed() -> None:
    large = {str(path): path.stat().st_size for path in files() if path.stat().st_size > 4 * 2**20}
    assert not large
