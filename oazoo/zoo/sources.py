"""What a source of models is. The kinds: :mod:`~oazoo.zoo.sources_hub`, ``…_wheel``, ``…_url`` and ``…_bundled``.

A source is asked in two steps. ``resolve`` finds out what there is to fetch (a moving name becomes a
revision), ``fetch`` brings it. Both raise :class:`~oazoo.errors.PullError` with a reason that reads well
after the source's label, as in ``huggingface: cannot reach the Hub (timed out)``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oazoo.errors import FormatError, PullError
from oazoo.formats.gguf_split import first_part
from oazoo.formats.mapped import open_regular
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import BundledRef, HubRef, WheelRef
from oazoo.zoo.store import StoredFile

if TYPE_CHECKING:
    from oazoo.zoo.cards import CardSource

#: File name ends of weights that a pull takes, the preferred first.
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".oam", ".onnx")
#: File name ends of pickled weights, which run code when read and are never taken.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified files below ``folder`` (in the staging area). ``entry`` is the one to open, or ``.`` for the folder."""

    folder: Path
    files: tuple[StoredFile, ...]
    license: str | None = None
    archive_sha256: str | None = None

    @property
    def entry(self) -> str:
        """The single file of weights, if it stands for itself (one file, or a GGUF), else the folder. Of a GGUF in
        several files it is the first.
        """
        weights = [file.path for file in self.files if file.path.lower().endswith(WEIGHT_SUFFIXES)]
        first = first_part(weights)
        if first is not None and len(weights) > 1:
            return first
        alone = len(self.files) == 1 or (len(weights) == 1 and weights[0].lower().endswith((".gguf", ".oam")))
        return (weights or [self.files[0].path])[0] if alone else "."


class Resolved(ABC):
    """A source whose revision is known.

    ``key`` is its folder in the store, ``source`` the reference without revision, ``requested`` what was
    asked for and ``revision`` what that is.
    """

    key: str
    source: str
    requested: str | None
    revision: str | None

    @abstractmethod
    def fetch(self, into: Path, progress: Progress) -> Fetched:
        """Bring the files into ``into``, going on from what an earlier try left there."""


class Source(ABC):
    """A place to get one model from."""

    #: How messages call it.
    label: str
    #: The reference without revision, free of secrets.
    source: str
    #: What was asked for: a branch, tag, commit or version; None for the latest.
    requested: str | None
    #: Whether ``requested`` can only ever mean the same files.
    pinned: bool

    @abstractmethod
    def resolve(self) -> Resolved:
        """Ask what there is."""


def source_for(card_source: CardSource, notify: Notify) -> Source:
    """The source of a card's entry, or of a bare reference (an entry without files)."""
    # Here, not above: the kinds import this module.
    from oazoo.zoo.sources_bundled import BundledSource
    from oazoo.zoo.sources_hub import HubSource
    from oazoo.zoo.sources_url import UrlSource
    from oazoo.zoo.sources_wheel import WheelSource

    ref = card_source.ref
    if isinstance(ref, HubRef):
        return HubSource(ref, card_source.files)
    if isinstance(ref, WheelRef):
        return WheelSource(ref, card_source, notify)
    if isinstance(ref, BundledRef):
        return BundledSource(ref, card_source.files)
    return UrlSource(ref)


def refuse_pickle(path: Path) -> None:
    """Raise if ``path`` holds pickled Python objects, whatever its name: reading those runs code.

    Recognised are bare pickles (protocol 2 and up) and PyTorch's zip archives with a pickle inside. Such an archive may stay
    if it holds nothing but tensors and plain values, which :mod:`oazoo.formats.torch_zip` reads without running it.
    """
    with open_regular(path) as file:
        head = file.read(4)
    reason = ""
    pickled = len(head) >= 2 and head[0] == 0x80 and 2 <= head[1] <= 5
    if head == b"PK\x03\x04":
        import zipfile

        try:
            with zipfile.ZipFile(path) as archive:
                pickled = any(name.endswith(".pkl") for name in archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            pickled = False
        reason = _why_not_plain(path) if pickled else ""
        pickled = bool(reason)
    if pickled:
        raise PullError(
            f"{path.name} is a pickle, which can run code when it is read; oazoo does not open such files{reason}. "
            "Look for a safetensors or GGUF file of the model, or convert it with the safetensors package "
            "on a machine that you can lose"
        )


def _why_not_plain(path: Path) -> str:
    """What is wrong with a PyTorch archive, in brackets; nothing for one that can be read."""
    from oazoo.formats.torch_zip import TorchSource

    try:
        TorchSource(path).close()
    except FormatError as error:
        return f" ({str(error).removeprefix(f'{path}: ')})"
    return ""


def only_pickles(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that look like pickled weights."""
    return [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
