"""The package index that pip is configured for: its address, and the files that it lists (PEP 503, PEP 691).

pip's own command tells the configuration (files, environment, ``PIP_INDEX_URL``); no address is built in
here.
"""

from __future__ import annotations

import ast
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from oazoo.errors import PullError
from oazoo.zoo.refs import is_loopback, redact
from oazoo.zoo.web import HttpClient, HttpStatusError

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_MAX_PAGE_BYTES = 64 << 20
_PIP_TIMEOUT = 60
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Asks pip for the index that it uses when nothing is configured.
_DEFAULT_INDEX = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """Where packages come from. ``indexes`` are simple-API addresses over http(s), the preferred first.

    ``local`` tells whether there are also places that only pip itself looks into (folders, ``find-links``).
    """

    indexes: tuple[str, ...]
    local: bool
    cafile: str | None = None
    proxy: str | None = None


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A file that an index lists. ``url`` is absolute; ``size`` and ``sha256`` are None where it does not say."""

    filename: str
    url: str
    sha256: str | None
    size: int | None
    yanked: bool


def pip_command() -> list[str] | None:
    """How to run pip here, or None."""
    if find_spec("pip") is not None:
        # -P: a pip.py in the current folder is not what is meant.
        return [sys.executable, "-P", "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    return [found] if found else None


def index_settings() -> IndexSettings:
    """The configuration of pip's ``download`` command as it is in effect here."""
    values = _pip_values()

    def last(name: str) -> str | None:
        for section in (":env:", "download", "global"):
            if values.get(f"{section}.{name}"):
                return values[f"{section}.{name}"]
        return None

    main = last("index-url") or os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
    extra = (last("extra-index-url") or os.environ.get("PIP_EXTRA_INDEX_URL") or "").split()
    no_index = (last("no-index") or "").lower() in ("1", "true", "yes", "on")
    if no_index:
        addresses: list[str] = []
    else:
        addresses = [address for address in (main or _default_index(), *extra) if address]
    remote = tuple(address for address in addresses if urlsplit(address).scheme in ("http", "https"))
    local = bool(last("find-links")) or len(remote) < len(addresses)
    return IndexSettings(remote, local, last("cert"), last("proxy"))


def _pip_output(*arguments: str) -> str:
    """What pip (or its Python, for ``-c``) prints; empty if that fails."""
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("PIP_")))
    return _run_pip(arguments, environment)


@cache
def _run_pip(arguments: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> str:
    # The environment is there for the cache: it is what configures pip.
    command = pip_command()
    if command is None:
        return ""
    if arguments[0] == "-c":
        command = command[:2] if command[1:] else []
    if not command:
        return ""
    try:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _pip_values() -> dict[str, str]:
    """The lines of ``pip config list``, e.g. ``global.index-url='…'``, as a mapping."""
    values = {}
    for line in _pip_output("config", "list").splitlines():
        name, separator, value = line.partition("=")
        try:
            parsed = ast.literal_eval(value) if separator else None
        except (ValueError, SyntaxError):
            continue
        if isinstance(parsed, str):
            values[name.strip()] = parsed.strip()
    return values


def _default_index() -> str | None:
    address = _pip_output("-c", _DEFAULT_INDEX).strip()
    return address if address.startswith("https://") else None


def list_files(index: str, project: str, client: HttpClient) -> list[IndexFile]:
    """What ``index`` lists for ``project`` (normalized name); empty if it does not know the project.

    Raises:
        PullError: The index cannot be reached, or its answer cannot be used.
    """
    url = f"{index.rstrip('/')}/{project}/"
    try:
        body, headers, final = client.get_bytes(url, {"Accept": _ACCEPT}, limit=_MAX_PAGE_BYTES)
    except HttpStatusError as error:
        if error.status == 404:
            return []
        raise
    kind = headers.get_content_type()
    try:
        text = body.decode("utf-8")
        files = _parse_json(text) if kind.endswith("json") else _parse_html(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PullError(f"{redact(url)} is no package index page ({type(error).__name__})") from None
    return [
        IndexFile(name, _absolute(index, final, link), sha256, size, yanked)
        for name, link, sha256, size, yanked in files
    ]


_Row = tuple[str, str, str | None, int | None, bool]


def _parse_json(text: str) -> Iterable[_Row]:
    rows: list[_Row] = []
    for item in json.loads(text)["files"]:
        size = item.get("size")
        rows.append(
            (
                str(item["filename"]),
                str(item["url"]),
                _digest(item.get("hashes", {}).get("sha256")),
                size if type(size) is int and size > 0 else None,
                item.get("yanked", False) not in (False, None),
            )
        )
    return rows


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.rows: list[_Row] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "base" and values.get("href"):
            self.base = values["href"] or ""
        link = values.get("href")
        if tag != "a" or not link:
            return
        link = urljoin(self.base, link)
        address, fragment = urldefrag(link)
        name = unquote(urlsplit(address).path.rsplit("/", 1)[-1])
        key, _, value = fragment.partition("=")
        digest = _digest(value) if key == "sha256" else None
        self.rows.append((name, address, digest, None, "data-yanked" in values))


def _parse_html(text: str) -> Iterable[_Row]:
    parser = _Anchors()
    parser.feed(text)
    parser.close()
    return parser.rows


def _digest(value: object) -> str | None:
    return value if isinstance(value, str) and _SHA256.fullmatch(value) else None


def _absolute(index: str, page: str, link: str) -> str:
    """The address of a file; one on the index's own host gets the index's user and password."""
    url = urldefrag(urljoin(page, link)).url
    parts, home = urlsplit(url), urlsplit(index)
    if parts.scheme not in ("http", "https"):
        raise PullError(f"{redact(page)} lists a file at an address that cannot be used")
    if "@" in home.netloc and "@" not in parts.netloc:
        userinfo, _, host = home.netloc.rpartition("@")
        if (host, home.scheme) == (parts.netloc, parts.scheme):
            return parts._replace(netloc=f"{userinfo}@{host}").geturl()
    return url


def is_trustworthy(url: str) -> bool:
    """Whether what comes from ``url`` cannot be changed on the way: https, or this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")
