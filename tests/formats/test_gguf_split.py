"""Models in several GGUF files: opened by any part as one, and every way in which parts do not belong together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, gguf_names, llama_metadata, llama_tensors, write_gguf
from gguf import GGUFReader, GGUFWriter

from oazoo.errors import FormatError
from oazoo.formats.detect import open_source
from oazoo.formats.gguf import GgufSource
from oazoo.formats.gguf_split import SplitGgufSource, first_part, part_name
from oazoo.translators import convert

NAMES = [f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


def split_model(
    folder: Path,
    count: int = 6,
    each: int = 2,
    seed: int = 0,
    arch: str = "llama",
    name: str = "m",
    **options: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Parts of ``each`` tensors by the reference writer; the tensors by name."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(folder / f"{name}.gguf", arch, split_max_tensors=each, **options)
    writer.add_string("general.name", f"model {seed}")
    random = np.random.default_rng(seed)
    tensors = {f"t{index}": random.normal(size=(index + 1, 3)).astype("f4") for index in range(count)}
    for key, value in tensors.items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("opened", NAMES)
def test_any_part_opens_the_model(tmp_path: Path, opened: str) -> None:
    tensors = split_model(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert [len(GGUFReader(tmp_path / name).tensors) for name in NAMES] == [2, 2, 2]
    with open_source(tmp_path / opened) as source:
        assert source.format == "gguf" and source.path == tmp_path / opened
        assert source.files == tuple(tmp_path / name for name in NAMES)
        assert source.metadata == {"general.architecture": "llama", "general.name": "model 0"}
        assert list(source) == list(tensors)
        for name, value in tensors.items():
            np.testing.assert_array_equal(source[name].numpy(), value)


def test_a_folder_of_parts_is_one_model(tmp_path: Path) -> None:
    split_model(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    with open_source(tmp_path) as source:
        assert isinstance(source, SplitGgufSource) and len(source) == 6 and source.notes == ()


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    tensors = split_model(tmp_path, count=4, small_first_shard=True)
    parts = sorted(tmp_path.iterdir())
    assert [len(GgufSource(path)) for path in parts] == [0, 2, 2]
    with open_source(parts[0]) as source:
        assert list(source) == list(tensors)


def test_one_part_alone_is_an_ordinary_file(tmp_path: Path) -> None:
    split_model(tmp_path, count=2, each=0)
    with open_source(tmp_path / "m.gguf") as source:
        assert isinstance(source, GgufSource) and len(source) == 2


@pytest.mark.parametrize("opened", [NAMES[0], NAMES[2]])
def test_missing_parts_are_named(tmp_path: Path, opened: str) -> None:
    split_model(tmp_path)
    (tmp_path / NAMES[1]).unlink()
    with pytest.raises(FormatError) as caught:
        open_source(tmp_path / opened)
    message = str(caught.value)
    assert (
        message.startswith(str(tmp_path / opened))
        and f"1 are not there: {NAMES[1]} (there: {NAMES[0]}, {NAMES[2]})" in message
    )
    with pytest.raises(FormatError, match=NAMES[1]):
        open_source(tmp_path)


def test_renumbered_parts(tmp_path: Path) -> None:
    split_model(tmp_path)
    shutil.move(tmp_path / NAMES[1], tmp_path / "keep")
    shutil.move(tmp_path / NAMES[2], tmp_path / NAMES[1])
    shutil.move(tmp_path / "keep", tmp_path / NAMES[2])
    for opened in NAMES:
        with pytest.raises(FormatError, match=r"named as part [23] of 3, but holds part [32] of 3"):
            open_source(tmp_path / opened)


def test_renamed_parts(tmp_path: Path) -> None:
    split_model(tmp_path)
    shutil.copy(tmp_path / NAMES[1], tmp_path / "second.gguf")
    with pytest.raises(FormatError, match=r"part 2 of a GGUF model in 3 files.*NAME-00002-of-00003\.gguf"):
        open_source(tmp_path / "second.gguf")
    shutil.copy(tmp_path / NAMES[1], tmp_path / "m-00002-of-00004.gguf")
    with pytest.raises(FormatError, match="named as part 2 of 4, but holds part 2 of 3"):
        open_source(tmp_path / "m-00002-of-00004.gguf")


def test_parts_joined_with_cat(tmp_path: Path) -> None:
    split_model(tmp_path)
    whole = b"".join((tmp_path / name).read_bytes() for name in NAMES)
    for name in ("whole.gguf", NAMES[0]):
        (tmp_path / name).write_bytes(whole)
        with pytest.raises(FormatError, match=r"joined end to end.*open the first"):
            open_source(tmp_path / name)


def test_a_joined_first_part_without_tensors(tmp_path: Path) -> None:
    split_model(tmp_path / "parts", count=4, small_first_shard=True)
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(b"".join(path.read_bytes() for path in sorted((tmp_path / "parts").iterdir())))
    with pytest.raises(FormatError, match="joined end to end"):
        open_source(whole)


def other(folder: Path, change: str) -> None:
    """Put part 2 of another model in the place of part 2."""
    if change == "more tensors":
        split_model(folder, count=5)
    elif change == "another count of parts":
        split_model(folder, each=1)
        shutil.copy(folder / "m-00002-of-00006.gguf", folder / NAMES[1])
    elif change == "not split":
        split_model(folder, each=0, name="whole")
        shutil.copy(folder / "whole.gguf", folder / NAMES[1])
    else:
        writer = GGUFWriter(folder / NAMES[1], "gemma" if change == "another architecture" else "llama")
        writer.add_uint16("split.no", 1)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 6)
        held = {"the same tensor": ["t1", "t9"], "too few": ["t2"], "another architecture": ["t2", "t3"]}
        for name in held[change]:
            writer.add_tensor(name, np.zeros(3, "f4"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("more tensors", "model of 5 tensors.*one of 6"),
        ("another count of parts", "named as part 2 of 3, but holds part 2 of 6"),
        ("not split", "named as part 2 of 3, but is not part of a split model"),
        ("the same tensor", "'t1' is in m-00001-of-00003.gguf as well"),
        ("too few", "the model has 6 tensors, its 3 parts 5"),
        ("another architecture", "'gemma', and 'llama' in m-00001"),
    ],
)
def test_parts_of_different_models(tmp_path: Path, change: str, words: str) -> None:
    split_model(tmp_path / "a")
    (tmp_path / "b").mkdir()
    other(tmp_path / "b", change)
    shutil.copy(tmp_path / "b" / NAMES[1], tmp_path / "a" / NAMES[1])
    with pytest.raises(FormatError, match=words) as caught:
        open_source(tmp_path / "a" / NAMES[0])
    assert str(tmp_path / "a") in str(caught.value)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    split_model(tmp_path)
    path = tmp_path / NAMES[2]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FormatError, match="cut short") as caught:
        open_source(tmp_path / NAMES[0])
    assert str(path) in str(caught.value)


def test_names_of_parts() -> None:
    part = part_name("a-00001-of-00002-00002-of-00011.gguf")
    assert part is not None and (part.prefix, part.number, part.count) == ("a-00001-of-00002", 2, 11)
    assert part.of(11) == "a-00001-of-00002-00011-of-00011.gguf"
    for name in (
        "m.gguf",
        "m-1-of-3.gguf",
        "m-00000-of-00003.gguf",
        "m-00004-of-00003.gguf",
        "-00001-of-00003.gguf",
    ):
        assert part_name(name) is None
    assert first_part(NAMES[::-1]) == NAMES[0]
    assert first_part([*NAMES, "m.gguf"]) is None and first_part([*NAMES, "n-00001-of-00003.gguf"]) is None
    assert first_part([]) is None


def test_a_split_model_converts_as_the_whole_one(tmp_path: Path) -> None:
    tensors, metadata = gguf_names(llama_tensors(LLAMA)), llama_metadata()
    whole = write_gguf(tmp_path / "whole.gguf", metadata, tensors)
    write_gguf(tmp_path / "part.gguf", metadata, tensors, split_max_tensors=8)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) == 3
    convert(whole, tmp_path / "whole.oam")
    report = convert(parts[1], tmp_path / "parts.oam")
    assert [file["name"] for file in report.source["files"]] == [path.name for path in parts]
    with open_source(tmp_path / "whole.oam") as expected, open_source(tmp_path / "parts.oam") as found:
        assert list(expected) == list(found)
        for name, tensor in expected.items():
            assert found[name].raw().tobytes() == tensor.raw().tobytes()
