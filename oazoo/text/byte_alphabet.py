"""GPT-2's spelling of bytes as printable characters, which every byte-level vocabulary uses."""

from __future__ import annotations


def _spelling() -> tuple[str, ...]:
    """Printable bytes are spelled as themselves, the others from U+0100 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256))


#: The character of each byte.
SPELLING = _spelling()
#: The byte of each character.
ALPHABET = {character: byte for byte, character in enumerate(SPELLING)}
