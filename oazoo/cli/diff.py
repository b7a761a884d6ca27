"""Compare two models across containers: tensors, encodings, configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oazoo.cli.common import (
    emit,
    emit_json,
    emit_table,
    json_option,
    printable,
    progress_bar,
    quiet_option,
    say,
)


@click.command()
@click.argument("first", metavar="A", type=click.Path(path_type=Path))
@click.argument("second", metavar="B", type=click.Path(path_type=Path))
@click.option(
    "--tol",
    "tolerance",
    type=float,
    default=0.0,
    show_default=True,
    help="Largest absolute difference of two values that counts as equal.",
)
@json_option
@quiet_option
def command(first: Path, second: Path, tolerance: float, as_json: bool) -> int:
    """Compare the models A and B: each an .oam, SafeTensors or GGUF file, or a Hugging Face folder.

    Models of one family are compared under common names, whatever their containers call the tensors. Exit status: 0 when
    tensors (within --tol) and model config are the same, 1 when they are not. Tokenizer, chat template and generation
    settings are listed and do not count.
    """
    from oazoo.zoo.diff import diff

    with progress_bar() as progress:
        found = diff(first, second, tolerance=tolerance, progress=progress)
    status = 0 if found.equal else 1
    if as_json:
        emit_json(found.to_json())
        return status
    if found.why_raw:
        say(f"tensors are compared under their own names: {found.why_raw}")
    changed = [t for t in found.tensors if t.beyond(0) or len(set(t.encodings)) > 1]
    rows: list[tuple[str, ...]] = [(name, "only in A", "", "", "", "") for name in found.missing]
    rows += [(name, "only in B", "", "", "", "") for name in found.extra]
    for tensor in changed:
        word = (
            "differs"
            if tensor.beyond(tolerance)
            else ("same values" if not tensor.beyond(0) else "within --tol")
        )
        stored = " / ".join(dict.fromkeys(tensor.encodings))
        if tensor.shapes[0] != tensor.shapes[1]:
            word = "shape"
            stored = " / ".join("×".join(map(str, shape)) or "scalar" for shape in tensor.shapes)
        if tensor.nonfinite:
            word += f", {tensor.nonfinite} not finite"
        numbers = (tensor.max_abs, tensor.mean_abs, tensor.cosine)
        rows.append((tensor.name, word, stored, *_shown(numbers)))
    if rows:
        emit_table(
            ["tensor", "", "stored as", "max error", "mean error", "cosine"],
            rows,
            right=["max error", "mean error", "cosine"],
        )
    for title, entries in (("config", found.config), ("options (not counted)", found.options)):
        if entries:
            emit_table([title, "A", "B"], [(name, _text(a), _text(b)) for name, a, b in entries])
    same = len(found.tensors) - len(found.differing)
    emit(
        printable(
            f"{'equal' if found.equal else 'different'}: {same} of {len(found.tensors)} common tensors the same"
            + (f" within {tolerance:g}" if tolerance else "")
            + f", {len(found.missing)} only in {first}, {len(found.extra)} only in {second}, "
            f"{len(found.config)} config differences"
        )
    )
    return status


def _shown(numbers: tuple[float | None, float | None, float | None]) -> tuple[str, str, str]:
    largest, mean, cosine = numbers
    return (
        "–" if largest is None else f"{largest:.3g}",
        "–" if mean is None else f"{mean:.3g}",
        "–" if cosine is None else f"{cosine:.9f}",
    )


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:160]}…"
