"""GGUF models in several files from the Hub: any part's name brings all of them, or nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from checkpoints import LLAMA, gguf_names, llama_metadata, llama_tensors, write_gguf
from click.testing import CliRunner
from exported import oam_bytes

import oazoo
from oazoo.cli import main
from oazoo.errors import FormatError, PullError
from oazoo.zoo.pull import pull
from oazoo.zoo.store import home

REPO = "org/big"
NAMES = [f"big-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, bytes]:
    """A tiny Llama in three files, by the reference writer."""
    folder = tmp_path / "made"
    folder.mkdir()
    tensors = gguf_names(llama_tensors(LLAMA))
    write_gguf(folder / "big.gguf", llama_metadata(), tensors, split_max_tensors=8)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """The same model in one file, converted."""
    path = write_gguf(tmp_path / "whole.gguf", llama_metadata(), gguf_names(llama_tensors(LLAMA)))
    oazoo.convert(path, tmp_path / "whole.oam")
    return tmp_path / "whole.oam"


def stored() -> list[Path]:
    return list((home() / "models").glob("*")) if (home() / "models").exists() else []


@pytest.mark.parametrize("named", [f"/{NAMES[0]}", f"/{NAMES[1]}", ""])
def test_all_parts_come_and_convert(hub, parts, whole, named: str, tmp_path: Path) -> None:
    assert list(parts) == NAMES
    hub.add(REPO, parts | {"README.md": b"# Big"}, large=(NAMES[0], NAMES[2]))
    shown = CliRunner().invoke(main, ["pull", f"hf:{REPO}{named}"])
    assert shown.exit_code == 0, shown.output
    assert Path(shown.stdout.strip()).name == NAMES[0]
    pulled = pull(f"hf:{REPO}{named}")
    assert not pulled.fetched and pulled.path.name == NAMES[0]
    assert [path.name for path in pulled.files] == NAMES
    assert pulled.nbytes == sum(map(len, parts.values()))
    for path in pulled.files:
        assert path.read_bytes() == parts[path.name]
        assert pulled.sha256s[path.name] == hashlib.sha256(parts[path.name]).hexdigest()
    out = tmp_path / "m.oam"
    done = CliRunner().invoke(main, ["convert", f"hf:{REPO}{named}", "-o", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert oam_bytes(out) == oam_bytes(whole)
    files = {entry["name"]: entry["sha256"] for entry in json.loads(done.stdout)["source"]["files"]}
    assert files == pulled.sha256s


def test_any_part_means_the_same_stored_model(hub, parts) -> None:
    hub.add(REPO, {f"Q4/{name}": data for name, data in parts.items()})
    first = pull(f"hf:{REPO}/Q4/{NAMES[2]}")
    asked = len(hub.site.gets())
    assert pull(f"hf:{REPO}/Q4/{NAMES[0]}").path == first.path
    assert len(hub.site.gets()) == asked + 1  # what is newest, and no file
    assert len(stored()) == 1 and {path.name for path in first.path.parent.iterdir()} == set(NAMES)
    assert pull(f"hf:{REPO}").path.name == NAMES[0]


@pytest.mark.parametrize("named", [f"/{NAMES[0]}", f"/{NAMES[1]}", f"/{NAMES[2]}", ""])
def test_a_part_that_is_not_published_is_named(hub, parts, named: str) -> None:
    hub.add(REPO, {name: data for name, data in parts.items() if name != NAMES[1]})
    with pytest.raises(PullError, match=rf"has 2 of the 3 parts .* it lacks {NAMES[1]}\. Nothing was"):
        pull(f"hf:{REPO}{named}")
    assert not [request for request in hub.site.gets() if "/resolve/" in request.path]
    assert not stored()
    done = CliRunner().invoke(main, ["pull", f"hf:{REPO}{named}"])
    assert done.exit_code == 1 and NAMES[1] in done.stderr


def test_wrong_bytes_in_one_part(hub, parts) -> None:
    hub.add(REPO, parts, large=(NAMES[2],))
    place = f"/lfs/{hashlib.sha256(parts[NAMES[2]]).hexdigest()}"
    hub.cdn.routes[place].content = parts[NAMES[2]][:-1] + b"?"
    with pytest.raises(PullError, match=rf"{NAMES[2]}@0123456789ab: its sha256 is"):
        pull(f"hf:{REPO}/{NAMES[0]}")
    assert not stored()


def test_an_interrupted_pull_goes_on_with_the_part_that_is_missing(hub, parts) -> None:
    hub.add(REPO, parts)
    path = f"/{REPO}/resolve/{hub.COMMIT}/"
    route = hub.site.routes[path + NAMES[1]]
    hub.refuse(path + NAMES[1], 404, X_Error_Code="EntryNotFound")
    with pytest.raises(PullError, match="lacks a file that it lists"):
        pull(f"hf:{REPO}/{NAMES[0]}")
    assert not stored()
    hub.site.routes[path + NAMES[1]] = route
    assert len(pull(f"hf:{REPO}/{NAMES[0]}").files) == 3
    assert len(hub.site.gets(path + NAMES[0])) == 1


def test_parts_of_different_models_are_told_when_they_are_opened(hub, parts, tmp_path: Path) -> None:
    other = gguf_names(llama_tensors(LLAMA | {"num_hidden_layers": 1}))
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "big.gguf", llama_metadata(), other, split_max_tensors=4)
    hub.add(REPO, parts | {NAMES[2]: (tmp_path / "other" / NAMES[2]).read_bytes()})
    with pytest.raises(FormatError, match="parts of different models"):
        oazoo.convert(f"hf:{REPO}/{NAMES[0]}", tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()


def test_sets_of_parts_are_offered_by_their_first(hub, parts) -> None:
    small = {name.replace("big", "small"): data for name, data in parts.items()}
    hub.add(REPO, parts | small | {"one.gguf": parts[NAMES[0]]})
    with pytest.raises(
        PullError, match=rf"name one, as in .*: {NAMES[0]}, one\.gguf, small-00001-of-00003\.gguf$"
    ):
        pull(f"hf:{REPO}")


def test_an_address_leads_to_one_file(site, resource, parts) -> None:
    site.routes[f"/{NAMES[1]}"] = resource(parts[NAMES[1]])
    with pytest.raises(PullError, match=rf"is one of the 3 parts .* hf:org/name/{NAMES[0]} fetches all"):
        pull(f"{site.url}/{NAMES[1]}")
    assert not site.requests and not stored()


def test_a_local_part_stands_for_the_others(parts, whole, tmp_path: Path) -> None:
    pulled = pull(tmp_path / "made" / NAMES[1])
    assert [path.name for path in pulled.files] == NAMES and pulled.nbytes == sum(map(len, parts.values()))
    (tmp_path / "made" / NAMES[2]).unlink()
    assert len(pull(tmp_path / "made" / NAMES[1]).files) == 2
    with pytest.raises(FormatError, match=rf"1 are not there: .*{NAMES[2]}"):
        oazoo.convert(tmp_path / "made" / NAMES[1], tmp_path / "m.oam")
