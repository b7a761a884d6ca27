"""The pre-tokenizers that GGUF files name, as the published tokenizer definitions state them.

``tokenizer.ggml.pre`` is only a label. Each entry here gives the normalizer and the split rule behind the
label, in the terms of the ``tokenizers`` library. A label that is not listed is refused: a wrong split rule
gives a model that runs and answers badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oazoo.errors import TokenizerError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before byte-level BPE.

    ``whole_words``: a piece that is itself in the vocabulary is taken without merging. ``add_bos``: the
    default when the file does not say.
    """

    splits: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, Any] | None = None
    whole_words: bool = False
    add_bos: bool = False

    def to_json(self) -> dict[str, Any]:
        """The ``pre_tokenizer`` object of a tokenizer.json."""
        if len(self.splits) == 1:
            return dict(self.splits[0])
        return {"type": "Sequence", "pretokenizers": [dict(split) for split in self.splits]}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _regex(pattern: str) -> tuple[dict[str, Any], ...]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return split, _byte_level(False)


_GPT2 = (_byte_level(True),)
_DIGITS = ({"type": "Digits", "individual_digits": True}, _byte_level(True))
_NFC = {"type": "NFC"}

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OTHER = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+|{_OTHER}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

#: GPT-4o's: words as above, with an English ending as part of the word, and numbers in threes.
_O200K = (
    rf"{_OTHER}{_UPPER}*{_LOWER}+{_ENGLISH}?|{_OTHER}{_UPPER}+{_LOWER}*{_ENGLISH}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

_LLAMA_BPE = PreTokenizer(_regex(_LLAMA3), whole_words=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(_GPT2),
    "mpt": PreTokenizer(_GPT2, _NFC),
    "olmo": PreTokenizer(_GPT2, _NFC),
    "smollm": PreTokenizer(_DIGITS),
    "starcoder": PreTokenizer(_DIGITS),
    "refact": PreTokenizer(_DIGITS),
    "command-r": PreTokenizer(_DIGITS, _NFC),
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "qwen2": PreTokenizer(_regex(_QWEN2), _NFC),
    "deepseek-r1-qwen": PreTokenizer(_regex(_QWEN2)),
    "dbrx": PreTokenizer(_regex(_LLAMA3)),
    "smaug-bpe": PreTokenizer(_regex(_LLAMA3)),
    "gpt-4o": PreTokenizer(_regex(_O200K)),
    "tekken": PreTokenizer(_regex(_TEKKEN), whole_words=True, add_bos=True),
}


def pre_tokenizer(name: str | None, where: str) -> PreTokenizer:
    """The split rule behind a label.

    Raises:
        TokenizerError: no label, or one that is not known exactly; the message names it.
    """
    if name is None:
        raise TokenizerError(
            f"{where}: the file does not name its pre-tokenizer (tokenizer.ggml.pre), so its tokenizer cannot be "
            "rebuilt; convert the weights alone with --no-tokenizer"
        )
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{where}: the pre-tokenizer {name[:64]!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}. "
            "Convert the weights alone with --no-tokenizer"
        )
    return PRE_TOKENIZERS[name]
