"""LoRA adapters and model files: which layers of an `.oam` an adapter is for, and adding it to the weights for good."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.configs import ModelConfig, config_from_json
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats import encodings, quant
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.lora import (
    CONFIG_FILE,
    TENSORS_FILE,
    Adapter,
    LoraPair,
    merge_delta,
    read_adapter,
    write_adapter,
)
from oazoo.formats.lora_gguf import read_gguf_adapter, write_gguf_adapter
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED_ASSET
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.source import SourceTensor
from oazoo.translators.convert import Progress
from oazoo.translators.lora import LoraMap, bind, lora_map, to_published
from oazoo.zoo.files import open_file

#: Bytes copied at a time of tensors that stay as they are.
_PIECE = 4 << 20

DENSE = ("f32", "f16", "bf16")
#: What merged weights may be stored as: as before, or one of the dense types.
TYPES = ("keep", *DENSE)
#: How merged weights are packed again.
METHODS = ("search", "absmax")
#: Values that are in memory at a time.
_STEP = 4 << 20


@dataclass(frozen=True)
class MergedTensor:
    """One weight that the adapter was added to.

    Attributes:
        name: of the weight; ``source`` and ``target`` are its encodings before and after.
        rank: of the adapter here.
        change: norm of what was added, over the norm of the weight.
        rounding: norm of what storing the sum has lost, over the norm of what was added; 0 if nothing was.
    """

    name: str
    source: str
    target: str
    rank: int
    change: float
    rounding: float


@dataclass(frozen=True)
class MergeReport:
    """What a merge has done; ``warnings`` are lines for the user, ``seconds`` is 0 for a plan that was not run."""

    source: str
    adapter: str
    output: str
    tensors: tuple[MergedTensor, ...]
    warnings: tuple[str, ...]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return asdict(self)


def declared_architectures(source: OamSource) -> list[str]:
    """The architectures that a model's file says it was converted from."""
    record = source.metadata.get("source")
    declared = record.get("architecture") if isinstance(record, Mapping) else None
    return [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []


def base_facts(source: OamSource) -> dict[str, Any]:
    """What an adapter's file keeps of the model that it is trained on: name, checksum, and how its weights are stored."""
    record = source.metadata.get("source")
    name = record.get("name") if isinstance(record, Mapping) else None
    kinds = sorted({tensor.info.encoding for tensor in source.values() if len(tensor.info.shape) > 1})
    return {
        "name": name if isinstance(name, str) else source.path.name,
        "weights": source.weights_checksum,
        "encoding": ", ".join(kinds),
    }


def bound_adapter(source: OamSource, adapter: Path | str) -> tuple[Adapter, dict[str, LoraPair]]:
    """An adapter, and its pairs by the model's layers; every one of its tensors has found its layer.

    Raises:
        FormatError, UsageError: see :func:`oazoo.formats.lora.read_adapter`,
            :func:`oazoo.formats.lora_gguf.read_gguf_adapter` and :func:`oazoo.translators.lora.bind`.
        TranslationError: the model is of no published architecture, so adapters have no names for its layers.
    """
    config, declared, path = _config(source), declared_architectures(source), Path(adapter)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                found = read_gguf_adapter(path)
                return found, bind(found, config, declared, path, "gguf")
    found = read_adapter(path)
    return found, bind(found, config, declared, path)


def write_pairs(
    source: OamSource,
    pairs: Mapping[str, LoraPair],
    output: Path | str,
    *,
    base: Mapping[str, Any] | None = None,
    dropout: float = 0.0,
    overwrite: bool = False,
) -> LoraMap:
    """Write an adapter of a model's layers: ``OUT.gguf`` for llama.cpp, any other name a folder for PEFT.

    Args:
        source: the model.
        pairs: by its layers (``layers.0.attn.q``).
        output: file or folder.
        base: what the file is to say of the model that it was trained on; :func:`base_facts` of ``source`` if None.
        dropout: of the training, for the record.
        overwrite: replace an adapter that is there.

    Returns:
        Where the layers are in the published model whose names were used.

    Raises:
        TranslationError: the model is of no published architecture, or a layer has no module of its own there.
        UsageError, OutputError: the adapter is there already, or cannot be written.
    """
    to_gguf = _is_gguf(output)
    where = lora_map(_config(source), declared_architectures(source), "gguf" if to_gguf else "hf")
    facts = base_facts(source) if base is None else base
    write_mapped(pairs, where, output, facts, dropout, overwrite=overwrite)
    return where


def _is_gguf(output: Path | str) -> bool:
    return Path(output).suffix == ".gguf"


def write_mapped(
    pairs: Mapping[str, LoraPair],
    where: LoraMap,
    output: Path | str,
    base: Mapping[str, Any],
    dropout: float,
    *,
    overwrite: bool,
) -> None:
    """As :func:`write_pairs`, for a model whose map is known: that to GGUF for ``OUT.gguf``, else that to Hugging Face."""
    made = Adapter(to_published(pairs, where), where.fan_in_fan_out, base, dropout)
    if _is_gguf(output):
        write_gguf_adapter(output, made, where.architecture, overwrite=overwrite)
    else:
        write_adapter(output, made, linear_modules=where.modules, overwrite=overwrite)


def base_warnings(adapter: Adapter, source: OamSource) -> list[str]:
    """What to tell where an adapter was trained on other weights than these."""
    stated = adapter.base.get("weights")
    if not isinstance(stated, str) or stated == source.weights_checksum:
        return []
    here = base_facts(source)
    return [
        f"the adapter was trained on other weights: {str(adapter.base.get('name'))[:80]} "
        f"({str(adapter.base.get('encoding'))[:40]}), not on {here['name']} ({here['encoding']}). It has learned to "
        "make up for the rounding of those; compare the result: oazoo eval … --against …"
    ]


def merge(
    source: str | Path,
    adapter: str | Path,
    output: str | Path | None,
    *,
    dtype: str = "keep",
    method: str = "search",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> MergeReport:
    """Add a LoRA adapter to the weights of an `.oam` file: W becomes W + scale · B · A, computed in float32.

    A dense weight is stored in its own type again, rounded to nearest. A Q4 or Q8 weight is decoded, added to, and packed
    again; that rounds anew, and the report says how much of what was added it has lost.

    Args:
        source: the model.
        adapter: a PEFT folder, a SafeTensors file that holds its config, or a GGUF file for llama.cpp.
        output: the file to write; may be None for a dry run.
        dtype: what weights with an adapter become: ``keep``, ``f32``, ``f16`` or ``bf16``.
        method: how weights are packed again (:func:`oazoo.runtime.ops.pack.pack`): ``search`` on the device, or ``absmax``,
            which needs none.
        overwrite: replace an existing output.
        dry_run: check everything, write nothing.
        progress: called with how far the work has come.

    Raises:
        UsageError: an unknown type or method, an output that exists, no such adapter.
        DeviceError: weights are to be packed by search, and there is no device.
        FormatError: model or adapter are damaged or do not belong together, or a sum does not fit its type.
    """
    if dtype not in TYPES:
        raise UsageError(f"unknown type {dtype[:32]!r}; there are {', '.join(TYPES)}")
    if method not in METHODS:
        raise UsageError(f"unknown method {method[:32]!r}; there are {', '.join(METHODS)}")
    start = time.perf_counter()
    with open_file(source) as opened:
        if not isinstance(opened, OamSource):
            raise FormatError(
                f"{source} is a {opened.format} file; merge takes .oam files: oazoo convert {source} -o MODEL.oam"
            )
        found, pairs = bound_adapter(opened, adapter)
        for layer in pairs:
            kind = opened[f"{layer}.weight"].info.encoding
            if kind not in (*DENSE, *quant.CODE_BYTES):
                raise FormatError(
                    f"{source}: {layer}.weight is stored as {kind}, which nothing can be added to"
                )
        if output is not None:
            inside = [Path(adapter) / name for name in (CONFIG_FILE, TENSORS_FILE)]
            check_not_input(output, [opened.path, Path(adapter), *inside])
            check_output(output, overwrite=overwrite)
        elif not dry_run:
            raise UsageError("say where to write: only a dry run needs no output")
        work = _Merge(opened, pairs, dtype, method, progress)
        report = MergeReport(
            str(source), str(adapter), str(output or ""), work.planned(), tuple(base_warnings(found, opened))
        )
        if dry_run or output is None:
            return report
        work.write(output, _payload(opened, found, pairs, dtype, adapter), overwrite)
        return replace(report, tensors=tuple(work.done), seconds=time.perf_counter() - start)


def _config(source: OamSource) -> ModelConfig:
    try:
        return config_from_json(source.metadata.get("family"), source.metadata.get("model"))
    except OazooError as error:
        raise FormatError(f"{source.path}: holds no model that an adapter could be for: {error}") from error


def _payload(
    source: OamSource, adapter: Adapter, pairs: Mapping[str, LoraPair], dtype: str, path: str | Path
) -> bytes:
    """The model's config with a note of the merge; a receipt, which was about the weights before, goes."""
    note = {
        "name": Path(path).name,
        "layers": len(pairs),
        "ranks": sorted({pair.rank for pair in pairs.values()}),
        "base_weights": source.weights_checksum,
        "trained_on": dict(adapter.base),
        "dtype": dtype,
        "packing": "absmax",
        "tool": f"oazoo {__version__}",
    }
    kept = {key: value for key, value in source.metadata.items() if key != "receipt"}
    before = kept.get("adapters")
    kept["adapters"] = [*(before if isinstance(before, list) else []), note]
    return json.dumps(kept, ensure_ascii=False, separators=(",", ":")).encode()


class _Merge:
    def __init__(
        self,
        source: OamSource,
        pairs: Mapping[str, LoraPair],
        dtype: str,
        method: str,
        progress: Progress | None,
    ) -> None:
        self.source, self.dtype, self._method = source, dtype, method
        self.pairs = {f"{layer}.weight": pair for layer, pair in pairs.items()}
        self.done: list[MergedTensor] = []
        self._progress: Callable[[str, int, int | None], None] | None = progress
        self._moved, self._total = 0, sum(t.info.nbytes for t in source.values())

    def _target(self, name: str) -> str:
        kind = self.source[name].info.encoding
        return kind if self.dtype == "keep" or name not in self.pairs else self.dtype

    def planned(self) -> tuple[MergedTensor, ...]:
        return tuple(
            MergedTensor(name, self.source[name].info.encoding, self._target(name), pair.rank, 0.0, 0.0)
            for name, pair in self.pairs.items()
        )

    def write(self, output: str | Path, payload: bytes, overwrite: bool) -> None:
        source = self.source
        state = {name: tensor for name, tensor in source.state.items() if name != CARRIED_ASSET}
        entries = [OamEntry(name, t.info.shape, self._target(name)) for name, t in source.items()]
        entries += [OamEntry(name, t.info.shape, t.info.encoding, "state") for name, t in state.items()]
        config = replace(source.config, payload=payload)
        with OamWriter(
            output, config=config, entries=entries, progress=source.progress, overwrite=overwrite
        ) as writer:
            for name, tensor in source.items():
                pair = self.pairs.get(name)
                writer.write(name, tensor.pieces(_PIECE) if pair is None else self._stored(tensor, pair))
                self._moved += tensor.info.nbytes
                if self._progress is not None:
                    self._progress("merging", self._moved, self._total)
            for name, tensor in state.items():
                writer.write(name, tensor.pieces(_PIECE))

    def _stored(self, tensor: SourceTensor, pair: LoraPair) -> Iterator[npt.NDArray[Any]]:
        """The payload of the sum, in file order; notes what it did."""
        name, kind = tensor.info.name, self._target(tensor.info.name)
        sums = _Sums()
        pieces = self._pieces(tensor, pair, kind, sums)
        if kind not in quant.CODE_BYTES:
            yield from pieces
        else:
            scales = []
            for piece in pieces:
                codes, scale = self._packed(piece, kind)
                stored = np.concatenate([codes, scale.view(np.uint8)])
                sums.lost += _square(quant.decode(stored, kind, piece.size) - np.ravel(piece))
                scales.append(scale)
                yield codes
            yield from scales
        change, rounding = sums.ratios()
        self.done.append(MergedTensor(name, tensor.info.encoding, kind, pair.rank, change, rounding))

    def _packed(
        self, values: npt.NDArray[Any], kind: str
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """Codes and scales of whole blocks."""
        if self._method == "absmax":
            return quant.encode(values, kind)
        from oazoo.runtime import Tensor, get_device
        from oazoo.runtime.ops.pack import pack

        codes, scales = pack(Tensor.from_numpy(get_device(), values), kind, self._method).planes()
        return codes.numpy().reshape(-1).view(np.uint8), scales.numpy()

    def _pieces(
        self, tensor: SourceTensor, pair: LoraPair, kind: str, sums: _Sums
    ) -> Iterator[npt.NDArray[Any]]:
        """The sum, some rows at a time, in the dense type ``kind`` or in float32."""
        width = tensor.info.shape[1]
        # Whole rows that are whole blocks.
        unit = quant.BLOCK // gcd(quant.BLOCK, width)
        rows = max(_STEP // width // unit, 1) * unit
        start = 0
        for flat in tensor.chunks(rows * width):
            weight = np.asarray(flat, np.float32).reshape(-1, width)
            part = replace(pair, b=pair.b[start : start + len(weight)])
            total = merge_delta(weight, part)
            start += len(weight)
            sums.weight += _square(weight)
            sums.added += _square(total - weight)
            with np.errstate(over="ignore"):
                stored = total if kind in quant.CODE_BYTES else total.astype(encodings.get(kind).dtype)
            if not np.isfinite(stored.astype(np.float32)).all():
                raise FormatError(
                    f"{tensor.info.name}: with the adapter added it holds values that {kind} cannot (not finite, or too "
                    "large); is the adapter damaged? --dtype f32 has the widest range"
                )
            if kind not in quant.CODE_BYTES:
                sums.lost += _square(stored.astype(np.float32) - total)
            yield stored


@dataclass
class _Sums:
    """Squares of the weight, of what was added to it, and of what storing the sum lost."""

    weight: float = 0.0
    added: float = 0.0
    lost: float = 0.0

    def ratios(self) -> tuple[float, float]:
        return _root(self.added, self.weight), _root(self.lost, self.added)


def _root(part: float, whole: float) -> float:
    return float(np.sqrt(part / whole)) if whole > 0 else 0.0


def _square(values: npt.NDArray[np.float32]) -> float:
    flat = np.ravel(values).astype(np.float64)
    return float(flat @ flat)
