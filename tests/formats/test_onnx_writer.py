"""Writing ONNX files: framing, data files, limits, and that a set of files is published whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.onnx_graph import Node, ValueInfo
from oazoo.formats.onnx_writer import ALIGNMENT, GraphPlan, write_onnx
from oazoo.formats.source import TensorInfo
from oazoo.formats.staging import publish_files, staging
from oazoo.formats.streamed import StreamedTensor

Array = npt.NDArray[np.float32]
GRAPH = GraphPlan(
    "g",
    [Node("Add", "", "sum", ("x", "w"), ("y",), {}), Node("Softmax", "", "s", ("y",), ("z",), {"axis": -1})],
    {"number": np.array(2.5, np.float32)},
    [ValueInfo("x", 1, ("n", 300))],
    [ValueInfo("z", 1, ("n", 300))],
    17,
    8,
)


def streamed(name: str, values: Array) -> StreamedTensor:
    def pieces() -> Iterator[Array]:
        flat = values.reshape(-1)
        for start in range(0, flat.size, 100):
            yield flat[start : start + 100]

    return StreamedTensor(TensorInfo(name, values.shape, "f32", values.nbytes), pieces)


@pytest.mark.parametrize("external", (False, True))
def test_the_onnx_package_reads_it(external: bool, tmp_path: Path) -> None:
    values = {"w": np.arange(300, dtype=np.float32), "v": np.ones((2, 3, 5), np.float32)}
    path = tmp_path / "a b ü.onnx"
    tensors = [streamed(name, value) for name, value in values.items()]
    write_onnx(path, GRAPH, {"key": "wert ü", "half": "\ud800"}, tensors, external=external)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert list(found) == ["number", "w", "v"] and found["number"] == 2.5
    assert all(np.array_equal(found[name], value) for name, value in values.items())
    assert {e.key: e.value for e in model.metadata_props} == {"key": "wert ü", "half": "?"}
    assert [node.op_type for node in model.graph.node] == ["Add", "Softmax"]
    data = tmp_path / "a b ü.onnx.data"
    assert data.exists() == external
    if external:
        assert data.stat().st_size == ALIGNMENT + 120
    with open_source(path) as source:
        assert not source.notes and set(source.files) == ({path, data} if external else {path})
        assert all(np.array_equal(source[name].numpy(), value) for name, value in values.items())
    with pytest.raises(UsageError, match="exists already"):
        write_onnx(path, GRAPH, {}, tensors, external=external)


def test_what_a_file_cannot_hold(tmp_path: Path) -> None:
    path, w = tmp_path / "m.onnx", streamed("w", np.zeros(4, np.float32))
    with pytest.raises(FormatError, match="'w' comes twice"):
        write_onnx(path, GRAPH, {}, [w, w])
    with pytest.raises(FormatError, match="'number' comes twice"):
        write_onnx(path, GRAPH, {}, [streamed("number", np.zeros(4, np.float32))])
    odd = StreamedTensor(TensorInfo("w", (32,), "q8", 36), lambda: iter(()))
    with pytest.raises(FormatError, match="'w': a graph has no weights of the type q8"):
        write_onnx(path, GRAPH, {}, [odd])
    wrong = StreamedTensor(TensorInfo("w", (32,), "f32", 36), lambda: iter(()))
    with pytest.raises(FormatError, match="'w': 36 bytes do not follow from its shape"):
        write_onnx(path, GRAPH, {}, [wrong])
    large = StreamedTensor(TensorInfo("w", (1 << 29,), "f32", 1 << 31), lambda: iter(()))
    with pytest.raises(FormatError, match="more than the 2 GiB of an ONNX file"):
        write_onnx(path, GRAPH, {}, [large])
    with pytest.raises(FormatError, match="'key': 1048577 characters, too long"):
        write_onnx(path, GRAPH, {"key": "x" * ((1 << 20) + 1)}, [w])
    with pytest.raises(FormatError, match=r"'a\\\\b.onnx.data' has a backslash"):
        write_onnx(tmp_path / "a\\b.onnx", GRAPH, {}, [w], external=True)
    short = StreamedTensor(TensorInfo("w", (4,), "f32", 16), lambda: iter([np.zeros(3, np.float32)]))
    for external in (False, True):
        with pytest.raises(FormatError, match="12 bytes came, 16 were announced"):
            write_onnx(path, GRAPH, {}, [short], external=external)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", (False, True))
def test_a_set_of_files_is_published_whole_or_not_at_all(overwrite: bool, tmp_path: Path) -> None:
    """The last of three cannot get its name: the first keeps what it held, and the second does not appear."""
    if overwrite:
        (tmp_path / "one").write_text("before")
    with (
        pytest.raises(OutputError, match="cannot be written"),
        staging(tmp_path / "three", tmp_path) as folder,
    ):
        for name in ("one", "two", "three"):
            (folder / name).write_text("new")
        targets = {name: tmp_path / name for name in ("one", "two")} | {"three": tmp_path / "gone" / "three"}
        publish_files(folder, targets, overwrite=overwrite)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == ({"one": "before"} if overwrite else {})


def test_files_go_where_links_lead(tmp_path: Path) -> None:
    """The staged name and that of the target need not be the same."""
    (tmp_path / "real").write_text("before")
    with staging(tmp_path / "link", tmp_path) as folder:
        (folder / "link").write_text("new")
        publish_files(folder, {"link": tmp_path / "real"}, overwrite=True)
    assert (tmp_path / "real").read_text() == "new" and len(list(tmp_path.iterdir())) == 1
