"""HTTP GET for downloads: standard library only, careful about what goes where.

Credentials never leave the origin they belong to, also over redirects; https never becomes http; only http
and https are followed; addresses in messages carry no user, password or query. Connecting is given
:data:`CONNECT_TIMEOUT` seconds, a silent server :data:`READ_TIMEOUT`. Proxies come from the environment
(``HTTPS_PROXY``, ``NO_PROXY``), certificates from the system (``SSL_CERT_FILE`` and ``REQUESTS_CA_BUNDLE``
respected).
"""

from __future__ import annotations

import base64
import http.client
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from functools import cache
from typing import IO, Any
from urllib.parse import unquote, urlsplit, urlunsplit

from oazoo import __version__
from oazoo.errors import PullError
from oazoo.zoo.refs import redact

CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 30.0
#: First pause before another attempt, in seconds; it doubles each time, up to 8 s.
RETRY_PAUSE = 0.25
#: The longest wait that a server may ask for with Retry-After before we rather give up.
MAX_RETRY_AFTER = 30.0

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})


class Unreachable(PullError):
    """The server cannot be reached at all: no address, refused, timed out, or not trusted."""


class HttpStatusError(PullError):
    """The server answered with an error status; ``headers`` are those of the answer."""

    def __init__(self, status: int, headers: Message, url: str) -> None:
        self.status = status
        self.headers = headers
        super().__init__(f"{redact(url)} answers {status} {http.client.responses.get(status, '')}".rstrip())

    @property
    def transient(self) -> bool:
        """Whether the same request may well succeed later."""
        return self.status in _TRANSIENT

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait as the server asks for, or None."""
        value = (self.headers.get("Retry-After") or "").strip()
        return float(value) if value.isdecimal() and len(value) < 7 else None


class _Http(http.client.HTTPConnection):
    def connect(self) -> None:
        self.timeout = CONNECT_TIMEOUT
        super().connect()
        self.sock.settimeout(READ_TIMEOUT)


class _Https(http.client.HTTPSConnection):
    def connect(self) -> None:
        self.timeout = CONNECT_TIMEOUT
        super().connect()
        self.sock.settimeout(READ_TIMEOUT)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Http, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._trust = context

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Https, req, context=self._trust)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects keep the Range header, lose credentials at another origin, and never fall back to http."""

    max_redirections = 10

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise PullError(
                f"{redact(req.full_url)} redirects to {redact(newurl)}, which is not safe to follow"
            )
        kept = dict(req.header_items())
        kept.pop("Host", None)
        if origin(req.full_url) != origin(newurl):
            kept = {name: value for name, value in kept.items() if name.lower() not in _SECRET_HEADERS}
        return urllib.request.Request(newurl, headers=kept, method=req.get_method(), unverifiable=True)


def origin(url: str) -> tuple[str, str, int]:
    """(scheme, host, port) of an address: what credentials belong to."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.scheme, (parts.hostname or "").lower(), parts.port or default


class HttpClient:
    """Opens addresses; one for each set of certificates and proxy.

    ``cafile`` and ``proxy`` override what the system and the environment say.
    """

    def __init__(self, cafile: str | None = None, proxy: str | None = None) -> None:
        proxies = {"http": proxy, "https": proxy} if proxy else None
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(proxies),
            urllib.request.UnknownHandler(),
            _HttpHandler(),
            _HttpsHandler(_trust(cafile)),
            urllib.request.HTTPDefaultErrorHandler(),
            _Redirects(),
            urllib.request.HTTPErrorProcessor(),
        ):
            self._opener.add_handler(handler)

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """One GET; the response has a 2xx status and a body still to be read.

        User and password in the address are sent as basic authentication, to its origin only.

        Raises:
            Unreachable: No connection came about.
            HttpStatusError: The status is not 2xx.
            OSError, http.client.HTTPException: The connection broke later.
        """
        address, credentials = _split_credentials(url)
        sent = {
            "User-Agent": f"oazoo/{__version__}",
            "Accept-Encoding": "identity",
            **credentials,
            **(headers or {}),
        }
        request = urllib.request.Request(address, headers=sent)
        try:
            response = self._opener.open(request, timeout=READ_TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise HttpStatusError(error.code, error.headers, error.url or url) from None
        except urllib.error.URLError as error:
            raise Unreachable(f"cannot reach {_host(url)} ({reason_of(error)})") from error
        except (ValueError, http.client.InvalidURL) as error:
            raise PullError(f"{redact(url)} is no address that can be opened ({error})") from None
        with response:
            encoding = response.headers.get("Content-Encoding", "identity").lower()
            if encoding != "identity":
                raise PullError(f"{redact(url)} sends {encoding} data although that was not asked for")
            yield response

    def get_bytes(
        self, url: str, headers: Mapping[str, str] | None = None, *, limit: int, attempts: int = 3
    ) -> tuple[bytes, Message, str]:
        """A small document: (body, headers, final address). A transient failure is tried again.

        Raises:
            PullError: It cannot be had, or is larger than ``limit`` bytes.
        """
        for attempt in range(attempts):
            try:
                with self.get(url, headers) as response:
                    body = response.read(limit + 1)
                    if len(body) > limit:
                        raise PullError(f"{redact(url)} is larger than {limit} bytes")
                    return body, response.headers, response.geturl()
            except HttpStatusError as error:
                if not error.transient or attempt + 1 == attempts or not pause(attempt, error.retry_after):
                    raise
            except (OSError, http.client.HTTPException) as error:
                if attempt + 1 == attempts:
                    raise Unreachable(f"{_host(url)} breaks off ({reason_of(error)})") from error
                pause(attempt)
        raise AssertionError("unreachable")


@cache
def default_client() -> HttpClient:
    """The client with the system's certificates and the environment's proxies."""
    return HttpClient()


def pause(attempt: int, retry_after: float | None = None) -> bool:
    """Wait before the next attempt (0: the first retry); False, at once, if the server asks for too much."""
    if retry_after is not None and retry_after > MAX_RETRY_AFTER:
        return False
    time.sleep(max(retry_after or 0.0, min(8.0, RETRY_PAUSE * 2**attempt)))
    return True


def reason_of(error: BaseException) -> str:
    """A short reason without addresses: what a connection failed of."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "timed out"
    if isinstance(inner, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {inner.verify_message}"
    if isinstance(inner, socket.gaierror):
        return "no such host, or no network"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(inner) or type(inner).__name__


def _host(url: str) -> str:
    parts = urlsplit(url)
    return (parts.hostname or "?") + (f":{parts.port}" if parts.port else "")


def _split_credentials(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    userinfo, _, host = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    token = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


def _trust(cafile: str | None) -> ssl.SSLContext:
    chosen = cafile or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or None
    try:
        if chosen is None or not os.path.exists(chosen):  # noqa: PTH110
            return ssl.create_default_context()
        if os.path.isdir(chosen):  # noqa: PTH112
            return ssl.create_default_context(capath=chosen)
        return ssl.create_default_context(cafile=chosen)
    except (OSError, ssl.SSLError) as error:
        raise PullError(f"the certificates in {chosen!r} cannot be used: {error}") from None
