"""External data of ONNX models: found beside the model and nowhere else, held against the shapes, waste reported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx_files import read, write

from oazoo.errors import FormatError
from oazoo.formats.detect import open_source


def external(location: str | None, count: int = 4, **entries: str) -> TensorProto:
    tensor = TensorProto(name="t", data_type=1, dims=[count], data_location=TensorProto.EXTERNAL)
    if location is not None:
        entries = {"location": location, **entries}
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_external_data_as_onnx_writes_it(data: Path, tmp_path: Path) -> None:
    golden = onnx.load(data / "onnx" / "nanogpt_dynamo" / "model.onnx")
    expected = {tensor.name: numpy_helper.to_array(tensor) for tensor in golden.graph.initializer}
    path = tmp_path / "модель 模型" / "m.onnx"
    path.parent.mkdir()
    onnx.save(golden, path, save_as_external_data=True, location="weights.bin", size_threshold=100)
    with open_source(path) as source:
        assert source.files == (path, path.parent / "weights.bin") and source.notes == ()
        for name, value in expected.items():
            assert np.array_equal(source[name].numpy(), value)
            assert value.nbytes < 100 or not source[name].mapped().flags.owndata


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../secret",
        "sub/../../secret",
        "C:secret",
        "C:/secret",
        "..\\secret",
        "a\\b",
        "",
        "a//b",
        ".",
        "..",
        "./",
        "sub/.",
    ],
)
def test_locations_that_leave_the_folder(location: str, tmp_path: Path) -> None:
    """OX-01."""
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    with pytest.raises(FormatError, match="location"):
        open_source(write(folder / "m.onnx", external(location)))


def test_a_location_with_nul(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="NUL"):
        open_source(write(tmp_path / "m.onnx", external("a\0b")))


def test_no_location(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty"):
        open_source(write(tmp_path / "m.onnx", external(None, offset="0")))


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    """OX-01: also by a link; a cache that keeps model and data as links to one place is fine."""
    (tmp_path / "secret").write_bytes(bytes(16))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data").symlink_to("../secret")
    with pytest.raises(FormatError, match="link"):
        open_source(write(folder / "m.onnx", external("data")))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write(blobs / "1", external("data"))
    (blobs / "2").write_bytes(np.arange(4, dtype="f4").tobytes())
    (snapshot / "m.onnx").symlink_to("../blobs/1")
    (snapshot / "data").symlink_to("../blobs/2")
    assert read(snapshot / "m.onnx").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"offset": "1"}, "1 to 17.*has 16"),
        ({"offset": "-1"}, "not a number"),
        ({"offset": "1e3"}, "not a number"),
        ({"offset": "9" * 30}, "not a number"),
        ({"length": "15"}, "15 bytes.*takes 16"),
        ({"length": "-16"}, "not a number"),
        ({"length": ""}, "not a number"),
        ({"offset": "9223372036854775807"}, "has 16"),
    ],
)
def test_ranges_that_do_not_fit(entries: dict[str, str], words: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(16))
    with pytest.raises(FormatError, match=words):
        open_source(write(tmp_path / "m.onnx", external("data", **entries)))


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"external data is missing.*data"):
        open_source(write(tmp_path / "m.onnx", external("data")))
    (tmp_path / "data").mkdir()
    with pytest.raises(FormatError, match="folder"):
        open_source(tmp_path / "m.onnx")


def test_bytes_that_nobody_refers_to_are_reported(tmp_path: Path) -> None:
    """OX-08."""
    values = np.arange(1000, dtype="f4")
    (tmp_path / "data").write_bytes(values.tobytes() * 2)
    path = write(tmp_path / "m.onnx", external("data", 1000, offset="4000", length="4000"))
    with open_source(path) as source:
        assert len(source.notes) == 1 and "4,000 of 8,000 bytes" in source.notes[0]
    assert np.array_equal(read(path), values)
    # Zeros that align what follows are no waste.
    (tmp_path / "data").write_bytes(values[:4].tobytes() + bytes(4080) + values.tobytes())
    second = external("data", 1000, offset="4096")
    second.name = "u"
    with open_source(write(path, external("data"), second)) as source:
        assert source.notes == ()
