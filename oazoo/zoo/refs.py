"""How a model is named: ``hf:org/name@rev``, ``pypi:name==version``, ``bundled:FILE``, a URL, a path, or a card's name.

A reference is parsed without touching the network, and its text form never contains a secret
(:func:`UrlRef.public` drops the query, which in signed links is a key).
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from oazoo.errors import UsageError

_HUB_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_HUB_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,199}")
_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,62}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CARD_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubRef:
    """A Hugging Face repository (``org/name``), optionally one file of it, at a revision (None: its main
    branch)."""

    repo: str
    file: str | None = None
    revision: str | None = None

    @property
    def public(self) -> str:
        """The reference without its revision, e.g. ``hf:org/name``."""
        return f"hf:{self.repo}" + (f"/{self.file}" if self.file else "")

    @property
    def full(self) -> str:
        """The reference with its revision, as a user writes it."""
        return self.public + (f"@{self.revision}" if self.revision else "")

    @property
    def pinned(self) -> bool:
        """Whether the revision is a full commit hash, so that nothing on the Hub can change what it means."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True, slots=True)
class WheelRef:
    """A wheel on the package index; ``version`` None means the newest release."""

    name: str
    version: str | None = None

    @property
    def public(self) -> str:
        """The reference without its version, e.g. ``pypi:some-model`` (name normalized as in PEP 503)."""
        return f"pypi:{self.name}"

    @property
    def full(self) -> str:
        """The reference with its version, as a user writes it."""
        return self.public + (f"=={self.version}" if self.version else "")


@dataclass(frozen=True, slots=True)
class UrlRef:
    """One file at an ``https`` address (``http`` only on this machine, or with a hash to check against)."""

    url: str
    sha256: str | None = None

    @property
    def public(self) -> str:
        """The address without user, password, query and fragment: fit for messages and manifests."""
        return redact(self.url)

    @property
    def full(self) -> str:
        """The same: what distinguishes addresses may be secret."""
        return self.public

    @property
    def filename(self) -> str:
        """The last part of the path, as a safe file name."""
        name = PurePosixPath(unquote(urlsplit(self.url).path)).name
        return re.sub(r"[^\w.+-]", "_", name).strip(".") or "model"

    @property
    def digest(self) -> str:
        """A short identity of the full address, query included."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class BundledRef:
    """A file that ships with this package."""

    file: str

    @property
    def public(self) -> str:
        """The reference, as a user writes it."""
        return f"bundled:{self.file}"

    @property
    def full(self) -> str:
        """The same: there are no others."""
        return self.public


@dataclass(frozen=True, slots=True)
class LocalRef:
    """A file or folder of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class CardRef:
    """The name of a model card of the zoo; ``text`` is what was typed, for a file of that name here."""

    name: str
    text: str


Ref = HubRef | WheelRef | UrlRef | BundledRef | LocalRef | CardRef


def parse_ref(text: str) -> Ref:
    """Parse what a user typed.

    ``hf:``, ``pypi:``, ``bundled:`` and URLs are taken by their prefix. Anything else is a card's name if it looks like one
    and a path otherwise: with a separator, or a leading dot or tilde, it is always a path.

    Raises:
        UsageError: The text is malformed; the message says what the form is.
    """
    if text.startswith("hf:"):
        return _parse_hub(text)
    if text.startswith("pypi:"):
        return _parse_wheel(text)
    if text.startswith("bundled:"):
        return _parse_bundled(text)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", text):
        return _parse_url(text)
    if not text or "\0" in text:
        raise UsageError("no model: give a name of 'oazoo list', hf:org/name, pypi:name, a URL or a path")
    looks_like_path = os.sep in text or "/" in text or text.startswith((".", "~"))
    if looks_like_path or not _CARD_NAME.fullmatch(text.lower()):
        return LocalRef(Path(text).expanduser())
    return CardRef(text.lower(), text)


def _parse_hub(text: str) -> HubRef:
    form = "write hf:org/name, hf:org/name@revision or hf:org/name/FILE.gguf"
    body, separator, revision = text.removeprefix("hf:").partition("@")
    if separator and not (_HUB_REVISION.fullmatch(revision) and ".." not in revision):
        raise UsageError(f"{text!r}: {revision!r} is no revision; {form}")
    parts = body.split("/")
    if len(parts) < 2 or not all(_HUB_PART.fullmatch(part) and ".." not in part for part in parts):
        raise UsageError(f"{text!r} is no Hugging Face repository; {form}")
    return HubRef("/".join(parts[:2]), "/".join(parts[2:]) or None, revision or None)


def _parse_wheel(text: str) -> WheelRef:
    name, separator, version = text.removeprefix("pypi:").partition("==")
    if not _PROJECT.fullmatch(name) or (separator and not _VERSION.fullmatch(version)):
        raise UsageError(f"{text!r} is no package; write pypi:name or pypi:name==version")
    return WheelRef(re.sub(r"[-_.]+", "-", name).lower(), version or None)


def _parse_bundled(text: str) -> BundledRef:
    name = text.removeprefix("bundled:")
    if not _CARD_NAME.fullmatch(name) or not name.endswith(".oam"):
        raise UsageError(f"{text!r} is no file of this package; write bundled:NAME.oam")
    return BundledRef(name)


def _parse_url(text: str) -> UrlRef:
    try:
        parts = urlsplit(text)
        host = parts.hostname
    except ValueError as error:
        raise UsageError(f"{redact(text)!r} is no address: {error}") from None
    if parts.scheme.lower() not in ("http", "https") or not host:
        raise UsageError(f"{redact(text)!r}: only https addresses (and hf:, pypi:, paths) can be pulled")
    sha256 = None
    if parts.fragment:
        key, _, value = parts.fragment.partition("=")
        if key != "sha256" or not _SHA256.fullmatch(value.lower()):
            raise UsageError(f"{redact(text)!r}: what follows '#' must be sha256=<64 hexadecimal digits>")
        sha256 = value.lower()
    if parts.scheme.lower() == "http" and sha256 is None and not is_loopback(host):
        raise UsageError(
            f"{redact(text)!r}: plain http can be changed on the way; "
            "use https, or add #sha256=<digest> to check against"
        )
    return UrlRef(urlunsplit(parts._replace(fragment="")), sha256)


def is_loopback(host: str) -> bool:
    """Whether ``host`` names this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redact(url: str) -> str:
    """``url`` without user, password, query and fragment."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return url.split("?")[0].split("#")[0].rpartition("@")[2]
    host = f"[{host}]" if ":" in host else host
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def check_relative(path: str) -> str:
    """``path`` itself, if it is a relative POSIX path that stays below its root on every system.

    Raises:
        ValueError: It is absolute, climbs with ``..``, or holds a backslash, a colon, or a control character.
    """
    parts = path.split("/")
    if not path or len(path) > 1024 or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"unsafe path {path!r}")
    if any(char in '\\:*?"<>|' or ord(char) < 32 or ord(char) == 127 for char in path):
        raise ValueError(f"unsafe character in path {path!r}")
    return path
