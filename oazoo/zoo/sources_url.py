"""A single file at a URL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oazoo.errors import PullError
from oazoo.formats.gguf_split import all_parts
from oazoo.zoo.download import RemoteFile, download
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import UrlRef
from oazoo.zoo.sources import Fetched, Resolved, Source, refuse_pickle
from oazoo.zoo.store import StoredFile, make_key
from oazoo.zoo.web import default_client


class UrlSource(Source):
    """One file at an address. It is fetched once: what the address serves later is not asked."""

    label = "url"

    def __init__(self, ref: UrlRef) -> None:
        self.ref = ref
        self.source = ref.public
        self.requested = ref.digest
        self.pinned = True

    def resolve(self) -> Resolved:
        """Nothing to find out. One part of a GGUF model in several files is refused: an address leads to no others."""
        parts = all_parts(self.ref.filename)
        if len(parts) > 1:
            raise PullError(
                f"{self.ref.filename} is one of the {len(parts)} parts of a GGUF model, and an address names one file. "
                "Fetch all of them into one folder and name one of them there; from the Hub, "
                f"hf:org/name/{parts[0]} fetches all"
            )
        return _ResolvedUrl(
            key=make_key("url", self.ref.digest, self.ref.filename),
            source=self.source,
            requested=self.requested,
            revision=self.ref.sha256,
            ref=self.ref,
        )


@dataclass(frozen=True)
class _ResolvedUrl(Resolved):
    key: str
    source: str
    requested: str | None
    revision: str | None
    ref: UrlRef

    def fetch(self, into: Path, progress: Progress) -> Fetched:
        name = self.ref.filename
        remote = RemoteFile(path=name, url=self.ref.url, identity=self.ref.public, sha256=self.ref.sha256)
        target = into / name
        digest = download(remote, target, default_client(), progress)
        refuse_pickle(target)
        return Fetched(into, (StoredFile(name, target.stat().st_size, digest),))
