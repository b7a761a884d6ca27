"""What flow models learn from: images and sequences in NumPy's files, or scikit-learn's digits; and batches of them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.training.order import permutation

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int32]
#: Bytes that the arrays of a file may take unpacked; they are held in memory.
MAX_BYTES = 8 << 30
#: Names of arrays in an .npz file.
_VALUES = ("images", "sequences", "x", "data")
_LABELS = ("labels", "y", "classes", "target")
_OTHERS = ("conditions", "mask")


@dataclass(frozen=True)
class FlowData:
    """Images or sequences in their own units, and what is known of each.

    Attributes:
        values: f32 [items, height, width, channels] of images, or [items, tokens, values] of sequences.
        labels: class numbers, int32 [items], or None.
        conditions: f32 [items, features], or None.
        mask: f32 [items, tokens], 1 for tokens that are there; of sequences, or None.
        low, high: the range of values that an image can have; None for sequences.
        where: what it was read from, for messages.
    """

    values: Floats
    labels: Numbers | None = None
    conditions: Floats | None = None
    mask: Floats | None = None
    low: float | None = None
    high: float | None = None
    where: str = ""

    @property
    def count(self) -> int:
        """Items."""
        return len(self.values)

    @property
    def is_image(self) -> bool:
        """Whether it is images."""
        return self.values.ndim == 4

    def take(self, which: npt.NDArray[Any]) -> FlowData:
        """Some items: by number, or by a mask."""
        rest: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[which]
            for name in ("labels", "conditions", "mask")
        }
        return replace(self, values=self.values[which], **rest)

    def of_classes(self, classes: Sequence[int]) -> FlowData:
        """Only the items of some classes, with the numbers they have.

        Raises:
            UsageError: there are no labels, or no items of a class.
        """
        if self.labels is None:
            raise UsageError(f"{self.where}: has no labels, so no classes can be chosen")
        for number in classes:
            if not (self.labels == number).any():
                found = sorted({int(n) for n in self.labels})[:20]
                raise UsageError(
                    f"{self.where}: has nothing of class {number}; it has {', '.join(map(str, found))}"
                )
        return self.take(np.isin(self.labels, np.asarray(list(classes))))

    def split(self, share: float, seed: int) -> tuple[FlowData, FlowData | None]:
        """What is learned from, and what is held back (None if that would be nothing)."""
        held = round(self.count * share)
        if not held:
            return self, None
        if held >= self.count:
            raise UsageError(f"{self.where}: a share of {share:g} held back leaves nothing to learn from")
        order = permutation(self.count, seed, 0)
        return self.take(np.sort(order[held:])), self.take(np.sort(order[:held]))

    def digest(self) -> str:
        """SHA-256 of all of it."""
        found = hashlib.sha256(json.dumps([self.values.shape, self.low, self.high]).encode())
        for array in (self.values, self.labels, self.conditions, self.mask):
            found.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
        return found.hexdigest()


def digits() -> FlowData:
    """scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels from 0 to 16.

    Raises:
        UsageError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"the digits come with scikit-learn, which cannot be imported ({error}): pip install 'oazoo[digits]', or bring "
            "images of your own (--data FILE.npz)"
        ) from error
    found = load_digits()
    images = np.asarray(found.images, np.float32)[..., None]
    return FlowData(
        images, np.asarray(found.target, np.int32), low=0.0, high=16.0, where="scikit-learn's digits"
    )


def load_flow_data(files: Sequence[Path]) -> FlowData:
    """The items of `.npy` and `.npz` files, one after the other.

    An `.npz` file has ``images`` ([items, height, width] or with channels last; uint8, or floats) or ``sequences`` ([items,
    tokens, values]), and may have ``labels`` ([items] whole numbers from 0), ``conditions`` ([items, features]) and, for
    sequences, ``mask`` ([items, tokens]). An `.npy` file has images or sequences alone: uint8 is images.

    Raises:
        UsageError: files that do not fit each other, or shapes and values that cannot be learned from.
        FormatError: a file that NumPy cannot read.
    """
    parts = [_read(Path(file)) for file in files]
    if not parts:
        raise UsageError("no data: name .npy or .npz files (--data)")
    first = parts[0]
    for part in parts[1:]:
        same = all(
            (getattr(first, name) is None) == (getattr(part, name) is None)
            for name in ("labels", "conditions", "mask")
        )
        if part.values.shape[1:] != first.values.shape[1:] or not same:
            raise UsageError(f"{part.where}: holds other things than {first.where}")
    if len(parts) == 1:
        return first
    joined: dict[str, Any] = {
        name: None
        if getattr(first, name) is None
        else np.concatenate([getattr(part, name) for part in parts])
        for name in ("values", "labels", "conditions", "mask")
    }
    lows = [part.low for part in parts if part.low is not None]
    highs = [part.high for part in parts if part.high is not None]
    return replace(
        first,
        **joined,
        low=min(lows) if lows else None,
        high=max(highs) if highs else None,
        where=f"{first.where} and {len(parts) - 1} more",
    )


