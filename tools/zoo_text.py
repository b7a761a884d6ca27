"""The King James Bible as plain text, one verse a line: what the zoo's own models learn from.

    python tools/zoo_text.py FOLDER

Reads the public-domain text with the program ``bible`` of Debian's packages bible-kjv and bible-kjv-text. Writes
``train.txt`` and, of the books from Hebrews on, which no model here is trained on, ``test.txt``.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

HELD_OUT_FROM = "Hebrews 1"
#: Of train.txt and test.txt as version 4.38 of the packages gives them.
SHA256 = {
    "train.txt": "92ce50cf8304cb7eb6faab53c5bc85e5a86587c68193fea0fb0ddfa613a0806f",
    "test.txt": "d7c4e7769c166378d01dbfab96969ae234e15da1913bb4603cf21f3a084a8bf9",
}
_HEADING = re.compile(r"[1-3A-Z][A-Za-z ]* \d+")
_VERSE = re.compile(r"  \d+ (.*)")


def verses(listing: str) -> list[str]:
    """Chapter headings and verses, each a line, from the program's wrapped listing."""
    lines: list[str] = []
    for line in listing.splitlines():
        verse = _VERSE.fullmatch(line)
        if verse is not None:
            lines.append(verse[1])
        elif _HEADING.fullmatch(line):
            lines += ["", line]
        elif line.strip():
            lines[-1] += " " + line.strip()
    return lines[1:]


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    program = shutil.which("bible")
    if program is None:
        print("the program 'bible' is missing: apt-get install bible-kjv bible-kjv-text", file=sys.stderr)
        return 1
    done = subprocess.run([program, "Gen1:1-Rev22:21"], capture_output=True, text=True, check=True)
    lines = verses(done.stdout)
    cut = lines.index(HELD_OUT_FROM)
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.txt", lines[:cut]), ("test.txt", lines[cut:])):
        content = ("\n".join(part).strip() + "\n").encode("utf-8")
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        note = "" if digest == SHA256[name] else "  (another text than the models of the zoo were trained on)"
        print(f"{digest}  {folder / name}  {len(content):,} bytes{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
