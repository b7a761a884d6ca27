"""Show what is in a model file: configuration, tensors, encodings, sizes, provenance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oazoo.cli.common import (
    emit,
    emit_json,
    emit_table,
    format_bytes,
    format_count,
    json_option,
    printable,
    quiet_option,
)
from oazoo.zoo.inspect import inspect
from oazoo.zoo.receipt import summary


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--tensors/--no-tensors", default=True, show_default=True, help="List every tensor.")
@json_option
@quiet_option
def command(file: Path, tensors: bool, as_json: bool) -> None:
    """Show what FILE holds: an .oam, SafeTensors, GGUF or ONNX file, a PyTorch checkpoint, or a Hugging Face folder.

    Reads the structure only, never the weights, and needs no device.
    """
    found = inspect(file)
    if as_json:
        emit_json(found)
        return
    title = found["format"] + (f" version {found['version']}" if "version" in found else "")
    size = sum(f["bytes"] for f in found["files"])
    emit(
        printable(f"{found['path']}: {title}, {format_bytes(size)}, {len(found['tensors'])} tensors, ")
        + (f"{format_count(found['elements'])} values")
    )
    for key in ("architecture", "family", "tool"):
        if key in found:
            emit(printable(f"{key}: {found[key]}"))
    for key in ("config", "source", "generation", "quantization", "assets", "optimizer", "metadata"):
        if found.get(key):
            _emit_section(key, found[key])
    if "receipt" in found:
        _emit_receipt(found["receipt"])
    emit_table(
        ["encoding", "tensors", "values", "bytes", "bits a value"],
        [
            (
                name,
                row["tensors"],
                f"{row['elements']:,}",
                format_bytes(row["bytes"]),
                f"{8 * row['bytes'] / row['elements']:.2f}" if row["elements"] else "–",
            )
            for name, row in found["encodings"].items()
        ],
        right=["tensors", "values", "bytes", "bits a value"],
    )
    if tensors:
        emit_table(
            ["tensor", "shape", "encoding", "bytes"],
            [
                (
                    t["name"],
                    "×".join(map(str, t["shape"])) or "scalar",
                    t["encoding"],
                    format_bytes(t["bytes"]),
                )
                for t in [*found["tensors"], *found.get("state", [])]
            ],
            right=["bytes"],
        )


def _emit_section(name: str, values: Any) -> None:
    if not isinstance(values, dict):  # a file of somebody else's may hold anything
        emit(printable(f"{name}: {json.dumps(values, ensure_ascii=False)}"))
        return
    emit(f"{name}:")
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if name == "assets":
            text = format_bytes(value)
        first, *rest = text.splitlines() or [""]
        emit(printable(f"  {key}: {first}" + (f" … ({len(rest) + 1} lines)" if rest else "")))


def _emit_receipt(receipt: dict[str, Any] | None) -> None:
    if receipt is None:
        emit("quality receipt: none; measure with: oazoo eval FILE --against ORIGINAL --text TEXT --receipt")
        return
    emit("quality receipt:")
    for key, text in summary(receipt):
        emit(printable(f"  {key}: {text}".replace("\n", " ")))
