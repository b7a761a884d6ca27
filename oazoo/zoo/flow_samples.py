"""Samples of flow models as files: a grid of pictures, or arrays."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import FlowConfig
from oazoo.errors import FormatError, UsageError
from oazoo.formats.atomic import check_output, write_atomically
from oazoo.generation.flow_model import FlowSamples
from oazoo.generation.pictures import grid, png
from oazoo.runtime import Device
from oazoo.zoo.load import load_flow
from oazoo.zoo.progress import Progress

#: Side of a picture in a grid, in pixels, at least.
_SIDE = 48
_SUFFIXES = (".png", ".npy", ".npz")


def _makes_picture(config: FlowConfig) -> bool:
    return config.is_image and config.clip and config.image_channels in (1, 3)


def picture_of(found: FlowSamples, config: FlowConfig, columns: int | None = None) -> tuple[str, bytes]:
    """What samples look like: ``.png`` and a grid of images, or ``.npy`` and an array of sequences."""
    if _makes_picture(config):
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


def sample_to_file(
    model: str | Path,
    output: Path,
    *,
    classes: Sequence[int] = (),
    count: int | None = None,
    conditions: Path | None = None,
    mask: Path | None = None,
    columns: int | None = None,
    overwrite: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load a flow model, sample, and write a file; all that can be refused is refused before anything is sampled.

    Args:
        model: as :func:`oazoo.load_flow` takes it.
        output: ``.png``, ``.npy`` or ``.npz``.
        classes: one, or several in turn; all in turn if there are none.
        count: how many; one a class or condition if None.
        conditions, mask: `.npy` files, see :meth:`FlowModel.sample`.
        columns: of a grid.
        overwrite: replace the file if there is one.
        device: which, as ``OAZOO_DEVICE`` says it.
        options: of :meth:`FlowModel.sample`.

    Returns:
        What was done: ``count``, ``shape``, ``seconds``, ``file`` and the options.
    """
    if output.suffix not in _SUFFIXES:
        raise UsageError(f"{output}: samples are written as {', '.join(_SUFFIXES)}")
    if columns is not None and not 1 <= columns <= 1 << 12:
        raise UsageError(f"{columns} columns: there must be 1 to {1 << 12:,}")
    check_output(output, overwrite=overwrite)
    told = None if conditions is None else array_of(conditions)
    keep = None if mask is None else array_of(mask)
    where = None if device is None else Device.open(device)
    loaded = load_flow(model, device=where, progress=progress, notify=notify)
    config = loaded.config
    if output.suffix == ".png" and not _makes_picture(config):
        raise UsageError(f"{loaded.name} makes no pictures: name an .npy file")
    if count is None and config.num_classes:
        count = len(classes) or config.num_classes
    start = time.perf_counter()
    found = loaded.sample(
        list(classes) or None, count, conditions=told, mask=keep, progress=progress, **options
    )
    seconds = time.perf_counter() - start
    if not np.isfinite(found.values).all():
        raise UsageError(
            f"{loaded.name}: samples are not finite; a smaller guidance scale or more steps may help"
        )
    write_atomically(output, file_of(found, config, output.suffix, columns), overwrite=overwrite)
    facts = {"count": len(found.values), "shape": list(found.values.shape), "seconds": seconds}
    return {"file": str(output), **facts, **options}


def array_of(path: Path) -> npt.NDArray[np.float32]:
    """The numbers of an `.npy` file of at most 1 GiB; nothing in it is run.

    Raises:
        UsageError: there is no such file, or it holds no finite numbers.
        FormatError: it is no file of NumPy.
    """
    try:
        found = np.load(path, allow_pickle=False, mmap_mode="r")
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except (OSError, ValueError, EOFError) as error:
        raise FormatError(f"{path}: is no .npy file: {str(error)[:200]}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiub" or found.nbytes > 1 << 30:
        raise UsageError(f"{path}: must be an .npy file of numbers, of at most 1 GiB")
    values = np.array(found, np.float32)
    if not np.isfinite(values).all():
        raise UsageError(f"{path}: has values that are not finite")
    return values
