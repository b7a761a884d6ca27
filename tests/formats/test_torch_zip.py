"""PyTorch checkpoints: tensors and plain values read without running the pickle; anything else refused by name."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from torch_files import STORAGES, View, archive, contiguous, pickled, save, save_tensors, text

from oazoo.errors import FormatError
from oazoo.formats import plain_pickle
from oazoo.formats.detect import open_source
from oazoo.formats.torch_zip import TorchSource

GOLDENS = ("nanogpt_script", "nanogpt_nobias_script", "nanogpt_dynamo")


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name: str, data: Path) -> None:
    reference = np.load(data / "onnx" / name / "reference.npz")
    with open_source(data / "onnx" / name / "ckpt.pt") as source:
        assert isinstance(source, TorchSource)
        for key in source:
            expected = reference[key.removeprefix("model.").replace(".", "/")]
            assert np.array_equal(source[key].numpy(), expected)
            assert not source[key].mapped().flags.owndata
        assert len(source) == len(reference.files) - 2
        assert (
            source.metadata["model_args"]["n_head"] == 4 and source.metadata["model_args"]["vocab_size"] == 96
        )


@pytest.mark.parametrize("name", STORAGES)
def test_every_type(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    with open_source(save_tensors(tmp_path / "c", {"t": values})) as source:
        found = source["t"].numpy()
        assert found.dtype == dtype and np.array_equal(found, values)


def test_nested_values_and_names(tmp_path: Path) -> None:
    value = {
        "model": {"a.b": np.arange(3.0), "c": [np.ones(1), "text"]},
        "optimizer": {
            "state": {0: {"exp_avg": np.zeros(2)}},
            "param_groups": [{"lr": 1e-3, "betas": [0.9, 0.95]}],
        },
        "iter_num": 5,
        "big": -(2**62),
        "none": None,
        "flag": True,
    }
    with open_source(save_tensors(tmp_path / "c", value)) as source:
        assert list(source) == ["model.a.b", "model.c.0", "optimizer.state.0.exp_avg"]
        assert source.metadata["optimizer"]["param_groups"] == [{"lr": 1e-3, "betas": [0.9, 0.95]}]
        assert [source.metadata[key] for key in ("iter_num", "big", "none", "flag")] == [
            5,
            -(2**62),
            None,
            True,
        ]


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = np.arange(24, dtype="f4")
    views = {
        "first": View("0", 0, (2, 3), (3, 1)),
        "turned": View("0", 6, (3, 2), (1, 3)),
        "tied": View("0", 0, (2, 3), (3, 1)),
        "deep": View("0", 12, (2, 1, 3), (1, 77, 2)),
        "empty": View("0", 24, (0, 5), (5, 1)),
        "scalar": View("0", 23, (), ()),
    }
    with open_source(save(tmp_path / "c", views, {"0": base})) as source:
        assert isinstance(source, TorchSource) and source.shared == {"tied": "first"}
        assert source["first"].numpy().tolist() == base[:6].reshape(2, 3).tolist()
        for name, expected in (
            ("turned", base[6:12].reshape(2, 3).T),
            ("deep", base[12:18].reshape(3, 2).T[:, None]),
            ("empty", np.zeros((0, 5))),
            ("scalar", np.array(23)),
        ):
            found = source[name]
            assert np.array_equal(found.numpy(), expected) and found.numpy().shape == expected.shape
            assert found.raw().tobytes() == expected.astype("f4").tobytes()
            assert b"".join(piece.tobytes() for piece in found.chunks(4)) == found.raw().tobytes()


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ({"t": View("0", 20, (5,), (1,))}, "leave its storage of 24"),
        ({"t": View("0", 25, (), ())}, "leave its storage"),
        ({"t": View("0", 0, (2, 3), (0, 1))}, "one dense block"),
        ({"t": View("0", 0, (2, 3), (4, 1))}, "one dense block"),
        ({"t": View("0", 0, (2, 3), (2, 1))}, "one dense block"),
        ({"t": View("0", -1, (2,), (1,))}, "not a dense tensor"),
        ({"t": View("0", 0, (-2,), (1,))}, "not a dense tensor"),
        ({"t": View("0", 0, (2,), (1, 1))}, "not a dense tensor"),
        ({"t": View("0", 0, (2**61,), (1,))}, "not a dense tensor"),
        ({"t": View("0", 0, (2**32, 2**31), (2**31, 1))}, "2\\^63|leave its storage"),
        ({"t": View("0", 0, (1,) * 65, (1,) * 65)}, "not a dense tensor"),
        ({"t": View("0", 0, (24,), (1,), 25)}, "96 bytes, but 25 elements"),
        ({"t": View("0", 0, (2,), (1,), -1)}, "storage of"),
        ({"a": View("0", 0, (4,), (1,)), "b": View("0", 3, (4,), (1,))}, "overlap"),
        ({"a": View("0", 0, (4,), (1,)), "b": View("0", 0, (2, 2), (2, 1))}, "overlap"),
        ({"a.b": View("0", 0, (2,), (1,)), "a": {"b": View("0", 4, (2,), (1,))}}, "two tensors are named"),
        ({"a\0": View("0", 0, (2,), (1,))}, "cannot be the name"),
        ({"": View("0", 0, (2,), (1,))}, "cannot be the name"),
        (View("0", 0, (2,), (1,)), "cannot be the name"),
    ],
)
def test_tensors_that_do_not_fit(views: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        open_source(save(tmp_path / "c", views, {"0": np.arange(24, dtype="f4")}))


def test_a_missing_record(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"t": View("0", 0, (1,), (1,))}, {"0": np.zeros(1, "f4")})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "d", "w") as new:
        for name in old.namelist():
            if name != "ckpt/data/0":
                new.writestr(name, old.read(name))
    with pytest.raises(FormatError, match="data/0 is missing"):
        open_source(tmp_path / "d")


# -- pickles that want more than data ----------------------------------------------------------------------------------


class Runs:
    """A pickle of this writes a marker file when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "ckpt.pt", "model.onnx", "model.gguf"]
)
@pytest.mark.parametrize("wrapped", [True, False], ids=["zip", "bare"])
@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_never_runs(name: str, wrapped: bool, protocol: int, tmp_path: Path) -> None:
    """HB-07: reduce that writes a marker, by several ways to call; named as weights, bare and inside a zip."""
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()"
    attacks = [
        Runs(os.system, f"touch '{marker}'"),
        Runs(exec, code),
        Runs(eval, f"open({str(marker)!r}, 'w')"),
        Runs(subprocess.check_call, [sys.executable, "-c", code]),
        {"model": {"w": Runs(Path.touch, marker)}, "model_args": {"n_head": 1}},
        [Runs(getattr, Runs(__import__, "os"), "system")],
    ]
    for attack in attacks:
        content = pickle.dumps(attack, protocol)
        path = tmp_path / name
        if wrapped:
            archive(path, content, {})
        else:
            path.write_bytes(content)
        with pytest.raises(FormatError) as caught:
            open_source(path)
        assert not marker.exists()
        assert "pickle" in str(caught.value) and "safetensors" in str(caught.value)
    pickle.loads(pickle.dumps(attacks[0], protocol))  # they are live
    assert marker.exists()


