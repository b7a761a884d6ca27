"""The downloader against servers that break, lie and change (HB-01, HB-06)."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from oazoo.errors import PullError
from oazoo.zoo.download import RemoteFile, download, git_sha1_of
from oazoo.zoo.web import HttpStatusError, Unreachable, default_client


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetch(url: str, target: Path, **known: object) -> str:
    remote = RemoteFile(path=target.name, url=url, identity="test-object", **known)  # type: ignore[arg-type]
    return download(remote, target, default_client())


def leftovers(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir()) if target.parent.exists() else []


@pytest.mark.parametrize("known_hash", [True, False])
def test_connection_dropped_at_half_goes_on_there(site, resource, blob, tmp_path, known_hash) -> None:
    half = len(blob) // 2
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[half])
    target = tmp_path / "d" / "m"
    known = {"size": len(blob), "sha256": sha256(blob)} if known_hash else {}
    assert fetch(f"{site.url}/m", target, **known) == sha256(blob)
    assert target.read_bytes() == blob
    assert [request.headers.get("range") for request in site.requests] == [None, f"bytes={half}-"]
    assert site.requests[1].headers["if-range"] == '"v1"'
    assert leftovers(target) == ["m"]


def test_a_later_call_goes_on_from_the_part(site, resource, blob, tmp_path) -> None:
    # Each connection brings a little, so the first call gives up; what it has is not lost.
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[1000] * 6)
    target = tmp_path / "d" / "m"
    with pytest.raises(PullError, match="6000 bytes are kept, pull again to go on"):
        fetch(f"{site.url}/m", target, size=len(blob), sha256=sha256(blob))
    assert not target.exists()
    assert (tmp_path / "d" / "m.partial").read_bytes() == blob[:6000]
    assert fetch(f"{site.url}/m", target, size=len(blob), sha256=sha256(blob)) == sha256(blob)
    assert site.requests[-1].headers["range"] == "bytes=6000-"
    assert len(site.requests) == 7


def test_server_that_ignores_range_means_start_over(site, resource, blob, tmp_path) -> None:
    site.routes["/m"] = resource(blob, etag='"v1"', ranges=False, cuts=[len(blob) // 2])
    target = tmp_path / "m"
    fetch(f"{site.url}/m", target)
    assert target.read_bytes() == blob


@pytest.mark.parametrize("honours_if_range", [True, False])
def test_object_that_changed_in_between_is_not_mixed(
    site, resource, blob, tmp_path, honours_if_range
) -> None:
    changed = blob[::-1]
    first = resource(blob, etag='"v1"')
    second = resource(changed, etag='"v2"', honours_if_range=honours_if_range)

    def route(handler) -> None:
        if len(site.requests) == 1:
            first.cuts = [len(blob) // 2]
            handler.serve(first)
        else:
            handler.serve(second)

    site.routes["/m"] = route
    target = tmp_path / "m"
    fetch(f"{site.url}/m", target)
    assert target.read_bytes() == changed


def test_part_without_validator_is_not_trusted(site, resource, blob, tmp_path) -> None:
    # No ETag and no known hash: nothing tells whether the rest belongs to the part.
    site.routes["/m"] = resource(blob, cuts=[1000] * 6)
    target = tmp_path / "m"
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", target)
    fetch(f"{site.url}/m", target)
    assert target.read_bytes() == blob
    assert "range" not in site.requests[-1].headers


def test_weak_etag_is_no_validator(site, resource, blob, tmp_path) -> None:
    site.routes["/m"] = resource(blob, etag='W/"v1"', cuts=[len(blob) // 2])
    target = tmp_path / "m"
    fetch(f"{site.url}/m", target, sha256=sha256(blob))
    assert target.read_bytes() == blob
    assert all("if-range" not in request.headers for request in site.requests)


def test_body_that_is_always_short_never_lands(site, resource, blob, tmp_path) -> None:
    site.routes["/m"] = resource(blob, etag='"v1"', ranges=False, cuts=[100] * 50)
    target = tmp_path / "m"
    with pytest.raises(PullError, match="breaks in a row"):
        fetch(f"{site.url}/m", target, size=len(blob))
    assert not target.exists()


def test_416_for_a_part_that_is_complete(site, resource, blob, tmp_path) -> None:
    # Killed between the last byte and the renaming, by a server that never said how long the file is.
    site.routes["/m"] = resource(blob, etag='"v1"', chunked=True, cuts=[len(blob)])
    target = tmp_path / "m"
    assert fetch(f"{site.url}/m", target, sha256=sha256(blob)) == sha256(blob)
    assert site.requests[-1].headers["range"] == f"bytes={len(blob)}-"
    assert target.read_bytes() == blob


def test_416_for_a_part_of_something_longer(site, resource, blob, tmp_path) -> None:
    target = tmp_path / "m"
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[1000] * 6)
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", target, sha256=sha256(blob[:3000]))
    site.routes["/m"] = resource(blob[:3000], etag='"v1"')
    assert fetch(f"{site.url}/m", target, sha256=sha256(blob[:3000])) == sha256(blob[:3000])


def test_complete_part_needs_no_network(site, resource, blob, tmp_path) -> None:
    target = tmp_path / "m"
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[1000] * 6)
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", target, size=len(blob), sha256=sha256(blob))
    (tmp_path / "m.partial").write_bytes(blob)
    site.stop()
    fetch(f"{site.url}/m", target, size=len(blob), sha256=sha256(blob))
    assert target.read_bytes() == blob


def test_wrong_content_never_lands(site, resource, blob, tmp_path) -> None:
    site.routes["/m"] = resource(blob, etag='"v1"')
    target = tmp_path / "d" / "m"
    wrong = sha256(b"something else")
    with pytest.raises(PullError, match=f"sha256 is {sha256(blob)}, but should be {wrong}"):
        fetch(f"{site.url}/m", target, sha256=wrong)
    with pytest.raises(PullError, match="git hash"):
        fetch(f"{site.url}/m", target, git_sha1="0" * 40)
    with pytest.raises(PullError, match=f"has {len(blob)} bytes where 7 were expected"):
        fetch(f"{site.url}/m", target, size=7)
    assert leftovers(target) == []


def test_rotten_part_is_fetched_again_from_the_start(site, resource, blob, tmp_path) -> None:
    target = tmp_path / "m"
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[1000] * 6)
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", target, sha256=sha256(blob))
    (tmp_path / "m.partial").write_bytes(b"x" * 6000)
    fetch(f"{site.url}/m", target, sha256=sha256(blob))
    assert target.read_bytes() == blob


def test_part_of_another_object_is_dropped(site, resource, blob, tmp_path) -> None:
    target = tmp_path / "m"
    site.routes["/m"] = resource(blob, etag='"v1"', cuts=[1000] * 6)
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", target, sha256=sha256(blob[::-1]))
    fetch(f"{site.url}/m", target, sha256=sha256(blob))
    assert "range" not in site.requests[-1].headers
    assert target.read_bytes() == blob


def test_206_at_another_offset_is_not_appended(site, blob, tmp_path) -> None:
    def route(handler) -> None:
        if len(site.requests) == 1:
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(blob)))
            handler.send_header("ETag", '"v1"')
            handler.end_headers()
            handler.wfile.write(blob[:5000])
            handler.close_connection = True
        elif "Range" in handler.headers:
            rest = blob[7000:]
            handler.answer(206, rest, ETag='"v1"', Content_Range=f"bytes 7000-{len(blob) - 1}/{len(blob)}")
        else:
            handler.answer(200, blob, ETag='"v1"')

    site.routes["/m"] = route
    target = tmp_path / "m"
    fetch(f"{site.url}/m", target)
    assert target.read_bytes() == blob
    assert [request.headers.get("range") for request in site.requests] == [None, "bytes=5000-", None]


def test_endless_body_is_cut_off(site, resource, blob, tmp_path) -> None:
    site.routes["/m"] = resource(blob, chunked=True)
    target = tmp_path / "d" / "m"
    with pytest.raises(PullError, match="more than the 1000 bytes"):
        fetch(f"{site.url}/m", target, size=1000, sha256=sha256(blob[:1000]))
    assert leftovers(target) == []


def test_more_than_the_disk_holds_is_refused_before_it_fills(site, tmp_path) -> None:
    site.routes["/m"] = lambda handler: handler.answer(200, b"", Content_Length=str(1 << 59))
    target = tmp_path / "m"
    with pytest.raises(PullError, match="are free; make room, or point OAZOO_HOME"):
        fetch(f"{site.url}/m", target)


def test_unasked_compression_is_refused(site, resource, tmp_path) -> None:
    site.routes["/m"] = resource(b"x", headers={"Content-Encoding": "gzip"})
    with pytest.raises(PullError, match="gzip data although that was not asked for"):
        fetch(f"{site.url}/m", tmp_path / "m")


def test_busy_server_is_asked_again_and_a_long_wait_is_not_waited(site, resource, blob, tmp_path) -> None:
    def route(handler) -> None:
        if len(site.requests) <= 2:
            handler.answer(503)
        else:
            handler.serve(resource(blob))

    site.routes["/m"] = route
    fetch(f"{site.url}/m", tmp_path / "m")
    assert len(site.requests) == 3
    site.routes["/n"] = lambda handler: handler.answer(429, Retry_After="3600")
    with pytest.raises(HttpStatusError) as caught:
        fetch(f"{site.url}/n", tmp_path / "n")
    assert caught.value.status == 429
    assert caught.value.retry_after == 3600
    assert len(site.gets("/n")) == 1


def test_refusals_are_final(site, tmp_path) -> None:
    with pytest.raises(HttpStatusError, match="answers 404 Not Found"):
        fetch(f"{site.url}/absent?token=s3cret", tmp_path / "m")
    assert len(site.requests) == 1


def test_nobody_listening_fails_at_once(tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=f"cannot reach 127.0.0.1:{port} .*refused"):
        fetch(f"http://127.0.0.1:{port}/m", tmp_path / "m")


def test_unknown_host_has_a_plain_reason(tmp_path) -> None:
    with pytest.raises(Unreachable, match="no such host, or no network"):
        fetch("https://host.invalid/m", tmp_path / "m")


def test_credentials_stay_at_their_origin(site, other_site, resource, blob, tmp_path) -> None:
    other_site.routes["/far"] = resource(blob, etag='"v1"', cuts=[1000])
    site.routes["/near"] = lambda handler: handler.answer(302, Location=f"{other_site.url}/far")
    site.routes["/m"] = lambda handler: handler.answer(307, Location="/near")
    headers = {"Authorization": "Bearer s3cret", "Cookie": "s3cret"}
    fetch(f"{site.url}/m", tmp_path / "m", headers=headers)
    assert [request.headers.get("authorization") for request in site.requests] == ["Bearer s3cret"] * 4
    assert other_site.requests[1].headers["range"] == "bytes=1000-"
    for request in other_site.requests:
        assert "s3cret" not in str(request.headers)


def test_password_in_the_address_is_sent_but_never_told(site, resource, tmp_path) -> None:
    site.routes["/m"] = resource(b"content")
    fetch(f"http://user:pass%40word@127.0.0.1:{site.port}/m", tmp_path / "m")
    assert site.requests[0].headers["authorization"] == "Basic dXNlcjpwYXNzQHdvcmQ="
    with pytest.raises(PullError) as caught:
        fetch(f"http://user:s3cret@127.0.0.1:{site.port}/absent?key=s3cret", tmp_path / "n")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x"])
def test_redirect_to_another_scheme_is_not_followed(site, tmp_path, place) -> None:
    site.routes["/m"] = lambda handler: handler.answer(302, Location=place)
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_redirect_loop_ends(site, tmp_path) -> None:
    site.routes["/m"] = lambda handler: handler.answer(302, Location="/m")
    with pytest.raises(PullError):
        fetch(f"{site.url}/m", tmp_path / "m")
    assert len(site.requests) <= 12


def test_git_hash_is_the_one_of_git(tmp_path) -> None:
    # From git's own documentation: echo 'test content' | git hash-object --stdin
    path = tmp_path / "f"
    path.write_bytes(b"test content\n")
    assert git_sha1_of(path) == "d670460b4b4aece5915caf5c68d12f560a9fe3e4"
