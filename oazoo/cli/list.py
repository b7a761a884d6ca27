"""List the models of the zoo and of the store."""

from __future__ import annotations

from typing import Any

import click

from oazoo.cli.common import emit_json, emit_table, format_bytes, format_count, json_option, quiet_option, say


@click.command("list")
@json_option
@quiet_option
def command(as_json: bool) -> None:
    """List the models that 'oazoo pull' knows by name, and what else is in the store."""
    from oazoo.zoo.cards import card_names, load_card
    from oazoo.zoo.pull import source_text, stored_card
    from oazoo.zoo.store import Store

    store = Store()
    records: list[dict[str, Any]] = []
    shown: set[str] = set()
    for name in card_names():
        card = load_card(name)
        manifest = stored_card(card, store)
        records.append(
            {
                "name": name,
                "parameters": card.parameters,
                "license": card.license,
                "stored": manifest is not None,
                "size": manifest.nbytes if manifest else None,
                "path": str(store.entry_of(manifest)) if manifest else None,
                "source": source_text(manifest) if manifest else card.sources[0].ref.full,
            }
        )
        if manifest is not None:
            shown.add(manifest.key)
    for manifest in store.manifests():
        if manifest.key not in shown:
            records.append(
                {
                    "name": manifest.name,
                    "parameters": None,
                    "license": manifest.license,
                    "stored": True,
                    "size": manifest.nbytes,
                    "path": str(store.entry_of(manifest)),
                    "source": source_text(manifest),
                }
            )
    if as_json:
        emit_json({"store": str(store.root), "models": records})
        return
    emit_table(
        ["Model", "Parameters", "In store", "License", "Source"],
        [
            (
                record["name"],
                format_count(record["parameters"]) if record["parameters"] else "",
                format_bytes(record["size"]) if record["stored"] else "no",
                record["license"] or "",
                record["source"],
            )
            for record in records
        ],
        right=["Parameters", "In store"],
    )
    total = sum(manifest.nbytes for manifest in store.manifests())
    copies = [path.stat().st_size for path in (store.root / "converted").glob("*.oam")]
    converted = f", and {len(copies)} converted copies of {format_bytes(sum(copies))}" if copies else ""
    say(f"store: {store.root} ({format_bytes(total)} fetched{converted})", style="dim")
