"""Models that oazoo itself exported as ONNX graphs: the metadata says which model it is, the graph proves it.

A file can claim anything. So the graph of the claimed config is written anew and compared with the one in the file, node by
node and constant by constant. If they are the same, the file computes the model of that config and nothing else; weights
then go by their names. What differs in any way (another program has optimised it, say) is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oazoo.configs import DecoderConfig, NanoGPTConfig, config_from_json
from oazoo.errors import FormatError, TokenizerError, TranslationError, UsageError
from oazoo.formats import strict_json
from oazoo.formats.messages import quoted, some
from oazoo.formats.onnx import GraphSource
from oazoo.formats.onnx_writer import DATA_TYPES, GraphPlan
from oazoo.translators.assets import Assets, check_vocabulary, load_tokenizer
from oazoo.translators.carried import generation_defaults, special_tokens
from oazoo.translators.onnx_out import FAMILY, GRAPH, GRAPH_VERSION, MODEL, graph_of
from oazoo.translators.rules import Ignored, Rule
from oazoo.translators.settings import Settings, read_small
from oazoo.translators.translator import Checkpoint, Translation, Translator

#: What :func:`our_assets` reads from the metadata: the SHA-256 of the tokenizer.json beside the model, and JSON or text.
TOKENIZER, TEMPLATE, TOKENS, GENERATION = (
    f"oazoo.{name}" for name in ("tokenizer_sha256", "chat_template", "special_tokens", "generation")
)
TOKENIZER_FILE = "tokenizer.json"
_CONSTANT = "a constant of the graph, which follows from the config"
_OTHERWISE = (
    "A graph that another program has changed is read for what it is: --arch onnx_nanogpt for a GPT-2, or --arch raw for "
    "the tensors without a model"
)


def asset_texts(assets: Assets) -> dict[str, str]:
    """What travels with a model, as texts for the metadata; the tokenizer itself goes into a file beside the model."""
    texts = {GENERATION: _json(assets.generation), TOKENS: _json(assets.tokens)}
    if assets.tokenizer is not None:
        texts[TOKENIZER] = hashlib.sha256(assets.tokenizer).hexdigest()
    if assets.chat_template:
        texts[TEMPLATE] = assets.chat_template
    return texts


def our_assets(checkpoint: Checkpoint, rows: int, with_tokenizer: bool) -> tuple[Assets, list[Path]]:
    """What travels with a model that oazoo exported, and the files it was read from.

    Args:
        checkpoint: the model.
        rows: rows of the embedding.
        with_tokenizer: ``False`` to leave tokenizer and template out.

    Raises:
        TokenizerError: tokenizer.json is missing, or is not the one that was exported with the model.
        TranslationError: metadata of a wrong form.
    """
    where, texts = str(checkpoint.source.path), _properties(checkpoint)
    generation = generation_defaults(_parsed(texts, GENERATION, {}), f"{where}: {GENERATION}")
    ids = [*generation["eos_ids"], *(generation[name] for name in ("bos_id", "pad_id") if name in generation)]
    if any(not 0 <= number < rows for number in ids):
        raise TranslationError(
            f"{where}: {GENERATION} names ids without a row in the embedding ({rows} rows)"
        )
    tokens = special_tokens(_parsed(texts, TOKENS, {}), f"{where}: {TOKENS}")
    if not with_tokenizer:
        notes = ("tokenizer and chat template left out, as asked",)
        return Assets(tokens=tokens, generation=generation, notes=notes), []
    template = texts.text(TEMPLATE) if TEMPLATE in texts else None
    if TOKENIZER not in texts:
        return Assets(None, template, tokens, generation, ("no tokenizer was exported with the model",)), []
    path = checkpoint.source.path.parent / TOKENIZER_FILE
    try:
        data = read_small(path)
    except UsageError as error:
        raise TokenizerError(
            f"{error}; the model was exported with this file beside it. Put it back, or convert the weights alone with "
            "--no-tokenizer"
        ) from error
    if hashlib.sha256(data).hexdigest() != texts.text(TOKENIZER):
        raise TokenizerError(
            f"{path}: is not the tokenizer that was exported with {checkpoint.source.path.name}; put that back, or convert "
            "the weights alone with --no-tokenizer"
        )
    note = check_vocabulary(load_tokenizer(data, str(path)), rows, str(path))
    return Assets(data, template, tokens, generation, (note,) if note else ()), [path]


def our_provenance(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What the file says about where its weights come from; empty if it says nothing that can be read."""
    try:
        found = _parsed(_properties(checkpoint), "oazoo.source", {})
    except (TranslationError, FormatError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _translate(checkpoint: Checkpoint) -> Translation:
    source, texts = checkpoint.source, _properties(checkpoint)
    assert isinstance(source, GraphSource)
    if texts.text(GRAPH) != GRAPH_VERSION:
        raise TranslationError(
            f"{source.path}: has a graph of version {texts.text(GRAPH)[:16]!r} of oazoo's, this program knows "
            f"{GRAPH_VERSION!r}. {_OTHERWISE}"
        )
    config = config_from_json(texts.text(FAMILY), _parsed(texts, MODEL, None))
    names = config.parameters()
    missing = [name for name in names if name not in source]
    if missing:
        raise TranslationError(f"{source.path}: lacks the weights {some(missing)}")
    kinds = {name: source[name].info.encoding for name in names}
    odd = [f"{name} ({kind})" for name, kind in kinds.items() if kind not in DATA_TYPES]
    if odd:
        raise TranslationError(f"{source.path}: weights are of types that oazoo does not write: {some(odd)}")
    assert isinstance(config, DecoderConfig | NanoGPTConfig)
    plan = graph_of(config, kinds)
    fault = _difference(source, plan, checkpoint.config)
    if fault is not None:
        raise TranslationError(
            f"{source.path}: the graph is not what oazoo writes for the config in its metadata: {fault}. {_OTHERWISE}"
        )
    ignored = [Ignored(re.escape(name), _CONSTANT) for name in plan.constants]
    return Translation(config, [Rule(name, (name,)) for name in names], ignored)


def _difference(source: GraphSource, plan: GraphPlan, metadata: Mapping[str, Any]) -> str | None:
    """The first thing in which a graph differs from what was meant; None if they are the same."""
    graph = source.graph
    if metadata.get("opsets") != {"": plan.opset} or metadata.get("functions"):
        return f"it is not of operator set {plan.opset} alone"
    if list(graph.inputs) != list(plan.inputs) or list(graph.outputs) != list(plan.outputs):
        return "its inputs or outputs are others"
    for number, (found, meant) in enumerate(zip(graph.nodes, plan.nodes, strict=False)):
        if found != meant:
            return f"node {number} is {found}, not {meant}, or differs from it in inputs or attributes"
    if len(graph.nodes) != len(plan.nodes):
        return f"it has {len(graph.nodes)} nodes, not {len(plan.nodes)}"
    for name, values in plan.constants.items():
        if name not in source:
            return f"it lacks the constant {quoted(name)}"
        info = source[name].info
        if info.shape != values.shape or info.nbytes != values.nbytes:
            return f"the constant {quoted(name)} has the shape {list(info.shape)}"
        stored = source[name].numpy()
        if stored.dtype != values.dtype or not np.array_equal(_bits(stored), _bits(values)):
            return f"the constant {quoted(name)} has other values"
    return None


def _bits(values: Any) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _properties(checkpoint: Checkpoint) -> Settings:
    return Settings(checkpoint.config.get("properties") or {}, str(checkpoint.source.path))


def _parsed(texts: Settings, key: str, default: Any) -> Any:
    return (
        strict_json.loads(texts.text(key), f"{texts.where}: {key}")
        if key in texts or default is None
        else default
    )


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


TRANSLATORS = (Translator("onnx_ours", "a model that oazoo exported (ONNX)", ("onnx:oazoo",), _translate),)
