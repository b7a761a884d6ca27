"""Resumable, verified download of one file.

The bytes go to ``NAME.partial``; a small ``NAME.partial.json`` beside it remembers what they are part of
(address identity, ETag). An interrupted download goes on where it stopped, with ``Range`` and ``If-Range``,
also in another process. The server's answer is not trusted: 200 to a Range request means start over; a 206 of
another object, or at another offset, throws the part away; a body that is too short is a break, one that is
too long an error; the finished file must have the expected size and hash, else it is removed. Only then does
``NAME`` come into being, by renaming.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from oazoo.errors import PullError
from oazoo.zoo.progress import Progress, no_progress
from oazoo.zoo.web import MAX_RETRY_AFTER, HttpClient, HttpStatusError, Unreachable, pause, reason_of

#: Breaks in a row, without :data:`_PROGRESS` new bytes in between, after which a download gives up.
MAX_BREAKS = 5
_PROGRESS = 1 << 16
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch.

    ``path`` is its place below the target folder; ``identity`` names the object without secrets and stays the
    same between runs, although ``url`` may not. ``size``, ``sha256`` and ``git_sha1`` (git's blob hash) are
    what it must have, where known. ``headers`` go to the origin of ``url`` only, if secret.
    """

    path: str
    url: str
    identity: str
    size: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def download(
    remote: RemoteFile,
    target: Path,
    client: HttpClient,
    progress: Progress = no_progress,
    label: str | None = None,
) -> str:
    """Fetch ``remote`` into ``target`` and return its sha256; ``target`` exists only complete and verified.

    A ``target`` that is already there and verifies is kept as it is.

    Raises:
        Unreachable: No connection came about.
        HttpStatusError: The server refuses.
        PullError: Wrong content, no space, or too many breaks; ``.partial`` stays for the next try if it is
        of use.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_file():
        fault, digest = _examine(remote, target)
        if not fault:
            return digest
        target.unlink()
    part = _Part(remote, target)
    shown = label or remote.path
    for last_try in (False, True):
        resumed = _fill(part, client, lambda done: progress(shown, done, remote.size))
        fault, digest = _examine(remote, part.path)
        if not fault:
            part.land(target)
            return digest
        part.discard()
        if not resumed or last_try:
            raise PullError(f"{remote.identity}: {fault}; it was thrown away")
    raise AssertionError("unreachable")


def _examine(remote: RemoteFile, path: Path) -> tuple[str, str]:
    """What is wrong with the content of ``path`` (empty: nothing), and its sha256 if nothing is."""
    size = path.stat().st_size
    if remote.size is not None and size != remote.size:
        return f"{size} bytes arrived where {remote.size} were expected", ""
    digest = sha256_of(path)
    if remote.sha256 is not None and digest != remote.sha256:
        return f"its sha256 is {digest}, but should be {remote.sha256}", ""
    if remote.git_sha1 is not None:
        blob = git_sha1_of(path)
        if blob != remote.git_sha1:
            return f"its git hash is {blob}, but should be {remote.git_sha1}", ""
    return "", digest


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def git_sha1_of(path: Path) -> str:
    """The hash that git gives a file with this content, hexadecimal."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


