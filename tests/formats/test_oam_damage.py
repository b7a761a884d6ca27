"""Damaged ``.oam`` files: hundreds of them, each refused with a clear error, checksums mended or not."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from oazoo.errors import FormatError
from oazoo.formats.hashing import fnv1a64 as fnv  # held against the plain definition in test_hashing
from oazoo.formats.oam import OamSource

CONFIG, WEIGHTS, STATE, OPTIMIZER, PROGRESS, LEGACY = range(1, 7)
HUGE = (2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)


def entry(
    name: bytes,
    shape: tuple[int, ...],
    offset: int,
    size: int,
    dtype: int = 0,
    encoding: int = 0,
    block: int = 0,
    rank: int | None = None,
    reserved: bytes = bytes(4),
) -> bytes:
    sizes = [*shape, *[0] * (8 - len(shape))]
    rank = len(shape) if rank is None else rank
    return struct.pack("<128sQQ4B4s8Q", name, offset, size, dtype, rank, encoding, block, reserved, *sizes)


def table(*entries: bytes, blob: bytes = b"", count: int | None = None, reserved: int = 0) -> bytes:
    return struct.pack("<II", len(entries) if count is None else count, reserved) + b"".join(entries) + blob


GOOD_ENTRIES = [
    entry(b"a", (2, 3), 0, 24),
    entry(b"b.weight", (5,), 64, 10, dtype=1),
    entry(b"scalar", (), 128, 8, dtype=8),
    entry(b"none", (0, 4), 0, 0),
    entry(b"q4", (33,), 192, 40, encoding=1, block=32),
    entry(b"q8", (2, 2), 256, 36, encoding=2, block=32),
]
WEIGHT_BLOB = (np.arange(73, dtype="<f4").tobytes())[:292]
STATE_ENTRIES = [entry(b"asset/x", (5,), 0, 5, dtype=5)]
ARCHITECTURE_CONFIG = b'{"oazoo": 1}'


def config(
    name: bytes = b"decoder",
    extra: bytes = ARCHITECTURE_CONFIG,
    size: int | None = None,
    dtypes: bytes = b"\0\0\0\0",
) -> bytes:
    fixed = struct.pack(
        "<32s6I4s48s", name, 1, 0, 64, 2, 320, len(extra) if size is None else size, dtypes, b""
    )
    return fixed + extra


def optimizer(kind: bytes = b"AdamW", count: int = 3, moments: int = 6) -> bytes:
    return struct.pack("<16s5fqQ16x", kind, 0.1, 0.9, 0.99, 1e-8, 0.0, 7, count) + bytes(4 * moments)


def progress(metric: bytes = b"loss", extra: bytes = b"") -> bytes:
    return struct.pack("<B3xqQQffB3x32s32x", 1, 2, 3, 4, 0.5, 0.25, 1, metric) + extra


Sections = dict[int, bytes]
GOOD: Sections = {
    CONFIG: config(),
    WEIGHTS: table(*GOOD_ENTRIES, blob=WEIGHT_BLOB),
    STATE: table(*STATE_ENTRIES, blob=b"hello"),
    OPTIMIZER: optimizer(),
    PROGRESS: progress(),
}


def seal(content: bytes, sections: bool = True) -> bytes:
    """Mend the checksums of a file whose other fields may be wrong."""
    data = bytearray(content)
    (count,) = struct.unpack_from("<I", data, 8)
    (version,) = struct.unpack_from("<I", data, 4)
    count = min(count, (len(data) - 64) // 64, 40)
    combined = 0
    for index in range(count):
        at = 64 + 64 * index
        offset, size = struct.unpack_from("<QQ", data, at + 12)
        if sections and offset + size <= len(data):
            struct.pack_into("<Q", data, at + 36, fnv(data[offset : offset + size]))
        combined ^= struct.unpack_from("<Q", data, at + 36)[0]
    head = bytes(data[:24]) + bytes(8) + bytes(data[32 : 64 + 64 * count])
    struct.pack_into("<Q", data, 24, combined if version == 1 else fnv(head))
    return bytes(data)


def build(
    sections: Sections | list[tuple[int, bytes]] | None = None, version: int = 3, **changes: bytes
) -> bytes:
    """A file of these sections; ``changes`` replace some of the good ones by name."""
    names = {
        "config": CONFIG,
        "weights": WEIGHTS,
        "state": STATE,
        "optimizer": OPTIMIZER,
        "progress": PROGRESS,
    }
    listed = list(
        (
            GOOD | {names[key]: value for key, value in changes.items()}
            if sections is None
            else dict(sections)
        ).items()
    )
    if isinstance(sections, list):
        listed = sections
    position, headers, body = 4096, b"", b""
    for kind, payload in listed:
        headers += struct.pack("<IB3xIQQQQ20x", kind, 0, 0, position + len(body), len(payload), 0, 0)
        body += payload
    total = position + len(body)
    head = struct.pack("<IIIIQQ32x", 0x004D414F, version, len(listed), 0, total, 0)
    return seal((head + headers).ljust(position, b"\0") + body)


DENSE: Sections = GOOD | {WEIGHTS: table(*GOOD_ENTRIES[:4], blob=WEIGHT_BLOB)}


def put(form: str, at: int, value: int, mend: bool = True) -> bytes:
    """The good file with one field replaced."""
    data = bytearray(build())
    struct.pack_into(form, data, at, value)
    return seal(bytes(data)) if mend else bytes(data)


def file_cases() -> Iterator[tuple[str, bytes]]:
    good = build()
    bounds = {0, 1, 4, 8, 12, 16, 24, 32, 63, 64, 65, 128, 384, 4095, 4096}
    for kind in range(5):
        offset, size = struct.unpack_from("<QQ", good, 64 + 64 * kind + 12)
        bounds |= {
            offset,
            offset + 1,
            offset + 8,
            offset + 107,
            offset + 224,
            offset + size // 2,
            offset + size - 1,
        }
    for size in sorted(bound for bound in bounds if bound < len(good)):
        yield f"truncated to {size}", good[:size]
        fixed = bytearray(good[:size])
        if size >= 64:
            struct.pack_into("<Q", fixed, 16, size)
            yield f"truncated to {size}, size mended", seal(bytes(fixed))
    for extra in (b"\0", b"\0" * 4096, b"x"):
        yield f"{len(extra)} bytes appended", good + extra
    for value in (0, 0x4D414F00, 0x004D4150, 2**32 - 1):
        yield f"magic {value:x}", put("<I", 0, value)
    for value in (0, 4, 5, 2**31, 2**32 - 1):
        yield f"version {value}", put("<I", 4, value)
    for value in (0, 1, 4, 6, 31, 32, 33, 64, 2**31, 2**32 - 1):
        yield f"{value} sections", put("<I", 8, value)
    for value in (1, 2**31):
        yield f"flags {value}", put("<I", 12, value)
    for value in (0, len(good) - 1, len(good) + 1, *HUGE):
        yield f"total size {value}", put("<Q", 16, value)
    for at in (32, 40, 63):
        yield f"reserved at {at}", put("<B", at, 1)
    for index in range(5):
        at = 64 + 64 * index
        for value in (0, 7, 100, 2**32 - 1, index or 5):
            yield f"section {index}: type {value}", put("<I", at, value)
        for value in (1, 255):
            yield f"section {index}: compression {value}", put("<B", at + 4, value)
        for value in (1, 2**63):
            yield f"section {index}: compressed size {value}", put("<Q", at + 28, value)
        for value in (0, 64, 4095, 4096 + 5000, *HUGE):
            yield f"section {index}: offset {value}", put("<Q", at + 12, value)
        for value in (0, 1, 7, 5000, *HUGE):
            yield f"section {index}: size {value}", put("<Q", at + 20, value)
    for name, sections in {
        "no Config": {k: v for k, v in GOOD.items() if k != CONFIG},
        "no Progress": {k: v for k, v in GOOD.items() if k != PROGRESS},
        "nothing but Weights": {WEIGHTS: GOOD[WEIGHTS]},
    }.items():
        yield name, build(sections)
    for kind in range(1, 7):
        payload = GOOD.get(kind, b"")
        yield f"section type {kind} twice", build([*GOOD.items(), (LEGACY, b""), (kind, payload)])
    overlapping = bytearray(good)
    first = struct.unpack_from("<Q", good, 64 + 64 + 12)[0]
    struct.pack_into("<Q", overlapping, 64 + 128 + 12, first)
    yield "sections overlap", seal(bytes(overlapping))
    for at in (4, 8, 12, 30, 64, 100, 64 + 12, 64 + 20, 64 + 36):
        yield f"header byte {at} flipped", put("<B", at, good[at] ^ 0x40, mend=False)
    for index, name in ((0, "Config"), (4, "Progress")):
        offset, size = struct.unpack_from("<QQ", good, 64 + 64 * index + 12)
        for at in range(offset, offset + size, 5):
            yield f"{name} byte {at - offset} flipped", put("<B", at, good[at] ^ 1, mend=False)


def section_cases() -> Iterator[tuple[str, bytes]]:
    for payload in (b"", b"\0" * 107, config() + b"x", config()[:-1], config(size=0), config(size=2**32 - 1)):
        yield f"Config of {len(payload)} bytes", build(config=payload)
    for name in (b"x" * 32, b"\xff", b"a\0b", b"\xe2\x82"):
        yield f"architecture {name[:6]!r}", build(config=config(name))
    for position in range(3):
        yield (
            f"Config dtype {position}",
            build(config=config(dtypes=bytes([0] * position + [15] + [0] * (3 - position)))),
        )
    for payload in (
        b"",
        b"\0" * 103,
        progress(extra=b"\0"),
        progress(b"m" * 32),
        progress(b"\xff"),
        progress(b"a\0b"),
    ):
        yield f"Progress of {len(payload)} bytes", build(progress=payload)
    for payload in (
        b"",
        b"\0" * 67,
        optimizer(count=2),
        optimizer(count=4),
        optimizer(moments=3),
        optimizer(moments=7),
        optimizer(b"Muon"),
        optimizer(b"SGD", 6),
        optimizer(b""),
        optimizer(b"adam"),
        optimizer(b"Lion"),
        optimizer(b"A" * 16),
        optimizer(b"Adam\0x"),
        optimizer(b"\xff"),
        *(optimizer(count=count) for count in HUGE),
        *(optimizer(count=count) for count in (2**61 + 3, 2**62 + 3)),
    ):
        yield f"Optimizer {payload[:6]!r} of {len(payload)} bytes", build(optimizer=payload)


def tensor_cases(section: int) -> Iterator[tuple[str, bytes]]:
    def one(
        label: str, *entries: bytes, blob: bytes = bytes(512), count: int | None = None, reserved: int = 0
    ) -> tuple[str, bytes]:
        payload = table(*entries, blob=blob, count=count, reserved=reserved)
        return f"section {section}: {label}", build(GOOD | {section: payload})

    yield one("nothing", blob=b"", count=1)
    for payload in (b"", b"\0" * 7):
        yield f"section {section} of {len(payload)} bytes", build(GOOD | {section: payload})
    for count in (2, 1000, 2**31, 2**32 - 1):
        yield one(f"{count} entries", entry(b"a", (4,), 0, 16), blob=b"", count=count)
    yield one("reserved count", entry(b"a", (4,), 0, 16), reserved=1)
    for name in (b"", b"n" * 128, b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe2\x82", b"a\0b", b"\0a"):
        yield one(f"name {name[:6]!r}", entry(name, (4,), 0, 16))
    yield one("name twice", entry(b"a", (4,), 0, 16), entry(b"a", (4,), 16, 16))
    for rank in (0, 2, 9, 16, 255):
        yield one(f"rank {rank}", entry(b"a", (4,), 0, 16 if rank != 2 else 4, rank=rank))
    for dtype in (15, 16, 100, 255):
        yield one(f"dtype {dtype}", entry(b"a", (4,), 0, 16, dtype=dtype))
    for dtype, size in enumerate((4, 2, 2, 1, 4, 1, 8, 2, 8, 2, 4, 8, 1, 8, 16)):
        yield one(f"dtype {dtype} too long", entry(b"a", (4,), 0, 4 * size + 1, dtype=dtype))
        yield one(f"dtype {dtype} too short", entry(b"a", (4,), 0, 4 * size - 1, dtype=dtype))
    for encoding in (3, 4, 128, 255):
        yield one(f"encoding {encoding}", entry(b"a", (4,), 0, 16, encoding=encoding, block=32))
    for encoding, size in ((1, 20), (2, 36)):
        for block in (0, 16, 31, 33, 64, 255):
            yield one(
                f"encoding {encoding} block {block}",
                entry(b"a", (4,), 0, size, encoding=encoding, block=block),
            )
        yield one(
            f"encoding {encoding} bf16", entry(b"a", (4,), 0, size, dtype=1, encoding=encoding, block=32)
        )
        yield one(f"encoding {encoding} empty", entry(b"a", (0,), 0, 0, encoding=encoding, block=32))
        yield one(f"encoding {encoding} size", entry(b"a", (33,), 0, size, encoding=encoding, block=32))
        yield one(f"encoding {encoding} dense size", entry(b"a", (4,), 0, 16, encoding=encoding, block=32))
        yield one(
            f"encoding {encoding} overflow", entry(b"a", (2**63,), 0, size, encoding=encoding, block=32)
        )
        yield one(
            f"encoding {encoding} wraps", entry(b"a", (2**32, 2**32), 0, 0, encoding=encoding, block=32)
        )
    yield one("block of dense", entry(b"a", (4,), 0, 16, block=32))
    for position in range(4):
        yield one(
            f"reserved {position}",
            entry(b"a", (4,), 0, 16, reserved=bytes(position) + b"\1" + bytes(3 - position)),
        )
    yield one("sizes beyond the rank", entry(b"a", (4, 7), 0, 16, rank=1))
    for offset in (497, 512, 513, *HUGE):
        yield one(f"offset {offset}", entry(b"a", (4,), offset, 16))
    for size in (0, 4, 15, 17, 512, *HUGE):
        yield one(f"size {size}", entry(b"a", (4,), 0, size))
    for shape in ((2**62, 4), (2**32, 2**32), (2**63, 2), (2**21,) * 8, (2**63, 2**63, 0), (2**64 - 1,)):
        for size in (0, 16):
            yield one(f"shape {shape} of {size} bytes", entry(b"a", shape, 0, size))
    yield one("overlap", entry(b"a", (4,), 0, 16), entry(b"b", (4,), 8, 16))
    yield one("the same range", entry(b"a", (4,), 0, 16), entry(b"b", (4,), 0, 16))
    yield one("inside another", entry(b"a", (64,), 0, 256), entry(b"b", (1,), 100, 4))
    yield one("overlap, listed backwards", entry(b"b", (4,), 8, 16), entry(b"a", (4,), 0, 16))


def version_cases() -> Iterator[tuple[str, bytes]]:
    for version in (1, 2):
        yield f"Q4 and Q8 in version {version}", build(version=version)
        for encoding, size in ((1, 20), (2, 36)):
            payload = table(entry(b"a", (4,), 0, size, encoding=encoding, block=32), blob=bytes(64))
            yield f"encoding {encoding} in version {version}", build(version=version, weights=payload)
        payload = table(entry(b"a", (4,), 0, 16, block=32), blob=bytes(64))
        yield f"block size in version {version}", build(version=version, weights=payload)
    for at in (24, 64 + 36, 128 + 36):
        data = bytearray(build(DENSE, version=1))
        data[at] ^= 1
        yield f"version 1: byte {at} flipped", bytes(data)
    for encoding, size in ((1, 20), (2, 36)):
        payload = table(entry(b"a", (4,), 0, size, encoding=encoding, block=32), blob=bytes(64))
        yield f"encoding {encoding} in State", build(state=payload)


def carried_cases() -> Iterator[tuple[str, bytes]]:
    weights = table(entry(b"w", (4,), 0, 4, dtype=5), entry(b"f", (1,), 64, 4), blob=bytes(128))
    for text in (
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"w":1}',
        b'{"w":{}}',
        b'{"w":{"encoding":"f8_e4m3"}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[4],"x":1}}',
        b'{"w":{"encoding":"f32","shape":[1]}}',
        b'{"w":{"encoding":"f9","shape":[4]}}',
        b'{"w":{"encoding":null,"shape":[4]}}',
        b'{"w":{"encoding":[],"shape":[4]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[5]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[-4]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[4.0]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":"4"}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[9223372036854775807,9]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[1,1,1,1,1,1,1,1,4]}}',
        b'{"w":{"encoding":"f4_e2m1","shape":[7]}}',
        b'{"v":{"encoding":"f8_e4m3","shape":[4]}}',
        b'{"f":{"encoding":"f8_e4m3","shape":[4]}}',
        b'{"w":{"encoding":"f8_e4m3","shape":[4]},"w":{"encoding":"f8_e5m2","shape":[4]}}',
    ):
        state = table(entry(b"asset/encodings.json", (len(text),), 0, len(text), dtype=5), blob=text)
        yield f"carried types {text[:30]!r}", build(weights=weights, state=state)
    state = table(entry(b"asset/encodings.json", (1,), 0, 4), blob=bytes(4))
    yield "carried types not u8", build(weights=weights, state=state)


def all_cases() -> Iterator[tuple[str, bytes]]:
    yield from file_cases()
    yield from section_cases()
    yield from tensor_cases(WEIGHTS)
    yield from tensor_cases(STATE)
    yield from version_cases()
    yield from carried_cases()


def test_damaged_files_are_refused(refuses: Callable[..., int]) -> None:
    # Some fields of the good file happen to hold the value that a case puts there; those are no damage.
    good = build()
    assert refuses(OamSource, ((label, content) for label, content in all_cases() if content != good)) >= 400


def test_the_undamaged_file_is_read(tmp_path: Path, oamref: ModuleType) -> None:
    path = tmp_path / "good.oam"
    path.write_bytes(build())
    theirs = oamref.load(path)
    ours = OamSource(path)
    ours.verify()
    assert [item["name"] for item in theirs["weights"]] == list(ours)
    for item in theirs["weights"]:
        np.testing.assert_array_equal(
            ours[item["name"]].numpy().astype("f4"), oamref.dense(item).astype("f4")
        )
    assert ours.asset("asset/x") == b"hello" and ours.asset("asset/y") is None
    assert ours.metadata == {"oazoo": 1}
    assert ours.optimizer is not None and ours.optimizer.second is not None
    assert ours.optimizer.kind == "AdamW" and ours.optimizer.first.size == ours.optimizer.second.size == 3


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_and_the_legacy_section(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.oam"
    path.write_bytes(build([*DENSE.items(), (LEGACY, b"kernels")], version=version))
    source = OamSource(path)
    source.verify()
    assert source.version == version and len(source) == 4
    np.testing.assert_array_equal(source["a"].numpy(), np.arange(6, dtype="f4").reshape(2, 3))


def test_a_flipped_byte_anywhere_is_found_by_verify(tmp_path: Path) -> None:
    good = build()
    path = tmp_path / "flipped.oam"
    offset = struct.unpack_from("<Q", good, 128 + 12)[0]
    for at in [*range(32), *range(64, 64 + 5 * 64), *range(offset, len(good), 7)]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        with pytest.raises(FormatError, match=r"flipped\.oam"), OamSource(path) as source:
            source.verify()


def test_mended_mutations_never_crash(survives: Callable[..., int]) -> None:
    good = build()
    rng = random.Random(5)
    offset = struct.unpack_from("<Q", good, 128 + 12)[0]
    places = [*range(64 + 5 * 64), *range(4096, 4096 + 120), *range(offset, len(good) - 104)]

    def mutants() -> Iterator[bytes]:
        for _ in range(400):
            data = bytearray(good)
            for at in rng.sample(places, rng.choice((1, 1, 2, 8))):
                data[at] = rng.randrange(256)
            yield seal(bytes(data))

    assert survives(OamSource, mutants()) > 100


def test_verify_names_the_damaged_section(tmp_path: Path) -> None:
    good = build()
    path = tmp_path / "bad.oam"
    for index, name in ((1, "Weights"), (2, "State"), (3, "Optimizer")):
        offset, size = struct.unpack_from("<QQ", good, 64 + 64 * index + 12)
        data = bytearray(good)
        data[offset + size - 1] ^= 1
        path.write_bytes(data)
        seen: list[int] = []
        with pytest.raises(FormatError, match=name), OamSource(path) as source:
            source.verify(seen.append)
        assert sum(seen) > 0
