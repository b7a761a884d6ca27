"""Check a LoRA adapter against a model; write it for PEFT or llama.cpp."""

from __future__ import annotations

from pathlib import Path

import click

from oazoo.cli.common import emit_json, emit_table, json_option, quiet_option, say, warn
from oazoo.errors import FormatError


@click.command()
@click.argument("model", metavar="MODEL.oam", type=click.Path(path_type=Path))
@click.argument("adapter", metavar="ADAPTER", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Write it: OUT.gguf for llama.cpp, any other name a folder for PEFT.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@json_option
@quiet_option
def command(model: Path, adapter: Path, output: Path | None, force: bool, as_json: bool) -> None:
    """Say which layers of MODEL.oam ADAPTER is for; with -o write it in another container.

    ADAPTER is a folder as PEFT saves it, a SafeTensors file that holds its config, or a GGUF file for llama.cpp. Every
    tensor of it must find its layer. To add it to the weights: oazoo merge. Needs no Vulkan device.
    """
    from oazoo.formats.atomic import check_not_input
    from oazoo.formats.lora import CONFIG_FILE, TENSORS_FILE
    from oazoo.formats.oam import OamSource
    from oazoo.zoo.adapters import base_warnings, bound_adapter, write_pairs
    from oazoo.zoo.files import open_file

    with open_file(model) as source:
        if not isinstance(source, OamSource):
            raise FormatError(
                f"{model} is a {source.format} file; convert it first: oazoo convert {model} -o MODEL.oam"
            )
        found, pairs = bound_adapter(source, adapter)
        warnings = base_warnings(found, source)
        architecture = None
        if output is not None:
            for written in (output, output / CONFIG_FILE, output / TENSORS_FILE):
                check_not_input(
                    written, [source.path, adapter, adapter / CONFIG_FILE, adapter / TENSORS_FILE]
                )
            # An adapter whose file says nothing of its base keeps that: this model may be another.
            where = write_pairs(
                source, pairs, output, base=found.base, dropout=found.dropout, overwrite=force
            )
            architecture = where.architecture
    for line in warnings:
        warn(line)
    if as_json:
        layers = [
            {"layer": name, "rank": p.rank, "alpha": p.alpha, "scale": p.scale, "shape": [p.b.shape[0], p.a.shape[1]]}
            for name, p in pairs.items()
        ]  # fmt: skip
        emit_json(
            {
                "layers": layers,
                "trained_on": dict(found.base),
                "warnings": warnings,
                "output": None if output is None else str(output),
                "architecture": architecture,
            }
        )
        return
    rows = [(name, p.rank, f"{p.scale:g}", f"{p.b.shape[0]}×{p.a.shape[1]}") for name, p in pairs.items()]
    emit_table(["layer", "rank", "scale", "shape"], rows, right=["rank", "scale", "shape"])
    parameters = sum(p.a.size + p.b.size for p in pairs.values())
    say(f"{len(rows)} layers, {parameters:,} parameters; every tensor has its layer in {model}")
    if output is not None:
        say(f"{output}: written for {architecture}")
