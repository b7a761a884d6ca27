"""Open any supported container, told apart by content: a file name proves nothing."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from oazoo.errors import FormatError
from oazoo.formats.gguf_metadata import MAGIC as GGUF_MAGIC
from oazoo.formats.gguf_split import open_gguf
from oazoo.formats.hf_folder import ShardedSource, find_weights
from oazoo.formats.mapped import MappedFile, open_regular
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import MAGIC as OAM_MAGIC
from oazoo.formats.safetensors import MAX_HEADER, SafetensorsSource
from oazoo.formats.source import WeightSource

SUPPORTED = (
    "SafeTensors (one file, or a sharded index), GGUF (versions 2 and 3), ONNX, PyTorch checkpoints of plain tensors "
    "(torch.save) and .oam"
)

_HEAD = 512


def open_source(path: Path | str) -> WeightSource:
    """Open a weights file, a SafeTensors index, or a model folder, whatever its name.

    Raises:
        UsageError: there is no such file, or a folder in which no single set of weights can be told.
        FormatError: the content is not supported, or is damaged. Pickles are never loaded: of a PyTorch checkpoint tensors
            and plain values are read without running it, and it is refused when it asks for anything else.
    """
    path = Path(path)
    if path.is_dir():
        chosen, notes = find_weights(path)
        source = open_source(chosen)
        source.notes = (*notes, *source.notes)
        return source
    with open_regular(path) as file:
        head = file.read(_HEAD)
    if head.startswith(GGUF_MAGIC):
        return open_gguf(path)
    if head.startswith(struct.pack("<I", OAM_MAGIC)):
        return OamSource(path)
    if _looks_like_safetensors(head):
        return SafetensorsSource(path)
    if head.lstrip()[:1] == b"{":
        return ShardedSource(path)
    if _looks_like_torch(head):
        from oazoo.formats.torch_zip import TorchSource

        return TorchSource(path)
    if _looks_like_onnx(path, head):
        from oazoo.formats.onnx import OnnxSource

        return OnnxSource(path)
    raise FormatError(f"{path}: {_what_it_is(head)}; supported are {SUPPORTED}")


def _looks_like_safetensors(head: bytes) -> bool:
    # Eight bytes of length, then "{". A length that is out of bounds is the reader's to explain.
    return (
        len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= max(MAX_HEADER, 1 << 32)
    )


def _looks_like_torch(head: bytes) -> bool:
    """Whether a zip begins as torch.save writes it: with the pickle, or a record that only its archives have."""
    if not head.startswith(b"PK\x03\x04") or b".npy" in head:
        return False
    return b".pkl" in head or b"/byteorder" in head or b"/version" in head or b"/.format_version" in head


def _looks_like_onnx(path: Path, head: bytes) -> bool:
    from oazoo.formats.onnx import FIRST_BYTES, looks_like_onnx

    # Cheap on anything else: the first byte of a ModelProto is the tag of one of its fields.
    if looks_like_onnx(head):
        return True
    if head[:1] not in FIRST_BYTES or _looks_like_pickle(head):
        return False
    file = MappedFile(path)
    try:
        return looks_like_onnx(head, file)
    finally:
        file.close()


def _what_it_is(head: bytes) -> str:
    """What an unsupported file is, as far as its first bytes tell, and what to do about it."""
    from oazoo.formats.torch_zip import HOW

    if not head:
        return "is empty; fetch it again"
    if head.startswith(b"PK\x03\x04") and b".npy" in head:
        return "is a NumPy archive (.npz)"
    if head.startswith(b"PK\x03\x04"):
        return "is a zip archive; unpack it, or if it is a PyTorch checkpoint: " + HOW
    if _looks_like_pickle(head):
        return f"is a Python pickle, which can run code when loaded and is never read; {HOW}"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; fetch the file with: git lfs pull"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "is an HDF5 file"
    if head.startswith(b"\x93NUMPY"):
        return "is a NumPy array file"
    if head.lstrip()[:1] == b"<":
        return "is a web page or XML, not weights: the download went wrong"
    if len(head) >= 265 and head[257:262] == b"ustar":
        return f"is a tar archive; unpack it, or if it is an old PyTorch checkpoint: {HOW}"
    return f"has unknown content (first bytes: {head[:8].hex(' ')})"


def _looks_like_pickle(head: bytes) -> bool:
    # Protocols 2 to 5 announce themselves. Older pickles are opcodes from the first byte on: a mark, an empty container,
    # or a global, which is two lines of text.
    if head[:1] == b"\x80" and len(head) > 1 and 2 <= head[1] <= 5:
        return True
    if re.match(rb"[c(]+[\w.]+\n\w+\n", head):
        return True
    return head[:2] in (b"(d", b"(l", b"(c", b"(i", b"(t", b"}q", b"]q", b"}(", b"](")
