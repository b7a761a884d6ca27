"""External data of an ONNX model: files beside it, named by the model and so not to be trusted."""

from __future__ import annotations

import re
from pathlib import Path

from oazoo.errors import FormatError, UsageError
from oazoo.formats.mapped import MappedFile
from oazoo.formats.messages import quoted

#: Tensors may begin at multiples of these; zeros of less than the number before such a place are padding.
_ALIGNMENTS = (64, 4096, 65536)
_DRIVE = re.compile(r"[A-Za-z]:")


def checked_location(location: str) -> str:
    """A location that stays inside the model's folder on any system.

    Raises:
        FormatError: it is empty, absolute, has a drive letter, a backslash, NUL, or a part that is empty, ``.`` or ``..``.
    """
    reason = None
    if not location:
        reason = "is empty"
    elif "\0" in location:
        reason = "holds NUL"
    elif "\\" in location:
        reason = "has a backslash"
    elif location.startswith("/"):
        reason = "is absolute"
    elif _DRIVE.match(location):
        reason = "has a drive letter"
    elif any(part in ("", ".", "..") for part in location.removeprefix("./").split("/")):
        reason = "has a part that is empty, '.' or '..'"
    if reason is not None:
        raise FormatError(
            f"external data location {quoted(location)} {reason}; it must be a plain name inside the model's folder"
        )
    return location.removeprefix("./")


class ExternalFiles:
    """The data files of one model: opened once, every range noted."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._files: dict[str, MappedFile] = {}
        self._ranges: dict[str, list[tuple[int, int]]] = {}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, in the order of their first use."""
        return tuple(file.path for file in self._files.values())

    def find(self, entries: dict[str, str], size: int) -> tuple[MappedFile, int]:
        """The file and offset of a tensor of ``size`` bytes, from its ``external_data``.

        Raises:
            FormatError: the location leaves the folder, the file is missing, or the range does not fit.
        """
        location = checked_location(entries.get("location", ""))
        offset = _number(entries, "offset", 0)
        length = _number(entries, "length", size)
        if length != size:
            raise FormatError(f"external data has {length} bytes, but the shape takes {size} bytes")
        file = self._files.get(location)
        if file is None:
            file = self._files[location] = self._open(location)
            self._ranges[location] = []
        if offset + size > file.size:
            raise FormatError(
                f"external data takes bytes {offset} to {offset + size} of {quoted(location)}, which has {file.size}"
            )
        self._ranges[location].append((offset, offset + size))
        return file, offset

    def notes(self) -> list[str]:
        """A line for every file that holds bytes which no tensor refers to."""
        found = []
        for location, file in self._files.items():
            orphaned = _unreferenced(file, self._ranges[location])
            if orphaned:
                found.append(
                    f"{location}: {orphaned:,} of {file.size:,} bytes belong to no tensor (saving a model twice into one "
                    "data file leaves such bytes); they were not read"
                )
        return found

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _open(self, location: str) -> MappedFile:
        folder = self._model.parent
        path = folder / location
        # Links may lead to where the model itself lies (caches keep files under their hash), and nowhere else.
        allowed = {folder.resolve(), self._model.resolve().parent}
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise FormatError(f"external data {quoted(location)} cannot be found: {error}") from error
        if not any(real.is_relative_to(root) for root in allowed):
            raise FormatError(f"external data {quoted(location)} is a link that leaves the model's folder")
        try:
            return MappedFile(path)
        except UsageError as error:
            raise FormatError(f"external data is missing: {error}; it belongs beside the model") from error


def _number(entries: dict[str, str], key: str, default: int) -> int:
    value = entries.get(key)
    if value is None:
        return default
    if not re.fullmatch(r"[0-9]{1,19}", value):
        raise FormatError(f"external data {key} {quoted(value)} is not a number of bytes")
    return int(value)


def _unreferenced(file: MappedFile, ranges: list[tuple[int, int]]) -> int:
    """Bytes outside all ranges, without the zeros that align what follows."""
    total = position = 0
    for start, stop in [*sorted(ranges), (file.size, file.size)]:
        if start > position and not _is_padding(file, position, start):
            total += start - position
        position = max(position, stop)
    return total


def _is_padding(file: MappedFile, start: int, stop: int) -> bool:
    aligned = stop == file.size or any(stop % n == 0 and stop - start < n for n in _ALIGNMENTS)
    if not aligned or stop - start >= _ALIGNMENTS[-1]:
        return False
    return not any(file.read(start, stop - start))
