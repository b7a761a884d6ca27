"""Round trips through every container, against the packages and the reader that others wrote."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from oazoo.errors import FormatError, UsageError
from oazoo.formats import quant
from oazoo.formats.encodings import ENCODINGS
from oazoo.formats.gguf import GgufSource
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED, DTYPES, OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.safetensors import DTYPES as SAFETENSORS_DTYPES
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.safetensors_writer import export_safetensors, write_safetensors
from oazoo.formats.source import WeightSource

relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

#: name, dtype as SafeTensors calls it, shape, bytes.
Stored = tuple[str, tuple[int, ...], bytes]
names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20
).filter(lambda name: name != "__metadata__" and len(name.encode()) < 127)
shapes = st.lists(st.integers(0, 4), max_size=8).map(tuple).filter(lambda shape: math.prod(shape) <= 600)


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(SAFETENSORS_DTYPES)))
        shape = draw(shapes)
        if dtype.startswith(("F4", "F6")):
            shape = (*shape[:7], 4)
        size = ENCODINGS[SAFETENSORS_DTYPES[dtype]].bytes_for(shape)
        top = 1 if dtype == "BOOL" else 255
        raw = (
            draw(st.binary(min_size=size, max_size=size))
            if size < 40
            else bytes(i * 37 % (top + 1) for i in range(size))
        )
        tensors[name] = (dtype, shape, bytes(byte & top for byte in raw))
    return tensors


def reference_bytes(tensors: dict[str, Stored], metadata: dict[str, str] | None = None) -> bytes:
    """The file that the safetensors package writes for tensors of any of its types."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def deserialized(path: Path) -> dict[str, Stored]:
    """What the safetensors package reads from a file."""
    deserialize: Any = safetensors.deserialize
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in deserialize(path.read_bytes())
    }


def to_oam(source: WeightSource, path: Path) -> None:
    infos = [tensor.info for tensor in source.values()]
    entries = [OamEntry(info.name, info.shape, info.encoding) for info in infos]
    with OamWriter(path, config=OamConfig("test"), entries=entries, overwrite=True) as writer:
        for name, tensor in source.items():
            raw = tensor.raw()
            writer.write(name, (raw[start : start + 7] for start in range(0, raw.size, 7)))


@relaxed
@given(tensors=stored(), metadata=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2))
def test_safetensors_to_oam_and_back_is_bit_exact(
    tmp_path: Path, oamref: ModuleType, tensors: dict[str, Stored], metadata: dict[str, str]
) -> None:
    first, middle, last = tmp_path / "first", tmp_path / "middle", tmp_path / "last"
    first.write_bytes(reference_bytes(tensors, metadata))
    assert deserialized(first) == tensors
    with SafetensorsSource(first) as source:
        assert dict(source.metadata) == metadata
        to_oam(source, middle)
    theirs = {item["name"]: item["data"] for item in oamref.load(middle).get("weights", [])}
    assert theirs == {name: raw for name, (_, _, raw) in tensors.items()}
    with OamSource(middle) as model:
        model.verify()
        assert list(model) == list(tensors)
        export_safetensors(model, last, overwrite=True)
    assert deserialized(last) == tensors


@relaxed
@given(tensors=stored())
def test_our_safetensors_are_aligned(tmp_path: Path, tensors: dict[str, Stored]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(reference_bytes(tensors))
    with SafetensorsSource(first) as source:
        write_safetensors(second, source, overwrite=True)
    with SafetensorsSource(second) as source:
        assert {name: tensor.raw().tobytes() for name, tensor in source.items()} == {
            n: t[2] for n, t in tensors.items()
        }
        for tensor in source.values():
            encoding, stored = ENCODINGS[tensor.info.encoding], tensor.mapped()
            if encoding.kind == "dense":
                values = encoding.numpy(stored, tensor.info.shape)  # a copy where the bytes are not aligned
                assert np.shares_memory(values, stored) or tensor.info.nbytes == 0


NUMPY_TYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"]


@pytest.mark.parametrize("dtype", NUMPY_TYPES)
def test_safetensors_of_numpy_types(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "matrix": rng.integers(0, 2, (3, 5)).astype(dtype),
        "scalar": np.array(1, dtype),
        "none": np.empty((2, 0, 3), dtype),
        "fortran": np.asfortranarray(rng.integers(0, 2, (3, 4)).astype(dtype)),
        "swapped": rng.integers(0, 2, 4).astype(np.dtype(dtype).newbyteorder(">")),
    }
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    write_safetensors(ours, arrays, metadata={"by": "us"})
    save_file(
        {name: np.ascontiguousarray(value) for name, value in arrays.items() if name != "swapped"}, theirs
    )
    for name, value in load_file(ours).items():
        np.testing.assert_array_equal(value, arrays[name])
        assert value.shape == arrays[name].shape
    for name, tensor in SafetensorsSource(theirs).items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])


