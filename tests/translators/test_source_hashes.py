"""Hashes of the source, computed while it is converted."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from pathlib import Path

import pytest
from checkpoints import LLAMA, gguf_names, llama_folder, llama_metadata, llama_tensors, write_gguf

from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.translators import convert, plan
from oazoo.translators.source_hashes import SourceHashes


def test_hashes_and_progress(tmp_path: Path) -> None:
    contents = {"a": b"", "b": bytes(range(256)) * 10_000, "c": b"x"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    seen: list[tuple[int, int]] = []
    with SourceHashes([tmp_path / name for name in contents], {}) as hashes:
        found = hashes.result(lambda done, total: seen.append((done, total)))
    assert found == {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    assert seen[-1] == (2_560_001, 2_560_001) and seen == sorted(seen)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 3), (3, 0, 1), (2, 2, 0), ()])
def test_a_followed_file_is_hashed_once_and_whole(tmp_path: Path, order: tuple[int, ...]) -> None:
    """In whatever order its parts come, and whatever is left out."""
    content = random.Random(1).randbytes(4_500_000)
    path, beside = tmp_path / "followed", tmp_path / "beside"
    path.write_bytes(content)
    beside.write_bytes(b"x")
    step = 1_100_000
    with SourceHashes([path, beside], {}, {path}) as hashes:
        for part in order:
            hashes.follow(path, part * step, memoryview(content)[part * step : (part + 1) * step])
        found = hashes.result()
    assert found == {
        "followed": hashlib.sha256(content).hexdigest(),
        "beside": hashlib.sha256(b"x").hexdigest(),
    }
    assert hashes.done == hashes.total == len(content) + 1


def test_a_followed_file_that_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "followed"
    path.write_bytes(bytes(10))
    with SourceHashes([path], {}, {path}) as hashes, pytest.raises(FormatError, match="shorter than it was"):
        hashes.follow(path, 20, memoryview(b"abc"))


def test_copies_are_read_once_in_the_order_of_the_files(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    with plan(folder) as planned:
        tensors, followed = planned.in_file_order()
        source = planned.checkpoint.source
        offsets = [source[tensor.rule.sources[0]].place for tensor in tensors]
    assert followed == {folder / "model.safetensors"}
    assert offsets == sorted(offsets) and {t.target for t in tensors} == {t.target for t in planned.tensors}
    convert(folder, tmp_path / "m.oam")
    with OamSource(tmp_path / "m.oam") as made:
        assert list(made) == [tensor.target for tensor in tensors]
        recorded = json.loads(made.config.payload)["source"]["files"][0]
    assert recorded["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    with plan(folder, dtype="f16") as rounded:
        assert rounded.in_file_order() == (rounded.tensors, frozenset())


def test_leaving_early_ends_the_thread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), SourceHashes([path], {}):
        raise KeyboardInterrupt
    assert threading.active_count() == before


def test_errors_of_the_thread_are_raised(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x")
    hashes = SourceHashes([path], {})
    path.unlink()
    with hashes, pytest.raises(UsageError, match="no such file"):
        hashes.result()


def test_a_file_that_is_not_what_was_fetched(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "hf")
    known = {"model.safetensors": "0" * 64}
    with pytest.raises(FormatError, match=r"model\.safetensors: has changed since it was fetched"):
        convert(folder, tmp_path / "m.oam", provenance={"files": known})
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_no_file_of_the_source_is_replaced(tmp_path: Path) -> None:
    """Neither a part of a split model that was not named itself, nor a file beside the weights."""
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_metadata(), gguf_names(llama_tensors(LLAMA)), split_max_tensors=8)
    first, second, *_ = sorted(tmp_path.glob("m-*.gguf"))
    folder = llama_folder(tmp_path / "hf")
    for source, output in (
        (first, second),
        (folder, folder / "config.json"),
        (folder, folder / "model.safetensors"),
    ):
        whole = output.read_bytes()
        with pytest.raises(UsageError, match="is the source itself"):
            convert(source, output, overwrite=True)
        assert output.read_bytes() == whole
