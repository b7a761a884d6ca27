"""The store: one fetch for any number of pulls, nothing half-done, reading without writing."""

from __future__ import annotations

import hashlib
import json
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from oazoo.errors import PullError, UsageError
from oazoo.zoo.cards import parse_card
from oazoo.zoo.pull import pull, pull_card
from oazoo.zoo.store import Store, home, manifest_from_json

PROGRAM = """
import sys
from oazoo.zoo.pull import pull
print(pull(sys.argv[1], notify=lambda line: print(line, flush=True)).path, flush=True)
"""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def start(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)


def models() -> list[str]:
    return sorted(path.name for path in (home() / "models").glob("*"))


def test_two_processes_fetch_once(site, blob) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def route(handler) -> None:
        asked.set()
        assert go_on.wait(30)
        handler.answer(200, blob)

    site.routes["/m.gguf"] = route
    url = f"{site.url}/m.gguf#sha256={digest(blob)}"
    first = start(url)
    assert asked.wait(30)
    second = start(url)
    assert second.stdout is not None and first.stdout is not None
    assert "another process is pulling" in second.stdout.readline()
    go_on.set()
    paths = {first.stdout.readline().strip(), second.stdout.readline().strip()}
    assert first.wait(30) == second.wait(30) == 0
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == blob
    assert len(site.gets()) == 1


def test_killed_process_leaves_a_part_that_is_gone_on_with(site, resource, blob) -> None:
    half = len(blob) // 2
    sent, hold = threading.Event(), threading.Event()

    def route(handler) -> None:
        if len(site.requests) > 1:
            handler.serve(resource(blob, etag='"v1"'))
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(blob)))
        handler.send_header("ETag", '"v1"')
        handler.end_headers()
        handler.wfile.write(blob[:half])
        handler.wfile.flush()
        sent.set()
        hold.wait(30)

    site.routes["/m.gguf"] = route
    url = f"{site.url}/m.gguf#sha256={digest(blob)}"
    process = start(url)
    assert sent.wait(30)
    while not any(part.stat().st_size for part in home().rglob("*.partial")):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    hold.set()
    assert models() == []
    here = next(home().rglob("*.partial")).stat().st_size
    assert pull(url).path.read_bytes() == blob
    assert site.requests[1].headers["range"] == f"bytes={here}-"
    assert here > 0
    assert not list(home().rglob("*.partial*"))


