"""Real HTTP servers on this machine: plain files with faults, the Hub's API, and a package index."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from oazoo.zoo import web

#: The store of the whole suite, which outlives a run: a large file is fetched once.
SUITE_HOME = os.environ.get("OAZOO_HOME")


@dataclass
class Resource:
    """A file that a server serves, and how it misbehaves.

    ``cuts`` holds, for each coming request, after how many bytes of the body the connection is cut (None: not at all).
    """

    content: bytes
    etag: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    honours_if_range: bool = True
    chunked: bool = False
    cuts: list[int | None] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What a server was asked."""

    method: str
    path: str
    headers: dict[str, str]


Route = Resource | Callable[["Handler"], None]


class _Server(ThreadingHTTPServer):
    """Remembers its connections: clients keep them open, and a stopped server must not answer there."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Site:
    """An HTTP server in a thread. ``routes`` maps paths (without query) to what is there."""

    def __init__(self) -> None:
        self.routes: dict[str, Route] = {}
        self.requests: list[Request] = []
        site = self

        class Bound(Handler):
            pass

        Bound.site = site
        self._server = _Server(("127.0.0.1", 0), Bound)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; later connections are refused."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server.hang_up()

    def gets(self, path: str | None = None) -> list[Request]:
        """The GET requests so far."""
        return [
            request for request in self.requests if request.method == "GET" and path in (None, request.path)
        ]


class Handler(BaseHTTPRequestHandler):
    """Serves the routes of its site."""

    site: Site
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.site.requests.append(Request(self.command, path, headers))
        route = self.site.routes.get(path)
        if route is None:
            self.answer(404)
        elif isinstance(route, Resource):
            self.serve(route)
        else:
            route(self)

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A complete answer. Underscores in header names become dashes."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def serve(self, resource: Resource) -> None:
        """Serve a file with ranges as RFC 9110 says, except for the faults that it has."""
        start, status = 0, 200
        wanted = self.headers.get("Range")
        if wanted and resource.ranges:
            validator = self.headers.get("If-Range")
            if validator is None or validator == resource.etag or not resource.honours_if_range:
                start, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
        total = len(resource.content)
        if status == 206 and start >= total:
            self.answer(416, Content_Range=f"bytes */{total}")
            return
        body = resource.content[start:]
        self.send_response(status)
        if resource.etag:
            self.send_header("ETag", resource.etag)
        for name, value in resource.headers.items():
            self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Transfer-Encoding", "chunked") if resource.chunked else self.send_header(
            "Content-Length", str(len(body))
        )
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = resource.cuts.pop(0) if resource.cuts else None
        sent = body if cut is None else body[:cut]
        if resource.chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(sent), sent))
            if cut is None:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(sent)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


class Hub:
    """Enough of the Hugging Face Hub: model information, files, large files on another host, errors.

    ``repos`` maps a repository to its files; ``large`` names the files that are stored with Git LFS and served by ``cdn``.
    """

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, site: Site, cdn: Site) -> None:
        self.site, self.cdn = site, cdn
        self.states_hashes = True

    def add(
        self, repo: str, files: dict[str, bytes], large: tuple[str, ...] = (), commit: str = COMMIT
    ) -> None:
        """Publish a repository at its main branch and at ``commit``."""
        siblings = []
        for name, content in files.items():
            sha256 = hashlib.sha256(content).hexdigest()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling: dict[str, object] = {"rfilename": name}
            if self.states_hashes:
                sibling |= {"size": len(content), "blobId": blob}
                if name in large:
                    sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(sibling)
            path = f"/{repo}/resolve/{commit}/{name}"
            if name in large:
                place = f"/lfs/{sha256}"
                self.cdn.routes[place] = Resource(content, etag=f'"{sha256[:32]}"')
                self.site.routes[path] = self._redirect(place, sha256, len(content), commit)
            else:
                self.site.routes[path] = Resource(
                    content, etag=f'"{blob}"', headers={"X-Repo-Commit": commit}
                )
        info = {
            "id": repo,
            "sha": commit,
            "private": False,
            "tags": ["license:mit", "safetensors"],
            "siblings": siblings,
            "downloads": 1,
            "likes": 1,
        }
        body = json.dumps(info).encode()
        for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
            self.site.routes[path] = Resource(body, headers={"Content-Type": "application/json"})
        self.site.routes[f"/api/models/{repo}/revision/{commit}"] = self.site.routes[path]

    def _redirect(self, place: str, sha256: str, size: int, commit: str) -> Callable[[Handler], None]:
        def route(handler: Handler) -> None:
            handler.answer(
                302,
                Location=f"{self.cdn.url}{place}?signature=cdn-secret",
                X_Linked_Etag=f'"{sha256}"',
                X_Linked_Size=str(size),
                X_Repo_Commit=commit,
            )

        return route

    def refuse(self, path: str, status: int, **headers: str) -> None:
        """Let a path answer with an error as the Hub does."""
        self.site.routes[path] = lambda handler: handler.answer(status, b'{"error":"no"}', **headers)


class Index:
    """A package index with the simple API of PEP 691 (JSON) or PEP 503 (HTML)."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.url = f"{site.url}/simple"

    def add(
        self, project: str, wheels: dict[str, bytes], *, html: bool = False, files_at: Site | None = None
    ) -> None:
        """Publish wheels by file name."""
        host = files_at or self.site
        entries = []
        for name, content in wheels.items():
            host.routes[f"/files/{name}"] = Resource(content, etag=f'"{len(content)}-{name}"')
            address = f"../../files/{name}" if files_at is None else f"{host.url}/files/{name}"
            sha256 = hashlib.sha256(content).hexdigest()
            entries.append(
                {"filename": name, "url": address, "hashes": {"sha256": sha256}, "size": len(content)}
            )
        if html:
            links = "".join(
                f'<a href="{entry["url"]}#sha256={entry["hashes"]["sha256"]}">{entry["filename"]}</a><br/>\n'
                for entry in entries
            )
            body, kind = f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html"
        else:
            page = {"meta": {"api-version": "1.1"}, "name": project, "files": entries}
            body, kind = json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json"
        self.site.routes[f"/simple/{project}/"] = Resource(body, headers={"Content-Type": kind})


