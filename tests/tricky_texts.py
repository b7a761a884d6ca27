"""Texts on which rules for splitting text part ways, and a vocabulary that shows where each of them splits."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from checkpoints import LLAMA, gguf_names, llama_metadata, llama_tensors
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXTS = (
    "I'll DON'T we've 'TIS o'clock rock'n'roll HE'S HE'Ll 'Re x'S",
    "12345 1,234.56 ½ Ⅻ ²³ 007 a1b22c333d4444 ٣٤٥ १२३ 一二三",
    "  two  spaces   and\ttabs\t\tx",
    "line\n\nbreak\r\nwin \n \n  x\n",
    "trailing   ",
    "\n\n\n",
    "   ",
    "日本語テキスト、漢字。한국어 문장",
    "emoji 🙂🙃👩‍👩‍👧 end 🇩🇪",
    "Größe ÀÉÎ naïve ǅungla ЖЖж",
    "cafe\u0301 e\u0301 decomposed",
    "नमस्ते दुनिया ไทย",
    "a\u00a0b\u2003c\u3000d\u200be \u1680x\u0085y\u2028z",
    "foo_bar(baz)[0] != {x: 'y'};// end/\n/x",
    "CamelCaseHTTPServer x86_64 iPhone15 McDonald's",
    "::--==>> ...!!?? can\u2019t",
    "\x00\x01\x7f",
)


@cache
def learned() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary whose merges run across every place where a rule might split."""
    chosen, corpus = random.Random(0), list(TEXTS)
    for text in TEXTS:
        for _ in range(30):
            start, stop = sorted(chosen.sample(range(len(text) + 1), 2))
            corpus.append(text[start:stop])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


def learned_metadata(pre: str) -> dict[str, Any]:
    """GGUF metadata with the learned vocabulary and the rule of that name."""
    tokens, merges = learned()
    tokens = [*tokens, "<s>", "<|end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_llama(tokenizer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a model with such a tokenizer."""
    rows = len(tokenizer["tokenizer.ggml.tokens"])
    return llama_metadata(rows) | tokenizer, gguf_names(llama_tensors(LLAMA | {"vocab_size": rows}))
