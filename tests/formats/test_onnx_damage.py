"""Damaged ONNX files: a clear error each, in memory bounded by the file's size, whatever the damage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from oazoo.formats.onnx import OnnxSource

Case = tuple[str, bytes]


def small() -> bytes:
    """A model with each kind of field, all in one piece, so that every byte's meaning is known from its place."""
    typed = TensorProto(name="typed", data_type=TensorProto.FLOAT16, dims=[3], int32_data=[15872, 1, 65535])
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.arange(3, dtype="i8"))),
        helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1, alpha=1.0, name="gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 2])],
        [
            numpy_helper.from_array(np.arange(8, dtype="f4").reshape(2, 4), "w"),
            numpy_helper.from_array(np.arange(2, dtype="f4"), "b"),
            typed,
        ],
    )
    model = helper.make_model(graph, producer_name="test")
    model.metadata_props.add(key="key", value="value")
    return bytes(model.SerializeToString())


def marks(data: bytes) -> list[tuple[int, int]]:
    """Place and end of every length in the file, found by walking it as the specification says."""
    found: list[tuple[int, int]] = []

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if data[at - 1] < 128:
                return value, at

    def walk(at: int, stop: int, inside: str) -> None:
        while at < stop:
            tag, at = number(at)
            if tag & 7 == 2:
                size, after = number(at)
                found.append((at, after))
                message = {"model": {7: "graph"}, "graph": {1: "node", 5: "tensor"}, "node": {5: "attribute"}}
                inner = message.get(inside, {}).get(tag >> 3) or (
                    "tensor" if inside == "attribute" and tag >> 3 == 5 else ""
                )
                if inner:
                    walk(after, after + size, inner)
                at = after + size
            elif tag & 7 == 0:
                _, at = number(at)
            else:
                at += 4 if tag & 7 == 5 else 8

    walk(0, len(data), "model")
    return found


def cases() -> Iterator[Case]:
    data = small()
    places = marks(data)
    graph = onnx.load_model_from_string(data).graph.SerializeToString()
    for size in range(2, data.index(graph) + len(graph)):  # what comes after the graph may be missing
        yield f"cut to {size} bytes", data[:size]
    for start, stop in places:
        for label, length in (
            ("huge", b"\xff\xff\xff\xff\x07"),
            ("64 bits", b"\xff" * 9 + b"\x01"),
            ("endless", b"\xff" * 11),
        ):
            yield f"{label} length at {start}", data[:start] + length + data[stop:]
    for old, new in (
        (b"\x0a\x01w", b"\x0a\x00w"),
        (b"typed", b"ty\0ed"),
        (b"typed", b"ty\xffed"),
        (b"Gemm", b"\xc3\x28mm"),
    ):
        assert old in data
        yield f"{old!r} → {new!r}", data.replace(old, new)
    weight = data.index(np.arange(8, dtype="f4").tobytes())
    for size in (0, 1, 31, 33):
        yield f"raw_data of {size} bytes", data[: weight - 1] + bytes([size]) + data[weight:]


def test_damaged_files_are_refused(refuses: Callable[..., int]) -> None:
    assert refuses(OnnxSource, cases()) >= 200


def test_random_damage_is_survived(survives: Callable[..., int]) -> None:
    random.seed(7)
    data = small()

    def mutated() -> Iterator[bytes]:
        for _ in range(1500):
            copy = bytearray(data)
            for _ in range(random.choice((1, 1, 2, 5))):
                at = random.randrange(len(copy))
                match random.randrange(4):
                    case 0:
                        copy[at] ^= 1 << random.randrange(8)
                    case 1:
                        copy[at] = random.choice((0, 1, 127, 128, 255))
                    case 2:
                        del copy[at : at + random.randrange(1, 9)]
                    case _:
                        copy[at:at] = random.randbytes(random.randrange(1, 9))
            yield bytes(copy)

    assert survives(OnnxSource, mutated()) > 500


def test_a_golden_cut_anywhere(refuses: Callable[..., int], data: Path) -> None:
    whole = (data / "onnx" / "nanogpt_nobias_script" / "model.onnx").read_bytes()
    end = len(whole) - 200  # what follows the graph may be missing
    sizes = [2 + (end - 2) * k // 60 for k in range(60)]
    assert refuses(OnnxSource, ((f"cut to {size}", whole[:size]) for size in sizes)) == 60
