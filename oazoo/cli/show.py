"""Show the card of a model, and where its files came from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from oazoo.cli.common import (
    emit_json,
    emit_table,
    format_bytes,
    format_count,
    json_option,
    printable,
    quiet_option,
    stdout_console,
)

if TYPE_CHECKING:
    from oazoo.zoo.cards import Card
    from oazoo.zoo.store import Manifest, Store

_READING_WIDTH = 100


@click.command("show")
@click.argument("model")
@json_option
@quiet_option
def command(model: str, as_json: bool) -> None:
    """Show what is known about MODEL: its card, its sources, and the files in the store."""
    from oazoo.zoo.cards import card_names, load_card
    from oazoo.zoo.pull import stored_card
    from oazoo.zoo.store import Store

    store = Store()
    card: Card | None = None
    if model.lower() in card_names():
        card = load_card(model.lower())
        manifest = stored_card(card, store)
    else:
        manifest = store.find(lambda found: model in (found.name, found.key, found.source))
        if manifest is None:
            load_card(model)  # Raises, with the closest names.
    if as_json:
        emit_json(_record(card, manifest, store))
        return
    if card is not None:
        _print_card(card)
    if manifest is None:
        stdout_console().print("Not in the store yet: oazoo pull " + model)
    else:
        _print_stored(manifest, store)


def _record(card: Card | None, manifest: Manifest | None, store: Store) -> dict[str, Any]:
    record: dict[str, Any] = {"card": None, "stored": None}
    if card is not None:
        record["card"] = {
            "name": card.name,
            "title": card.title,
            "license": card.license,
            "language": list(card.language),
            "base_model": card.base_model,
            "architecture": card.architecture,
            "parameters": card.parameters,
            "context_length": card.context_length,
            "tokenizer": None if card.tokenizer is None else dataclasses.asdict(card.tokenizer),
            "prompt_format": card.prompt_format,
            "sources": [{**dataclasses.asdict(source), "ref": source.ref.full} for source in card.sources],
            "text": card.text,
        }
    if manifest is not None:
        record["stored"] = {**dataclasses.asdict(manifest), "path": str(store.entry_of(manifest))}
    return record


def _print_card(card: Card) -> None:
    from rich.markdown import Markdown

    out = stdout_console()
    out.print(Markdown(printable(card.text), hyperlinks=False), width=min(out.width, _READING_WIDTH))
    out.print()
    emit_table(
        ["Card", ""],
        [
            ("license", card.license),
            ("languages", ", ".join(card.language)),
            ("base model", card.base_model or ""),
            ("architecture", card.architecture),
            ("parameters", format_count(card.parameters)),
            ("context", f"{card.context_length} tokens"),
            *_of_text(card),
            *((f"source {number}", source.ref.full) for number, source in enumerate(card.sources, 1)),
        ],
    )


def _of_text(card: Card) -> list[tuple[str, str]]:
    """What only cards of language models have."""
    if card.tokenizer is None:
        return []
    kind = f"{card.tokenizer.kind}, vocabulary of {card.tokenizer.vocabulary_size}"
    return [("tokenizer", kind), ("prompt format", card.prompt_format or "")]


def _print_stored(manifest: Manifest, store: Store) -> None:
    from oazoo.zoo.pull import source_text

    emit_table(
        ["In the store", ""],
        [
            ("path", store.entry_of(manifest)),
            ("source", source_text(manifest)),
            ("revision", manifest.revision or "not stated"),
            ("license", manifest.license or "not stated"),
            ("pulled", manifest.pulled),
            *([("wheel sha256", manifest.archive_sha256)] if manifest.archive_sha256 else []),
        ],
    )
    emit_table(
        ["File", "Size", "sha256"],
        [(file.path, format_bytes(file.size), file.sha256) for file in manifest.files],
        right=["Size"],
    )
