"""An ``.oam`` file with another Config section: everything else is copied as it lies, checksums included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from oazoo.formats import oam_layout as layout
from oazoo.formats.atomic import AtomicFile, check_output, check_space, output_error
from oazoo.formats.hashing import fnv1a64
from oazoo.formats.oam import OamSource, Section

_PIECE = 1 << 22


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
