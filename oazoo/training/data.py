"""Training data: files in, documents of token ids out, and a part held back for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from oazoo.errors import OazooError, UsageError
from oazoo.text import BaseTokenizer, ChatTemplate
from oazoo.text.files import EXAMPLE_SUFFIXES, TEXT_SUFFIXES, data_files, lines_of, text_pieces
from oazoo.training.documents import Documents, DocumentsWriter
from oazoo.training.examples import ExampleReader, Special

Progress = Callable[[str, int, int | None, str], None]

_TICK_LINES = 50


def load_data(
    paths: Iterable[str | Path],
    tokenizer: BaseTokenizer,
    *,
    template: ChatTemplate | None = None,
    eos_id: int | None = None,
    special: Special = "refuse",
    raw: bool = False,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Documents:
    """Read and tokenize training data.

    Args:
        paths: files, or folders of them. ``.jsonl`` files hold an example a line (see
            :mod:`oazoo.training.examples`), all others are text: UTF-8, one document a file.
        tokenizer: of the model. What it puts before a text is put before each document.
        template: the model's chat template, for examples.
        eos_id: ends each document; by default the first of the tokenizer's, if it has any.
        special: what names of control tokens in the data are: ``refuse`` them, ``plain`` text, or ``tokens``.
        raw: leave the template aside.
        folder: where to put the token ids (4 bytes each); by default where the system keeps temporary files.
        progress: called with how many bytes have been read.

    Raises:
        UsageError: a missing, empty or damaged file; the message names file and line.
        OazooError: what the tokenizer or the template refuse, with file and line.
    """
    files = data_files(paths, suffixes=(*TEXT_SUFFIXES, *EXAMPLE_SUFFIXES))
    if eos_id is None:
        eos_id = next(iter(tokenizer.eos_ids), None)
    reader = ExampleReader(tokenizer, template, eos_id, special, raw)
    writer = DocumentsWriter(folder)
    total = sum(file.stat().st_size for file in files)
    done = 0

    def tick(size: int) -> None:
        nonlocal done
        done = min(done + size, total)
        if progress is not None:
            progress("reading data", done, total, "bytes")

    try:
        for file in files:
            if file.suffix.lower() in EXAMPLE_SUFFIXES:
                _add_examples(file, reader, writer, tick)
            else:
                _add_text(file, reader, writer, tick)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def _add_text(
    file: Path, reader: ExampleReader, writer: DocumentsWriter, tick: Callable[[int], None]
) -> None:
    tokenizer = reader.tokenizer
    writer.begin_file(str(file), continuous=True)
    line = 1
    first = True
    for piece in text_pieces(file):
        try:
            reader.check_special(piece)
            allow = reader.special == "tokens"
            if first:
                ids = tokenizer.encode_prompt(piece, allow_special=allow)
            else:
                ids = tokenizer.encode(piece, add_special_tokens=False, allow_special=allow)
        except OazooError as error:
            names = tokenizer.control_tokens_in(piece) & set(tokenizer.special_tokens)
            at = line + piece.count("\n", 0, min(map(piece.find, names), default=0))
            raise type(error)(f"{file}:{at}: {error}") from error
        writer.extend(ids)
        line += piece.count("\n")
        first = False
        tick(len(piece.encode("utf-8")))
    if not first and reader.eos_id is not None:
        writer.extend([reader.eos_id])
    writer.end()


def _add_examples(
    file: Path, reader: ExampleReader, writer: DocumentsWriter, tick: Callable[[int], None]
) -> None:
    writer.begin_file(str(file), continuous=False)
    read = 0
    for number, line in lines_of(file):
        where = f"{file}:{number}"
        try:
            examples = reader.read(line, where)
        except OazooError as error:
            told = str(error)
            raise type(error)(told if told.startswith(where) else f"{where}: {told}") from error
        for example in examples:
            writer.extend(example.ids, example.targets)
            writer.end(line=number, whole=example.whole)
        read += len(line) + 1
        if number % _TICK_LINES == 0:
            tick(read)
            read = 0
    tick(read)


@dataclass(frozen=True)
class Part:
    """A part of documents: the ids from ``start`` to ``stop`` of running text, or whole documents by number."""

    documents: Documents
    start: int
    stop: int
    chosen: npt.NDArray[np.int64] | None = None

    @property
    def tokens(self) -> int:
        """Ids in the part."""
        if self.chosen is None:
            return self.stop - self.start
        return int(self.documents.lengths()[self.chosen].sum())


def everything(documents: Documents) -> Part:
    """All of the documents as one part."""
    chosen = None if documents.continuous else np.arange(len(documents), dtype=np.int64)
    return Part(documents, 0, len(documents.tokens), chosen)


def split(documents: Documents, fraction: float, seed: int = 0) -> tuple[Part, Part]:
    """Part for training, and part held back for validation; no token is in both.

    Of running text the end is held back. Of examples, documents are drawn by ``seed``; equal documents go to the same side.

    Args:
        documents: what to split.
        fraction: how much to hold back, more than 0 and less than 1.
        seed: of the draw.

    Raises:
        UsageError: another fraction, or data too small for two parts.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"a part of {fraction} cannot be held back: it must be more than 0 and less than 1")
    if documents.continuous:
        size = len(documents.tokens)
        cut = size - max(round(size * fraction), 2)
        if cut < 2:
            raise UsageError(f"{size} tokens are too few to hold a part back for validation")
        return Part(documents, 0, cut), Part(documents, cut, size)
    count = len(documents)
    starts, tokens = documents.starts, documents.tokens
    key = seed.to_bytes(16, "little", signed=True)
    digests = [
        hashlib.blake2b(tokens[starts[i] : starts[i + 1]].tobytes(), digest_size=16, key=key).digest()
        for i in range(count)
    ]
    order = sorted(range(count), key=lambda i: (digests[i], i))
    wanted = max(round(count * fraction), 1)
    # Equal documents are neighbours now: the cut goes between two that differ.
    cuts = [i for i in range(1, count) if digests[order[i - 1]] != digests[order[i]]]
    if not cuts:
        raise UsageError(
            f"{documents.where(0)}: {count} example{'s' if count > 1 else ''} cannot be split into training and validation"
            f"{': all are the same' if count > 1 else ''}"
        )
    cut = min(cuts, key=lambda i: abs(i - wanted))
    held, kept = np.sort(order[:cut]), np.sort(order[cut:])
    return Part(documents, 0, 0, kept.astype(np.int64)), Part(documents, 0, 0, held.astype(np.int64))
