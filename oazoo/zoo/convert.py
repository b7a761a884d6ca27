"""From a name, URI or path to an `.oam` file: fetch, then translate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oazoo.errors import OazooError
from oazoo.formats.atomic import check_not_input
from oazoo.translators.convert import ConversionReport, Progress
from oazoo.translators.convert import convert as translate
from oazoo.translators.plan import Plan, plan
from oazoo.translators.translator import Translator
from oazoo.zoo.pull import PulledModel, pull


def provenance_of(pulled: PulledModel) -> dict[str, Any]:
    """What a conversion records about where its source came from; nothing of this machine's paths."""
    known: dict[str, Any] = {"files": {Path(name).name: digest for name, digest in pulled.sha256s.items()}}
    if pulled.sha256s:  # it came through the store, so its origin is known
        known |= {
            "name": pulled.name,
            "uri": pulled.source,
            "revision": pulled.revision,
            "license": pulled.license,
        }
    if pulled.card is not None:
        from oazoo.zoo.cards import load_card

        known["generation"] = dict(load_card(pulled.card).generation)
    return {key: value for key, value in known.items() if value is not None}


def convert(
    source: str | Path,
    output: str | Path,
    *,
    arch: str = "auto",
    dtype: str = "keep",
    overwrite: bool = False,
    with_tokenizer: bool = True,
    map_file: str | Path | None = None,
    check: bool = False,
    check_tolerance: float | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> ConversionReport:
    """Translate a model into an `.oam` file.

    Args:
        source: a path, a name of the zoo, or a URI (see :func:`oazoo.zoo.pull.pull`).
        output: the file to write; it appears only when complete.
        arch: a translator's name, or ``auto`` to go by what the checkpoint says.
        dtype: ``keep``, ``f32``, ``f16`` or ``bf16``. ``keep`` leaves dense tensors as they are, re-encodes quantised ones
            without loss where the format can (Q8_0 → q8, Q4_0 → q4), and makes the others f16.
        overwrite: replace an existing output.
        with_tokenizer: carry tokenizer and chat template.
        map_file: a map of your own, ``.toml`` or ``.py``, to be used instead of the built-in ones; see
            docs/tutorial-own-map.md. A Python file is run: name only what you trust.
        check: compare logits with the source afterwards; the report's ``check`` is then a
            :class:`oazoo.zoo.check.CheckReport`. Needs a Vulkan device. The file is kept whatever the check finds.
        check_tolerance: see :func:`oazoo.zoo.check.check_conversion`.
        progress: called with how far the work has come.
        notify: called with a line for each thing worth knowing about a download.

    Raises:
        OazooError: UsageError, PullError, FormatError, TranslationError or OutputError; nothing is left behind. With
            ``check`` also DeviceError, and the file is there.
    """
    if check_tolerance is not None:
        from oazoo.zoo.check import check_tolerance as checked

        checked(check_tolerance)
    own = _own(map_file)
    pulled = fetch(source, progress, notify)
    check_not_input(output, pulled.files)
    report = translate(
        pulled.path,
        output,
        arch=arch,
        dtype=dtype,
        overwrite=overwrite,
        progress=progress,
        provenance=provenance_of(pulled),
        with_tokenizer=with_tokenizer,
        own=own,
    )
    if not check:
        return report
    from oazoo.zoo.check import check_conversion

    try:
        found = check_conversion(pulled.path, report, arch="auto" if own else arch, tolerance=check_tolerance)
    except OazooError as error:
        raise type(error)(f"{output} is converted and kept, but could not be checked: {error}") from error
    return replace(report, check=found)


def plan_conversion(
    source: str | Path,
    *,
    arch: str = "auto",
    dtype: str = "keep",
    with_tokenizer: bool = True,
    map_file: str | Path | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Plan:
    """The checked plan of a conversion, for ``--dry-run``; close it."""
    own = _own(map_file)
    pulled = fetch(source, progress, notify)
    return plan(
        pulled.path, arch, dtype, with_tokenizer=with_tokenizer, provenance=provenance_of(pulled), own=own
    )


def _own(map_file: str | Path | None) -> Sequence[Translator]:
    """The translators of a map that was named."""
    if map_file is None:
        return ()
    from oazoo.translators.own_map import load_map

    return load_map(map_file).translators


def fetch(
    source: str | Path, progress: Progress | None = None, notify: Callable[[str], None] | None = None
) -> PulledModel:
    """:func:`oazoo.zoo.pull.pull` with optional arguments."""
    options: dict[str, Any] = {"notify": notify}
    if progress is not None:
        options["progress"] = progress
    return pull(source, **options)
