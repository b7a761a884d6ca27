"""Carrying out a plan of :mod:`oazoo.zoo.quantize`: tensors stream through the device into the file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED_ASSET
from oazoo.formats.oam_writer import OamWriter
from oazoo.formats.source import SourceTensor
from oazoo.zoo.pack_stream import SLOTS, PackedPiece, PackStream
from oazoo.zoo.progress import Progress
from oazoo.zoo.quantize_plan import BLOCKS, DENSE, TensorQuantization
from oazoo.zoo.unpack import unpack

if TYPE_CHECKING:
    from oazoo.runtime import Device, Tensor
    from oazoo.runtime.ops.pack import Packer
    from oazoo.zoo.error_feedback import ErrorFeedback
    from oazoo.zoo.statistics import Statistics
    from oazoo.zoo.tune import TuneReport

#: The token embedding, which is also the head of models with tied embeddings.
EMBEDDING = "embed.weight"
#: Elements that the device packs in one go: whole blocks, 4 MB of f32, which the caches hold.
CHUNK_ELEMENTS = 1 << 20
#: Bytes copied at a time of tensors that stay as they are.
PIECE = 4 << 20


@dataclass(frozen=True)
class QuantizeReport:
    """The plan and outcome of packing one file. Sizes are bytes; ``seconds`` is 0 for a plan that was not run."""

    source: str
    output: str
    target: str
    tensors: tuple[TensorQuantization, ...]
    source_bytes: int
    output_bytes: int
    dropped: tuple[str, ...]
    device: str = ""
    seconds: float = 0.0
    method: str = "absmax"
    recipe: str = ""
    budget: str = ""
    tuned: TuneReport | None = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of values that were packed or unpacked."""
        return sum(t.bytes_before for t in self.tensors if not t.reason)

    @property
    def requantized(self) -> tuple[TensorQuantization, ...]:
        """Tensors that were quantised before and are now quantised again."""
        return tuple(t for t in self.tensors if not t.reason and t.source in BLOCKS and t.target in BLOCKS)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        rows = [{**t.__dict__, "shape": list(t.shape)} for t in self.tensors]
        return {
            **self.__dict__,
            "packed_bytes": self.packed_bytes,
            "tensors": rows,
            "tuned": None if self.tuned is None else self.tuned.to_json(),
            "dropped": list(self.dropped),
        }


@dataclass
class Work:
    """What packing needs to know of every tensor, and how far it has come."""

    packers: Mapping[str, Packer]
    target: str
    allow_nonfinite: bool
    progress: Progress | None
    total: int
    statistics: Statistics | None = None
    tied: bool = False
    done: int = 0

    def weights(self, tensor: SourceTensor, target: str) -> Tensor | None:
        """How much each column's errors count, [inputs], or [experts, inputs] of a stack; None if all count the same."""
        info = tensor.info
        # What 8 bits lose beside 4 is little, and the few columns that weights favour would take it from all others.
        weighted = self.statistics if target == self.target else None
        found = weighted.moment(info.name, info.shape[-1]) if weighted else None
        if found is None or not found.mean() > 0:
            return None
        if found.ndim == 2 and (len(info.shape) != 3 or found.shape[0] != info.shape[0]):
            raise UsageError(
                f"the statistics are of another model, whose {info.name} has {found.shape[0]} experts. Gather them with the "
                "model that is quantised: oazoo calibrate"
            )
        found = found / np.maximum(found.mean(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        if self.tied and info.name == EMBEDDING:
            # Rows are looked up as well as multiplied with, and then every column counts.
            found += np.float32(1)
        # Nothing counts so little that its values may become anything.
        return self.packers[target].place(np.maximum(found, np.float32(1e-6)))

    def stream(self, tensor: SourceTensor, pieces: Iterator[PackedPiece]) -> Iterator[npt.NDArray[Any]]:
        """The packed bytes of a tensor: its codes piece by piece, then its scales."""
        scales = []
        for piece in pieces:
            odd = piece.odd
            if odd.count and not self.allow_nonfinite:
                raise FormatError(
                    f"tensor {tensor.info.name!r} holds values that are not finite: {odd.count} from element "
                    f"{piece.start + odd.first} on ({piece.values[odd.first]}); they would be packed as 0. Mend the source, "
                    "or allow it (--allow-nonfinite)"
                )
            yield piece.codes
            scales.append(piece.scales.copy())
            self.advance(piece.values.size * tensor.info.nbytes // tensor.info.numel)
        yield from scales

    def advance(self, count: int) -> None:
        """So many bytes of values more are done."""
        self.done += count
        if self.progress is not None:
            self.progress("packing", self.done, self.total)


def run(
    report: QuantizeReport,
    source: OamSource,
    writer: OamWriter,
    allow_nonfinite: bool,
    progress: Progress | None,
    device: Device | None,
    statistics: Statistics | None,
    packed: OamSource | None,
    feedback: ErrorFeedback | None,
) -> QuantizeReport:
    """Write the file. Tensors that ``packed`` has as they should become are taken from it."""
    if report.target in DENSE:
        start = time.perf_counter()
        unpack(report.tensors, report.target, source, writer, allow_nonfinite, progress)
        return replace(report, seconds=time.perf_counter() - start)
    from oazoo.runtime import get_device
    from oazoo.runtime.ops.pack import Packer

    start = time.perf_counter()
    device = device or get_device()
    largest = max(prod(step.shape) for step in report.tensors if not step.reason)
    # Whole blocks; no more than a buffer holds as f32, and no more than there is to pack.
    chunk = min(CHUNK_ELEMENTS, device.allocator.max_buffer_bytes // 4, -(-largest // 32) * 32)
    chunk = max(32, chunk // 32 * 32)
    packers = {
        target: Packer(device, target, chunk, "absmax" if report.method == "absmax" else "search", SLOTS)
        for target in sorted({step.target for step in report.tensors if not step.reason})
    }
    tied = statistics is not None and EMBEDDING in statistics.shares
    work = Work(packers, report.target, allow_nonfinite, progress, report.packed_bytes, statistics, tied)
    taken = {
        step.name: packed[step.name]
        for step in report.tensors
        if packed is not None and not step.reason and packed[step.name].info.encoding == step.target
    }
    steps = report.tensors if feedback is None else feedback.order(report.tensors)
    fed = {step.name for step in steps if feedback is not None and feedback.takes(step)}
    tasks = [
        (source[step.name], step.target)
        for step in steps
        if not step.reason and step.name not in taken and step.name not in fed
    ]
    stream = PackStream(packers, tasks, chunk, work.weights)
    with writer:
        for step in steps:
            tensor = source[step.name]
            try:
                if step.name in taken:
                    writer.write(step.name, taken[step.name].pieces(PIECE))
                    work.done += step.bytes_before
                elif step.reason:
                    writer.write(step.name, tensor.pieces(PIECE))
                elif feedback is not None:
                    fits = step.name in fed
                    pieces = (
                        feedback.pack(tensor, allow_nonfinite)
                        if fits
                        else [np.array(p) for p in work.stream(tensor, stream.pieces(step.name))]
                    )
                    writer.write(step.name, pieces)
                    feedback.packed(step, pieces)
                    work.advance(step.bytes_before if fits else 0)
                else:
                    writer.write(step.name, work.stream(tensor, stream.pieces(step.name)))
            except OazooError as error:
                if str(source.path) not in str(error):
                    raise type(error)(f"{source.path}: {error}") from error
                raise
        for name, state in source.state.items():
            if name != CARRIED_ASSET:
                writer.write(name, state.pieces(PIECE))
    return replace(report, device=device.info.name, seconds=time.perf_counter() - start)