class _Part:
    """The ``.partial`` file, and what is known of the object that it is a part of."""

    def __init__(self, remote: RemoteFile, target: Path) -> None:
        self.remote = remote
        self.path = target.with_name(target.name + ".partial")
        self._note = target.with_name(target.name + ".partial.json")
        self.etag: str | None = None
        note = self._read_note()
        if note.get("identity") == remote.identity and note.get("expected") == remote.sha256:
            self.etag = note.get("etag")
        else:
            self.discard()
        if self.have and remote.size is not None and self.have > remote.size:
            self.discard()
        if self.have and self.etag is None and remote.sha256 is None and remote.git_sha1 is None:
            # Nothing could tell whether what follows belongs to what is here.
            self.discard()

    @property
    def have(self) -> int:
        """Bytes that are here."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, etag: str | None) -> None:
        """Note what the part will be of, before its first byte."""
        self.path.unlink(missing_ok=True)
        self.etag = etag
        note = {"identity": self.remote.identity, "expected": self.remote.sha256, "etag": etag}
        self._note.write_text(json.dumps(note), encoding="utf-8")

    def discard(self) -> None:
        """Forget everything."""
        self.etag = None
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)

    def land(self, target: Path) -> None:
        """Give the finished file its name."""
        self.path.replace(target)
        self._note.unlink(missing_ok=True)

    def _read_note(self) -> dict[str, str | None]:
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(note, dict):
            return {}
        return {key: value for key, value in note.items() if isinstance(value, str)} | {
            "expected": note.get("expected")
        }


class _ProgressTo(Protocol):
    def __call__(self, done: int) -> None: ...


def _fill(part: _Part, client: HttpClient, progress: _ProgressTo) -> bool:
    """Fetch until the part has all bytes; True if some of them came from an earlier connection."""
    breaks = 0
    reached = False
    while True:
        before = part.have
        size = part.remote.size
        if size is not None and before == size and size > 0:
            return True
        headers = dict(part.remote.headers)
        if before:
            headers["Range"] = f"bytes={before}-"
            if part.etag is not None:
                headers["If-Range"] = part.etag
        wait: float | None = None
        refusal: HttpStatusError | None = None
        try:
            with client.get(part.remote.url, headers) as response:
                reached = True
                if _receive(part, response, progress):
                    return before > 0 and part.have > before
            why = "the connection ended early"
        except HttpStatusError as error:
            reached = True
            if error.status == 416 and before:
                if _content_total(error.headers.get("Content-Range")) == before and size in (None, before):
                    return True
                part.discard()
            elif not error.transient:
                raise
            wait = error.retry_after
            if wait is not None and wait > MAX_RETRY_AFTER:
                raise
            why, refusal = str(error), error
        except Unreachable as error:
            # A server that never answered is not worth waiting for: there may be another source.
            if not reached:
                raise
            why = str(error)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise PullError(f"no space left for {part.remote.path} in {part.path.parent}") from None
            if isinstance(error, OSError) and error.filename is not None:
                raise
            why = reason_of(error)
        breaks = 0 if part.have >= before + _PROGRESS else breaks + 1
        if breaks > MAX_BREAKS:
            if refusal is not None:
                raise refusal
            raise PullError(
                f"{part.remote.identity}: gave up after {breaks} breaks in a row ({why}); "
                f"{part.have} bytes are kept, pull again to go on"
            )
        pause(max(breaks - 1, 0), wait)


def _receive(part: _Part, response: http.client.HTTPResponse, progress: _ProgressTo) -> bool:
    """Append one answer to the part; True if the object is complete with it."""
    etag = _strong(response.headers.get("ETag"))
    start = 0
    total: int | None
    if response.status == 206:
        start, total = _content_range(response.headers.get("Content-Range"))
        changed = part.etag is not None and etag is not None and etag != part.etag
        if start != part.have or changed:
            part.discard()
            return False
    elif response.status == 200:
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() and len(length) < 19 else None
        part.begin(etag)
    else:
        raise PullError(f"{part.remote.identity}: unexpected status {response.status}")
    expected = part.remote.size
    if total is not None and expected is not None and total != expected:
        part.discard()
        raise PullError(
            f"{part.remote.identity}: the server has {total} bytes where {expected} were expected"
        )
    limit = total if total is not None else expected
    _check_space(part, limit)
    with part.path.open("ab") as file:
        done = _copy(response, file, start, limit, progress)
        file.flush()
        os.fsync(file.fileno())
    if limit is not None and done > limit:
        part.discard()
        raise PullError(f"{part.remote.identity}: the server sends more than the {limit} bytes it announced")
    return done == limit if limit is not None else True


def _copy(
    response: http.client.HTTPResponse, file: BinaryIO, done: int, limit: int | None, progress: _ProgressTo
) -> int:
    progress(done)
    while chunk := response.read1(_CHUNK):
        file.write(chunk)
        done += len(chunk)
        if limit is not None and done > limit:
            break
        progress(done)
    return done


def _check_space(part: _Part, limit: int | None) -> None:
    free = shutil.disk_usage(part.path.parent).free
    missing = (limit or 0) - part.have
    if missing > free:
        raise PullError(
            f"{part.remote.path} needs {missing} more bytes in {part.path.parent}, where {free} are free; "
            "make room, or point OAZOO_HOME to a larger disk"
        )


def _content_range(value: str | None) -> tuple[int, int | None]:
    """(first byte, total or None) of a Content-Range; (-1, None) if it is unusable."""
    match = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", (value or "").strip())
    if match is None:
        return -1, None
    return int(match[1]), None if match[3] == "*" else int(match[3])


def _content_total(value: str | None) -> int | None:
    """The total of the Content-Range of a 416 answer."""
    match = re.fullmatch(r"bytes \*/(\d{1,18})", (value or "").strip())
    return int(match[1]) if match else None


def _strong(etag: str | None) -> str | None:
    """A strong ETag as it stands, or None: a weak one does not promise equal bytes."""
    return etag if etag and re.fullmatch(r'"[^"]*"', etag.strip()) else None