def test_the_exporter_and_quantised_tensors(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((3, 33)).astype("f4")
    path = tmp_path / "q.oam"
    entries = [OamEntry("w", (3, 33), "q8"), OamEntry("n", (33,), "f32")]
    with OamWriter(path, config=OamConfig("test"), entries=entries) as writer:
        writer.write("w", quant.encode(values, "q8"))
        writer.write("n", values[0])
    with OamSource(path) as source:
        with pytest.raises(UsageError, match="dequantize=True"):
            export_safetensors(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        export_safetensors(source, tmp_path / "out", dequantize=True)
        exported = load_file(tmp_path / "out")
        np.testing.assert_array_equal(exported["w"], source["w"].numpy())
        np.testing.assert_array_equal(exported["n"], values[0])


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    target = tmp_path / "out"
    bad: list[dict[str, npt.NDArray[Any]]] = [
        {"c": np.zeros(2, "c16")},
        {"": np.zeros(2, "f4")},
        {"a\0": np.zeros(2, "f4")},
        {"__metadata__": np.zeros(2, "f4")},
        {"\ud800": np.zeros(2, "f4")},
    ]
    for arrays in bad:
        with pytest.raises(FormatError):
            write_safetensors(target, arrays)
    with pytest.raises(FormatError, match="only text"):
        write_safetensors(target, {}, metadata={"epoch": 3})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", [path.name for path in sorted((Path(__file__).parent.parent / "data/oa").glob("*.oam"))]
)
def test_files_of_the_other_engine(tmp_path: Path, data: Path, oamref: ModuleType, name: str) -> None:
    path = data / "oa" / name
    recorded = np.load(path.with_suffix(".npz"))
    theirs = oamref.load(path)
    copy = tmp_path / "copy.oam"
    with OamSource(path) as source:
        source.verify()
        assert list(source) == [key for key in recorded.files if key[0] == "p" and key[1:].isdigit()]
        for key, tensor in source.items():
            np.testing.assert_array_equal(tensor.numpy(), recorded[key])
        entries = [OamEntry(key, tensor.info.shape, "f32") for key, tensor in source.items()]
        with OamWriter(
            copy, config=source.config, entries=entries, progress=source.progress, optimizer=source.optimizer
        ) as writer:
            for key, tensor in source.items():
                writer.write(key, tensor.numpy())
    ours = oamref.load(copy)
    for part in ("arch", "config", "dtypes", "archconfig", "weights", "opt", "progress"):
        assert ours[part] == theirs[part], part


@relaxed
@given(
    tensors=st.dictionaries(names, st.tuples(st.sampled_from([*DTYPES, *CARRIED]), shapes), max_size=8),
    assets=st.dictionaries(st.text("abc.", min_size=1, max_size=8), st.binary(max_size=100), max_size=3),
    payload=st.binary(max_size=50),
)
def test_oam_layout(
    tmp_path: Path,
    oamref: ModuleType,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    assets: dict[str, bytes],
    payload: bytes,
) -> None:
    tensors = {
        name: (kind, (*shape[:7], 4) if kind.startswith(("f4", "f6")) else shape)
        for name, (kind, shape) in tensors.items()
    }
    path = tmp_path / "file.oam"
    content = {
        name: bytes(i * 31 % (2 if kind == "bool" else 256) for i in range(ENCODINGS[kind].bytes_for(shape)))
        for name, (kind, shape) in tensors.items()
    }
    entries = [OamEntry(name, shape, kind) for name, (kind, shape) in tensors.items()]
    config = OamConfig("test", 8, 2, 320, "bf16", payload=payload)
    with OamWriter(path, config=config, entries=entries, assets=assets, overwrite=True) as writer:
        for name in reversed(content):
            writer.write(name, content[name])
    whole = path.read_bytes()
    assert len(whole) == writer.size
    theirs = oamref.load(path)
    assert theirs["version"] == 3 and theirs["archconfig"] == payload
    for kind, offset, size in theirs["sections"]:
        if kind in (2, 3):
            (count,) = struct.unpack_from("<I", whole, offset)
            for index in range(count):
                (place,) = struct.unpack_from("<Q", whole, offset + 8 + 216 * index + 128)
                assert (offset + 8 + 216 * count + place) % 64 == 0
            following = [start for _, start, _ in theirs["sections"] if start > offset]
            assert min(following) >= offset + -(-size // 4096) * 4096
    with OamSource(path) as source:
        source.verify()
        assert source.config == config
        assert {name: (tensor.info.encoding, tensor.info.shape) for name, tensor in source.items()} == tensors
        assert {name: tensor.raw().tobytes() for name, tensor in source.items()} == content
        assert {name: source.asset(f"asset/{name}") for name in assets} == assets


def test_gguf_of_the_reference_writer(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    rng = np.random.default_rng(2)
    arrays: dict[str, npt.NDArray[Any]] = {
        "f32": rng.standard_normal((3, 4)).astype("f4"),
        "f16": rng.standard_normal((2, 3, 4)).astype("f2"),
        "f64": rng.standard_normal((1, 2, 3, 4)),
        **{kind: rng.integers(-100, 100, (5, 3)).astype(kind) for kind in ("i1", "i2", "i4", "i8")},
    }
    writer = GGUFWriter(path, "llama")
    writer.add_name("name é 🙂")
    writer.add_token_list([f"token {index}" for index in range(5000)])
    writer.add_token_scores([float(index) for index in range(5000)])
    writer.add_array("mixed", [1, 2, 3])
    writer.add_bool("yes", True)
    writer.add_uint64("large", 2**63)
    writer.add_float64("pi", math.pi)
    for name, value in arrays.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = GGUFReader(path)
    with GgufSource(path) as ours:
        assert dict(ours.metadata) == {
            name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
        }
        assert list(ours) == [tensor.name for tensor in theirs.tensors]
        for name, value in arrays.items():
            np.testing.assert_array_equal(ours[name].numpy(), value)
            assert ours[name].info.shape == value.shape and ours[name].numpy().dtype == value.dtype


@pytest.mark.parametrize("kind", ["BF16", "F32", "Q4_0", "Q4_K_M", "Q6_K", "Q8_0"])
def test_reference_gguf_files(data: Path, kind: str) -> None:
    path = data / "gguf" / f"tiny-{kind}.gguf"
    with GgufSource(path) as ours:
        for tensor in GGUFReader(path).tensors:
            mine = ours[tensor.name]
            assert mine.info.nbytes == tensor.n_bytes and mine.info.shape == tuple(
                reversed(tensor.shape.tolist())
            )
            np.testing.assert_array_equal(mine.raw(), tensor.data.view(np.uint8).ravel())


def test_bf16_and_f8_arrays_are_written(tmp_path: Path) -> None:
    values = np.arange(-4, 4).reshape(2, 4)
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        array = values.astype(kind)
        write_safetensors(tmp_path / "x", {"w": array}, overwrite=True)
        assert deserialized(tmp_path / "x")["w"][2] == array.tobytes()
        encoding = SafetensorsSource(tmp_path / "x")["w"].info.encoding
        with OamWriter(
            tmp_path / "y", config=OamConfig("t"), entries=[OamEntry("w", (2, 4), encoding)], overwrite=True
        ) as writer:
            writer.write("w", array)
        read = OamSource(tmp_path / "y")["w"].numpy()
        assert read.dtype == array.dtype and read.tobytes() == array.tobytes()
