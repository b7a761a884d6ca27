"""Check a model file's structure and checksums."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from oazoo.cli.common import emit, emit_json, format_bytes, json_option, printable, progress_bar, quiet_option
from oazoo.errors import FormatError
from oazoo.zoo.verify import verify


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
@quiet_option
def command(file: Path, as_json: bool) -> None:
    """Check FILE: its whole structure, and every checksum if it is an .oam.

    Exit status 0 when all is well, 1 with the first fault when the file is broken.
    """
    try:
        with progress_bar() as progress:
            found = verify(file, progress)
    except FormatError as error:
        if as_json:
            emit_json({"path": str(file), "ok": False, "error": str(error)})
        raise
    if as_json:
        emit_json({**asdict(found), "ok": True})
        return
    extent = (
        f"checksums over {format_bytes(found.checked_bytes)} agree"
        if found.checked_bytes
        else f"a {found.format} file carries no checksums"
    )
    emit(printable(f"{found.path}: {found.format}, {found.tensors} tensors, structure sound; {extent}"))
