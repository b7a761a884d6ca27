"""Samples of flow models as files: a grid of pictures, or arrays."""

from __future__ import annotations

import io

import numpy as np

from oazoo.configs import FlowConfig
from oazoo.errors import UsageError
from oazoo.generation.flow_model import FlowSamples
from oazoo.generation.pictures import grid, png

#: Side of a picture in a grid, in pixels, at least.
_SIDE = 48


def picture_of(found: FlowSamples, config: FlowConfig, columns: int | None = None) -> tuple[str, bytes]:
    """What samples look like: ``.png`` and a grid of images, or ``.npy`` and an array of sequences."""
    if config.is_image and config.clip and config.image_channels in (1, 3):
        low, high = (
            config.data_offset[0] - config.data_scale[0],
            config.data_offset[0] + config.data_scale[0],
        )
        larger = max(1, -(-_SIDE // max(config.image_height, config.image_width)))
        return ".png", png(grid(found.values, low, high, columns=columns, enlarge=larger))
    return ".npy", array_file(found)


def array_file(found: FlowSamples) -> bytes:
    """The values as an `.npy` file."""
    file = io.BytesIO()
    np.save(file, found.values, allow_pickle=False)
    return file.getvalue()


def file_of(found: FlowSamples, config: FlowConfig, suffix: str, columns: int | None = None) -> bytes:
    """Samples as a file of a kind: ``.png``, ``.npy``, or ``.npz`` with classes and seed.

    Raises:
        UsageError: no such kind, or samples that make no picture.
    """
    if suffix == ".npy":
        return array_file(found)
    if suffix == ".npz":
        file = io.BytesIO()
        name = "images" if config.is_image else "sequences"
        more = {} if found.classes is None else {"labels": found.classes}
        np.savez(file, **{name: found.values}, **more)  # type: ignore[arg-type]
        return file.getvalue()
    if suffix != ".png":
        raise UsageError(
            f"samples are written as .png, .npy or .npz, not {suffix or 'a file without suffix'!r}"
        )
    kind, content = picture_of(found, config, columns)
    if kind != ".png":
        raise UsageError("these samples make no picture: name an .npy file")
    return content
