"""A file that ships with this package, beside the model cards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from oazoo.errors import PullError
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import BundledRef
from oazoo.zoo.sources import Fetched, Resolved, Source
from oazoo.zoo.store import StoredFile, make_key

if TYPE_CHECKING:
    from oazoo.zoo.cards import CardFile


class BundledSource(Source):
    """A model of this package: it is copied into the store, and needs no network."""

    label = "this package"

    def __init__(self, ref: BundledRef, files: Sequence[CardFile] = ()) -> None:
        self.ref = ref
        self.source = ref.public
        self.requested = None
        self.pinned = True
        self._files = tuple(files)

    def resolve(self) -> Resolved:
        """Whether the file is there."""
        data = _content(self.ref)
        return _ResolvedBundled(
            key=make_key("bundled", self.ref.file),
            source=self.source,
            requested=None,
            revision=hashlib.sha256(data).hexdigest(),
            ref=self.ref,
            files=self._files,
        )


def _content(ref: BundledRef) -> bytes:
    file = resources.files("oazoo.model_cards").joinpath(ref.file)
    if not file.is_file():
        raise PullError(f"it has no file {ref.file}; install oazoo again")
    return file.read_bytes()


@dataclass(frozen=True)
class _ResolvedBundled(Resolved):
    key: str
    source: str
    requested: str | None
    revision: str | None
    ref: BundledRef
    files: tuple[CardFile, ...]

    def fetch(self, into: Path, progress: Progress) -> Fetched:
        data = _content(self.ref)
        digest = hashlib.sha256(data).hexdigest()
        if any(file.sha256 not in (None, digest) for file in self.files):
            raise PullError(
                f"{self.ref.file} is not what its card says (sha256 {digest}); install oazoo again"
            )
        (into / self.ref.file).write_bytes(data)
        progress("copying", len(data), len(data))
        return Fetched(into, (StoredFile(self.ref.file, len(data), digest),))
