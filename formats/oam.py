"""``.oam``: a strict reader of wire versions 1 to 3. The writer is :mod:`oazoo.formats.oam_writer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from oazoo.errors import FormatError
from oazoo.formats import oam_layout as layout
from oazoo.formats.hashing import Fnv1a64, fnv1a64
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.oam_layout import OamConfig, OamOptimizer, OamProgress
from oazoo.formats.oam_names import full_names
from oazoo.formats.oam_tensors import apply_carried, read_entries
from oazoo.formats.source import SourceTensor, WeightSource
from oazoo.formats.strict_json import decode_utf8, load_object

_HASH_STEP = 1 << 22


@dataclass(frozen=True, slots=True)
class Section:
    """Where a section lies, and the FNV-1a 64 checksum that the file states for it."""

    kind: int
    offset: int
    size: int
    checksum: int

    @property
    def name(self) -> str:
        return layout.SECTION_NAMES[self.kind]


class OamSource(WeightSource):
    """One ``.oam`` file; the mapping holds its weights, under their full names.

    Opening checks the whole structure, the checksum of header and section table, and those of Config and Progress. The
    checksums of the large sections take reading them: :meth:`verify` does that, in any thread.

    Attributes:
        version: wire version, 1 to 3.
        config: the Config section. ``metadata`` is its payload parsed, if that is one of our JSON objects, else empty.
        state: State tensors by name, assets among them.
        progress: the Progress section.

    Raises:
        FormatError: the file breaks a rule of the format.
        UsageError: there is no such file.
    """

    format = "oam"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files = (self.path,)
        self._file = MappedFile(self.path)
        with self._file.reading_head():
            self._open()

    def _open(self) -> None:
        self.version, self._sections = _read_sections(self._file)
        self.config = OamConfig.unpack(self._checked(layout.CONFIG_SECTION))
        self.progress = OamProgress.unpack(self._checked(layout.PROGRESS_SECTION))
        self.metadata = MappingProxyType(_parse_payload(self.config.payload))
        weights = self._entries(layout.WEIGHTS)
        self.state: Mapping[str, SourceTensor] = MappingProxyType(self._entries(layout.STATE))
        carried = self.asset(layout.CARRIED_ASSET)
        typed = weights if carried is None else apply_carried(weights, carried)
        self._tensors = full_names(typed, self.metadata)
        self._optimizer = self._optimizer_header()

    def close(self) -> None:
        self._file.close()

    def asset(self, name: str) -> bytes | None:
        """The bytes of a file that travels with the model (``asset/tokenizer.json``), or None.

        Raises:
            FormatError: the State tensor of this name is not a rank-1 u8 tensor.
        """
        tensor = self.state.get(name)
        if tensor is None:
            return None
        if tensor.info.encoding != "u8" or len(tensor.info.shape) != 1:
            raise FormatError(f"{self.path}: {quoted(name)} is not a rank-1 u8 tensor, so it is no asset")
        return tensor.raw().tobytes()

    @property
    def optimizer(self) -> OamOptimizer | None:
        """The Optimizer section with its moments, read now; or None. See :attr:`optimizer_kind`."""
        if self._optimizer is None:
            return None
        (kind, lr, beta1, beta2, eps, decay, step), count = self._optimizer
        start = self._sections[layout.OPTIMIZER_SECTION].offset + layout.OPTIMIZER.size
        parts = [
            np.frombuffer(self._file.array((start + 4 * count * index, 4 * count)), "<f4")
            for index in range(layout.OPTIMIZER_MOMENTS[kind])
        ]
        second = parts[1] if len(parts) > 1 else None
        return OamOptimizer(kind, lr, beta1, beta2, eps, decay, step, parts[0], second)

    @property
    def optimizer_kind(self) -> tuple[str, int] | None:
        """Type and step of the Optimizer section, whose moments are not read for that; or None."""
        return None if self._optimizer is None else (self._optimizer[0][0], self._optimizer[0][-1])

    @property
    def sections(self) -> Mapping[int, Section]:
        """The sections by type (see :mod:`oazoo.formats.oam_layout`), in the order of the file's table."""
        return MappingProxyType(self._sections)

    @property
    def weights_checksum(self) -> str:
        """What the file states as checksum of all weights with their names and shapes, ``fnv1a64:`` and 16 hex digits.

        :meth:`verify` tells whether it is true. It finds accidents, not forgery. Empty for a file without weights.
        """
        section = self._sections.get(layout.WEIGHTS)
        return "" if section is None else f"fnv1a64:{section.checksum:016x}"

    def section_bytes(self, kind: int, start: int, size: int) -> bytes:
        """``size`` bytes of a section's payload from ``start`` on, unchecked."""
        section = self._sections[kind]
        if not 0 <= start <= start + size <= section.size:
            raise FormatError(f"{self.path}: {start} to {start + size} is not within {section.name}")
        return self._file.read(section.offset + start, size)

    @property
    def checked_bytes(self) -> int:
        """How many bytes :meth:`verify` reads."""
        return sum(section.size for section in self._sections.values())

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Check the checksum of every section; ``progress`` is called with the bytes done since its last call.

        Raises:
            FormatError: the first section whose bytes are not what was written.
        """
        for section in self._sections.values():
            digest = Fnv1a64()
            for start in range(0, section.size, _HASH_STEP):
                size = min(_HASH_STEP, section.size - start)
                digest.update(self._file.read(section.offset + start, size))
                if progress is not None:
                    progress(size)
            _compare(self.path, section, digest.value)

    def _checked(self, kind: int) -> bytes:
        """The payload of a small section, its checksum checked."""
        section = self._sections[kind]
        data = self._file.read(section.offset, section.size)
        _compare(self.path, section, fnv1a64(data))
        return data

    def _entries(self, kind: int) -> dict[str, MappedTensor]:
        section = self._sections.get(kind)
        if section is None:
            return {}
        return read_entries(self._file, section.offset, section.size, section.name, self.version)

    def _optimizer_header(self) -> tuple[tuple[Any, ...], int] | None:
        section = self._sections.get(layout.OPTIMIZER_SECTION)
        if section is None:
            return None
        if section.size < layout.OPTIMIZER.size:
            raise FormatError(f"Optimizer: {section.size} bytes; at least {layout.OPTIMIZER.size} are needed")
        raw_kind, *hyper, step, count, _ = layout.OPTIMIZER.unpack(
            self._file.read(section.offset, layout.OPTIMIZER.size)
        )
        kind = layout.unpack_text(raw_kind, "Optimizer: type")
        if kind not in layout.OPTIMIZER_MOMENTS:
            raise FormatError(
                f"Optimizer: unknown type {kind!r}; known: {', '.join(layout.OPTIMIZER_MOMENTS)}"
            )
        expected = layout.OPTIMIZER.size + 4 * count * layout.OPTIMIZER_MOMENTS[kind]
        if section.size != expected:
            raise FormatError(
                f"Optimizer: {section.size} bytes, but {kind} over {count} parameters takes {expected} bytes"
            )
        return (kind, *hyper, step), count


def _read_sections(file: MappedFile) -> tuple[int, dict[int, Section]]:
    path = file.path
    header_size = layout.FILE_HEADER.size
    if file.size < header_size:
        raise FormatError(f"{path}: cut short: {file.size} bytes, an .oam file has at least {header_size}")
    header = file.read(0, header_size)
    magic, version, count, flags, total, checksum, reserved = layout.FILE_HEADER.unpack(header)
    if magic != layout.MAGIC:
        raise FormatError(f"{path}: is not an .oam file: begins with {header[:4]!r}")
    if version not in layout.VERSIONS:
        raise FormatError(
            f"{path}: .oam version {version} is not supported; versions 1 to {layout.VERSION} are"
        )
    if total != file.size:
        state = "cut short" if total > file.size else "longer than it should be"
        raise FormatError(f"{path}: {state}: its header says {total} bytes, the file has {file.size}")
    if not 1 <= count <= layout.MAX_SECTIONS:
        raise FormatError(f"{path}: {count} sections; an .oam file has 1 to {layout.MAX_SECTIONS}")
    if flags or any(reserved):
        raise FormatError(f"{path}: nonzero flags or reserved bytes in the file header")
    table = file.read(header_size, count * layout.SECTION_HEADER.size)
    data_start = -(-(header_size + len(table)) // layout.PAGE) * layout.PAGE

    sections: dict[int, Section] = {}
    for kind, compression, _, _, offset, size, packed, check, _ in layout.SECTION_HEADER.iter_unpack(table):
        if kind not in layout.SECTION_NAMES:
            raise FormatError(f"{path}: unknown section type {kind}")
        section = Section(kind, offset, size, check)
        if kind in sections:
            raise FormatError(f"{path}: section {section.name} comes twice")
        if compression or packed:
            raise FormatError(
                f"{path}: section {section.name} is compressed, which the format does not allow"
            )
        if offset < data_start or offset + size > file.size:
            raise FormatError(
                f"{path}: section {section.name} takes bytes {offset} to {offset + size}, outside the data, which is "
                f"{data_start} to {file.size}"
            )
        sections[kind] = section
    _check_disjoint(path, sections)
    _check_manifest(path, version, header, table, checksum, sections)
    for required in (layout.CONFIG_SECTION, layout.PROGRESS_SECTION):
        if required not in sections:
            raise FormatError(f"{path}: has no {layout.SECTION_NAMES[required]} section")
    return version, sections


def _check_disjoint(path: Path, sections: dict[int, Section]) -> None:
    previous: Section | None = None
    for section in sorted(sections.values(), key=lambda item: (item.offset, item.size)):
        if previous is not None and section.offset < previous.offset + previous.size:
            raise FormatError(
                f"{path}: sections {previous.name} and {section.name} overlap at byte {section.offset}"
            )
        if section.size:
            previous = section


def _check_manifest(
    path: Path, version: int, header: bytes, table: bytes, checksum: int, sections: dict[int, Section]
) -> None:
    if version == 1:
        found = 0
        for section in sections.values():
            found ^= section.checksum
    else:
        at = layout.CHECKSUM_AT
        found = fnv1a64(header[: at.start] + bytes(8) + header[at.stop :] + table)
    if found != checksum:
        raise FormatError(
            f"{path}: the header is damaged: its checksum is {checksum:016x}, its bytes give {found:016x}"
        )


def _compare(path: Path, section: Section, found: int) -> None:
    if found != section.checksum:
        raise FormatError(
            f"{path}: section {section.name} is damaged: its checksum is {section.checksum:016x}, its "
            f"{section.size} bytes give {found:016x}; fetch or convert the file again"
        )


def _parse_payload(payload: bytes) -> dict[str, Any]:
    """Our architecture config as a dict; empty where the payload is somebody else's."""
    if not payload.lstrip().startswith(b"{"):
        return {}
    try:
        value = load_object(decode_utf8(payload, "config"), "config")
    except FormatError:
        return {}
    return value if "oazoo" in value else {}