def make_wheel(name: str, version: str, members: dict[str, bytes], license: str = "Apache-2.0") -> bytes:
    """A wheel with ``members`` and metadata."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in members.items():
            archive.writestr(path, content)
        folder = f"{name.replace('-', '_')}-{version}.dist-info"
        archive.writestr(
            f"{folder}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nLicense: {license}\n",
        )
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own, no configuration or login of whoever runs the tests, and short pauses."""
    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    for name in list(os.environ):
        if name in ("OAZOO_OFFLINE", "OAZOO_DEBUG", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(web, "RETRY_PAUSE", 0.001)
    yield


@pytest.fixture
def suite_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the store of the whole suite."""
    if SUITE_HOME is not None:
        monkeypatch.setenv("OAZOO_HOME", SUITE_HOME)


@pytest.fixture
def site() -> Iterator[Site]:
    server = Site()
    yield server
    server.stop()


@pytest.fixture
def other_site() -> Iterator[Site]:
    server = Site()
    yield server
    server.stop()


@pytest.fixture
def hub(site: Site, other_site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    """A Hub at HF_ENDPOINT, with nobody logged in."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", site.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    return Hub(site, other_site)


@pytest.fixture(scope="session")
def index_site() -> Iterator[Site]:
    """One address for all tests with an index: pip is asked for its configuration once."""
    server = Site()
    yield server
    server.stop()


@pytest.fixture
def index(index_site: Site, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An empty package index, the only one that pip's configuration names."""
    index_site.routes.clear()
    index_site.requests.clear()
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    server = Index(index_site)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    return server


@pytest.fixture
def resource() -> type[Resource]:
    return Resource


@pytest.fixture
def wheel() -> Callable[..., bytes]:
    return make_wheel


@pytest.fixture
def blob() -> bytes:
    """Half a megabyte that does not compress and does not repeat."""
    return b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(16384))
