"""The local store of fetched models.

``OAZOO_HOME`` (default: the platform's cache folder) holds::

    models/KEY/manifest.json     source, revision, license, and path, size and sha256 of each file
    models/KEY/files/…           the model's files, at the paths that the manifest lists
    staging/KEY/SOURCE/…         what an unfinished pull has so far; it goes on from there
    locks/KEY.lock               held by the one process that pulls KEY

KEY is a card's name, or made from the source and its revision. A folder under ``models`` appears by one
rename after every file in it has been verified, and is never changed afterwards: a reader needs no lock, and
the store may be read-only. There are no symbolic links in it, so it works on every file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oazoo import __version__
from oazoo.errors import PullError
from oazoo.zoo.refs import check_relative

_VERSION = 1
_MAX_MANIFEST_BYTES = 16 << 20
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def home() -> Path:
    """The folder of the store: ``OAZOO_HOME``, or the platform's cache folder."""
    chosen = os.environ.get("OAZOO_HOME")
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs  # not needed by a conversion of what is at hand

    return platformdirs.user_cache_path("oazoo", appauthor=False)


def is_offline() -> bool:
    """Whether ``OAZOO_OFFLINE`` forbids the network."""
    return os.environ.get("OAZOO_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a stored model: ``path`` below the model's ``files`` folder, ``size`` in bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the store knows about a model.

    ``name`` is what a user calls it (a card's name, or the reference); ``source`` is the reference that it
    came from without its revision; ``requested`` is the branch, tag or version asked for, ``revision`` what
    that was at the time. ``entry`` is the path to open, below ``files`` (``.``: the folder).
    ``archive_sha256`` is that of the wheel.
    """

    key: str
    name: str
    card: str | None
    source: str
    requested: str | None
    revision: str | None
    license: str | None
    entry: str
    files: tuple[StoredFile, ...]
    archive_sha256: str | None
    pulled: str

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """As written to ``manifest.json``."""
        return {"oazoo_store": _VERSION, "tool": f"oazoo {__version__}", **asdict(self)}


def manifest_from_json(value: object) -> Manifest:
    """Check and convert the content of a ``manifest.json``.

    Raises:
        ValueError: A field is missing, ill-typed, or names a path outside the model's folder.
    """
    if not isinstance(value, dict) or value.get("oazoo_store") != _VERSION:
        raise ValueError(f"not a version {_VERSION} manifest")

    def text(owner: dict[Any, Any], key: str) -> str:
        found = owner.get(key)
        if not isinstance(found, str) or not found:
            raise ValueError(f"{key} must be a text")
        return found

    def optional(key: str) -> str | None:
        return None if value.get(key) is None else text(value, key)

    listed = value.get("files")
    if not isinstance(listed, list) or not listed:
        raise ValueError("files must be a list")
    files = []
    for item in listed:
        if not isinstance(item, dict) or type(item.get("size")) is not int or item["size"] < 0:
            raise ValueError("each file needs a size")
        digest = text(item, "sha256")
        if not _SHA256.fullmatch(digest):
            raise ValueError("sha256 must be 64 hexadecimal digits")
        files.append(StoredFile(check_relative(text(item, "path")), item["size"], digest))
    entry = text(value, "entry")
    if entry != "." and entry not in {file.path for file in files}:
        raise ValueError(f"entry {entry!r} is none of the files")
    key = text(value, "key")
    if not _KEY.fullmatch(key):
        raise ValueError(f"unsafe key {key!r}")
    return Manifest(
        key=key,
        name=text(value, "name"),
        card=optional("card"),
        source=text(value, "source"),
        requested=optional("requested"),
        revision=optional("revision"),
        license=optional("license"),
        entry=entry,
        files=tuple(files),
        archive_sha256=optional("archive_sha256"),
        pulled=text(value, "pulled"),
    )


def make_key(*parts: str) -> str:
    """A folder name from the parts of a reference."""
    return re.sub(r"[^A-Za-z0-9._+!-]", "-", "--".join(parts)).lstrip(".-_+!")[:200]


class Store:
    """A store folder. Nothing is created before something is to be written."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = home() if root is None else root

    # ------------------------------------------------------------------------------------------------------ reading

    def manifests(self) -> Iterator[Manifest]:
        """All complete models, sorted by key. Folders whose manifest or files are damaged are left out."""
        try:
            folders = sorted(path for path in (self.root / "models").iterdir() if path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return
        for folder in folders:
            manifest = self._read(folder.name)
            if manifest is not None:
                yield manifest

    def get(self, key: str) -> Manifest | None:
        """The complete model with this key, or None."""
        return self._read(key)

    def find(self, matches: Callable[[Manifest], bool]) -> Manifest | None:
        """The latest pulled model for which ``matches`` holds."""
        return max(filter(matches, self.manifests()), key=lambda manifest: manifest.pulled, default=None)

    def files_of(self, manifest: Manifest) -> Path:
        """The folder with the model's files."""
        return self.root / "models" / manifest.key / "files"

    def entry_of(self, manifest: Manifest) -> Path:
        """The path to open: the single weight file, or the folder."""
        folder = self.files_of(manifest)
        return folder if manifest.entry == "." else folder / manifest.entry

    def _read(self, key: str) -> Manifest | None:
        folder = self.root / "models" / key
        path = folder / "manifest.json"
        try:
            if path.stat().st_size > _MAX_MANIFEST_BYTES:
                return None
            manifest = manifest_from_json(json.loads(path.read_text(encoding="utf-8")))
            whole = all((folder / "files" / file.path).stat().st_size == file.size for file in manifest.files)
        except (OSError, ValueError, RecursionError):
            return None
        return manifest if whole and manifest.key == key else None

    # ------------------------------------------------------------------------------------------------------ writing

    @contextmanager
    def lock(self, key: str, notify: Callable[[str], None], doing: str | None = None) -> Iterator[None]:
        """Hold the lock of ``key``: a second process waits here until the first is done or gone.

        ``doing`` is what to say that the other one does; by default it pulls ``key``.
        """
        import filelock  # here: most commands take no lock, and it is slow to load

        folder = self.root / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / f"{key}.lock")
            try:
                lock.acquire(timeout=0.5)
            except filelock.Timeout:
                notify(f"another process is {doing or f'pulling {key}'}; waiting for it")
                lock.acquire(poll_interval=0.1)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            yield
        finally:
            lock.release()

    def staging(self, key: str, source: str) -> Path:
        """The folder for an unfinished pull of ``key`` from ``source``; created if need be."""
        folder = self.root / "staging" / key / make_key(source)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None
        return folder

    def land(self, manifest: Manifest, folder: Path) -> Manifest:
        """Make a model of the verified files below ``folder`` (in staging) and return its manifest.

        The caller holds the lock of its key. A damaged model of the same key is replaced. Files that the
        manifest does not list are dropped.
        """
        parent = self.root / "staging" / manifest.key
        fresh = parent / "landing"
        final = self.root / "models" / manifest.key
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            for file in manifest.files:
                target = fresh / "files" / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                (folder / file.path).replace(target)
            with (fresh / "manifest.json").open("w", encoding="utf-8") as out:
                json.dump(manifest.to_json(), out, indent=2, ensure_ascii=False)
                out.write("\n")
                out.flush()
                os.fsync(out.fileno())
            final.parent.mkdir(parents=True, exist_ok=True)
            if final.exists():
                old = parent / "replaced"
                shutil.rmtree(old, ignore_errors=True)
                final.rename(old)
            fresh.rename(final)
        except OSError as error:
            raise self._unwritable(error) from None
        shutil.rmtree(parent, ignore_errors=True)
        return manifest

    def _unwritable(self, error: OSError) -> PullError:
        return PullError(
            f"cannot write to the store {self.root} ({error.strerror or error}); "
            "set OAZOO_HOME to a folder that can be written"
        )


def now() -> str:
    """The present time for ``Manifest.pulled``: ISO 8601, UTC, microseconds (so that it sorts)."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
