"""Text files as pieces of text: checked, and never whole in memory."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from oazoo.errors import UsageError

#: What a folder is searched for.
TEXT_SUFFIXES = (".txt", ".text", ".md")
EXAMPLE_SUFFIXES = (".jsonl", ".ndjson")

_BLOCK_BYTES = 1 << 20
#: A piece ends at a place found in its last so many characters, if there is one.
_TAIL_CHARS = 1 << 16
#: Longest line of a file of examples.
MAX_LINE_BYTES = 16 << 20

#: Best first: between two lines, at any line end, at any space. Between two lines without blanks around, splitters
#: of text into words (which look at the blanks before a word) find the same words on both sides.
_CUTS = (re.compile(r"(?<=\S\n)(?=\S)"), re.compile(r"(?<=\n)"), re.compile(r"(?<=\S)(?=\s)"))


def data_files(paths: Iterable[str | Path], *, suffixes: Sequence[str] = TEXT_SUFFIXES) -> list[Path]:
    """The files that paths stand for: files as they are, folders as all files below with one of ``suffixes``.

    A folder's files come in the order of their relative names, hidden ones are left out.

    Raises:
        UsageError: a path that does not exist or is neither file nor folder, a folder without such files, no path at all.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(_files_below(path, suffixes), key=lambda file: file.relative_to(path).parts)
            if not inside:
                raise UsageError(f"{path}: there are no files in it that end in {', '.join(suffixes)}")
            found += inside
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise UsageError(f"{path}: is neither a file nor a folder")
        else:
            raise UsageError(f"{path}: no such file or folder")
    if not found:
        raise UsageError("no data: name a file or a folder")
    twice = {file.resolve() for file in found}
    if len(twice) < len(found):
        raise UsageError("a file of the data is named twice; name each once")
    return found


def _files_below(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(here, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                yield path


def text_pieces(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in pieces of about a million characters, cut between lines where there are any.

    A byte order mark at the start is left out; line ends stay as they are.

    Raises:
        UsageError: it is not UTF-8; the message has the place of the first bad byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    read = 0
    kept = ""
    with path.open("rb") as file:
        block = file.read(_BLOCK_BYTES)
        while block:
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, read - pending + error.start) from None
            kept += text.removeprefix("\ufeff") if read == 0 else text
            read += len(block)
            block = file.read(_BLOCK_BYTES)
            cut = _last_cut(kept) if block else 0  # what is left at the end is one piece
            if cut:
                yield kept[:cut]
                kept = kept[cut:]
    pending = len(decoder.getstate()[0])
    if pending:
        raise _not_utf8(path, read - pending)
    if kept:
        yield kept


def vocabulary_texts(files: Iterable[Path], *, whole: bool = False) -> Iterator[str]:
    """What a vocabulary is learned from: the text of text files, and of lines of examples what they say.

    A text file comes in pieces, or ``whole``.

    Raises:
        UsageError: a file is not UTF-8, or a line is no example; the message names the line.
    """
    for file in files:
        if file.suffix.lower() not in EXAMPLE_SUFFIXES:
            pieces = text_pieces(file)
            yield from ["".join(pieces)] if whole else pieces
            continue
        for number, line in lines_of(file):
            try:
                entry = json.loads(line)
                said = [message["content"] for message in entry.get("messages", ())]
                said += [entry[key] for key in ("prompt", "completion", "text") if key in entry]
            except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
                said = []
            if not said or not all(isinstance(text, str) for text in said):
                raise UsageError(
                    f"{file}:{number}: is no example: a JSON object with messages, prompt and completion, or text"
                )
            yield from said


def _last_cut(text: str) -> int:
    """Where to cut a text that goes on: 0 for nowhere yet."""
    start = max(0, len(text) - _TAIL_CHARS)
    for rule in _CUTS:
        places = [m.start() for m in rule.finditer(text, start) if 0 < m.start() < len(text)]
        if places:
            return places[-1]
    # No blank in sixty thousand characters: any place is as good.
    return len(text) if len(text) > _TAIL_CHARS else 0


def _not_utf8(path: Path, offset: int) -> UsageError:
    with path.open("rb") as file:
        head = file.read(2)
    hint = " It begins as UTF-16 does." if head in (b"\xff\xfe", b"\xfe\xff") else ""
    return UsageError(f"{path}: is not UTF-8 text: byte {offset} is wrong.{hint} Save it as UTF-8")


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, without their ends, and their numbers from 1.

    Raises:
        UsageError: a line longer than 16 MiB.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise UsageError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            line = line.strip()
            if line:
                yield number, line
