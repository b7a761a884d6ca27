"""LoRA adapters as llama.cpp keeps them: a GGUF file of ``adapter.type`` lora.

A tensor *t* of the model has ``<t>.lora_a`` [rank, in] and ``<t>.lora_b`` [out, rank], and the file has one alpha for all:
what is added is alpha / rank · B · A.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats.gguf import GgufSource
from oazoo.formats.gguf_writer import write_gguf
from oazoo.formats.lora import Adapter, LoraPair, matrix
from oazoo.formats.messages import quoted, some
from oazoo.formats.source import SourceTensor, TensorInfo
from oazoo.formats.streamed import StreamedTensor

Floats = npt.NDArray[np.float32]


def write_gguf_adapter(
    path: Path | str, adapter: Adapter, architecture: str, *, overwrite: bool = False
) -> None:
    """Write an adapter whose modules have GGUF's names (``blk.0.attn_q``).

    All pairs share one alpha there. Where theirs differ, or scale by √rank, the factor goes into B.

    Args:
        path: the file.
        adapter: at least one pair.
        architecture: GGUF's name of the model's, such as ``llama``.
        overwrite: replace an existing file.

    Raises:
        UsageError, OutputError: see :func:`oazoo.formats.atomic.check_output`; also for an empty adapter.
        FormatError: a name that GGUF cannot hold.
    """
    if not adapter.pairs:
        raise UsageError(f"{path}: there is nothing to write: the adapter has no layers")
    scaled = {name: pair.scale * pair.rank for name, pair in adapter.pairs.items()}
    common = [value for value in scaled.values() if value]  # llama.cpp takes an alpha of 0 for a scale of 1
    alpha = Counter(common).most_common(1)[0][0] if common else 1.0
    tensors = []
    for module, pair in adapter.pairs.items():
        ratio = scaled[module] / alpha
        b = pair.b if ratio == 1 else pair.b * np.float32(ratio)
        tensors += [_tensor(f"{module}.weight.lora_a", pair.a), _tensor(f"{module}.weight.lora_b", b)]
    metadata = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    name = adapter.base.get("name")
    if isinstance(name, str):
        metadata["general.base_model.0.name"] = name
        metadata["general.base_model.count"] = 1
    write_gguf(path, metadata, tensors, overwrite=overwrite)


def _tensor(name: str, values: Floats) -> StreamedTensor:
    info = TensorInfo(name, values.shape, "f32", values.nbytes)
    return StreamedTensor(info, _once(np.ascontiguousarray(values, np.float32)))


def _once(values: Floats) -> Callable[[], Iterator[npt.NDArray[Any]]]:
    return lambda: iter([values])


def read_gguf_adapter(path: Path | str) -> Adapter:
    """Read an adapter that llama.cpp reads; its modules have GGUF's names.

    Raises:
        FormatError: it is another kind of GGUF file, or a tensor is none of a whole pair; the message names it.
        UsageError: there is no such file.
    """
    with GgufSource(path) as source:
        kind = (source.metadata.get("general.type"), source.metadata.get("adapter.type"))
        if kind != ("adapter", "lora"):
            raise FormatError(
                f"{path}: is no LoRA adapter: general.type is {quoted(kind[0])} and adapter.type {quoted(kind[1])}"
            )
        alpha = source.metadata.get("adapter.lora.alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise FormatError(f"{path}: adapter.lora.alpha must be a number, not {quoted(alpha)}")
        found: dict[str, dict[str, SourceTensor]] = {}
        unknown = []
        for name, tensor in source.items():
            stem, _, part = name.rpartition(".lora_")
            if part in ("a", "b") and stem.endswith(".weight"):
                found.setdefault(stem.removesuffix(".weight"), {})[part] = tensor
            else:
                unknown.append(name)
        if unknown:
            raise FormatError(
                f"{path}: {len(unknown)} tensors are none of a LoRA of linear layers: {some([quoted(n) for n in unknown])}"
            )
        known = source.metadata.get("general.base_model.0.name")
        base = {"name": known} if isinstance(known, str) else {}
        return Adapter(dict(_pairs(path, found, float(alpha))), base=base)


def _pairs(
    path: Path | str, found: dict[str, dict[str, SourceTensor]], alpha: float
) -> Iterator[tuple[str, LoraPair]]:
    for module, both in found.items():
        for part in ("a", "b"):
            if part not in both:
                raise FormatError(f"{path}: {module}.weight.lora_{part} is missing; its other half is there")
        a, b = matrix(path, both["a"]), matrix(path, both["b"])
        if a.shape[0] != b.shape[1] or not a.shape[0]:
            raise FormatError(
                f"{path}: {quoted(module)}: lora_a has the rank {a.shape[0]}, lora_b {b.shape[1]}"
            )
        # An alpha of 0 is none: the scale is 1.
        yield module, LoraPair(a, b, alpha or float(a.shape[0]))
