"""Damaged SafeTensors files: hundreds of them, each refused with a clear error."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from oazoo.errors import FormatError, UsageError
from oazoo.formats.safetensors import SafetensorsSource

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b.weight": {"dtype": "F16", "shape": [3], "data_offsets": [16, 22]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [22, 23]},
    "d": {"dtype": "I64", "shape": [0, 4], "data_offsets": [23, 23]},
}
DATA = bytes(range(23))


def build(header: Any = HEADER, data: bytes = DATA, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed(name: str, **fields: Any) -> bytes:
    entry = {key: value for key, value in (HEADER[name] | fields).items() if value is not ...}
    return build(HEADER | {name: entry})


def pair(first: list[int], second: list[int], size: int, shape: list[int] | None = None) -> bytes:
    """Two tensors of 4 floats each, placed as told."""
    return build(
        {
            "one": {"dtype": "F32", "shape": shape or [4], "data_offsets": first},
            "two": {"dtype": "F32", "shape": [4], "data_offsets": second},
        },
        bytes(size),
    )


def cases() -> Iterator[tuple[str, bytes]]:
    good = build()
    offsets: Any
    shape: Any
    dtype: Any
    entry: Any
    for size in range(len(good)):
        yield f"truncated to {size}", good[:size]
    for extra in (b"\0", b"\0" * 4096, b"x" * 7):
        yield f"{len(extra)} bytes appended", good + extra
    text = json.dumps(HEADER).encode()
    for length in (
        0,
        1,
        len(text) - 1,
        len(text) + 1,
        len(good),
        2**31,
        2**32,
        2**60,
        2**63 - 1,
        2**63,
        2**64 - 1,
    ):
        yield f"header length {length}", build(length=length)
    for bit in range(64):
        yield f"header length bit {bit}", build(length=len(text) ^ (1 << bit))
    huge = [2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30]
    for name in ("a", "b.weight", "c", "d"):
        begin, end = HEADER[name]["data_offsets"]
        for value in [-1, -(2**63), *huge]:
            yield f"{name}: begin {value}", changed(name, data_offsets=[value, end])
            yield f"{name}: end {value}", changed(name, data_offsets=[begin, value])
            yield f"{name}: both {value}", changed(name, data_offsets=[value, value])
            yield f"{name}: shape {value}", changed(name, shape=[value, 2])
            yield f"{name}: shape 0 and {value}", changed(name, shape=[2**40, 2**40, 0, value])
        for shift in (1, 4, 8) if begin == end else (1, -1, 4, 8):  # an empty one may lie at any bound
            yield f"{name}: shifted by {shift}", changed(name, data_offsets=[begin + shift, end + shift])
            yield f"{name}: longer by {shift}", changed(name, data_offsets=[begin, end + shift])
        for offsets in (
            [],
            [0],
            [0, 16, 16],
            "0,16",
            None,
            {},
            [True, 16],
            [0.0, 16.0],
            ["0", "16"],
            [[0], [16]],
            16,
        ):
            yield f"{name}: offsets {offsets}", changed(name, data_offsets=offsets)
        for shape in (
            [3, 3],
            [2.0, 2],
            ["2", "2"],
            None,
            {},
            4,
            "4",
            [[2], [2]],
            [True, 4],
            [1] * 65,
            [None],
            [2**33] * 2,
        ):
            yield f"{name}: shape {shape}", changed(name, shape=shape)
        for dtype in (
            "",
            "f32",
            "F31",
            "Q4",
            None,
            0,
            [],
            {},
            "F32\0",
            "F" * 5000,
            *(["F64"] if name != "d" else []),
        ):
            yield f"{name}: dtype {dtype!r:.20}", changed(name, dtype=dtype)
        for field in ("dtype", "shape", "data_offsets"):
            yield f"{name}: no {field}", changed(name, **{field: ...})
        yield f"{name}: extra field", changed(name, extra=1)
        for entry in (None, 1, "x", [], True, {}):
            yield f"{name}: entry {entry}", build(HEADER | {name: entry})
    yield "inverted", pair([8, 4], [16, 32], 32)
    yield "outside", pair([0, 1 << 40], [16, 32], 32)
    yield "overlap", pair([0, 16], [8, 24], 24)
    yield "the same range", pair([0, 16], [0, 16], 16)
    yield "hole", pair([0, 16], [32, 48], 48)
    yield "hole at the start", pair([4, 20], [20, 36], 36)
    yield "shape and bytes", pair([0, 16], [16, 32], 32, [3])
    yield "product overflow", pair([0, 16], [16, 32], 32, [2**33, 2**33])
    for name in ("", "\0", "a\0b", "n" * 5000, "\ud800"):
        yield f"name {name!r:.12}", build({name: HEADER["a"]}, bytes(16))
    many = ",".join(f'"{number}":""' for number in range(65_537))
    yield "very much metadata", build(f'{{"__metadata__":{{{many}}}}}'.encode(), b"")
    entry_text = json.dumps(HEADER["a"])
    for label, raw in {
        "name twice": f'{{"a":{entry_text},"a":{entry_text}}}',
        "name twice, escaped": f'{{"a":{entry_text},"\\u0061":{entry_text}}}',
        "field twice": '{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        "metadata twice": f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{entry_text}}}',
        "metadata key twice": f'{{"__metadata__":{{"x":"1","x":"2"}},"a":{entry_text}}}',
        "metadata number": f'{{"__metadata__":{{"x":1}},"a":{entry_text}}}',
        "metadata object": f'{{"__metadata__":{{"x":{{}}}},"a":{entry_text}}}',
        "metadata null": f'{{"__metadata__":null,"a":{entry_text}}}',
        "metadata list": f'{{"__metadata__":["x"],"a":{entry_text}}}',
        "trailing comma": f'{{"a":{entry_text},}}',
        "no comma": f'{{"a":{entry_text} "b":{entry_text}}}',
        "no colon": f'{{"a" {entry_text}}}',
        "unclosed": f'{{"a":{entry_text}',
        "text after": f'{{"a":{entry_text}}} x',
        "second object": f'{{"a":{entry_text}}}{{}}',
        "newline after": f'{{"a":{entry_text}}}\n',
        "leading space": f' {{"a":{entry_text}}}',
        "byte order mark": f'\ufeff{{"a":{entry_text}}}',
        "list": "[]",
        "number": "1",
        "string": '"x"',
        "nothing": "",
        "spaces": "        ",
        "single quotes": "{'a':1}",
        "NaN": '{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}',
        "infinity": '{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,16]}}',
        "exponent": '{"a":{"dtype":"F32","shape":[4e0],"data_offsets":[0,16]}}',
        "long number": f'{{"a":{{"dtype":"F32","shape":[{"9" * 5000}],"data_offsets":[0,16]}}}}',
        "deep list": f'{{"a":{{"dtype":"F32","shape":{"[" * 4000}{"]" * 4000},"data_offsets":[0,16]}}}}',
        "deep and long list": '{"a":' + "[" * 100_000,
        "deep objects": '{"a":' * 50_000,
        "brace in a value": '{"a":{"dtype":"}","shape":[4],"data_offsets":[0,16]}}',
        "unclosed name": '{"a' + "x" * 3000,
        "quotes": '{"' + '\\"' * 50_000,
        "control character": '{"a\tb":' + entry_text + "}",
        "control in metadata": f'{{"__metadata__":{{"x":"\n"}},"a":{entry_text}}}',
        "comment": f'{{/* */"a":{entry_text}}}',
    }.items():
        yield label, build(raw.encode(), bytes(16))
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xe2\x82"):
        yield f"bad UTF-8 {bad.hex()}", build(b'{"' + bad + b'":' + entry_text.encode() + b"}", bytes(16))
    rng = random.Random(1)
    for _ in range(40):
        noise = rng.randbytes(rng.randrange(200))
        yield f"noise {noise[:8].hex()}", noise
        yield f"noise header {noise[:8].hex()}", build(b"{" + noise)


def test_damaged_files_are_refused(refuses: Callable[..., int]) -> None:
    assert refuses(SafetensorsSource, cases()) >= 200


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good"
    path.write_bytes(build())
    ours = SafetensorsSource(path)
    for name, value in load(build()).items():
        np.testing.assert_array_equal(ours[name].numpy(), value)
    assert dict(ours.metadata) == {"format": "pt"}


def test_flipped_bytes_never_crash(survives: Callable[..., int]) -> None:
    good = build()
    rng = random.Random(2)

    def mutants() -> Iterator[bytes]:
        for position in range(len(good) - len(DATA)):
            for value in {rng.randrange(256), good[position] ^ 1, good[position] ^ 128, 0, 0x7D}:
                yield good[:position] + bytes([value]) + good[position + 1 :]

    assert survives(SafetensorsSource, mutants()) > 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pair([8, 4], [16, 32], 32), ("'one'", "8", "4")),
        (pair([0, 1 << 40], [16, 32], 32), ("'one'", str(1 << 40), "16")),
        (pair([0, 16], [8, 24], 24), ("'one'", "'two'", "overlap", "16", "8")),
        (pair([0, 16], [32, 48], 48), ("'two'", "hole of 16 bytes", "16", "32")),
        (pair([0, 16], [16, 32], 32, [3]), ("'one'", "16 bytes", "12 bytes")),
        (pair([0, 16], [16, 32], 31), ("'two'", "32", "31", "cut short")),
        (pair([0, 16], [16, 32], 33), ("1 bytes after the last tensor", "32", "33")),
        (build(length=100_000_001), ("100000001", "100000000")),
        (build({"__metadata__": {"epoch": 3}}, b""), ("'epoch'", "string")),
        (build()[:7], ("7 bytes", "8")),
        (b"", ("0 bytes",)),
        (build()[:50], ("cut short", str(8 + len(json.dumps(HEADER))), "50")),
    ],
)
def test_messages_name_what_disagrees(tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        SafetensorsSource(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(200_000_000)
    with pytest.raises(FormatError, match="100000001"):
        SafetensorsSource(path)


def test_empty_tensors_in_every_place(tmp_path: Path) -> None:
    header = {
        "first": {"dtype": "F32", "shape": [2, 0], "data_offsets": [0, 0]},
        "between": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "inner": {"dtype": "BF16", "shape": [0], "data_offsets": [12, 12]},
        "last": {"dtype": "F64", "shape": [4, 0, 5], "data_offsets": [12, 12]},
    }
    path = tmp_path / "empty"
    path.write_bytes(build(header, bytes(12)))
    source = SafetensorsSource(path)
    assert {name: tensor.numpy().shape for name, tensor in source.items()} == {
        name: tuple(entry["shape"]) for name, entry in header.items()
    }
    assert all(tensor.raw().nbytes == tensor.info.nbytes for tensor in source.values())


def test_metadata_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "none"
    path.write_bytes(save({}, {"format": "pt"}))
    source = SafetensorsSource(path)
    assert len(source) == 0 and dict(source.metadata) == {"format": "pt"}


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        SafetensorsSource(tmp_path / "no.safetensors")
