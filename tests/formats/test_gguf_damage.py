"""Damaged and hostile GGUF files: hundreds of them, each refused with a clear error."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from oazoo.errors import FormatError
from oazoo.formats.gguf import GgufSource
from oazoo.formats.gguf_split import open_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
HUGE = (2**31, 2**32, 2**32 - 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def text(value: bytes | str, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, body: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + body


def tensor(
    name: bytes | str, dims: list[int], kind: int = 0, offset: int = 0, rank: int | None = None
) -> bytes:
    rank = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


PAIRS = [
    pair("general.architecture", STRING, text("llama")),
    pair("u8", U8, b"\x07"),
    pair("i16", I16, struct.pack("<h", -3)),
    pair("f32", F32, struct.pack("<f", 1.5)),
    pair("flag", BOOL, b"\1"),
    pair("tokens", ARRAY, array(STRING, 3, text("a") + text("") + text("日本"))),
    pair("scores", ARRAY, array(F32, 2, struct.pack("<2f", 0.5, -0.5))),
    pair("flags", ARRAY, array(BOOL, 2, b"\0\1")),
]
TENSORS = [tensor("w", [4, 2]), tensor("q", [32, 1], 8, 32), tensor("s", [], 1, 96)]
# 32 bytes of f32; one Q8_0 block of 34 with 30 of padding; one f16.
DATA = np.arange(8, dtype="<f4").tobytes() + bytes(range(34)) + bytes(30) + struct.pack("<e", 2.0)


def build(
    pairs: list[bytes] = PAIRS,
    tensors: list[bytes] = TENSORS,
    data: bytes = DATA,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pair_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def one_pair(value: bytes) -> bytes:
    return build([value], [], b"")


def one_tensor(description: bytes, data: bytes = bytes(64)) -> bytes:
    return build([], [description], data)


def boundaries() -> list[int]:
    """Offsets where a structure of the good file ends."""
    ends, position = [4, 8, 16, 24], 24
    for part in (*PAIRS, *TENSORS):
        ends += [position + 8, position + len(part) // 2, position + len(part)]
        position += len(part)
    return ends


def cases() -> Iterator[tuple[str, bytes]]:
    good = build()
    for size in range(len(good)):
        yield f"truncated to {size}", good[:size]
    for end in boundaries()[3:]:  # zeros for counts would be a whole, empty file
        yield f"truncated at bound {end} and padded", good[:end] + bytes(-end % 32)
    for extra in (b"x", b"\0" * 31, b"\0" * 4096, good):
        yield f"{len(extra)} bytes appended", good + extra
    for magic in (b"\0\0\0\0", b"GGUG", b"FUGG", b"ggml", b"GGML"):
        yield f"magic {magic!r}", build(magic=magic)
    for version in (0, 1, 4, 5, 2**31, 2**32 - 1, 0x01000000, 0x02000000, 0x03000000, 0x10000000):
        yield f"version {version}", build(version=version)
    for count in (*HUGE, 1000, len(PAIRS) + 1):
        yield f"{count} pairs", build(pair_count=count)
    for count in (*HUGE, 1000, len(TENSORS) + 1):
        yield f"{count} tensors", build(tensor_count=count)
    for length in HUGE:
        yield f"key length {length}", one_pair(text("key", length) + struct.pack("<I", U8) + b"\0")
        yield f"string length {length}", one_pair(pair("key", STRING, text("value", length)))
        yield f"name length {length}", one_tensor(text("name", length) + struct.pack("<IQIQ", 1, 4, 0, 0))
        yield (
            f"element length {length}",
            one_pair(pair("key", ARRAY, array(STRING, 2, text("a") + text("b", length)))),
        )
        for kind in (*range(13), 13, 99):
            yield (
                f"array of {length} of type {kind}",
                one_pair(pair("key", ARRAY, array(kind, length, bytes(64)))),
            )
    for kind in (13, 14, 255, 2**31, 2**32 - 1):
        yield f"value type {kind}", one_pair(pair("key", kind, bytes(16)))
        yield f"empty array of type {kind}", one_pair(pair("key", ARRAY, array(kind, 0, b"")))
    nested = array(U8, 1, b"\0")
    for depth in (5, 50, 2000):
        body = nested
        for _ in range(depth):
            body = array(ARRAY, 1, body)
        yield f"arrays {depth} deep", one_pair(pair("key", ARRAY, body))
    yield (
        "very many arrays inside an array",
        one_pair(pair("key", ARRAY, array(ARRAY, 70_000, array(U8, 0, b"") * 70_000))),
    )
    for count in (65_537, 2**18 + 1):
        yield f"{count} announced, with room", build(pair_count=count) + bytes(25 * count)
        yield f"{count} tensors announced, with room", build(tensor_count=count) + bytes(25 * count)
    for value in (2, 255):
        yield f"boolean {value}", one_pair(pair("key", BOOL, bytes([value])))
        yield f"array boolean {value}", one_pair(pair("key", ARRAY, array(BOOL, 2, bytes([1, value]))))
    for key in (b"", b"\0", b"a\0b", b"k" * 65536):
        yield f"key {key[:8]!r}", one_pair(pair(key, U8, b"\0"))
    yield "key twice", build([pair("key", U8, b"\0"), pair("key", U8, b"\1")], [], b"")
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"):
        yield f"key {bad.hex()}", one_pair(pair(bad, U8, b"\0"))
        yield f"value {bad.hex()}", one_pair(pair("key", STRING, text(bad)))
        yield f"element {bad.hex()}", one_pair(pair("key", ARRAY, array(STRING, 2, text("a") + text(bad))))
        yield f"name {bad.hex()}", one_tensor(tensor(bad, [16]))
    for name in (b"", b"\0", b"w\0", b"n" * 1025):
        yield f"name {name[:8]!r}", one_tensor(tensor(name, [16]))
    yield "name twice", build([], [tensor("w", [8]), tensor("w", [8], 0, 32)], bytes(64))
    for rank in (5, 8, 9, 64, 2**31, 2**32 - 1):
        yield f"rank {rank}", one_tensor(tensor("w", [2] * 4, rank=rank))
        yield f"rank {rank} with sizes", one_tensor(tensor("w", [1] * min(rank, 64), rank=rank))
    for dims in (
        [2**32, 2**32],
        [2**63, 2],
        [2**64 - 1],
        [2**62, 4],
        [2**21] * 3,
        [0, 2**63, 2**63],
        [2**63],
        [17],
        [16, 2],
    ):
        yield f"dims {dims}", one_tensor(tensor("w", dims))
    for dims in ([31], [33], [1], [16, 2], [2**58], [2**63 - 32], []):
        yield f"Q8_0 dims {dims}", one_tensor(tensor("w", dims, 8))
    for kind in (10, 12, 14, 16, 29, 34, 40):
        yield f"type {kind} with rows of 32", one_tensor(tensor("w", [32, 8], kind))
    for offset in (1, 16, 31, 33, 63, 64, 96, 2**20, *HUGE):
        yield f"offset {offset}", one_tensor(tensor("w", [16], 0, offset))
    for kind in (0, 1, 4, 8, 15, 24, 28, 30, 31, 38, 41):
        yield f"type {kind} outside", one_tensor(tensor("w", [256, 64], kind))
    two = [tensor("one", [16]), tensor("two", [16], 0, 32)]
    yield "overlap", build([], two, bytes(96))
    yield "the same range", build([], [tensor("one", [16]), tensor("two", [16])], bytes(64))
    yield "inside another", build([], [tensor("one", [64]), tensor("two", [8], 0, 64)], bytes(256))
    yield "hole", build([], [tensor("one", [8]), tensor("two", [8], 0, 64)], bytes(96))
    yield "hole at the start", build([], [tensor("one", [8], 0, 32)], bytes(64))
    yield "bytes without tensors", build([], [], b"\1" * 8)
    for value in (0, 3, 24, 33, 2**31 + 1, 2**32 - 1):
        yield (
            f"alignment {value}",
            build([pair("general.alignment", U32, struct.pack("<I", value))], [TENSORS[0]], DATA[:32]),
        )
    yield (
        "alignment past the end",
        build([pair("general.alignment", U32, struct.pack("<I", 2**30))], [TENSORS[0]], DATA[:32]),
    )
    yield "alignment is text", build([pair("general.alignment", STRING, text("32"))], [TENSORS[0]], DATA[:32])
    yield (
        "alignment is a fraction",
        build([pair("general.alignment", F32, struct.pack("<f", 32))], [TENSORS[0]], DATA[:32]),
    )
    for count in (2, 3, 4096, 4097, 65535):
        yield f"split of {count}", build([pair("split.count", U16, struct.pack("<H", count))])
        third = pair("split.no", U16, struct.pack("<H", count))
        yield f"part {count} of {count}", build([pair("split.count", U16, struct.pack("<H", count)), third])
    yield "split of 2^64 - 1", build([pair("split.count", U64, b"\xff" * 8)])
    yield "part -1", build([pair("split.count", U16, b"\2\0"), pair("split.no", I32, b"\xff" * 4)])
    yield "split number is true", build([pair("split.count", U16, b"\2\0"), pair("split.no", BOOL, b"\1")])
    yield "split count is text", build([pair("split.count", STRING, text("1" * 5000))])
    rng = random.Random(3)
    for _ in range(40):
        noise = rng.randbytes(rng.randrange(200))
        yield f"noise {noise[:8].hex()}", b"GGUF" + noise
        yield f"noise after counts {noise[:8].hex()}", b"GGUF" + struct.pack("<IQQ", 3, 2, 2) + noise


def test_damaged_files_are_refused(refuses: Callable[..., int]) -> None:
    assert refuses(open_gguf, cases()) >= 200


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(build())
    theirs = GGUFReader(path)
    ours = GgufSource(path)
    assert ours.metadata["tokens"] == ["a", "", "日本"]
    assert ours.metadata["flags"] == [False, True] and ours.metadata["flag"] is True
    assert {
        name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")
    } == dict(ours.metadata)
    assert list(ours) == [tensor.name for tensor in theirs.tensors]
    np.testing.assert_array_equal(ours["w"].numpy(), np.arange(8, dtype="f4").reshape(2, 4))
    assert ours["s"].numpy() == np.float16(2) and ours["s"].info.shape == ()


def test_flipped_bytes_never_crash(survives: Callable[..., int]) -> None:
    good = build()
    rng = random.Random(4)

    def mutants() -> Iterator[bytes]:
        for position in range(len(good) - len(DATA)):
            for value in {rng.randrange(256), good[position] ^ 1, good[position] ^ 128}:
                yield good[:position] + bytes([value]) + good[position + 1 :]

    assert survives(open_gguf, mutants()) > 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (build(version=1), ("version 1", "not supported")),
        (build(version=4), ("unknown GGUF version 4",)),
        (build(version=0x03000000), ("big-endian", "not supported")),
        (build([], [tensor("w", [8]), tensor("w", [8], 0, 32)], bytes(64)), ("'w'", "twice")),
        (build(data=DATA + b"A" * 31), ("31 bytes",)),
        (build() + bytes(-len(build()) % 32) + build(), ("joined end to end",)),
        (
            build([pair("split.count", U16, b"\3\0"), pair("split.no", U16, b"\1\0")]),
            ("part 2", "3 files", "NAME-00002-of-00003"),
        ),
        (one_tensor(tensor("w", [2**32, 2**32])), ("'w'", "2^63")),
        (one_tensor(tensor("w", [2] * 4, rank=5)), ("'w'", "5 dimensions")),
        (one_tensor(tensor("w", [16], 0, 1 << 20)), ("'w'", str(1 << 20), "64")),
    ],
)
def test_messages_say_what_it_is(tmp_path: Path, content: bytes, words: tuple[str, ...]) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (4, "Q4_2"),
        (5, "Q4_3"),
        (9, "Q8_1"),
        (15, "Q8_K"),
        (31, "Q4_0_4_4"),
        (38, "IQ4_NL_8_8"),
        (41, "Q1_0"),
        (200, "200"),
    ],
)
def test_types_that_cannot_be_decoded_are_listed(tmp_path: Path, number: int, name: str) -> None:
    path = tmp_path / "types"
    content = build([], [tensor("ffn", [256], number), tensor("w", [8], 0, 1024)], bytes(1024 + 32))
    if number != 200:
        block = {4: 10 * 16, 5: 12 * 16, 9: 36 * 8, 15: 292, 41: 36}.get(number, 18 * 8)
        second = -(-block // 32) * 32
        content = build([], [tensor("ffn", [256], number), tensor("w", [8], 0, second)], bytes(second + 32))
    path.write_bytes(content)
    source = GgufSource(path)
    assert source["w"].numpy().sum() == 0
    assert source["ffn"].raw().size == source["ffn"].info.nbytes
    for read in (source["ffn"].numpy, lambda: list(source["ffn"].chunks(10))):
        with pytest.raises(FormatError) as caught:
            read()
        message = str(caught.value)
        assert name in message and "'ffn'" in message and "Q4_K" in message and "not supported" in message


def test_an_unknown_type_of_any_shape_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "unknown"
    path.write_bytes(one_tensor(tensor("w", [2**50], 200)))
    with pytest.raises(FormatError, match="200"):
        GgufSource(path)["w"].numpy()


@pytest.mark.parametrize("padding", [b"", b"\0", bytes(31)])
def test_padding_after_the_last_tensor_is_optional(tmp_path: Path, padding: bytes) -> None:
    path = tmp_path / "padded"
    path.write_bytes(build([], [tensor("w", [33], 24)], bytes(range(33)) + padding))
    assert GgufSource(path)["w"].numpy().tolist() == list(range(33))


def test_empty_tensors_share_offsets(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    described = [
        tensor("w", [8]),
        tensor("none", [0]),
        tensor("also", [4, 0], 1, 32),
        tensor("q", [0, 3], 8, 32),
    ]
    path.write_bytes(build([], described, bytes(32)))
    source = GgufSource(path)
    assert {name: item.numpy().shape for name, item in source.items()} == {
        "w": (8,),
        "none": (0,),
        "also": (0, 4),
        "q": (3, 0),
    }


def test_empty_values_are_fine(tmp_path: Path) -> None:
    pairs = [pair("empty", STRING, text("")), pair("none", ARRAY, array(STRING, 0, b""))]
    pairs.append(pair("nested", ARRAY, array(ARRAY, 2, array(U8, 2, b"\1\2") + array(STRING, 1, text("x")))))
    path = tmp_path / "values"
    path.write_bytes(build(pairs, [], b""))
    assert dict(GgufSource(path).metadata) == {"empty": "", "none": [], "nested": [[1, 2], ["x"]]}


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_of_the_reference_writer(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    arrays: dict[str, Any] = {f"t{index}": np.arange(index + 1, dtype="f4") for index in range(5)}
    for name, value in arrays.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufSource(path)
    for name, value in arrays.items():
        np.testing.assert_array_equal(source[name].numpy(), value)
