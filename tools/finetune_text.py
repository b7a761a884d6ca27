"""Text in a style that language models do not know well: entries of a dictionary of 1913, with its marks and abbreviations.

    python tools/finetune_text.py FOLDER [DICTIONARY]

Reads Debian's package dict-gcide (the Collaborative International Dictionary of English, from Webster's of 1913; GPL). Its
file is /usr/share/dictd/gcide.dict.dz unless DICTIONARY names another. Writes ``train.txt``, 200 KB of whole entries drawn
evenly from the words in A to R, and ``test.txt``, 24 KB from those in S to Z: no entry is in both, nor any neighbour.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

DICTIONARY = Path("/usr/share/dictd/gcide.dict.dz")
TRAIN_BYTES, TEST_BYTES = 200_000, 24_000
#: Of train.txt and test.txt as version 0.48.5 of the package gives them.
SHA256 = {
    "train.txt": "f5332f25cb948708e2b3342c0bf1b5d000f512d7bc4a9e74070b867c5989003d",
    "test.txt": "c9a070388356fdd4600e263f6471781a226cfba335c6968f07e3d3818a3e3998",
}
_ENTRY = re.compile(r"([A-Z])[A-Za-z'-]+ \\")


def entries(text: str) -> list[str]:
    """Entries of Webster's, each with its headword's line first; the rest of a line that begins one is indented."""
    found = []
    for entry in re.split(r"\n(?=\S)", text):
        entry = "\n".join(line.rstrip() for line in entry.strip().splitlines())
        if _ENTRY.match(entry) and entry.endswith("[1913 Webster]") and entry.isascii():
            found.append(entry)
    return found


def drawn(entries: Sequence[str], size: int) -> str:
    """At most ``size`` bytes of whole entries, every n-th of them."""
    whole = sum(len(entry) + 2 for entry in entries)
    chosen: list[str] = []
    for entry in entries[:: max(1, whole // size)]:
        size -= len(entry) + 2
        if size < 0:
            break
        chosen.append(entry)
    return "\n\n".join(chosen) + "\n"


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(arguments[1]) if len(arguments) == 2 else DICTIONARY
    if not source.is_file():
        print(f"{source} is missing: apt-get install dict-gcide", file=sys.stderr)
        return 1
    # dictzip files are gzip files; a few bytes of this one are not UTF-8.
    found = entries(gzip.decompress(source.read_bytes()).decode("utf-8", "replace"))
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part, size in (
        ("train.txt", [entry for entry in found if entry[0] <= "R"], TRAIN_BYTES),
        ("test.txt", [entry for entry in found if entry[0] > "R"], TEST_BYTES),
    ):
        content = drawn(part, size).encode("ascii")
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        note = "" if digest == SHA256[name] else "  (another text than the figures are from)"
        print(f"{digest}  {folder / name}  {len(content):,} bytes{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
