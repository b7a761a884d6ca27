"""Checkpoints as ``torch.save`` writes them, and malicious ones, made without PyTorch."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STORAGES = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}


class View:
    """A tensor as a view of a named storage."""

    def __init__(
        self,
        key: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        count: int | None = None,
    ) -> None:
        self.key, self.offset, self.shape, self.strides, self.count = key, offset, shape, strides, count


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense row-major tensor, in elements."""
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(8, "little", signed=True)
    return b"\x8a\x08" + data


def pickled(value: Any, storages: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Protocol 2 opcodes of a value, tensors given as :class:`View`."""
    return b"\x80\x02" + _opcodes(value, storages) + b"."


def _opcodes(value: Any, storages: Mapping[str, npt.NDArray[Any]]) -> bytes:
    if isinstance(value, View):
        array = storages[value.key]
        kind = STORAGES[array.dtype.name]
        count = array.size if value.count is None else value.count
        storage = b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(value.key) + text("cpu")
        storage += number(count) + b"tQ"
        sizes = b"".join(b"(" + b"".join(map(number, part)) + b"t" for part in (value.shape, value.strides))
        hooks = b"\x89ccollections\nOrderedDict\n)R"
        return (
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(value.offset) + sizes + hooks + b"tR"
        )
    if isinstance(value, dict):
        items = b"".join(_opcodes(key, storages) + _opcodes(item, storages) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(_opcodes(item, storages) for item in value) + b"e"
    if isinstance(value, str):
        return text(value)
    return pickle.dumps(value, 2)[2:-1]  # None, bool, int, float: without the protocol and the end


def archive(path: Path, data: bytes, storages: Mapping[str, npt.NDArray[Any]], **options: Any) -> Path:
    """The zip around a pickle and its storages."""
    with zipfile.ZipFile(path, "w", options.get("compression", zipfile.ZIP_STORED)) as file:
        file.writestr("ckpt/data.pkl", data)
        file.writestr("ckpt/byteorder", options.get("byteorder", "little"))
        for key, array in storages.items():
            file.writestr(f"ckpt/data/{key}", array.tobytes())
        for name, content in options.get("more", {}).items():
            file.writestr(name, content)
        file.writestr("ckpt/version", "3\n")
    return path


def save(path: Path, value: Any, storages: Mapping[str, npt.NDArray[Any]], **options: Any) -> Path:
    """A checkpoint of a value whose tensors are :class:`View` of ``storages``."""
    return archive(path, pickled(value, storages), storages, **options)


def save_tensors(path: Path, value: Any, **options: Any) -> Path:
    """A checkpoint of a value whose tensors are NumPy arrays, each in a storage of its own; equal objects share one."""
    storages: dict[str, npt.NDArray[Any]] = {}
    keys: dict[int, str] = {}

    def views(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            key = keys.setdefault(id(item), str(len(keys)))
            storages[key] = np.ascontiguousarray(item).reshape(-1)
            return View(key, 0, item.shape, contiguous(item.shape))
        if isinstance(item, dict):
            return {name: views(part) for name, part in item.items()}
        return [views(part) for part in item] if isinstance(item, list) else item

    return save(path, views(value), storages, **options)
