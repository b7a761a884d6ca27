"""Exporting tensors without a model (``convert --arch raw``): one SafeTensors file, every tensor under its own name."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import OutputError, UsageError
from oazoo.formats import encodings
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.formats.source import TensorInfo
from oazoo.formats.staging import publish_files, staging
from oazoo.formats.streamed import StreamedTensor, as_bytes
from oazoo.translators.convert import Progress, TensorReport, tensor_report
from oazoo.translators.engine import DTYPES, Measured, TensorPlan, stream
from oazoo.translators.rules import Rule

_FLOATS = ("f64", "f32", "f16", "bf16")
_STEP = 1 << 22


def is_raw(source: OamSource) -> bool:
    """Whether the file holds tensors without a model."""
    return source.metadata.get("family") == "raw"


def plan_raw(source: OamSource, dtype: str) -> list[TensorPlan]:
    """What becomes of each tensor: as it is, but packed ones decoded and floats of the type that is asked for."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype[:32]!r}; known: {', '.join(DTYPES)}")
    plans = []
    for name, tensor in source.items():
        kind, shape = tensor.info.encoding, tensor.info.shape
        wanted = kind
        if encodings.get(kind).quantized:
            wanted = "f16" if dtype == "keep" else dtype
        elif dtype != "keep" and kind in _FLOATS:
            wanted = dtype
        size = encodings.get(wanted).bytes_for(shape)
        action = "store" if wanted == kind else "convert"
        plans.append(TensorPlan(Rule(name, (name,)), shape, wanted, size, (kind,), action))
    return plans


def write_raw(
    source: OamSource, output: Path, *, dtype: str, overwrite: bool, progress: Progress | None
) -> tuple[list[TensorReport], dict[str, int], list[str]]:
    """Write the file, read it again and compare; what happened to each tensor, the file's size, and notes.

    Raises:
        UsageError: the output is no ``OUT.safetensors``, exists, or is the source.
        TranslationError: a value does not fit ``dtype``.
        FormatError, OutputError: the source is damaged, or what was written cannot be read back.
    """
    if output.suffix.lower() != ".safetensors":
        raise UsageError(
            f"{output}: {source.path} holds tensors without a model, which go into one file: name OUT.safetensors"
        )
    check_not_input(output, source.files)
    final = check_output(output, overwrite=overwrite)
    plans = plan_raw(source, dtype)
    source.verify()
    run = _Run(source, sum(plan.nbytes for plan in plans), progress)
    with staging(final, output.parent) as folder:
        written = folder / final.name
        write_safetensors(written, run.tensors(plans), metadata=run.metadata())
        run.read_again(written, output)
        size = written.stat().st_size
        publish_files(folder, {final.name: final}, overwrite=overwrite)
    packed = [plan for plan in plans if encodings.get(plan.source_encodings[0]).quantized]
    notes = ["the tensors carry their own names; there is no config.json, because there is no model"]
    if packed:
        notes.append(
            f"{len(packed)} packed tensors became {packed[0].encoding}; the precision that packing took does not come back"
        )
    return run.reports, {final.name: size}, notes


class _Run:
    """One export: streams tensors and remembers what was written."""

    def __init__(self, source: OamSource, total: int, progress: Progress | None) -> None:
        self._source, self._total, self._progress = source, total, progress
        self._sums: dict[str, int] = {}
        self._done = 0
        self.reports: list[TensorReport] = []

    def metadata(self) -> dict[str, str]:
        """Where the tensors come from, as the ``.oam`` records it."""
        found = {f"oazoo.{key}": self._source.metadata.get(key) for key in ("source", "quantization", "tool")}
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in found.items()
            if value
        }
        return {"format": "pt", **texts}

    def tensors(self, plans: list[TensorPlan]) -> Mapping[str, StreamedTensor]:
        """Every tensor, made while it is written."""
        return {
            plan.target: StreamedTensor(
                TensorInfo(plan.target, plan.shape, plan.encoding, plan.nbytes), partial(self._pieces, plan)
            )
            for plan in plans
        }

    def _pieces(self, plan: TensorPlan) -> Iterator[npt.NDArray[np.uint8]]:
        measured, total = Measured(), 0
        for piece in stream(plan, self._source, measured):
            data = as_bytes(piece)
            total = zlib.crc32(data.data, total)
            self._done += data.size
            if self._progress is not None:
                self._progress("export", self._done, self._total)
            yield data
        self._sums[plan.target] = total
        self.reports.append(replace(tensor_report(plan, measured), sources=(plan.target,)))

    def read_again(self, path: Path, shown: Path) -> None:
        """Compare every tensor of the file with what was meant."""
        with SafetensorsSource(path) as written:
            found: dict[str, Any] = dict.fromkeys(written, 0)
            for name, tensor in written.items():
                for piece in tensor.pieces(_STEP):
                    found[name] = zlib.crc32(piece.data, found[name])
        if found != self._sums:
            raise OutputError(f"{shown}: what was written could not be read back as it was; nothing was kept")