def _read(path: Path) -> FlowData:
    arrays = _arrays(path)
    names = [name for name in _VALUES if name in arrays]
    if len(names) != 1:
        raise UsageError(
            f"{path}: must hold images or sequences, one array; it holds {', '.join(map(repr, arrays))[:200] or 'none'}"
        )
    unknown = sorted(set(arrays) - {*names, *_LABELS, *_OTHERS})
    if unknown:
        known = ", ".join([*_VALUES, *_LABELS, *_OTHERS])
        raise UsageError(f"{path}: holds {unknown[0]!r}; known are {known}")
    raw = arrays[names[0]]
    images = names[0] == "images" or (names[0] != "sequences" and (raw.dtype == np.uint8 or raw.ndim == 4))
    if raw.dtype.kind not in "fiub" or raw.size == 0:
        raise UsageError(f"{path}: {names[0]} must be numbers, and some; it is {raw.dtype} {list(raw.shape)}")
    values = _finite(path, names[0], raw)
    if images and values.ndim == 3:
        values = values[..., None]
    if values.ndim != (4 if images else 3) or min(values.shape) < 1:
        shape = "[items, height, width(, channels)]" if images else "[items, tokens, values]"
        raise UsageError(f"{path}: {names[0]} has shape {list(raw.shape)}; it must be {shape}")
    count = len(values)
    labels = next((arrays[name] for name in _LABELS if name in arrays), None)
    if labels is not None:
        whole = labels.dtype.kind in "iu" or (
            labels.dtype.kind == "f" and bool((labels == np.trunc(labels)).all())
        )
        if labels.shape != (count,) or not whole or labels.min() < 0 or labels.max() >= 1 << 20:
            raise UsageError(
                f"{path}: labels must be {count} whole numbers from 0 to {(1 << 20) - 1}; they are {labels.dtype} "
                f"{list(labels.shape)}"
            )
        labels = labels.astype(np.int32)
    conditions = arrays.get("conditions")
    if conditions is not None:
        conditions = _finite(path, "conditions", conditions)
        if conditions.ndim != 2 or conditions.shape[0] != count or not conditions.shape[1]:
            raise UsageError(
                f"{path}: conditions have shape {list(conditions.shape)}, not [{count}, features]"
            )
        if labels is not None:
            raise UsageError(f"{path}: has labels and conditions; a model is told one of them")
    mask = arrays.get("mask")
    if mask is not None:
        mask = (_finite(path, "mask", mask) != 0).astype(np.float32)
        if images or mask.shape != values.shape[:2] or not mask.any(axis=1).all():
            raise UsageError(
                f"{path}: a mask is for sequences, [{count}, {values.shape[1]}], with a token in each"
            )
    low = high = None
    if images:
        low, high = (0.0, 255.0) if raw.dtype == np.uint8 else (float(values.min()), float(values.max()))
        if not high > low:
            raise UsageError(f"{path}: all pixels are {low:g}; there is nothing to learn")
    return FlowData(values, labels, conditions, mask, low, high, str(path))


def _finite(path: Path, name: str, array: npt.NDArray[Any]) -> Floats:
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{path}: {name} must be numbers, not {array.dtype}")
    values = array.astype(np.float32)
    if not np.isfinite(values).all():
        bad = np.argwhere(~np.isfinite(values))[0].tolist()
        raise UsageError(f"{path}: {name} has values that are not finite, the first at {bad}")
    return values


