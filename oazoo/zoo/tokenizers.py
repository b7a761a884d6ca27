"""Tokenizers by name: of a model file, of a file of their own, or plain bytes."""

from __future__ import annotations

from pathlib import Path

from oazoo.errors import TokenizerError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.text import BaseTokenizer, ByteTokenizer
from oazoo.text.tokenizer import MAX_TOKENIZER_BYTES
from oazoo.text.train import tokenizer_from_file
from oazoo.text.vocabulary import TOKENIZER_ASSETS, tokenizer_of

#: The name of the tokenizer whose ids are the bytes.
BYTES = "bytes"
_OAM = b"OAM\0"


def load_tokenizer(name: str | Path) -> BaseTokenizer:
    """The tokenizer of ``name``: a ``tokenizer.json``, an ``oa_bpe_v1`` or ``oazoo_char_v1`` file, an `.oam`, or ``bytes``.

    Raises:
        UsageError: there is no such file.
        TokenizerError: the file has no tokenizer, or a damaged one.
    """
    if str(name) == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file; name a tokenizer.json, an oa_bpe_v1 or oazoo_char_v1 file, an .oam model, or '{BYTES}'"
        )
    with path.open("rb") as file:
        data = file.read(len(_OAM))
        if data != _OAM:
            data += file.read(MAX_TOKENIZER_BYTES + 1 - len(data))
    try:
        return _of_model(path) if data == _OAM else tokenizer_from_file(data)
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error


def _of_model(path: Path) -> BaseTokenizer:
    with OamSource(path) as source:
        settings = source.metadata.get("generation")
        found = {name: source.asset(f"asset/{name}") for name in TOKENIZER_ASSETS}
    assets = {name: data for name, data in found.items() if data is not None}
    tokenizer = tokenizer_of(assets, settings if isinstance(settings, dict) else {})
    if tokenizer is None:
        raise TokenizerError("the model has no tokenizer")
    return tokenizer
