"""Containers are told apart by content; folders and indexes are read exactly; pickles are never loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import unicodedata
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import save_file

from oazoo.errors import FormatError, UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.gguf import GgufSource
from oazoo.formats.hf_folder import ShardedSource
from oazoo.formats.oam import OamSource
from oazoo.formats.safetensors import SafetensorsSource

INDEX = "model.safetensors.index.json"


class TouchesAFile:
    """A pickle of this writes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.marker,)


def model(folder: Path, count: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """A model of ``count`` shards of two tensors each, with its index."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    weight_map: dict[str, str] = {}
    for number in range(count):
        shard = {f"layer.{number}.{part}": np.full((2, 3), number, "f4") for part in ("a", "b")}
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
        tensors |= shard
    write_index(folder, weight_map, count * 48)
    return tensors


def write_index(folder: Path, weight_map: dict[str, str], total: int | None = None) -> None:
    index: dict[str, Any] = {"weight_map": weight_map}
    if total is not None:
        index["metadata"] = {"total_size": total}
    (folder / INDEX).write_text(json.dumps(index))


def read_index(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return weight_map


def check(source: Any, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    assert source.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(source[name].numpy(), value)


@pytest.mark.parametrize("name", ["x", "x.bin", "x.gguf", "x.safetensors", "x.json", "no suffix.tar.gz"])
def test_the_name_does_not_matter(tmp_path: Path, data: Path, name: str) -> None:
    for original, kind in (
        ("hf/gpt2/model.safetensors", SafetensorsSource),
        ("gguf/tiny-Q4_0.gguf", GgufSource),
        ("oa/oam_linear_adamw.oam", OamSource),
    ):
        (tmp_path / name).write_bytes((data / original).read_bytes())
        with open_source(tmp_path / name) as source:
            assert type(source) is kind and len(source) > 0


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_paths_of_all_kinds(tmp_path: Path, form: Literal["NFC", "NFD"]) -> None:
    folder = tmp_path / unicodedata.normalize(form, "модель 模型 é 🙂")
    tensors = model(folder)
    check(open_source(folder), tensors)
    single = folder / "a b.safetensors"
    save_file(tensors, single)
    check(open_source(single), tensors)
    check(open_source(str(single)), tensors)


def test_reference_folders(data: Path) -> None:
    with open_source(data / "hf" / "qwen2") as source:
        assert isinstance(source, ShardedSource) and source.notes == ()
        assert len(source.files) == 5 and source.format == "safetensors"
    with open_source(data / "hf" / "llama") as source:
        assert isinstance(source, SafetensorsSource)


def test_an_index_is_read_as_named(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    for stray in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"layer.0.a": np.full((2, 3), 99, "f4")}, tmp_path / stray)
    with open_source(tmp_path) as source:
        check(source, tensors)
        assert list(source) == list(read_index(tmp_path))
        assert (
            len(source.notes) == 2
            and "adapter_model" in source.notes[0]
            and "consolidated" in source.notes[1]
        )
    with open_source(tmp_path / INDEX) as source:
        check(source, tensors)


def test_a_stated_size_that_is_wrong_is_reported(tmp_path: Path) -> None:
    tensors = model(tmp_path)
    write_index(tmp_path, read_index(tmp_path), 1000)
    with open_source(tmp_path) as source:
        check(source, tensors)
        assert len(source.notes) == 1 and "1000" in source.notes[0] and "144" in source.notes[0]


def test_a_missing_shard(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.safetensors' \(2 tensors\)"):
        open_source(tmp_path)


def test_an_index_of_another_export(tmp_path: Path) -> None:
    model(tmp_path, 3)
    stale = {f"t{number}": f"model-{number + 1:05}-of-00030.safetensors" for number in range(30)}
    write_index(tmp_path, stale)
    with pytest.raises(FormatError) as caught:
        open_source(tmp_path)
    message = str(caught.value)
    assert "30 of 30" in message and "model-00001-of-00030" in message and "model-00001-of-00003" in message
    assert "another export" in message


@pytest.mark.parametrize("size", [0, 7, 8, 60, -1])
def test_a_shard_cut_short_is_named(tmp_path: Path, size: int) -> None:
    model(tmp_path)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:size])
    with pytest.raises(FormatError) as caught:
        open_source(tmp_path)
    assert shard.name in str(caught.value)
    assert "cut short" in str(caught.value)
    assert size != -1 or (str(len(whole)) in str(caught.value) and str(len(whole) - 1) in str(caught.value))


def test_shards_must_hold_what_the_index_says(tmp_path: Path) -> None:
    model(tmp_path)
    good = read_index(tmp_path)
    moved = good | {"layer.0.a": good["layer.1.a"]}
    with_more = good | {"layer.9.a": good["layer.1.a"]}
    with_less = {name: file for name, file in good.items() if name != "layer.0.a"}
    for weight_map, name in ((moved, "layer.0.a"), (with_more, "layer.9.a"), (with_less, "layer.0.a")):
        write_index(tmp_path, weight_map)
        with pytest.raises(FormatError, match=name):
            open_source(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/passwd",
        "",
        ".",
        "..",
        "C:\\x",
        "C:x",
        "a\\b",
        "..\\x",
        "a\0b",
        "./x",
        "a//b",
        "a/./b",
        "a/",
    ],
)
def test_an_index_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    save_file({"a": np.zeros(1, "f4")}, tmp_path / "x")
    folder = tmp_path / "model"
    model(folder)
    write_index(folder, {"a": name})
    with pytest.raises(FormatError, match="not a plain name inside the folder"):
        open_source(folder)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "x", "a": "y"}}',
        '{"weight_map": {"": "x"}}',
        '{"weight_map": {"\\u0000": "x"}}',
        '{"weight_map": {}, "weight_map": {}}',
        '{"weight_map": {"a": "x"}, "extra": }',
        '{"weight_map": {"a": "x"}, "metadata": {"total_size": 1, "total_size": 2}}',
        '{"metadata": 1, "weight_map": {}}',
        '{"weight_map": {"a": "x"}} trailing',
        '{"weight_map": {"a": "x"}',
        '{"weight_map": {"\\ud800": "x"}}',
        '{"weight_map": ' + "[" * 100_000,
    ],
)
def test_damaged_indexes(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match="index"):
        open_source(tmp_path)


def test_an_index_of_too_many_files(tmp_path: Path) -> None:
    write_index(tmp_path, {f"t{number}": f"f{number}" for number in range(5000)})
    with pytest.raises(FormatError, match="more than 4096 files"):
        open_source(tmp_path)


def test_several_candidates_are_not_guessed_among(tmp_path: Path) -> None:
    for name in ("model.safetensors", "adapter_model.safetensors"):
        save_file({"a": np.zeros(1, "f4")}, tmp_path / name)
    with pytest.raises(UsageError) as caught:
        open_source(tmp_path)
    assert "adapter_model.safetensors" in str(caught.value) and "name the one you mean" in str(caught.value)
    for name in ("a", "b"):
        (tmp_path / f"{name}{INDEX}").write_text("{}")
    with pytest.raises(UsageError, match="2 sets of weights"):
        open_source(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weights"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin.*never read"):
        open_source(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        open_source(tmp_path / "missing")


def test_a_gguf_in_a_folder(tmp_path: Path, data: Path) -> None:
    (tmp_path / "model.gguf").write_bytes((data / "gguf" / "tiny-Q4_0.gguf").read_bytes())
    assert isinstance(open_source(tmp_path), GgufSource)


def test_weights_of_other_kinds_are_reported(tmp_path: Path, data: Path) -> None:
    tensors = model(tmp_path)
    (tmp_path / "model.gguf").write_bytes((data / "gguf" / "tiny-Q4_0.gguf").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with open_source(tmp_path) as source:
        check(source, tensors)
        assert [note.split()[1] for note in source.notes] == ["model.gguf", "pytorch_model.bin"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.pt", "model.gguf"])
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrapping", ["bare", "zip", "legacy", "dict"])
def test_pickles_are_refused_and_never_run(tmp_path: Path, name: str, protocol: int, wrapping: str) -> None:
    marker = tmp_path / "marker"
    value: Any = TouchesAFile(marker)
    content = pickle.dumps({"a": value} if wrapping == "dict" else value, protocol)
    if wrapping == "zip":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", content)
        content = stream.getvalue()
    elif wrapping == "legacy":
        content = pickle.dumps(0x1950A86A20F9469CFC6C, max(2, protocol)) + content
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        open_source(path)
    assert "pickle" in str(caught.value) and "safetensors" in str(caught.value)
    assert not marker.exists()


def test_other_content_is_named(tmp_path: Path) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    npz = io.BytesIO()
    np.savez(npz, a=np.zeros(1))
    npy = io.BytesIO()
    np.save(npy, np.zeros(1))
    for content, words in {
        b"": "is empty",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n": "Git LFS pointer",
        b"<!DOCTYPE html>": "web page",
        b"\x89HDF\r\n\x1a\n": "HDF5",
        npy.getvalue(): "NumPy array",
        npz.getvalue(): "NumPy archive",
        tar.getvalue(): "tar archive",
        b"PK\x03\x04" + bytes(40): "zip archive",
        b"hello": "unknown content",
        struct.pack("<Q", 2**63): "unknown content",
        bytes(1000): "unknown content",
    }.items():
        path = tmp_path / "file.safetensors"
        path.write_bytes(content)
        with pytest.raises(FormatError) as caught:
            open_source(path)
        assert (
            words in str(caught.value) and "SafeTensors" in str(caught.value) and "GGUF" in str(caught.value)
        )


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="not a regular file"):
            open_source(path)