def _arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file by name; nothing in it is ever run."""
    if path.suffix not in (".npy", ".npz"):
        raise UsageError(f"{path}: images and sequences are read from .npy and .npz files")
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False, mmap_mode="r")
            _check_size(path, array.nbytes)
            return {"x": np.array(array)}
        with zipfile.ZipFile(path) as archive:
            _check_size(path, sum(entry.file_size for entry in archive.infolist()))
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, NotImplementedError) as error:
        raise FormatError(f"{path}: is no file of NumPy: {str(error)[:200]}") from error


def _check_size(path: Path, nbytes: int) -> None:
    if nbytes > MAX_BYTES:
        raise UsageError(f"{path}: holds {nbytes:,} bytes; {MAX_BYTES:,} are the most that is read")


@dataclass(frozen=True)
class FlowBatch:
    """Items that are learned from together.

    Attributes:
        arrays: what a step is given: values f32 [items, tokens, token_size] as the model sees them; then, where there are
            any, class numbers int32 [items] or conditions f32 [items, features]; then the mask f32 [items, tokens].
        samples: items.
        tokens: tokens that count.
        where: for messages.
    """

    arrays: tuple[npt.NDArray[Any], ...]
    samples: int
    tokens: int
    where: str


class FlowItems:
    """Items as a model sees them.

    Args:
        data: images or sequences.
        tokens: their values as tokens, f32 [items, tokens, token_size], scaled.
    """

    def __init__(self, data: FlowData, tokens: Floats) -> None:
        self.data, self.tokens = data, tokens

    def batch(self, which: npt.NDArray[np.int64]) -> FlowBatch:
        """Items by number."""
        data = self.data
        parts: list[npt.NDArray[Any]] = [self.tokens[which]]
        for told in (data.labels, data.conditions, data.mask):
            if told is not None:
                parts.append(told[which])
        counted = len(which) * self.tokens.shape[1] if data.mask is None else int(data.mask[which].sum())
        where = f"{data.where}: item {int(which[0])} and {len(which) - 1} more"
        return FlowBatch(tuple(map(np.ascontiguousarray, parts)), len(which), counted, where)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the items."""
        return self.data.digest()


class FlowBatches:
    """Batches without end; every pass has each item once, in an order of its own (see ``Batches`` of the loop).

    Args:
        items: to learn from.
        batch_size: items of a batch.
        accumulate: batches of a step.
        seed: of the orders.
    """

    def __init__(self, items: FlowItems, batch_size: int, *, accumulate: int = 1, seed: int = 0) -> None:
        self._items, self.batch_size, self.accumulate, self._seed = items, batch_size, accumulate, seed
        self._epoch = self._index = 0
        self._order = permutation(items.data.count, seed, 1)

    @property
    def epoch(self) -> int:
        """The pass that the next batch begins in, from 0."""
        return self._epoch

    @property
    def steps_per_epoch(self) -> float:
        """Steps of a pass."""
        return len(self._order) / (self.batch_size * self.accumulate)

    @property
    def digest(self) -> str:
        """SHA-256 of the items."""
        return self._items.digest

    def next(self) -> list[FlowBatch]:
        """The batches of the next step."""
        return [self._items.batch(self._take()) for _ in range(self.accumulate)]

    def _take(self) -> npt.NDArray[np.int64]:
        chosen: list[npt.NDArray[np.int64]] = []
        missing = self.batch_size
        while missing:
            part = self._order[self._index : self._index + missing]
            chosen.append(part)
            missing -= len(part)
            self._index += len(part)
            if self._index == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = permutation(len(self._order), self._seed, self._epoch + 1)
        return np.concatenate(chosen)

    def state(self) -> dict[str, Any]:
        """The position, as JSON values."""
        return {"epoch": self._epoch, "index": self._index, "data": self.digest}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state` gave.

        Raises:
            FormatError: it is no such position.
            UsageError: it is one in other data.
        """
        epoch, index = state.get("epoch"), state.get("index")
        for value in (epoch, index):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise FormatError(f"the position in the data is damaged: {str(dict(state))[:200]}")
        if state.get("data") != self.digest:
            raise UsageError("the run was trained on other data; to go on exactly, the same is needed")
        assert isinstance(epoch, int) and isinstance(index, int)
        if index >= len(self._order):
            raise FormatError(f"the position in the data is damaged: item {index} of {len(self._order)}")
        self._epoch, self._index = epoch, index
        self._order = permutation(len(self._order), self._seed, epoch + 1)


def one_flow_pass(items: FlowItems, batch_size: int, limit: int) -> Iterator[FlowBatch]:
    """Each item once, in order, for validation, at most ``limit`` batches; a last part that fills no batch is left out.

    Fewer items than a batch come over and over until they fill one.
    """
    count = items.data.count
    if count < batch_size:
        yield items.batch(np.arange(batch_size, dtype=np.int64) % count)
        return
    for start in range(0, count - batch_size + 1, batch_size)[:limit]:
        yield items.batch(np.arange(start, start + batch_size, dtype=np.int64))
