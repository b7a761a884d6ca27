"""The tensor tables of an ``.oam`` file's Weights and State sections."""

from __future__ import annotations

import itertools
from typing import Any

from oazoo.errors import FormatError
from oazoo.formats import encodings
from oazoo.formats import oam_layout as layout
from oazoo.formats.mapped import MappedFile, MappedTensor
from oazoo.formats.messages import quoted
from oazoo.formats.source import TensorInfo
from oazoo.formats.strict_json import decode_utf8, load_object


def read_entries(
    file: MappedFile, offset: int, size: int, section: str, version: int
) -> dict[str, MappedTensor]:
    """Read and check the tensor table of the section at ``[offset, offset + size)``.

    Raises:
        FormatError: any rule of the specification is broken; the message has section and tensor.
    """
    if size < layout.COUNT.size:
        raise FormatError(f"{section}: {size} bytes; at least {layout.COUNT.size} are needed")
    count, reserved = layout.COUNT.unpack(file.read(offset, layout.COUNT.size))
    if reserved:
        raise FormatError(f"{section}: nonzero reserved bytes after the tensor count")
    table_size = count * layout.ENTRY.size
    blob_size = size - layout.COUNT.size - table_size
    if blob_size < 0:
        raise FormatError(f"{section}: announces {count} tensors, more than its {size} bytes can hold")
    blob = offset + layout.COUNT.size + table_size
    tensors: dict[str, MappedTensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for fields in layout.ENTRY.iter_unpack(file.read(offset + layout.COUNT.size, table_size)):
        start, info = _entry(fields, section, version)
        if info.name in tensors:
            raise FormatError(f"{section}: tensor {quoted(info.name)} comes twice")
        if start + info.nbytes > blob_size:
            raise FormatError(
                f"{section}: tensor {quoted(info.name)} takes bytes {start} to {start + info.nbytes} of the data, which has "
                f"{blob_size}"
            )
        tensors[info.name] = MappedTensor(info, file, blob + start)
        if info.nbytes:
            ranges.append((start, start + info.nbytes, info.name))
    ranges.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise FormatError(
                f"{section}: tensors {quoted(one)} and {quoted(other)} overlap: "
                f"one ends at byte {end} of the data, the other begins at {begin}"
            )
    return tensors


def _entry(fields: tuple[Any, ...], section: str, version: int) -> tuple[int, TensorInfo]:
    raw_name, start, nbytes, dtype, rank, encoding, block, reserved, *shape = fields
    name = layout.unpack_text(raw_name, f"{section}: a tensor name")
    if not name:
        raise FormatError(f"{section}: a tensor has an empty name")
    what = f"{section}: tensor {quoted(name)}"
    if rank > layout.MAX_RANK:
        raise FormatError(f"{what}: rank {rank}; at most {layout.MAX_RANK} is allowed")
    if any(shape[rank:]):
        raise FormatError(f"{what}: rank {rank}, but sizes beyond it: {shape}")
    if any(reserved):
        raise FormatError(f"{what}: nonzero reserved bytes")
    if dtype >= len(layout.DTYPES):
        raise FormatError(f"{what}: unknown dtype code {dtype}")
    if version < 3 and (encoding or block):
        raise FormatError(
            f"{what}: encoding {encoding} and block size {block} in version {version}, which has none"
        )
    if encoding == 0:
        kind, expected_block = layout.DTYPES[dtype], 0
    elif encoding in layout.BLOCK_ENCODINGS:
        kind, expected_block = layout.BLOCK_ENCODINGS[encoding], layout.BLOCK_SIZE
        if dtype != 0:
            raise FormatError(f"{what}: {kind} with dtype {layout.DTYPES[dtype]}; it must be f32")
        if section != layout.SECTION_NAMES[layout.WEIGHTS]:
            raise FormatError(f"{what}: {kind} is allowed in Weights only")
    else:
        raise FormatError(f"{what}: unknown encoding code {encoding}")
    if block != expected_block:
        raise FormatError(f"{what}: block size {block}; {kind} has {expected_block}")
    dimensions = tuple(shape[:rank])
    try:
        if encoding and encodings.numel(dimensions) == 0:
            raise FormatError(f"{kind} with zero elements")
        expected = encodings.get(kind).bytes_for(dimensions)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    if nbytes != expected:
        raise FormatError(f"{what}: {nbytes} bytes, but {kind} of shape {list(dimensions)} takes {expected}")
    return start, TensorInfo(name, dimensions, kind, nbytes)


def apply_carried(tensors: dict[str, MappedTensor], asset: bytes) -> dict[str, MappedTensor]:
    """Give tensors that are stored as u8 for want of a dtype code their true type (see ``layout.CARRIED_ASSET``).

    Raises:
        FormatError: the asset is not of its form, or disagrees with the tensors.
    """
    what = layout.CARRIED_ASSET
    result = dict(tensors)
    for name, entry in load_object(decode_utf8(asset, what), what).items():
        stored = tensors.get(name)
        if stored is None:
            raise FormatError(f"{what}: names {quoted(name)}, which is not a weight of this file")
        if not isinstance(entry, dict) or entry.keys() != {"encoding", "shape"}:
            raise FormatError(f"{what}: {quoted(name)}: must have exactly 'encoding' and 'shape'")
        encoding, shape = entry["encoding"], entry["shape"]
        if encoding not in layout.CARRIED:
            raise FormatError(
                f"{what}: {quoted(name)}: {quoted(encoding)} is not one of {', '.join(layout.CARRIED)}"
            )
        if (
            not isinstance(shape, list)
            or len(shape) > layout.MAX_RANK
            or any(type(n) is not int for n in shape)
        ):
            raise FormatError(
                f"{what}: {quoted(name)}: shape {quoted(shape)} is not a list of at most {layout.MAX_RANK} sizes"
            )
        if (
            stored.info.encoding != "u8"
            or encodings.get(encoding).bytes_for(tuple(shape)) != stored.info.nbytes
        ):
            raise FormatError(
                f"{what}: {quoted(name)}: {encoding} of shape {shape} does not fit the stored {stored.info.encoding} of "
                f"{stored.info.nbytes} bytes"
            )
        result[name] = stored.with_type(encoding, tuple(shape))
    return result
