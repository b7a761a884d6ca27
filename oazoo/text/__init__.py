"""Tokenizers and chat templates."""

from __future__ import annotations

from oazoo.text.base import BaseTokenizer
from oazoo.text.characters import CharacterTokenizer
from oazoo.text.chat import ChatTemplate, Message
from oazoo.text.oa_bpe import OaBpeTokenizer
from oazoo.text.streaming import StreamDecoder
from oazoo.text.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "BaseTokenizer",
    "ByteTokenizer",
    "CharacterTokenizer",
    "ChatTemplate",
    "Message",
    "OaBpeTokenizer",
    "StreamDecoder",
    "Tokenizer",
]
