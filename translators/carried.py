"""What travels with a model as our own files state it, its types checked: generation defaults and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oazoo.translators.settings import Settings

_SAMPLING = ("temperature", "top_p", "min_p", "repeat_penalty")


def generation_defaults(values: Any, where: str) -> dict[str, Any]:
    """``eos_ids``, ``bos_id``, ``pad_id`` and sampling defaults.

    Raises:
        TranslationError: a value of a wrong type.
    """
    stored = Settings(values, where)
    generation: dict[str, Any] = {"eos_ids": list(stored.ids("eos_ids"))}
    for name in ("bos_id", "pad_id"):
        if name in stored:
            generation[name] = stored.integer(name)
    if "do_sample" in stored:
        generation["do_sample"] = stored.boolean("do_sample")
    if "top_k" in stored:
        generation["top_k"] = stored.integer("top_k")
    return generation | {name: stored.number(name) for name in _SAMPLING if name in stored}


def special_tokens(values: Any, where: str) -> Mapping[str, str]:
    """``bos_token`` and its like, as texts.

    Raises:
        TranslationError: a value of a wrong type.
    """
    texts = Settings(values, where)
    return {name: texts.text(name) for name in texts.values if texts.values[name] is not None}
