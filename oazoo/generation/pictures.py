"""Pictures in files: a grid of images as PNG, written with nothing but the standard library."""

from __future__ import annotations

import math
import struct
import zlib

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError

_MAGIC = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2


def grid(
    images: npt.NDArray[np.float32],
    low: float,
    high: float,
    *,
    columns: int | None = None,
    enlarge: int = 1,
    gap: int = 1,
) -> npt.NDArray[np.uint8]:
    """Images beside and below each other.

    Args:
        images: [items, height, width, channels], 1 or 3 channels.
        low, high: what becomes black and white.
        columns: of the grid; about as many as rows if None.
        enlarge: pixels that one becomes, along each side.
        gap: pixels between images.

    Returns:
        uint8 [height, width, channels].

    Raises:
        UsageError: no images, or of another number of channels.
    """
    if images.ndim != 4 or not len(images) or images.shape[3] not in (1, 3):
        raise UsageError(
            f"images of shape {list(images.shape)} make no picture: they need 1 channel or 3, and one at least"
        )
    count, height, width, channels = images.shape
    across = columns or math.ceil(math.sqrt(count))
    down = math.ceil(count / across)
    levels = np.clip((images - low) / (high - low), 0, 1)
    pixels = np.round(levels * 255).astype(np.uint8).repeat(enlarge, 1).repeat(enlarge, 2)
    height, width = height * enlarge, width * enlarge
    sheet = np.full((down * (height + gap) + gap, across * (width + gap) + gap, channels), 96, np.uint8)
    for index, image in enumerate(pixels):
        y, x = gap + index // across * (height + gap), gap + index % across * (width + gap)
        sheet[y : y + height, x : x + width] = image
    return sheet


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file (ISO/IEC 15948) of uint8 [height, width, 1 or 3]."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if channels == 1 else _RGB, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return _MAGIC + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in parts
    )
