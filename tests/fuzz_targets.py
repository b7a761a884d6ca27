"""Each reader as a function of bytes: what fuzzing, the replay of its corpus and the property tests have in common.

A target reads everything that the bytes describe and lets nothing through but :class:`OazooError`, which means that they
were refused: it returns whether they were accepted. Whatever else it raises is a fault of the reader.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oazoo.errors import OazooError
from oazoo.formats import encodings, plain_pickle, strict_json
from oazoo.formats import oam_layout as layout
from oazoo.formats.detect import open_source
from oazoo.formats.gguf import GgufSource
from oazoo.formats.hashing import fnv1a64
from oazoo.formats.hf_folder import ShardedSource
from oazoo.formats.oam import OamSource
from oazoo.formats.onnx import OnnxSource
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.source import WeightSource
from oazoo.formats.torch_zip import TorchSource
from oazoo.translators import sentencepiece_model
from oazoo.translators.settings import Settings

#: What a reader may use on top of :data:`FACTOR` times the file: read-ahead buffers, caches, what a small tensor decodes to.
SLACK = 3 << 20
FACTOR = 3
#: Elements that a target decodes at a time.
STEP = 4096

Target = Callable[[bytes, Path], bool]


def touch(source: WeightSource) -> None:
    """Read a source whole: every byte, and every value that can be had, in pieces; sizes have to agree."""
    for name, tensor in source.items():
        info = tensor.info
        assert info.name == name and min(info.shape, default=0) >= 0
        raw = tensor.raw()
        assert raw.dtype == np.uint8 and raw.nbytes == info.nbytes
        assert np.array_equal(raw, tensor.mapped())
        encoding = encodings.get(info.encoding)
        if encoding.kind != "unknown":
            assert encoding.bytes_for(info.shape) == info.nbytes
            middle = info.numel // 2 // encoding.block * encoding.block
            parts = [tensor.part(0, middle), tensor.part(middle, info.numel)]
            assert sum(part.nbytes for part in parts) == info.nbytes
            assert encoding.kind == "oam" or np.array_equal(np.concatenate(parts), raw)
        try:
            total = sum(piece.size for piece in tensor.chunks(STEP))
        except OazooError:
            continue  # a type that can only be copied, or a bool of neither 0 nor 1
        assert total == info.numel
    assert len(source.notes) < 10_000


def container(reader: Callable[[Path], WeightSource], name: str) -> Target:
    """The target of a reader of files."""

    def target(data: bytes, folder: Path) -> bool:
        path = folder / name
        path.write_bytes(data)
        for open_it in (reader, open_source):  # what the reader refuses must not trip up the detection either
            try:
                with open_it(path) as source:
                    touch(source)
                return True
            except OazooError:
                pass
        return False

    return target


def safetensors(data: bytes, folder: Path) -> bool:
    """One SafeTensors file; also with its header's length set right, which chance hardly ever does."""
    read = container(SafetensorsSource, "x.safetensors")
    mended = struct.pack("<Q", max(0, data.rfind(b"}") + 1 - 8)) + data[8:]
    return read(data, folder) | read(mended, folder)


SHARD = b'{"%s":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


def index(data: bytes, folder: Path) -> bool:
    """The index of a sharded model, beside two shards that hold ``a`` and ``b`` and one that it need not name."""
    for name in ("a", "b", "c"):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            header = SHARD % name.encode()
            path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1\2")
    return container(ShardedSource, "model.safetensors.index.json")(data, folder)


def oam(data: bytes, folder: Path) -> bool:
    """One ``.oam``; also with its checksums made right, which chance never does."""
    return _oam(data, folder) | _oam(mended_oam(data), folder)


def _oam(data: bytes, folder: Path) -> bool:
    path = folder / "x.oam"
    path.write_bytes(data)
    try:
        with OamSource(path) as source:
            touch(source)
            for name, tensor in source.state.items():
                assert tensor.raw().nbytes == tensor.info.nbytes
                if name.startswith(layout.ASSET_PREFIX):
                    try:
                        source.asset(name)
                    except OazooError:
                        pass
            optimizer = source.optimizer
            if optimizer is not None:
                assert all(moment.dtype == np.float32 for moment in optimizer.moments)
            source.verify()
    except OazooError:
        return False
    return True


def mended_oam(data: bytes) -> bytes:
    """The file with its stated size and all checksums set to what its bytes give."""
    file = bytearray(data)
    if len(file) < layout.FILE_HEADER.size:
        return data
    struct.pack_into("<Q", file, 16, len(file))
    version, count = struct.unpack_from("<II", file, 4)
    head, size = layout.FILE_HEADER.size, layout.SECTION_HEADER.size
    count = min(count, layout.MAX_SECTIONS, (len(file) - head) // size)
    folded = 0
    for at in range(head, head + count * size, size):
        offset, length = struct.unpack_from("<QQ", file, at + 12)
        checksum = fnv1a64(bytes(file[offset : offset + length])) if offset + length <= len(file) else 0
        struct.pack_into("<Q", file, at + 36, checksum)
        folded ^= checksum
    file[layout.CHECKSUM_AT] = bytes(8)
    whole = folded if version == 1 else fnv1a64(bytes(file[: head + count * size]))
    struct.pack_into("<Q", file, layout.CHECKSUM_AT.start, whole)
    return bytes(file)


def onnx(data: bytes, folder: Path) -> bool:
    """One ONNX model, beside a file ``data.bin`` of 64 bytes for its external data."""
    beside = folder / "data.bin"
    if not beside.exists():
        beside.write_bytes(bytes(range(64)))
    return container(OnnxSource, "x.onnx")(data, folder)


def pickle(data: bytes, folder: Path) -> bool:
    """The pickle of a checkpoint, without its archive."""
    try:
        plain_pickle.loads(data)
    except OazooError:
        return False
    return True


def json(data: bytes, folder: Path) -> bool:
    """A strict JSON text; as a whole, and walked by the cursor that reads headers, which has to find the same."""
    try:
        text = strict_json.decode_utf8(data, "x")
    except OazooError:
        return False
    walked = _walk(text, lambda cursor, key: cursor.value(key))
    _walk(text, lambda cursor, key: cursor.string(key) if key[:1] == "s" else cursor.small_object(key))
    try:
        whole = strict_json.loads(text, "x")
    except OazooError:
        assert walked is None
        return False
    assert walked is None or walked == whole
    return True


def _walk(text: str, read: Callable[[strict_json.Cursor, str], Any]) -> dict[str, Any] | None:
    """The members of the object that a text holds; ``None`` where it is refused."""
    cursor = strict_json.Cursor(text, "x")
    try:
        members = {key: read(cursor, key) for key in cursor.keys("the text")}
        cursor.finish(" \n")
    except OazooError:
        return None
    return members


def sentencepiece(data: bytes, folder: Path) -> bool:
    """A ``tokenizer.model``."""
    settings = Settings({"add_bos_token": False}, "config")
    try:
        built = sentencepiece_model.build(data, settings, "tokenizer.model")
    except OazooError:
        return False
    strict_json.load_object(built.decode(), "built")
    return True


TARGETS: dict[str, Target] = {
    "safetensors": safetensors,
    "index": index,
    "gguf": container(GgufSource, "x.gguf"),
    "oam": oam,
    "onnx": onnx,
    "torch": container(TorchSource, "x.pt"),
    "pickle": pickle,
    "json": json,
    "sentencepiece": sentencepiece,
}
