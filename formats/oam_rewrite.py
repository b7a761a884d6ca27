"""An ``.oam`` file with something changed and all else as it was: another Config section, or other values of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from oazoo.formats import oam_layout as layout
from oazoo.formats.atomic import AtomicFile, check_output, check_space, output_error
from oazoo.formats.hashing import fnv1a64
from oazoo.formats.oam import OamSource, Section
from oazoo.formats.oam_writer import OamEntry, OamWriter

_PIECE = 1 << 22


#: A weight's new encoding, and what gives its payload in pieces.
Change = tuple[str, Callable[[], Iterable[npt.NDArray[Any]]]]


def write_with_weights(
    source: OamSource,
    path: Path | str,
    payload: bytes,
    changes: Mapping[str, Change],
    *,
    overwrite: bool = False,
) -> None:
    """Write ``source`` under ``path`` with another architecture config and, by name, other values of some weights.

    Names, shapes, order and state stay; the optimizer's state is left out, for it is about other weights.

    Raises:
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`.
    """
    entries = [
        OamEntry(n, t.info.shape, changes[n][0] if n in changes else t.info.encoding)
        for n, t in source.items()
    ]
    state = {name: t for name, t in source.state.items() if name != layout.CARRIED_ASSET}
    entries += [OamEntry(name, t.info.shape, t.info.encoding, "state") for name, t in state.items()]
    config = replace(source.config, payload=payload)
    with OamWriter(path, config=config, entries=entries, overwrite=overwrite) as writer:
        for name, tensor in source.items():
            writer.write(name, changes[name][1]() if name in changes else tensor.pieces(_PIECE))
        for name, tensor in state.items():
            writer.write(name, tensor.pieces(_PIECE))


def write_with_payload(
    source: OamSource, path: Path | str, payload: bytes, *, overwrite: bool = False
) -> None:
    """Write ``source`` under ``path`` with another architecture config; ``path`` may be the source itself.

    Sections keep their bytes, their checksums and how they are aligned; those behind Config move by whole pages where it
    has grown. The wire version stays.

    Raises:
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`; also when the disk has too little room.
        FormatError: the payload is too long for the format.
    """
    check_output(path, overwrite=overwrite)
    config = replace(source.config, payload=payload).pack()
    old = source.sections[layout.CONFIG_SECTION]
    behind = [s for s in source.sections.values() if s.offset >= old.offset + old.size and s.kind != old.kind]
    # Room up to the next section, which may be less than the old config took with its padding.
    room = min((s.offset for s in behind), default=old.offset + len(config)) - old.offset
    shift = -(-max(0, len(config) - room) // layout.PAGE) * layout.PAGE
    placed: list[tuple[Section, int]] = []
    for section in source.sections.values():
        if section.kind == layout.LEGACY:
            continue  # read over, never written
        moved = section.offset + (shift if section in behind else 0)
        placed.append((section, moved))
    ends = [at + section.size for section, at in placed if section.kind != old.kind]
    size = max([old.offset + len(config), *ends])
    check_space(path, size)
    output = AtomicFile(path, overwrite=overwrite)
    try:
        file = output.file
        file.truncate(size)
        table = b""
        checks = 0
        for section, at in placed:
            length, check = section.size, section.checksum
            if section.kind == old.kind:
                length, check = len(config), fnv1a64(config)
                file.seek(at)
                file.write(config)
            else:
                for start in range(0, length, _PIECE):
                    file.seek(at + start)
                    file.write(source.section_bytes(section.kind, start, min(_PIECE, length - start)))
            checks ^= check
            table += layout.SECTION_HEADER.pack(section.kind, 0, b"", 0, at, length, 0, check, b"")
        header = [layout.MAGIC, source.version, len(placed), 0, size, 0, b""]
        header[5] = checks if source.version == 1 else fnv1a64(layout.FILE_HEADER.pack(*header) + table)
        file.seek(0)
        file.write(layout.FILE_HEADER.pack(*header) + table)
    except BaseException as error:
        output.abort()
        if isinstance(error, OSError):
            raise output_error(path, error) from error
        raise
    output.commit()
