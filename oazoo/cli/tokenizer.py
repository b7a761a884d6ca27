"""Make a tokenizer from text; turn text into token ids and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from oazoo.cli._text import check_text, read_text
from oazoo.cli.common import (
    emit,
    emit_json,
    format_bytes,
    format_count,
    format_duration,
    json_option,
    quiet_option,
    say,
)
from oazoo.errors import UsageError

KINDS = {
    "bpe": "byte-level BPE (tokenizer.json)",
    "oa-bpe": "oa_bpe_v1",
    "char": "characters (oazoo_char_v1)",
}


@click.group()
@quiet_option
def command() -> None:
    """Make a tokenizer from text; turn text into token ids and back. Needs no Vulkan device."""


@command.command()
@click.option(
    "--data",
    "data",
    required=True,
    multiple=True,
    metavar="FILE|DIR",
    help="UTF-8 text to learn from, .jsonl examples, or a folder of such files. May be given several times.",
)
@click.option(
    "--vocab-size",
    type=int,
    metavar="N",
    help="Tokens in all; fewer when the text has no more pairs. Not for char: there the text says how many.",
)
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="bpe",
    show_default=True,
    help="bpe: a tokenizer.json. oa-bpe: OA's vocabulary file, merges over raw bytes. char: every character of the text.",
)
@click.option(
    "--special",
    "specials",
    multiple=True,
    metavar="TOKEN",
    help="A control token; in the order of their ids. Only for bpe.  [default: <|endoftext|>]",
)
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), metavar="OUT", help="The file to write."
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
@quiet_option
def train(
    data: tuple[str, ...],
    vocab_size: int | None,
    kind: str,
    specials: tuple[str, ...],
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Learn a vocabulary from text.

    The same text gives the same file. With bpe, text is split into words first; with oa-bpe, merges run over the bytes of
    whole files as they are; with char, each character that occurs is a token.
    """
    from oazoo.formats.atomic import check_output, write_atomically
    from oazoo.text.characters import CharacterTokenizer
    from oazoo.text.files import EXAMPLE_SUFFIXES, TEXT_SUFFIXES, data_files, vocabulary_texts
    from oazoo.text.oa_bpe import OaBpeTokenizer
    from oazoo.text.train import END_OF_TEXT, tokenizer_from_file, train_byte_level

    if specials and kind != "bpe":
        raise UsageError("--special is for --kind bpe: the others have no control tokens")
    if (vocab_size is None) != (kind == "char"):
        raise UsageError("--vocab-size is for --kind bpe and oa-bpe, which need it")
    files = data_files(data, suffixes=(*TEXT_SUFFIXES, *EXAMPLE_SUFFIXES))
    check_output(output, overwrite=force)
    start = time.perf_counter()
    size = 0

    def pieces() -> Iterator[str]:
        nonlocal size
        for piece in vocabulary_texts(files, whole=kind == "oa-bpe"):
            size += len(piece.encode("utf-8"))
            yield piece

    if vocab_size is None:
        made = CharacterTokenizer.train(pieces()).to_bytes()
    elif kind == "bpe":
        made = train_byte_level(pieces(), vocab_size, special_tokens=specials or (END_OF_TEXT,))
    else:
        made = OaBpeTokenizer.train(pieces(), vocab_size).to_bytes()
    tokenizer = tokenizer_from_file(made)
    write_atomically(output, made, overwrite=force)
    if as_json:
        emit_json(
            {
                "output": str(output),
                "kind": kind,
                "vocab_size": tokenizer.vocab_size,
                "requested_vocab_size": vocab_size,
                "special_tokens": dict(tokenizer.special_tokens),
                "files": len(files),
                "text_bytes": size,
            }
        )
        return
    seconds = time.perf_counter() - start
    say(
        f"{output}: {KINDS[kind]} of {tokenizer.vocab_size:,} tokens, learned from {format_bytes(size)} of text in "
        f"{format_duration(seconds)}"
    )
    if vocab_size is not None and tokenizer.vocab_size < vocab_size:
        say(f"the text has no more pairs to merge: {vocab_size:,} tokens were asked for")


_tokenizer_argument = click.argument("tokenizer", metavar="TOKENIZER")


@command.command()
@_tokenizer_argument
@click.argument("text", metavar="[TEXT]", required=False)
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Encode the UTF-8 text of a file in place of TEXT; '-' is standard input.",
)
@click.option("--no-special", is_flag=True, help="Read names of control tokens in the text as plain text.")
@json_option
@quiet_option
def encode(tokenizer: str, text: str | None, text_file: Path | None, no_special: bool, as_json: bool) -> None:
    """Print the token ids of TEXT.

    TOKENIZER is a tokenizer.json, an oa_bpe_v1 or oazoo_char_v1 vocabulary, an .oam model, or 'bytes'. What the tokenizer
    puts around a text, such as a beginning token, is included.
    """
    from oazoo.zoo.tokenizers import load_tokenizer

    if (text is None) == (text_file is None):
        raise click.UsageError("give a text, or --text FILE")
    source = check_text(text, "the text") if text is not None else read_text(Path(str(text_file)), "the text")
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(source, allow_special=not no_special)
    if as_json:
        emit_json(
            {"ids": ids, "tokens": [loaded.token(i) for i in ids], "text_bytes": len(source.encode("utf-8"))}
        )
        return
    emit(" ".join(map(str, ids)))
    ratio = len(source.encode("utf-8")) / max(len(ids), 1)
    say(f"{format_count(len(ids))} tokens, {ratio:.2f} bytes a token", style="dim")


@command.command()
@_tokenizer_argument
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--special", is_flag=True, help="Print control tokens too.")
@json_option
@quiet_option
def decode(tokenizer: str, ids: tuple[str, ...], special: bool, as_json: bool) -> None:
    """Print the text of token ids; without any, those on standard input."""
    from oazoo.zoo.tokenizers import load_tokenizer

    words = list(ids) or sys.stdin.read().split()
    numbers = []
    for word in words:
        if not (word.isascii() and word.isdecimal()):
            raise UsageError(f"{word[:40]!r} is not a token id: whole numbers from 0 on, with spaces between")
        numbers.append(int(word[:20]))
    text = load_tokenizer(tokenizer).decode(numbers, skip_special=not special)
    if as_json:
        emit_json({"text": text})
    else:
        emit(text)
