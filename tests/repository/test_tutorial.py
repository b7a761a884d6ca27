"""The tutorial, followed literally: its files saved, its commands run in order, its output looked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "tutorial-own-map.md"
_BLOCK = re.compile(
    r"(?:as `(?P<file>[\w./-]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)


def steps() -> list[tuple[str, str, str]]:
    """(language, file to save it as, text) of every block, in order."""
    found = _BLOCK.finditer(DOCUMENT.read_text("utf-8"))
    return [(match["language"], match["file"] or "", match["text"]) for match in found]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def test_every_block_has_a_use() -> None:
    """A file is named, a command is run, and output belongs to the commands before it."""
    before = ""
    for language, file, _ in steps():
        assert language in ("python", "toml", "sh", "text")
        assert bool(file) is (language in ("python", "toml"))
        assert language != "text" or before == "sh"
        before = language
    assert [file for _, file, _ in steps() if file] == [
        "make_checkpoint.py",
        "my_map.toml",
        "my_map.py",
        "package/pyproject.toml",
        "package/oazoo_tiny_wide/__init__.py",
    ]


def test_followed_literally(tmp_path: Path) -> None:
    scripts, folder = tmp_path / "bin", tmp_path / "tutorial"
    for name, words in (("python", ""), ("oazoo", "-m oazoo ")):
        write(scripts / name, f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n').chmod(0o755)
    folder.mkdir()
    environ = {**os.environ, "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]])}
    environ.pop("PYTHONPATH", None)
    last, output = 0, ""
    commands = 0
    for language, file, text in steps():
        if file:
            write(folder / file, text)
        elif language == "sh":
            output = ""
            for line in text.splitlines():
                assert last == 0, output  # only the last command before an error that is shown may fail
                done = subprocess.run(
                    ["/bin/sh", "-c", line],
                    cwd=folder,
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                last, output = done.returncode, output + done.stdout + done.stderr
                commands += 1
        else:
            position = 0
            for line in text.splitlines():
                position = output.find(line, position)
                assert position >= 0, f"{line!r} is not in\n{output}"
            if last:
                assert last == 1 and text.startswith("error: "), output
                last = 0
    assert last == 0, output
    assert commands == 17
