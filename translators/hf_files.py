"""The files beside the weights of a Hugging Face folder, from what an ``.oam`` carries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oazoo.configs import ModelConfig
from oazoo.translators.assets import Assets

#: Our encoding names → torch's.
TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64"}
_SAMPLING = {
    "do_sample": "do_sample",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}


def hf_files(
    settings: Mapping[str, Any],
    assets: Assets,
    config: ModelConfig,
    encoding: str,
    source: Mapping[str, Any],
    *,
    alone: bool = False,
) -> dict[str, bytes]:
    """Name → bytes of config.json, generation_config.json, tokenizer files and a model card.

    Args:
        settings: config.json as the exporter gives it.
        assets: tokenizer, chat template, special tokens, generation defaults.
        config: the typed config.
        encoding: what most weights are stored as.
        source: provenance, for the card.
        alone: config.json holds ``settings`` and nothing else.
    """
    ids = _ids(assets.generation)
    dtype = TORCH_DTYPES[encoding]
    document = {
        **settings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,  # Phi-3's and Gemma's defaults in transformers are ids of their own vocabularies
        **ids,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    document = dict(settings) if alone else document
    sampling = {
        theirs: assets.generation[ours] for ours, theirs in _SAMPLING.items() if ours in assets.generation
    }
    files = {"config.json": _json(document), "generation_config.json": _json({**ids, **sampling})}
    if assets.tokenizer is not None:
        texts = {name: text for name, text in assets.tokens.items() if isinstance(text, str)}
        tokens: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": getattr(config, "max_positions", 1 << 30),  # a recurrence has no limit
            "clean_up_tokenization_spaces": False,
            **texts,
        }
        if assets.chat_template:
            tokens["chat_template"] = assets.chat_template
        files["tokenizer.json"] = assets.tokenizer
        files["tokenizer_config.json"] = _json(tokens)
    files["README.md"] = _card(source)
    return files


def _ids(generation: Mapping[str, Any]) -> dict[str, Any]:
    ends = list(generation.get("eos_ids") or ())
    found = {
        "bos_token_id": generation.get("bos_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": generation.get("pad_id"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _card(source: Mapping[str, Any]) -> bytes:
    """A model card: the licence in its front matter, and where the weights come from."""

    def line(key: str) -> str:
        return " ".join(str(source.get(key) or "").split())[:256]

    lines = ["---", "library_name: transformers"]
    if line("license"):
        lines.append(f"license: {json.dumps(line('license'), ensure_ascii=False)}")
    lines += ["---", "", f"# {line('name') or 'Model'}", "", "Exported by oazoo from:", ""]
    lines += [f"- {key}: {line(key)}" for key in ("name", "uri", "revision", "format", "sha256") if line(key)]
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
