"""Packing keeps pieces of several tensors on their way: what comes out is what packing them one by one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oazoo.errors import FormatError
from oazoo.formats.mapped import MappedTensor
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.source import SourceTensor
from oazoo.runtime import Device, Tensor, get_device
from oazoo.runtime.ops.pack import Packer, pack
from oazoo.zoo import quantize_run as module
from oazoo.zoo.pack_stream import PackStream
from oazoo.zoo.quantize import quantize

KINDS: dict[str, type] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
CHUNK = 96


def write(path: Path, tensors: dict[str, npt.NDArray[Any]]) -> Path:
    kinds = {np.dtype(kind): name for name, kind in KINDS.items()}
    entries = [OamEntry(name, array.shape, kinds[array.dtype]) for name, array in tensors.items()]
    with OamWriter(path, config=OamConfig("test"), entries=entries) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    return path


def many() -> dict[str, npt.NDArray[Any]]:
    """Tensors of one block, of less, and of many pieces of 96 elements, in all types, in no order."""
    rng = np.random.default_rng(5)
    sizes = (1, 700, 31, 32, 33, 5, 2000, 96, 97, 64, 288, 3, 1000, 192)
    return {
        f"w{index}": rng.normal(size=(1, size)).astype(list(KINDS.values())[index % 3])
        for index, size in enumerate(sizes)
    }


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
def test_pieces_of_many_tensors(
    tmp_path: Path, staged: bool, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = many()
    monkeypatch.setenv("OAZOO_STAGING", "1" if staged else "0")
    device = Device.open(str(get_device().info.index)) if staged else get_device()
    assert not (staged and device.allocator.unified)
    asked: list[str] = []

    def weights(tensor: SourceTensor, target: str) -> Tensor | None:
        asked.append(tensor.info.name)
        return None

    try:
        with OamSource(write(tmp_path / "in.oam", tensors)) as source:
            packers = {target: Packer(device, target, CHUNK, slots=slots) for target in ("q4", "q8")}
            tasks = [(source[name], "q8" if i % 4 == 1 else "q4") for i, name in enumerate(tensors)]
            stream = PackStream(packers, tasks, CHUNK, weights)
            for tensor, target in tasks:
                values = tensors[tensor.info.name].reshape(-1)
                codes, scales = b"", b""
                for piece in stream.pieces(tensor.info.name):
                    end = piece.start + piece.values.size
                    assert np.array_equal(piece.values, values[piece.start : end])
                    assert piece.odd.count == 0
                    codes, scales = codes + piece.codes.tobytes(), scales + piece.scales.tobytes()
                wanted = pack(Tensor.from_numpy(get_device(), values), target).bytes()
                assert codes + scales == wanted.tobytes(), tensor.info.name
            assert asked == list(tensors)
        del packers, stream, piece
    finally:
        if staged:
            device.close()


def test_an_odd_value_is_told_of_its_own_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when pieces of the tensors after it are on their way, and in a piece that is not the first."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", CHUNK)
    tensors = many()
    for name, at in (("w6", 1500), ("w8", 3)):
        tensors[name][0, at] = np.inf
    out = tmp_path / "out.oam"
    source = write(tmp_path / "in.oam", tensors)
    with pytest.raises(FormatError, match=r"'w6' holds .* not finite: 1 from element 1500 on \(inf\)"):
        quantize(source, out, "q4")
    assert list(tmp_path.iterdir()) == [source]
    quantize(source, out, "q4", allow_nonfinite=True)
    with OamSource(out) as packed:
        packed.verify()
        assert packed["w6"].numpy()[0, 1500] == 0 and packed["w8"].numpy()[0, 3] == 0


def test_bytes_go_where_they_are_wanted(tmp_path: Path) -> None:
    values = np.arange(50, dtype=np.float32).reshape(5, 10)
    path = write(tmp_path / "in.oam", {"w": values})
    with OamSource(path) as source:
        tensor = source["w"]
        assert isinstance(tensor, MappedTensor)
        into = np.zeros(12, np.float32)
        tensor.bytes_into(40, into[1:11].view(np.uint8))
        assert into.tolist() == [0, *range(10, 20), 0]
        for start in (-4, 4):
            with pytest.raises(ValueError, match="not within 200 bytes"):
                tensor.bytes_into(start, np.zeros(200, np.uint8))
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 300)
        with pytest.raises(FormatError, match="changed while it was read: the file is shorter"):
            tensor.bytes_into(0, into.view(np.uint8))