def shared_tuples(levels: int) -> bytes:
    """A few dozen bytes that stand for 8^levels values."""
    code = b"N"
    for k in range(levels):
        name = bytes([k])
        code = b"(" + code + b"q" + name + (b"h" + name) * 7 + b"t"
    return code


@pytest.mark.parametrize(
    ("opcodes", "words"),
    [
        (b"cposix\nsystem\n.", "'posix.system'.*not run"),
        (b"ctorch._utils\n_rebuild_tensor_v3\n.", "_rebuild_tensor_v3"),
        (b"ctorch\nEvilStorage\n.", "EvilStorage"),
        (b"ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage"),
        (b"ccollections\nOrderedDict\n(K\x01tR.", "OrderedDict"),
        (b"ccollections\nOrderedDict\n.", "by itself"),
        (b"\x8c\x05posix\x8c\x06system\x93.", "posix.system"),
        (b"K\x01K\x01\x93.", "name is no text"),
        (b"(iposix\nsystem\n.", "opcode b'i'"),
        (b"(cposix\nsystem\no.", "posix.system"),
        (b"}}b}\x81.", "opcode"),
        (b"}N\x92.", "opcode"),
        (b"\x82\x01.", "opcode"),
        (b"C\x01x.", "opcode b'C'"),
        (b"}(K\x01u.", "without a value"),
        (b"}(]K\x01u.", "as a key"),
        (b"}(K\x01K\x01K\x01K\x01u.", "twice"),
        (b"]K\x01R.", "calls"),
        (b"K\x01Q.", "no storage"),
        (b"K\x01K\x01.", "2 values"),
        (b".", "0 values"),
        (b"(.", "0 values"),
        (b"t.", "no mark"),
        (b"h\x07.", "does not have"),
        (b"\x85.", "empty stack"),
        (b"K\x01.K\x01", "follow the end"),
        (b"X\xff\xff\xff\xff.", "text of 4294967295"),
        (b"X\x02\x00\x00\x00\xff\xfe.", "UTF-8"),
        (b"\x8a\xff" + bytes(255) + b".", "number of 255 bytes"),
        (b"r\xff\xff\xff\xff.", "remembers"),
        (b"K\x01]b.", "as a dict|state"),
        (shared_tuples(12) + b".", "too many"),
        (b"]q\x00h\x00a.", "nested"),
        (b"(" * 5000 + b".", "deeper"),
        (b"N" * (1 << 21) + b".", "more than 1048576"),
        (b"", "cut short"),
    ],
)  # fmt: skip
def test_opcodes_that_plain_data_does_not_take(opcodes: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        open_source(archive(tmp_path / "c", b"\x80\x02" + opcodes, {}))


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_data_of_every_protocol(protocol: int) -> None:
    value = {"a": [1, 2.5, -3, None, True], "b": {"c": (), "d": ("x", 2**40)}, 7: "é🙂", "long": "x" * 300}
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


# -- the archive -------------------------------------------------------------------------------------------------------


def test_archives_of_other_kinds(tmp_path: Path) -> None:
    values = {"t": np.zeros(4, "f4")}
    for options, words in (
        ({"compression": zipfile.ZIP_DEFLATED}, "compressed"),
        ({"byteorder": "big"}, "big-endian"),
        ({"more": {"ckpt/constants.pkl": b""}}, "TorchScript"),
        ({"more": {"ckpt/code/x.py": b""}}, "TorchScript"),
        ({"more": {"other/data.pkl": b""}}, "2 pickles"),
    ):
        with pytest.raises(FormatError, match=words):
            open_source(save_tensors(tmp_path / "c", values, **options))
    with zipfile.ZipFile(tmp_path / "d", "w") as file:
        file.writestr("x/version", "3")
    with pytest.raises(FormatError, match="0 pickles"):
        open_source(tmp_path / "d")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A record of 256 MB packed to 256 KB is refused by its header."""
    with (
        zipfile.ZipFile(tmp_path / "c", "w", zipfile.ZIP_DEFLATED) as file,
        file.open("ckpt/data.pkl", "w") as record,
    ):
        for _ in range(256):
            record.write(bytes(1 << 20))
    with pytest.raises(FormatError, match="compressed"):
        TorchSource(tmp_path / "c")


def small(folder: Path) -> bytes:
    """A checkpoint of two tensors and a number."""
    value = {"model": {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.arange(2, dtype="f4")}, "n": 1}
    return save_tensors(folder / "small", value).read_bytes()


def test_damaged_files_are_refused(refuses: Callable[..., int], tmp_path: Path) -> None:
    data = small(tmp_path)
    with zipfile.ZipFile(tmp_path / "small") as file:
        members = file.infolist()
    directory = data.index(b"PK\x01\x02")

    def cases() -> Iterator[tuple[str, bytes]]:
        for size in range(4, len(data), 4):
            yield f"cut to {size}", data[:size]
        for extra in (b"x", bytes(22), bytes(4096)):
            yield f"{len(extra)} bytes appended", data + extra
        yield "a comment", data[:-2] + b"\3\0abc"
        for member in members:
            for at, name in ((0, "magic"), (8, "method"), (26, "name length")):
                place = member.header_offset + at
                yield f"{name} of {member.filename}", data[:place] + b"\x63\x63" + data[place + 2 :]
        at = directory
        while data[at : at + 4] == b"PK\x01\x02":
            for offset, name in ((10, "method"), (20, "packed size"), (24, "size"), (42, "offset")):
                width = 2 if offset == 10 else 4
                for value in (1, 0xFFFF, 0x7FFFFFFF)[: 2 if width == 2 else 3]:
                    new = struct.pack("<H" if width == 2 else "<I", value)
                    yield f"{name} {value} at {at}", data[: at + offset] + new + data[at + offset + width :]
            at += 46 + sum(struct.unpack("<3H", data[at + 28 : at + 34]))

    assert refuses(TorchSource, cases()) >= 200


def test_damaged_pickles_are_refused(refuses: Callable[..., int], tmp_path: Path) -> None:
    storages = {"0": np.arange(6, dtype="f4")}
    value = {"model": {"w": View("0", 0, (2, 3), contiguous((2, 3)))}, "text": "x", "list": [1, 2]}
    whole = pickled(value, storages)

    def cases() -> Iterator[tuple[str, bytes]]:
        for size in range(len(whole)):
            yield f"cut to {size}", archive(tmp_path / "d", whole[:size], storages).read_bytes()
        for at in range(2, len(whole), 2):
            wrong = whole[:at] + b"\xfe" + whole[at:]
            if whole[at - 1 : at] not in (b"X",):
                yield f"a byte more at {at}", archive(tmp_path / "d", wrong, storages).read_bytes()

    assert refuses(TorchSource, cases()) >= 200


def test_random_damage_is_survived(survives: Callable[..., int], tmp_path: Path) -> None:
    random.seed(11)
    whole = small(tmp_path)
    start = whole.index(b"\x80\x02")

    def mutated() -> Iterator[bytes]:
        for _ in range(1500):
            copy = bytearray(whole)
            for _ in range(random.choice((1, 1, 2, 5))):
                at = (
                    random.randrange(start, start + 700)
                    if random.random() < 0.6
                    else random.randrange(len(copy))
                )
                at = min(at, len(copy) - 1)
                if random.random() < 0.5:
                    copy[at] ^= 1 << random.randrange(8)
                else:
                    copy[at] = random.choice((0, 1, 46, 40, 116, 127, 128, 255))
            yield bytes(copy)

    assert survives(TorchSource, mutated()) > 500


def test_texts_are_bounded_by_the_file() -> None:
    with pytest.raises(FormatError, match="cut short"):
        plain_pickle.loads(b"\x80\x02X\x00\x00\x0f\x00abc.")
    assert plain_pickle.loads(b"\x80\x02" + text("é") + b".") == "é"
