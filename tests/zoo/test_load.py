"""``oazoo.load`` of models in other containers: the converted copy in the store is right, or made anew."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_goldens
import pytest

import oazoo
from oazoo.errors import FormatError, UsageError
from oazoo.zoo.store import Store


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, and a store of its own."""
    monkeypatch.setenv("OAZOO_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    shutil.copytree(model_goldens.source_path("llama"), folder)
    return folder


def test_what_lies_beside_a_lone_file_counts(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    before = oazoo.load(weights).config
    config = json.loads((checkpoint / "config.json").read_text())
    config["rms_norm_eps"] = 0.125
    (checkpoint / "config.json").write_text(json.dumps(config))
    after = oazoo.load(weights).config
    assert before.norm_eps != 0.125 and after.norm_eps == 0.125


def test_the_converted_copy_is_made_once(checkpoint: Path) -> None:
    said: list[str] = []
    oazoo.load(checkpoint, notify=said.append)
    oazoo.load(checkpoint, notify=said.append)
    assert len(said) == 1 and "once" in said[0]


@pytest.mark.parametrize("damage", ["garbage", "empty", "bit"])
def test_a_damaged_converted_copy_is_made_anew(checkpoint: Path, tmp_path: Path, damage: str) -> None:
    ids = [1, 2, 3]
    wanted = oazoo.load(checkpoint).logits(ids)
    (copy,) = (tmp_path / "home" / "converted").iterdir()
    data = bytearray(copy.read_bytes())
    data[len(data) // 2] ^= 1
    copy.write_bytes({"garbage": b"garbage\n", "empty": b"", "bit": bytes(data)}[damage])
    said: list[str] = []
    assert (oazoo.load(checkpoint, notify=said.append).logits(ids) == wanted).all()
    assert "damaged" in said[0] and str(copy) in said[0]
    said.clear()
    oazoo.load(checkpoint, notify=said.append)
    assert not said


def test_a_damaged_file_of_the_users_is_left_alone(checkpoint: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.oam"
    oazoo.convert(checkpoint, own)
    own.write_bytes(own.read_bytes()[:-200])
    before = own.read_bytes()
    with pytest.raises(FormatError, match=r"own\.oam"):
        oazoo.load(own)
    assert own.read_bytes() == before


def test_who_waits_is_told_what_for(tmp_path: Path) -> None:
    store, said = Store(tmp_path), []
    lines: list[str] = said
    with store.lock("key", lines.append, "converting tiny"):
        assert not lines
        held = Store(tmp_path)
        with pytest.raises(LookupError), held.lock("key", _stop_at(lines), "converting tiny"):
            pass
    assert lines == ["another process is converting tiny; waiting for it"]


def _stop_at(lines: list[str]):  # type: ignore[no-untyped-def]
    def note(line: str) -> None:
        lines.append(line)
        raise LookupError

    return note


def test_the_source_is_never_the_output(checkpoint: Path, tmp_path: Path) -> None:
    weights = checkpoint / "model.safetensors"
    before = weights.read_bytes()
    (tmp_path / "link").symlink_to(weights)
    for source, output in [(weights, weights), (checkpoint, weights), (weights, tmp_path / "link")]:
        with pytest.raises(UsageError, match="is the source itself"):
            oazoo.convert(source, output, overwrite=True)
    assert weights.read_bytes() == before


def test_names_of_files_that_do_not_exist() -> None:
    for name in ("modell.oam", "x.GGUF", Path("smollm2-135m-instruct")):
        with pytest.raises(UsageError, match="no such file or folder"):
            oazoo.load(name)
    with pytest.raises(UsageError, match="not by NoneType"):
        oazoo.pull(None)  # type: ignore[arg-type]


def test_a_path_is_pulled_in_place(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert oazoo.pull(checkpoint).path == checkpoint
    monkeypatch.chdir(checkpoint)
    assert oazoo.pull(".").name == checkpoint.name
