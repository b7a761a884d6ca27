"""GGUF models in several files, as llama.cpp splits them: ``NAME-00001-of-00003.gguf`` and its siblings.

Every part is a whole GGUF file that says which part of how many it is, and how many tensors the model has. The parts are
found by their names, and have to be what their names and the other parts say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats.gguf import GgufSource
from oazoo.formats.messages import quoted, some
from oazoo.formats.source import SourceTensor, WeightSource

MAX_PARTS = 4096
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_NAME = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PartName:
    """A file name of the form ``PREFIX-00001-of-00003.gguf``; ``number`` counts from 1."""

    prefix: str
    number: int
    count: int

    def of(self, number: int) -> str:
        """The name of another part of the same model."""
        return f"{self.prefix}-{number:05d}-of-{self.count:05d}.gguf"


def part_name(name: str) -> PartName | None:
    """What a file name says about the part that it holds; ``None`` if it is not the name of a part."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return None
    return PartName(match[1], int(match[2]), int(match[3]))


def all_parts(name: str) -> list[str]:
    """The names of all parts of the model that the part ``name`` belongs to, in order; else ``name`` itself."""
    part = part_name(name)
    if part is None or part.count > MAX_PARTS:
        return [name]
    return [part.of(number) for number in range(1, part.count + 1)]


def first_part(names: list[str]) -> str | None:
    """The first of ``names``, if all of them are named as parts of one model."""
    parts = [part_name(name) for name in names]
    if not parts or None in parts or len({(part.prefix, part.count) for part in parts if part}) != 1:
        return None
    return min(names)


def open_gguf(path: Path | str) -> GgufSource | SplitGgufSource:
    """Open a GGUF model: one file, or with any part of a split one all of its parts.

    Raises:
        FormatError: see :class:`~oazoo.formats.gguf.GgufSource` and :class:`SplitGgufSource`.
        UsageError: there is no such file.
    """
    source = GgufSource(path)
    try:
        if _split(source)[1] <= 1:
            return source
        return SplitGgufSource(source)
    except BaseException:
        source.close()
        raise


class SplitGgufSource(WeightSource):
    """A GGUF model in several files. ``files`` are its parts in order, ``path`` is the part that was named.

    ``metadata`` is that of the first part with what the others add, without the keys about the split.

    Args:
        opened: any one of the parts; it belongs to this source from now on.

    Raises:
        FormatError: a part is missing, renamed, or of another model; the message names the files.
    """

    format = "gguf"

    def __init__(self, opened: GgufSource) -> None:
        self.path = opened.path
        number, count, _ = _split(opened)
        self.files = _parts(self.path, number, count)
        self._sources: list[GgufSource] = [opened]
        try:
            parts: list[GgufSource] = []
            for index, path in enumerate(self.files):
                part = opened if index == number else GgufSource(path)
                if part is not opened:
                    self._sources.append(part)
                _check_part(part, index, opened)
                parts.append(part)
            self._tensors = _join_tensors(parts)
            self.metadata = MappingProxyType(_join_metadata(parts))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _split(source: GgufSource) -> tuple[int, int, int | None]:
    """What a file says about the split: number of the part from 0, number of parts, tensors in all of them."""
    values = [source.metadata.get(key) for key in (_NUMBER, _COUNT, _TENSORS)]
    if not all(value is None or type(value) is int for value in values):
        raise FormatError(f"{source.path}: {_NUMBER}, {_COUNT} and {_TENSORS} must be whole numbers")
    number, count, tensors = values
    number, count = number or 0, count or 0
    if count > MAX_PARTS:
        raise FormatError(f"{source.path}: {_COUNT} is {count}; at most {MAX_PARTS} parts are read")
    if count > 1 and not 0 <= number < count:
        raise FormatError(f"{source.path}: {_NUMBER} is {number}, counted from 0, with {count} parts")
    return number, count, tensors


def _parts(path: Path, number: int, count: int) -> tuple[Path, ...]:
    """The files of all parts, which have to be there."""
    name = part_name(path.name)
    if name is None:
        raise FormatError(
            f"{path}: is part {number + 1} of a GGUF model in {count} files, and the others are found by name: call it "
            f"NAME-{number + 1:05d}-of-{count:05d}.gguf, and the others alike, in one folder"
        )
    if (name.number, name.count) != (number + 1, count):
        raise FormatError(
            f"{path}: is named as part {name.number} of {name.count}, but holds part {number + 1} of {count}: it was "
            "renamed, or is of another model; give the parts their own names again, or fetch them again"
        )
    names = [name.of(index + 1) for index in range(count)]
    absent = [other for other in names if not (path.parent / other).is_file()]
    if absent:
        there = [other for other in names if other not in absent]
        raise FormatError(
            f"{path}: is part {number + 1} of a GGUF model in {count} files, of which {len(absent)} are not there: "
            f"{some(absent)} (there: {some(there)}); fetch them into the same folder"
        )
    return tuple(path.parent / other for other in names)


def _check_part(part: GgufSource, index: int, opened: GgufSource) -> None:
    number, count, tensors = _split(part)
    _, expected, total = _split(opened)
    if (number, count) != (index, expected):
        is_split = f"holds part {number + 1} of {count}" if count > 1 else "is not part of a split model"
        raise FormatError(
            f"{part.path}: is named as part {index + 1} of {expected}, but {is_split}: it was renamed, or is of another "
            "model; give the parts their own names again, or fetch them again"
        )
    if tensors != total:
        raise FormatError(
            f"{part.path}: is a part of a model of {tensors} tensors, {opened.path.name} of one of {total}: these are parts "
            "of different models; fetch the model again"
        )


def _join_tensors(parts: list[GgufSource]) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    holder: dict[str, str] = {}
    for part in parts:
        for name, tensor in part.items():
            if name in holder:
                raise FormatError(
                    f"{part.path}: tensor {quoted(name)} is in {holder[name]} as well: these are parts of different models; "
                    "fetch the model again"
                )
            tensors[name], holder[name] = tensor, part.path.name
    total = _split(parts[0])[2]
    if total is not None and total != len(tensors):
        raise FormatError(
            f"{parts[0].path}: the model has {total} tensors, its {len(parts)} parts {len(tensors)}: these are parts of "
            "different models; fetch the model again"
        )
    return tensors


def _join_metadata(parts: list[GgufSource]) -> dict[str, Any]:
    """All key/values. Later parts usually have none but those about the split; what they repeat has to agree."""
    metadata: dict[str, Any] = {}
    own = (_NUMBER, _COUNT, _TENSORS, "general.alignment")
    for part in parts:
        for key, value in part.metadata.items():
            if key in own:
                continue
            if key in metadata and metadata[key] != value:
                raise FormatError(
                    f"{part.path}: {quoted(key)} is {quoted(value)}, and {quoted(metadata[key])} in {parts[0].path.name}: "
                    "these are parts of different models; fetch the model again"
                )
            metadata.setdefault(key, value)
    return metadata
