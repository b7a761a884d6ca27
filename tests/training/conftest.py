"""A byte-level tokenizer with ChatML's control tokens, and ways to write data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from oazoo.text import ChatTemplate, Tokenizer
from oazoo.text.byte_alphabet import SPELLING

CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WriteLines = Callable[..., Path]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Bytes as ids, merges for ``the`` and for a double line end, and three control tokens from 300 on."""
    vocabulary = {character: byte for byte, character in enumerate(SPELLING)}
    vocabulary |= {"th": 256, "the": 257, "ĊĊ": 258}
    vocabulary |= {f"<unused{i}>": i for i in range(259, 300)}
    library = Library(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e"), ("Ċ", "Ċ")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    library.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return Tokenizer(library.to_str().encode(), bos_id=300, eos_ids=[302, 300])


@pytest.fixture(scope="session")
def chatml() -> ChatTemplate:
    return ChatTemplate(CHATML)


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Writes examples as lines of JSON; a str is written as it is."""

    def write(*entries: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = (
            entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in entries
        )
        path.write_text("\n".join(lines) + "\n", "utf-8", newline="")
        return path

    return write
