"""Pulling from the Hub with its real client, over real HTTP (HB-04, HB-05, HB-06, HB-07)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oazoo.errors import PullError, UsageError
from oazoo.zoo.pull import pull
from oazoo.zoo.store import home

TOKEN = "hf_s3cretTokenOfTheUser"
REPO = "org/tiny"


@pytest.fixture
def files(blob: bytes) -> dict[str, bytes]:
    return {
        "model.safetensors": blob,
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "README.md": b"# A model",
        "pytorch_model.bin": b"\x80\x02not for us",
        "onnx/model.onnx": b"neither",
        "training_args.bin": b"\x80\x02nor this",
    }


@pytest.fixture
def published(hub, files):
    hub.add(REPO, files, large=("model.safetensors", "pytorch_model.bin"))
    return hub


def tree(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def test_only_what_is_needed_is_fetched_and_checked(published, files, blob) -> None:
    pulled = pull(f"hf:{REPO}")
    assert pulled.path.is_dir()
    assert pulled.fetched
    assert {path.name for path in pulled.files} == {"model.safetensors", "config.json", "tokenizer.json"}
    for path in pulled.files:
        assert path.read_bytes() == files[path.name]
        assert pulled.sha256s[path.name] == hashlib.sha256(files[path.name]).hexdigest()
    assert (pulled.source, pulled.revision, pulled.license) == (f"hf:{REPO}", published.COMMIT, "mit")
    assert len(published.cdn.gets()) == 1


def test_second_pull_fetches_nothing_and_writes_nothing(published) -> None:
    first = pull(f"hf:{REPO}")
    before, asked = tree(home()), len(published.site.requests)
    second = pull(f"hf:{REPO}")
    assert (second.path, second.fetched) == (first.path, False)
    assert [request.path for request in published.site.requests[asked:]] == [f"/api/models/{REPO}"]
    pinned = pull(f"hf:{REPO}@{published.COMMIT}")
    assert pinned.path == first.path
    assert len(published.cdn.gets()) == 1
    assert {name: time for name, time in tree(home()).items() if not name.startswith("locks")} == {
        name: time for name, time in before.items() if not name.startswith("locks")
    }


def test_full_commit_needs_no_network(published) -> None:
    first = pull(f"hf:{REPO}@{published.COMMIT}")
    asked = len(published.site.requests)
    assert pull(f"hf:{REPO}@{published.COMMIT}").path == first.path
    assert len(published.site.requests) == asked


def test_new_commit_is_fetched_beside_the_old_one(published, files, blob) -> None:
    old = pull(f"hf:{REPO}")
    published.add(
        REPO, files | {"model.safetensors": blob[::-1]}, large=("model.safetensors",), commit="f" * 40
    )
    new = pull(f"hf:{REPO}")
    assert new.revision == "f" * 40
    assert (new.path / "model.safetensors").read_bytes() == blob[::-1]
    assert (old.path / "model.safetensors").read_bytes() == blob


def test_hub_gone_means_stored_copy_with_a_word(published, monkeypatch) -> None:
    first = pull(f"hf:{REPO}")
    published.site.stop()
    told: list[str] = []
    assert pull(f"hf:{REPO}", notify=told.append).path == first.path
    assert len(told) == 1
    assert told[0].startswith("huggingface: cannot reach the Hub (Connection refused); using the stored copy")
    assert published.COMMIT in told[0]
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    told.clear()
    assert pull(f"hf:{REPO}", notify=told.append).path == first.path
    assert told == []


def test_offline_asks_nobody(published, monkeypatch) -> None:
    monkeypatch.setenv("OAZOO_OFFLINE", "1")
    with pytest.raises(PullError, match=r"not in the store .* OAZOO_OFFLINE forbids the network"):
        pull(f"hf:{REPO}")
    assert published.site.requests == []


def test_half_of_the_files_here_the_rest_is_fetched(published, files) -> None:
    published.refuse(f"/{REPO}/resolve/{published.COMMIT}/tokenizer.json", 404, X_Error_Code="EntryNotFound")
    with pytest.raises(PullError, match="lacks a file that it lists"):
        pull(f"hf:{REPO}")
    assert list((home() / "models").glob("*")) == []
    published.add(REPO, files, large=("model.safetensors",))
    pull(f"hf:{REPO}")
    assert len(published.cdn.gets()) == 1
    assert len(published.site.gets(f"/{REPO}/resolve/{published.COMMIT}/config.json")) == 1


def test_token_goes_to_the_hub_and_nowhere_else(published, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    published.cdn.routes[f"/lfs/{hashlib.sha256(b'').hexdigest()}"] = lambda handler: handler.answer(500)
    pull(f"hf:{REPO}")
    assert all(
        request.headers.get("authorization") == f"Bearer {TOKEN}" for request in published.site.requests
    )
    assert len(published.cdn.requests) >= 1
    for request in published.cdn.requests:
        assert TOKEN not in str(request)
    kept = "".join(path.read_text("utf-8", "ignore") for path in home().rglob("*.json"))
    assert TOKEN not in kept + caplog.text
    assert "cdn-secret" not in kept


@pytest.mark.parametrize(
    ("token", "status", "headers", "message"),
    [
        (None, 401, {"X_Error_Code": "GatedRepo"}, "gated and no token was given: accept its license"),
        (TOKEN, 403, {"X_Error_Code": "GatedRepo"}, "license is not accepted for your account"),
        (
            TOKEN,
            401,
            {"X_Error_Message": "Invalid credentials in Authorization header"},
            "refuses your token",
        ),
        (
            None,
            401,
            {"X_Error_Code": "RepoNotFound"},
            "no public repository org/tiny; if it is private, set HF",
        ),
        (TOKEN, 404, {"X_Error_Code": "RepoNotFound"}, "no repository org/tiny that your token may see"),
        (TOKEN, 403, {}, "your token does not permit reading org/tiny"),
        (None, 404, {"X_Error_Code": "RevisionNotFound"}, "org/tiny has no revision 'main'"),
        (None, 429, {"Retry_After": "300"}, "takes no more requests from here for 300 s"),
        (None, 500, {}, "the Hub answers 500"),
    ],
)
@pytest.mark.parametrize("where", ["information", "file"])
def test_refusals_are_told_apart(published, monkeypatch, token, status, headers, message, where) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    path = (
        f"/api/models/{REPO}" if where == "information" else f"/{REPO}/resolve/{published.COMMIT}/config.json"
    )
    published.refuse(path, status, **headers)
    with pytest.raises(PullError) as caught:
        pull(f"hf:{REPO}")
    assert message in str(caught.value)
    assert TOKEN not in str(caught.getrepr(chain=True, style="native"))
    assert list((home() / "models").glob("*")) == []


def test_busy_hub_is_asked_again(published) -> None:
    info = published.site.routes[f"/api/models/{REPO}"]

    def route(handler) -> None:
        if len(published.site.requests) < 3:
            handler.answer(503)
        else:
            handler.serve(info)

    published.site.routes[f"/api/models/{REPO}"] = route
    assert pull(f"hf:{REPO}").fetched


def test_wrong_bytes_from_the_hub_do_not_land(published, blob) -> None:
    place = f"/lfs/{hashlib.sha256(blob).hexdigest()}"
    published.cdn.routes[place].content = blob[:-1] + b"?"
    with pytest.raises(PullError, match=r"model\.safetensors@0123456789ab: its sha256 is"):
        pull(f"hf:{REPO}")
    small = published.site.routes[f"/{REPO}/resolve/{published.COMMIT}/config.json"]
    small.content = small.content.replace(b"llama", b"lemma")
    published.cdn.routes[place].content = blob
    with pytest.raises(PullError, match=r"config\.json@0123456789ab: its git hash is"):
        pull(f"hf:{REPO}")
    assert list((home() / "models").glob("*")) == []


def test_mirror_that_lists_names_only_is_asked_for_each_file(hub, files, blob) -> None:
    hub.states_hashes = False
    hub.add(REPO, files, large=("model.safetensors",))
    pulled = pull(f"hf:{REPO}")
    assert (pulled.path / "model.safetensors").read_bytes() == blob
    heads = [request.path for request in hub.site.requests if request.method == "HEAD"]
    assert f"/{REPO}/resolve/{hub.COMMIT}/model.safetensors" in heads
    hub.cdn.routes[f"/lfs/{hashlib.sha256(blob).hexdigest()}"].content = b"other"
    (pulled.path / "model.safetensors").unlink()
    with pytest.raises(PullError, match="where 524288 were expected"):
        pull(f"hf:{REPO}")


def test_sharded_weights_come_by_their_index(hub, blob) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": blob[n:] for n in (1, 2)}
    weight_map = {f"t{n}": name for n, name in enumerate(shards)}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    extra = {"consolidated.safetensors": b"the same again", "model.safetensors.index.json": index}
    hub.add(REPO, shards | extra, large=tuple(shards))
    pulled = pull(f"hf:{REPO}")
    assert {path.name for path in pulled.files} == {*shards, "model.safetensors.index.json"}


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{}",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "../../evil"}}',
        b'{"weight_map": 7}',
        b"\xff",
    ],
)
def test_index_that_is_none(hub, index) -> None:
    hub.add(REPO, {"model.safetensors.index.json": index, "a.safetensors": b"", "b.safetensors": b""})
    with pytest.raises(PullError, match=r"no index of weights|names files that it lacks"):
        pull(f"hf:{REPO}")


def test_gguf_repository(hub, blob) -> None:
    hub.add(REPO, {"tiny.Q4_0.gguf": blob, "config.json": b"{}"}, large=("tiny.Q4_0.gguf",))
    pulled = pull(f"hf:{REPO}")
    assert pulled.path.name == "tiny.Q4_0.gguf"
    assert pulled.path.read_bytes() == blob


def test_several_sets_of_weights_ask_for_a_choice(hub, blob) -> None:
    hub.add(REPO, {"tiny.Q4_0.gguf": blob, "tiny.Q8_0.gguf": blob[1:]})
    with pytest.raises(
        PullError, match=r"name one, as in hf:org/tiny/FILE: tiny\.Q4_0\.gguf, tiny\.Q8_0\.gguf"
    ):
        pull(f"hf:{REPO}")
    pulled = pull(f"hf:{REPO}/tiny.Q8_0.gguf")
    assert pulled.path.read_bytes() == blob[1:]
    assert len(pulled.files) == 1
    with pytest.raises(PullError, match=r"has no file 'absent.gguf'"):
        pull(f"hf:{REPO}/absent.gguf")


def test_pickled_weights_are_not_even_fetched(hub) -> None:
    hub.add(REPO, {"pytorch_model.bin": b"\x80\x02", "config.json": b"{}"})
    with pytest.raises(PullError, match="only pickled weights"):
        pull(f"hf:{REPO}")
    assert len(hub.site.requests) == 1


@pytest.mark.parametrize("name", ["../../evil.safetensors", "/etc/evil", "a/../../b", "C:\\evil", "a\\b"])
def test_unsafe_names_end_the_pull(hub, name, tmp_path) -> None:
    hub.add(REPO, {"model.safetensors": b"x", name: b"evil"})
    with pytest.raises(PullError, match="unsafe"):
        pull(f"hf:{REPO}")
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"id": 3}', b'{"id": "org/tiny", "sha": "../x"}'])
def test_something_else_answers_at_the_endpoint(hub, site, resource, body) -> None:
    site.routes[f"/api/models/{REPO}"] = resource(body)
    with pytest.raises(PullError, match=r"makes no sense|states no commit"):
        pull(f"hf:{REPO}")


def test_no_symbolic_links_needed(published, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("symbolic link privilege not held")

    monkeypatch.setattr(os, "symlink", refuse)
    pulled = pull(f"hf:{REPO}")
    assert not any(path.is_symlink() for path in home().rglob("*"))
    assert (
        sum(path.stat().st_size for path in home().rglob("*.safetensors"))
        == pulled.path.joinpath("model.safetensors").stat().st_size
    )


@pytest.mark.parametrize(
    "text", ["hf:", "hf:one", "hf:a/..", "hf:a/b@", "hf:a/b@..", "hf:a/b/../c", "hf:a b/c"]
)
def test_malformed_references(text) -> None:
    with pytest.raises(UsageError, match=r"write hf:org/name"):
        pull(text)


def test_command_line_end_to_end(published, tmp_path) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN}
    environment.pop("HF_HUB_DISABLE_TELEMETRY")
    done = subprocess.run(
        [sys.executable, "-m", "oazoo", "pull", f"hf:{REPO}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "model.safetensors").is_file()
    assert TOKEN not in done.stdout + done.stderr
    assert published.site.requests[0].path == f"/api/models/{REPO}"
    assert "hf:org/tiny: fetched, 524.3 kB from hf:org/tiny, license mit" in done.stderr
    assert "\x1b" not in done.stderr
