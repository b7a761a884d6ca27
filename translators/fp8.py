"""FP8 checkpoints with a scale for each block of a weight (DeepSeek-V3's form): decoded while they are read.

``X.weight`` in F8_E4M3 or F8_E5M2, of rank 2, and ``X.weight_scale_inv``: value = weight · scale of its block. Blocks are
128×128 as a rule, those at the edges smaller. The product is taken in float32, which rounds it once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import TranslationError
from oazoo.formats.messages import quoted
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource
from oazoo.translators.translator import Checkpoint

SUFFIX = "_scale_inv"
_WEIGHTS = ("f8_e4m3", "f8_e5m2")
_SCALES = ("f32", "bf16", "f16", "f8_e8m0")
_BLOCK = (128, 128)
Floats = npt.NDArray[np.float32]


def decode_fp8(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with FP8 weights and their scales taken together as f32 weights; itself where it has none.

    Raises:
        TranslationError: the checkpoint says that it is FP8 in another way, a weight lacks its scale or a scale its weight,
            or the two do not fit.
    """
    if checkpoint.naming != "hf":
        return checkpoint
    source = checkpoint.source
    stated = checkpoint.config.get("quantization_config")
    block = _block(checkpoint, stated)
    if stated and block is None:
        return checkpoint  # packed in another way, which is refused as such
    scales = [name for name in source if name.endswith(SUFFIX)]
    if not scales and block is None:
        return checkpoint
    tensors: dict[str, SourceTensor] = {}
    for scale in scales:
        name = scale.removesuffix(SUFFIX)
        if name not in source:
            raise TranslationError(f"{source.path}: the scale {quoted(scale)} has no weight {quoted(name)}")
        tensors[name] = _scaled(checkpoint, source[name], source[scale], block or _BLOCK)
    for name, tensor in source.items():
        if name in tensors or name.endswith(SUFFIX):
            continue
        if tensor.info.encoding in _WEIGHTS:
            raise TranslationError(
                f"{source.path}: {quoted(name)} is FP8, but its scale {quoted(name + SUFFIX)} is missing, and without it "
                "the values are off by a factor; fetch the model again"
            )
        tensors[name] = tensor
    if not scales:
        raise TranslationError(
            f"{checkpoint.where}: the checkpoint is said to be packed by fp8, but no weight of it has a scale (…{SUFFIX})"
        )
    ordered = {name: tensors[name] for name in source if name in tensors}
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    rows, columns = block or _BLOCK
    note = (
        f"{len(scales)} FP8 weights were multiplied with their scales, one for {rows}×{columns} values, and are f32 from "
        "here on (--dtype bf16 halves that)"
    )
    return replace(checkpoint, source=_Fp8Source(source, ordered, note), config=config)


def _block(checkpoint: Checkpoint, stated: Any) -> tuple[int, int] | None:
    """The block that the config states for FP8; None if it says nothing of FP8 (other methods are refused elsewhere).

    Raises:
        TranslationError: FP8, but with scales of another kind.
    """
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "fp8":
        return None
    where = f"{checkpoint.where}: quantization_config"
    if stated.get("activation_scheme", "dynamic") != "dynamic":
        raise TranslationError(f"{where}: FP8 with scales for activations is not supported")
    block = stated.get("weight_block_size", list(_BLOCK))
    if (
        not isinstance(block, (list, tuple))
        or len(block) != 2
        or any(type(size) is not int or not 0 < size <= 1 << 20 for size in block)
    ):
        raise TranslationError(
            f"{where}: weight_block_size is {quoted(block)}; supported is a block of two sizes"
        )
    return block[0], block[1]


def _scaled(
    checkpoint: Checkpoint, weight: SourceTensor, scale: SourceTensor, block: tuple[int, int]
) -> SourceTensor:
    at = f"{checkpoint.source.path}: {quoted(weight.info.name)}"
    if weight.info.encoding not in _WEIGHTS:
        raise TranslationError(
            f"{at} has a scale, but is {weight.info.encoding}; supported: {', '.join(_WEIGHTS)}"
        )
    if scale.info.encoding not in _SCALES:
        raise TranslationError(f"{at}: its scale is {scale.info.encoding}; supported: {', '.join(_SCALES)}")
    shape = weight.info.shape
    if len(shape) != 2:
        raise TranslationError(f"{at}: FP8 weights with scales have two dimensions, not {len(shape)}")
    wanted = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    if scale.info.shape != wanted:
        raise TranslationError(
            f"{at}: shape {list(shape)} in blocks of {list(block)} takes scales of shape {list(wanted)}, not "
            f"{list(scale.info.shape)}"
        )
    return _ScaledTensor(weight, scale, block)


class _ScaledTensor(SourceTensor):
    """A weight times the scales of its blocks, as f32, made while it is read."""

    def __init__(self, weight: SourceTensor, scale: SourceTensor, block: tuple[int, int]) -> None:
        self.info = TensorInfo(weight.info.name, weight.info.shape, "f32", 4 * weight.info.numel)
        self._weight, self._scale, self._block = weight, scale, block

    def raw(self) -> npt.NDArray[np.uint8]:
        data = self.numpy().reshape(-1).view(np.uint8)
        data.flags.writeable = False
        return data

    def numpy(self) -> Floats:
        values = np.empty(self.info.shape, np.float32)
        flat, at = values.reshape(-1), 0
        for piece in self.chunks(1 << 18):
            flat[at : at + piece.size] = piece
            at += piece.size
        return values

    def chunks(self, elements: int) -> Iterator[Floats]:
        rows, columns = self.info.shape
        scale = self._scale.numpy().astype(np.float32)
        start = 0
        # Pieces of whole rows of the stored weight; a row is many times shorter than a piece.
        for stored in self._weight.chunks(max(1, elements // max(1, columns)) * columns):
            count = stored.size // columns
            values = stored.reshape(count, columns).astype(np.float32)
            taken = scale[np.arange(start, start + count) // self._block[0]]
            with np.errstate(all="ignore"):
                values *= np.repeat(taken, self._block[1], axis=1)[:, :columns]
            start += count
            yield values.reshape(-1)
        assert start == rows or not columns


class _Fp8Source(WeightSource):
    """A checkpoint seen with its weights decoded."""

    def __init__(self, source: WeightSource, tensors: Mapping[str, SourceTensor], note: str) -> None:
        self._source = source
        self._tensors = tensors
        self.format, self.path, self.files = source.format, source.path, source.files
        self.metadata, self.notes = source.metadata, (*source.notes, note)

    def close(self) -> None:
        self._source.close()
