"""Properties of every reader: what anybody wrote comes back, and what was mutated is refused or read whole.

The files of the first kind are written by other packages or by hand, never by our writers alone. The examples are the same
in every run. Mutations go through the targets of the fuzzer, with its bounds on memory.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_files
import pytest
import torch_files
from fuzz_targets import FACTOR, SLACK, TARGETS, mended_oam
from gguf import GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from oazoo.errors import FormatError, OazooError
from oazoo.formats import plain_pickle, strict_json
from oazoo.formats.gguf import GgufSource
from oazoo.formats.hf_folder import ShardedSource
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.onnx import OnnxSource
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.source import WeightSource
from oazoo.formats.torch_zip import TorchSource
from oazoo.translators import sentencepiece_model
from oazoo.translators.settings import Settings

HERE = Path(__file__).resolve().parent.parent
Array = np.ndarray[Any, Any]

some = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TYPES = {
    "F32": "f4",
    "F16": "f2",
    "F64": "f8",
    "I64": "i8",
    "I32": "i4",
    "I16": "i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
names = texts.filter(lambda name: bool(name) and name != "__metadata__")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def filled(kind: str, shape: tuple[int, ...], seed: int) -> Array:
    """Some bytes as an array; NaN and infinities are as likely as they are in bytes."""
    dtype = np.dtype(kind)
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == np.bool_ else 256, math.prod(shape) * dtype.itemsize, np.uint8
    )
    return raw.view(dtype).reshape(shape)


def arrays(
    kinds: list[str], name: st.SearchStrategy[str] = names, least: int = 0
) -> st.SearchStrategy[dict[str, Array]]:
    one = st.builds(filled, st.sampled_from(kinds), shapes, st.integers(0, 2**32 - 1))
    return st.dictionaries(name, one, min_size=least, max_size=5)


def same(source: WeightSource, tensors: dict[str, Array]) -> None:
    """The source holds exactly these arrays, to the bit, whole and in pieces."""
    assert set(source) == set(tensors)
    for name, value in tensors.items():
        tensor = source[name]
        found = tensor.numpy()
        assert (found.shape, found.dtype) == (value.shape, value.dtype), name
        assert found.tobytes() == value.tobytes() == tensor.raw().tobytes()
        assert b"".join(piece.tobytes() for piece in tensor.chunks(3)) == value.tobytes()
        assert b"".join(piece.tobytes() for piece in tensor.pieces(7)) == value.tobytes()


def safetensors_bytes(tensors: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    codes = {np.dtype(kind): code for code, kind in TYPES.items()}
    data = b""
    for name, value in tensors.items():
        span = [len(data), len(data) + value.nbytes]
        header[name] = {"dtype": codes[value.dtype], "shape": list(value.shape), "data_offsets": span}
        data += value.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# -------------------------------------------------------------------------------------------- what was written comes back


@some
@given(arrays([*TYPES.values()]), st.dictionaries(texts, texts, max_size=3))
def test_safetensors(tmp_path: Path, tensors: dict[str, Array], metadata: dict[str, str]) -> None:
    path = tmp_path / "x"
    path.write_bytes(safetensors_bytes(tensors, metadata))
    with SafetensorsSource(path) as source:
        same(source, tensors)
        assert dict(source.metadata) == metadata


@some
@given(arrays(["f4", "i8"], least=1), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_an_index_and_its_shards(tmp_path: Path, tensors: dict[str, Array], places: list[int]) -> None:
    shards: dict[int, dict[str, Array]] = {}
    weight_map = {}
    for (name, value), place in zip(tensors.items(), places):
        shards.setdefault(place, {})[name] = value
        weight_map[name] = f"s{place}.safetensors"
    for place in range(3):
        path = tmp_path / f"s{place}.safetensors"
        path.write_bytes(safetensors_bytes(shards.get(place, {"stray": np.zeros(1, "f4")})))
    index = tmp_path / "model.safetensors.index.json"
    total = sum(value.nbytes for value in tensors.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}), "utf-8")
    with ShardedSource(index) as source:
        same(source, tensors)
        assert list(source) == list(tensors)
        assert sum("ignored" in note for note in source.notes) == 3 - len(shards)


def whole(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return st.integers(low, high)


SCALARS: dict[GGUFValueType, st.SearchStrategy[Any]] = {
    GGUFValueType.UINT8: whole(8, False),
    GGUFValueType.INT8: whole(8, True),
    GGUFValueType.UINT16: whole(16, False),
    GGUFValueType.INT16: whole(16, True),
    GGUFValueType.UINT32: whole(32, False),
    GGUFValueType.INT32: whole(32, True),
    GGUFValueType.UINT64: whole(64, False),
    GGUFValueType.INT64: whole(64, True),
    GGUFValueType.FLOAT32: st.floats(width=32, allow_nan=False),
    GGUFValueType.FLOAT64: st.floats(allow_nan=False),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: texts,
}


@st.composite
def gguf_values(draw: st.DrawFn) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    kind = draw(st.sampled_from(sorted(SCALARS)))
    if draw(st.booleans()):
        return draw(SCALARS[kind]), kind, None
    return draw(st.lists(SCALARS[kind], min_size=1, max_size=5)), GGUFValueType.ARRAY, kind


@some
@given(
    st.dictionaries(
        texts.filter(lambda key: key and not key.startswith(("general.", "GGUF."))), gguf_values(), max_size=5
    ),
    st.dictionaries(
        names,
        st.builds(
            filled,
            st.sampled_from(["f4", "f2", "f8", "i1", "i2", "i4", "i8"]),
            shapes.filter(bool),
            st.integers(0, 99),
        ),
        max_size=4,
    ),
)
def test_gguf(tmp_path: Path, values: dict[str, Any], tensors: dict[str, Array]) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    for key, (value, kind, inner) in values.items():
        writer.add_key_value(key, value, kind, inner)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufSource(path) as source:
        same(source, tensors)
        found = {key: value for key, value in source.metadata.items() if not key.startswith("general.")}
        assert found == {key: value for key, (value, _, _) in values.items()}
        assert [type(value) for value in found.values()] == [type(value) for value, _, _ in values.values()]


OAM_TYPES = {
    "f4": "f32",
    "f2": "f16",
    "f8": "f64",
    "i8": "i64",
    "i4": "i32",
    "i2": "i16",
    "i1": "i8",
    "u1": "u8",
    "b1": "bool",
}


def write_oam(path: Path, tensors: dict[str, Array], assets: dict[str, bytes]) -> None:
    path.unlink(missing_ok=True)
    entries = [OamEntry(name, v.shape, OAM_TYPES[v.dtype.str.lstrip("<|")]) for name, v in tensors.items()]
    config = OamConfig("raw", payload=b'{"oazoo":1}')
    with OamWriter(path, config=config, entries=entries, assets=assets) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


long_names = st.one_of(names, names.map(lambda name: name * 40).filter(lambda name: len(name) < 400))


@some
@given(
    arrays([*OAM_TYPES], long_names),
    st.dictionaries(st.text("abc.", min_size=1, max_size=5), st.binary(max_size=40), max_size=2),
)
def test_oam(tmp_path: Path, oamref: ModuleType, tensors: dict[str, Array], assets: dict[str, bytes]) -> None:
    path = tmp_path / "x.oam"
    write_oam(path, tensors, assets)
    with OamSource(path) as source:
        source.verify()
        same(source, tensors)
        assert {name: source.asset(f"asset/{name}") for name in assets} == assets
        full = dict(source.metadata.get("names", {}))
    found = oamref.load(path)
    by_name = {full.get(t["name"], t["name"]): t for t in found["weights"]}
    assert set(by_name) == set(tensors)
    for name, value in tensors.items():
        assert (by_name[name]["shape"], by_name[name]["data"]) == (value.shape, value.tobytes())


@st.composite
def protos(draw: st.DrawFn, name: str, value: Array) -> Any:
    """The TensorProto of an array, its values in any of the places where they may lie."""
    if value.dtype.str == "<f4" and value.size and draw(st.booleans()):
        return onnx_files.proto(name, 1, list(value.shape), float_data=value.reshape(-1).tolist())
    if value.dtype.str == "<i8" and value.size and draw(st.booleans()):
        return onnx_files.proto(name, 7, list(value.shape), int64_data=value.reshape(-1).tolist())
    if value.dtype.str == "<f2" and value.size and draw(st.booleans()):
        return onnx_files.proto(name, 10, list(value.shape), int32_data=value.reshape(-1).view("u2").tolist())
    return numpy_helper.from_array(value, name)


@st.composite
def onnx_models(draw: st.DrawFn) -> tuple[dict[str, Array], dict[str, Array], list[Any]]:
    """Arrays in the model, arrays outside of it, and the TensorProtos of all."""
    tensors = draw(arrays(["f4", "f2", "f8", "i8", "i4", "u1", "?"]))
    inside: dict[str, Array] = {}
    outside: dict[str, Array] = {}
    stored = []
    at = 0
    for name, value in tensors.items():
        if value.dtype.kind == "f" and value.size:
            value = np.nan_to_num(
                value
            )  # float_data goes through Python's floats, which keep no payload of a NaN
        if draw(st.booleans()):
            inside[name] = value
            stored.append(draw(protos(name, value)))
            continue
        outside[name] = value
        kind = numpy_helper.from_array(value, name)
        kind.ClearField("raw_data")
        kind.data_location = 1
        for key, text in (("location", "data.bin"), ("offset", str(at)), ("length", str(value.nbytes))):
            entry = kind.external_data.add()
            entry.key, entry.value = key, text
        stored.append(kind)
        at += value.nbytes
    return inside, outside, stored


@some
@given(onnx_models())
def test_onnx(tmp_path: Path, model: tuple[dict[str, Array], dict[str, Array], list[Any]]) -> None:
    inside, outside, stored = model
    (tmp_path / "data.bin").write_bytes(b"".join(value.tobytes() for value in outside.values()))
    onnx_files.write(tmp_path / "x.onnx", *stored)
    with OnnxSource(tmp_path / "x.onnx") as source:
        assert set(source) == {*inside, *outside}
        for name, value in {**inside, **outside}.items():
            found = source[name].numpy()
            assert (found.shape, found.dtype) == (value.shape, value.dtype)
            assert found.tobytes() == value.tobytes() == source[name].raw().tobytes(), name


plain = st.recursive(
    st.one_of(st.none(), st.booleans(), whole(64, True), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


@some
@given(
    arrays(["f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "?"], st.text("abc", min_size=1, max_size=3)),
    plain,
)
def test_torch(tmp_path: Path, tensors: dict[str, Array], value: Any) -> None:
    torch_files.save_tensors(tmp_path / "x.pt", {"model": tensors, "other": value, "again": dict(tensors)})
    with TorchSource(tmp_path / "x.pt") as source:
        same(source, {f"{place}.{name}": v for place in ("model", "again") for name, v in tensors.items()})
        assert source.shared == {f"again.{name}": f"model.{name}" for name in tensors}
        assert source.metadata["other"] == value


@some
@given(plain, st.integers(2, 5))
def test_pickle(value: Any, protocol: int) -> None:
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False, allow_infinity=False),
        texts,
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=20,
)


@some
@given(json_values, st.booleans(), st.sampled_from([None, 0, 3]))
def test_strict_json(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert strict_json.loads(text, "x") == value
    for damaged in (f"{text}x", f"[{text}", f'{{"a": {text}, "a": {text}}}', f"[{text}, NaN]", f"[{text},]"):
        with pytest.raises(FormatError):
            strict_json.loads(damaged, "x")


def field(number: int, wire: int, body: bytes) -> bytes:
    return bytes([number << 3 | wire]) + body


def delimited(number: int, body: bytes) -> bytes:
    size, length = len(body), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return field(number, 2, length + bytes([size]) + body)


def sentencepiece_bytes(pieces: list[tuple[str, float, int]]) -> bytes:
    """A BPE model: pieces with score and type (1 normal, 2 unknown, 3 control, 6 byte), no text normalization."""
    body = b"".join(
        delimited(
            1,
            delimited(1, text.encode()) + field(2, 5, struct.pack("<f", score)) + field(3, 0, bytes([kind])),
        )
        for text, score, kind in pieces
    )
    trainer = delimited(2, field(3, 0, b"\2"))
    return body + trainer + delimited(3, delimited(1, b"identity") + field(3, 0, b"\1") + field(4, 0, b"\0"))


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[str, float, int]]:
    """Letters, and pieces each of which joins two earlier ones, so that merges can spell all of them."""
    letters = ["▁", *draw(st.lists(st.sampled_from("abcdéß日🙂"), unique=True, min_size=1, max_size=6))]
    joined: list[str] = []
    for _ in range(draw(st.integers(0, 8))):
        both = [*letters, *joined]
        text = draw(st.sampled_from(both)) + draw(st.sampled_from(both))
        if text not in both and len(text) < 16:
            joined.append(text)
    special = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        *((f"<0x{n:02X}>", 0.0, 6) for n in range(256)),
    ]
    return [*special, *((text, -float(rank), 1) for rank, text in enumerate([*joined, *letters], 1))]


@some
@given(vocabularies())
def test_sentencepiece(pieces: list[tuple[str, float, int]]) -> None:
    built = json.loads(sentencepiece_model.build(sentencepiece_bytes(pieces), Settings({}, "config"), "x"))
    assert built["model"]["type"] == "BPE"
    vocabulary = built["model"]["vocab"]
    assert [vocabulary[text] for text, _, _ in pieces] == list(range(len(pieces)))


# ----------------------------------------------------------------------------------------------- what was mutated


def seeds(reader: str) -> list[bytes]:
    """The corpus of a reader, small files first."""
    found = [path.read_bytes() for path in sorted((HERE / "fuzz" / "corpus" / reader).iterdir())]
    return sorted(found, key=len)


edits = st.lists(
    st.tuples(
        st.sampled_from(["set", "flip", "insert", "delete", "number", "repeat", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
        st.integers(1, 16),
    ),
    min_size=1,
    max_size=4,
)
NUMBERS = [
    0,
    1,
    127,
    128,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def mutated(data: bytes, changes: list[tuple[str, float, int, int]]) -> bytes:
    """A file after a few changes of the kinds that fuzzers make."""
    file = bytearray(data)
    for kind, where, value, size in changes:
        at = int(where * len(file))
        if kind == "cut":
            del file[at:]
        elif kind == "delete":
            del file[at : at + size]
        elif kind == "insert":
            file[at:at] = bytes([value]) * size
        elif kind == "repeat":
            file[at:at] = file[at : at + 4 * size]
        elif kind == "number":
            file[at : at + 8] = struct.pack("<Q", NUMBERS[value % len(NUMBERS)])
        elif at < len(file):
            file[at] = value if kind == "set" else file[at] ^ (1 << value % 8)
    return bytes(file)


def survived(reader: str, data: bytes, folder: Path) -> bool:
    """Whether a reader takes the bytes; any error that is not ours, or too much memory, fails the test."""
    tracemalloc.start()
    try:
        accepted = TARGETS[reader](data, folder)
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert used <= FACTOR * len(data) + SLACK, f"{used} bytes for {len(data)}"
    return accepted


@pytest.mark.parametrize("reader", TARGETS)
def test_mutations_are_refused_or_read(tmp_path: Path, reader: str) -> None:
    files = seeds(reader)

    @settings(some, max_examples=120)
    @given(st.integers(0, len(files) - 1), edits)
    def mutate(number: int, changes: list[tuple[str, float, int, int]]) -> None:
        survived(reader, mutated(files[number], changes), tmp_path)

    mutate()


@pytest.mark.parametrize("reader", TARGETS)
def test_the_corpus_of_the_fuzzer(tmp_path: Path, reader: str) -> None:
    """Every input that fuzzing found worth keeping; some are good files, so that all of a reader is reached."""
    accepted = [survived(reader, data, tmp_path) for data in seeds(reader)]
    assert any(accepted)


def test_the_corpus_is_small() -> None:
    files = [path for path in (HERE / "fuzz" / "corpus").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS)
    assert sum(path.stat().st_size for path in files) < 200_000


def content(source: OamSource) -> dict[str, Any]:
    """All that a verified file says."""
    source.verify()
    weights = {name: (t.info, t.raw().tobytes()) for name, t in source.items()}
    state = {name: (t.info, t.raw().tobytes()) for name, t in source.state.items()}
    return {"config": source.config, "progress": source.progress, "weights": weights, "state": state}


@settings(some, max_examples=150)
@given(edits)
def test_an_oam_that_passes_its_checksums_is_the_same(
    tmp_path: Path, changes: list[tuple[str, float, int, int]]
) -> None:
    path = tmp_path / "x.oam"
    write_oam(path, {"w": filled("f4", (3, 5), 1), "n" * 150: filled("i8", (4,), 2)}, {"a.json": b"{}"})
    data = path.read_bytes()
    with OamSource(path) as source:
        before = content(source)
    path.write_bytes(mutated(data, changes))
    try:
        with OamSource(path) as source:
            after = content(source)
    except OazooError:
        return
    assert after == before


def test_mending_leaves_a_good_file_alone() -> None:
    data = (HERE / "data" / "oa" / "oam_linear_adamw.oam").read_bytes()
    assert mended_oam(data) == data
    assert mended_oam(data[:24] + bytes(8) + data[32:]) == data