def test_interrupt_ends_cleanly_and_keeps_the_part(site, blob) -> None:
    sent, hold = threading.Event(), threading.Event()

    def route(handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(blob)))
        handler.send_header("ETag", '"v1"')
        handler.end_headers()
        handler.wfile.write(blob[: len(blob) // 2])
        handler.wfile.flush()
        sent.set()
        hold.wait(30)

    site.routes["/m.gguf"] = route
    process = subprocess.Popen(
        [sys.executable, "-m", "oazoo", "pull", f"{site.url}/m.gguf"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert sent.wait(30)
    while not any(part.stat().st_size for part in home().rglob("*.partial")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    hold.set()
    assert (process.returncode, out, err.strip()) == (130, "", "error: interrupted")
    assert any(part.stat().st_size for part in home().rglob("*.partial"))
    assert models() == []


def test_url_is_fetched_once_and_found_offline(site, resource, blob, monkeypatch) -> None:
    site.routes["/a b/m.gguf"] = resource(blob)
    url = f"{site.url}/a%20b/m.gguf?key=s3cret"
    first = pull(url)
    site.stop()
    assert pull(url).path == first.path
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    assert pull(url).path == first.path
    assert first.path.name == "m.gguf"
    assert "s3cret" not in first.source + "".join(path.read_text() for path in home().rglob("*.json"))
    with pytest.raises(PullError, match="OAZOO_OFFLINE"):
        pull(f"{site.url}/a%20b/m.gguf?key=other")


def test_wrong_hash_in_the_url(site, resource, blob) -> None:
    site.routes["/m.gguf"] = resource(blob)
    with pytest.raises(PullError, match="but should be"):
        pull(f"{site.url}/m.gguf#sha256={'0' * 64}")
    assert models() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/m.gguf", "plain http can be changed on the way"),
        ("ftp://example.com/m.gguf", "only https"),
        ("file:///etc/passwd", "only https"),
        ("https:///m", "only https"),
        ("https://example.com/m#md5=0", "sha256="),
        ("https://[::1/m", "is no address"),
    ],
)
def test_addresses_that_are_refused(url, message) -> None:
    with pytest.raises(UsageError, match=message):
        pull(url)


class Marker:
    """A pickle of this writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.pt", "m.ckpt"])
@pytest.mark.parametrize("zipped", [False, True])
def test_pickles_are_never_read(site, resource, tmp_path, name, zipped) -> None:
    marker = tmp_path / "marker"
    content = pickle.dumps(Marker(marker))
    file = tmp_path / name
    if zipped:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
    else:
        file.write_bytes(content)
    site.routes[f"/{name}"] = resource(file.read_bytes())
    for ref in (f"{site.url}/{name}", str(file)):
        with pytest.raises(PullError, match="is a pickle"):
            pull(ref)
    assert not marker.exists()
    assert models() == []


def test_local_path_is_used_in_place(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "модель 模型 é 🙂"
    folder.mkdir()
    file = folder / "a b.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    pulled = pull(str(file))
    assert (pulled.path, pulled.files, pulled.name, pulled.nbytes) == (file, (file,), "a b", 4)
    assert pull(str(folder)).files == (file,)
    assert not home().exists()
    monkeypatch.chdir(folder)
    (folder / "plain").write_bytes(b"GGUF")
    assert pull("plain").path == Path("plain")
    assert pull("./plain").path == Path("plain")
    with pytest.raises(UsageError, match="no such file or folder"):
        pull("./absent.gguf")
    (folder / "empty").mkdir()
    with pytest.raises(UsageError, match="empty folder"):
        pull("./empty")


def test_unknown_name_suggests() -> None:
    with pytest.raises(
        UsageError, match=r"no model 'smolm2-135m-instruct'; did you mean smollm2-135m-instruct\?"
    ):
        pull("smolm2-135m-instruct")


def card_for(site, blob: bytes, *sources: str) -> object:
    lines = "\n".join(f"    - ref: {source}" for source in sources)
    return parse_card(
        "test-card",
        f"""---
license: mit
language: [en]
library_name: oazoo
oazoo:
  architecture: llama
  parameters: 1
  context_length: 1
  tokenizer: {{kind: bpe, vocabulary_size: 1}}
  prompt_format: none
  sources:
{lines}
---
# Test
""".encode(),
    )


def test_sources_in_order_with_a_word_about_each(site, hub, resource, blob, tmp_path, monkeypatch) -> None:
    site.routes["/m.gguf"] = resource(blob)
    good = f'"{site.url}/m.gguf#sha256={digest(blob)}"'
    bad = f'"{site.url}/m.gguf#sha256={"0" * 64}"'
    card = card_for(site, blob, "hf:org/absent", bad, good, "hf:org/never-asked")
    told: list[str] = []
    pulled = pull_card(card, Store(), notify=told.append)  # type: ignore[arg-type]
    assert pulled.path.read_bytes() == blob
    assert (pulled.name, pulled.license, pulled.card) == ("test-card", "mit", "test-card")
    assert [line.split(":")[0] for line in told] == ["huggingface", "url"]
    assert all(line.endswith("trying next source") for line in told)
    asked = len(site.requests)
    assert not pull_card(card, Store(), notify=told.append).fetched  # type: ignore[arg-type]
    assert len(site.requests) == asked
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    assert pull_card(card, Store()).path == pulled.path  # type: ignore[arg-type]


def test_damaged_store_is_repaired_or_says_so(site, resource, blob, monkeypatch) -> None:
    site.routes["/m.gguf"] = resource(blob)
    url = f"{site.url}/m.gguf"
    pulled = pull(url)
    pulled.path.write_bytes(blob[:100])
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    with pytest.raises(PullError, match="not in the store"):
        pull(url)
    monkeypatch.delenv("OAZOO_OFFLINE")
    assert pull(url).path.read_bytes() == blob


def test_store_that_cannot_be_written(site, resource, blob, tmp_path, monkeypatch) -> None:
    site.routes["/m.gguf"] = resource(blob)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "file" / "store"))
    with pytest.raises(PullError, match=r"cannot write to the store .*set OAZOO_HOME"):
        pull(f"{site.url}/m.gguf")


def test_stored_model_is_read_without_writing(site, resource, blob) -> None:
    site.routes["/m.gguf"] = resource(blob)
    pull(f"{site.url}/m.gguf")
    before = {path: path.stat().st_mtime_ns for path in home().rglob("*")}
    pull(f"{site.url}/m.gguf")
    list(Store().manifests())
    assert {path: path.stat().st_mtime_ns for path in home().rglob("*")} == before


@pytest.mark.parametrize(
    "change",
    [
        {"oazoo_store": 2},
        {"name": ""},
        {"name": None},
        {"files": []},
        {"files": {}},
        {"files": [{"path": "../m.gguf", "size": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "/m.gguf", "size": 1, "sha256": "0" * 64}]},
        {"files": [{"path": "m.gguf", "size": -1, "sha256": "0" * 64}]},
        {"files": [{"path": "m.gguf", "size": True, "sha256": "0" * 64}]},
        {"files": [{"path": "m.gguf", "size": 1, "sha256": "0" * 63}]},
        {"entry": "../../etc/passwd"},
        {"key": "../x"},
        {"revision": 7},
    ],
)
def test_manifest_is_checked(site, resource, blob, change) -> None:
    site.routes["/m.gguf"] = resource(blob)
    pull(f"{site.url}/m.gguf")
    path = next(home().rglob("manifest.json"))
    whole = json.loads(path.read_text())
    assert manifest_from_json(whole).entry == "m.gguf"
    with pytest.raises(ValueError):
        manifest_from_json(whole | change)
    path.write_text(json.dumps(whole | change))
    assert list(Store().manifests()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_manifest_that_is_no_json(content) -> None:
    folder = home() / "models" / "x"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(content)
    (home() / "models" / "file").write_bytes(b"")
    assert list(Store().manifests()) == []


def test_home_is_the_platforms_cache_by_default(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("OAZOO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home().name == "oazoo"
    if sys.platform == "linux":
        assert home() == tmp_path / "oazoo"
    monkeypatch.setenv("OAZOO_HOME", "~/models")
    assert home() == Path.home() / "models"
