"""What is in a model file: any supported container, described as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oazoo.errors import OazooError
from oazoo.formats.oam import OamSource
from oazoo.formats.source import WeightSource
from oazoo.translators.settings import read_json
from oazoo.zoo.files import open_file
from oazoo.zoo.receipt import KEY, read_receipt

#: Lists and texts in the metadata are shown up to this many items or characters; a tokenizer's vocabulary is not a summary.
_MAX_ITEMS = 16
_MAX_TEXT = 400


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe a model file.

    Returns:
        Plain data: ``format``, ``files`` with sizes, ``config`` (SafeTensors: the config.json beside it) and
        ``source`` (provenance) where there are such,
        ``metadata``, ``tensors`` (name, shape, encoding, bytes), ``encodings`` (tensors, elements and bytes of each),
        ``elements``, ``tensor_bytes``, and for an `.oam` its version, sections' values and assets, and for
        a quantised one its quality ``receipt`` (None if it has none).

    Raises:
        FormatError: the file is damaged or of no supported container.
    """
    with open_file(path) as source:
        return describe(source)


def describe(source: WeightSource) -> dict[str, Any]:
    """The same for an opened source."""
    tensors = [
        {
            "name": t.info.name,
            "shape": list(t.info.shape),
            "encoding": t.info.encoding,
            "bytes": t.info.nbytes,
        }
        for t in source.values()
    ]
    encodings: dict[str, dict[str, int]] = {}
    for tensor in source.values():
        row = encodings.setdefault(tensor.info.encoding, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += tensor.info.numel
        row["bytes"] += tensor.info.nbytes
    result: dict[str, Any] = {
        "path": str(source.path),
        "format": source.format,
        "files": [{"path": str(f), "bytes": f.stat().st_size} for f in source.files],
        "elements": sum(row["elements"] for row in encodings.values()),
        "tensor_bytes": sum(row["bytes"] for row in encodings.values()),
        "encodings": encodings,
        "tensors": tensors,
    }
    if isinstance(source, OamSource):
        result |= _describe_oam(source)
    else:
        result["metadata"] = _shorten(source.metadata)
        beside = source.path.parent / "config.json"
        if source.format == "safetensors" and beside.is_file():
            try:
                result["config"] = _shorten(read_json(beside))
            except OazooError as error:  # the weights can be looked at all the same
                result["config"] = f"cannot be read: {error}"
    return result


def _describe_oam(source: OamSource) -> dict[str, Any]:
    config, metadata = source.config, source.metadata
    result: dict[str, Any] = {
        "version": source.version,
        "architecture": config.architecture,
        "header": {
            "d_model": config.d_model,
            "n_layers": config.n_layers,
            "vocab_size": config.vocab_size,
            "weight_dtype": config.weight_dtype,
        },
        "assets": {
            name.removeprefix("asset/"): tensor.info.nbytes
            for name, tensor in source.state.items()
            if name.startswith("asset/")
        },
        "state": [
            {
                "name": t.info.name,
                "shape": list(t.info.shape),
                "encoding": t.info.encoding,
                "bytes": t.info.nbytes,
            }
            for name, t in source.state.items()
            if not name.startswith("asset/")
        ],
        "progress": {
            "step": source.progress.step,
            "metric": source.progress.metric_name,
            "best_metric": source.progress.best_metric,
        },
    }
    if source.optimizer_kind is not None:
        kind, step = source.optimizer_kind
        result["optimizer"] = {"type": kind, "step": step}
    for ours, shown in (
        ("model", "config"),
        ("family", "family"),
        ("source", "source"),
        ("generation", "generation"),
        ("quantization", "quantization"),
        ("tool", "tool"),
    ):
        if ours in metadata:
            result[shown] = _shorten(metadata[ours])
    if "quantization" in metadata or KEY in metadata:
        receipt = read_receipt(source)
        result["receipt"] = None if receipt is None else _shorten(receipt)
    return result


def _shorten(value: Any) -> Any:
    """Plain data with long lists and texts cut, saying how long they are."""
    if isinstance(value, Mapping):
        return {str(key): _shorten(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) > _MAX_ITEMS:
            return f"[{len(value):,} values]"
        return [_shorten(item) for item in value]
    if isinstance(value, (str, bytes)):
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text):,} characters)"
    if isinstance(value, float) and value != value:
        return "nan"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)
