"""Packing a model's weights to Q4 or Q8 on the device, file to file, in bounded memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED_ASSET
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.source import SourceTensor
from oazoo.zoo.files import open_file
from oazoo.zoo.pack_stream import SLOTS, PackedPiece, PackStream

if TYPE_CHECKING:
    from oazoo.runtime import Device, Tensor
    from oazoo.runtime.ops.pack import Packer
    from oazoo.zoo.statistics import Statistics

TARGETS = ("q4", "q8")
#: How scales and codes are chosen: by the largest magnitude of a block; or, for q4, for the least squared error of a block,
#: plain, or weighted by the mean squares of what each column is multiplied with.
METHODS = ("absmax", "search", "weighted")
#: Dense types that are packed; anything else of rank 2 or more stays as it is and is listed.
_PACKED_TYPES = ("f32", "f16", "bf16")
_KEPT = "asked to keep"
#: Weights that are small and feel every rounding, by our names and by those of ``--arch raw``; they are never packed.
_NEVER = (
    (
        (
            "*.moe.router.*",
            "*.moe.shared_gate.*",
            "*.shared_expert_gate.*",
            "*.ffn_gate_inp*",
            "*.block_sparse_moe.gate.*",
            "model.layers.*.mlp.gate.weight",
        ),
        "routes tokens to experts",
    ),
    (
        (
            "*.a_log",
            "*.mixer.a",
            "*.A_log",
            "*.ssm_a",
            "*.mixer.[dD]",
            "*.dt_bias",
            "*.[bBcC]_bias",
            "*.mimo_[xzo]",
        ),
        "state of a recurrence",
    ),
    (("*.mixer.conv.*", "*.conv1d.*", "*.ssm_conv1d.*"), "short convolution"),
)
#: The token embedding, which is also the head of models with tied embeddings.
EMBEDDING = "embed.weight"
#: Elements that the device packs in one go: whole blocks, 4 MB of f32, which the caches hold.
CHUNK_ELEMENTS = 1 << 20
#: Bytes copied at a time of tensors that stay as they are.
PIECE = 4 << 20


class Progress(Protocol):
    """How long work reports: a label, and how much of what total is done."""

    def __call__(self, label: str, done: int, total: int | None, unit: str = "bytes") -> None: ...


@dataclass(frozen=True)
class TensorQuantization:
    """What happens to one tensor: encodings before and after, bytes before and after, and why if it is kept."""

    name: str
    shape: tuple[int, ...]
    source: str
    target: str
    bytes_before: int
    bytes_after: int
    reason: str = ""


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

    @property
    def packed_bytes(self) -> int:
        """Bytes of dense values that went through the packing kernels."""
        return sum(t.bytes_before for t in self.tensors if not t.reason)

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        rows = [{**t.__dict__, "shape": list(t.shape)} for t in self.tensors]
        return {
            **self.__dict__,
            "packed_bytes": self.packed_bytes,
            "tensors": rows,
            "dropped": list(self.dropped),
        }


@dataclass
class _Work:
    packers: Mapping[str, Packer]
    allow_nonfinite: bool
    progress: Progress | None
    total: int
    statistics: Statistics | None = None
    tied: bool = False
    done: int = 0

    def weights(self, tensor: SourceTensor, target: str) -> Tensor | None:
        """How much each column's errors count; None if all count the same."""
        info = tensor.info
        searched = self.statistics is not None and target == "q4"
        found = self.statistics.moment(info.name, info.shape[-1]) if self.statistics and searched else None
        if found is None or not found.mean() > 0:
            return None
        found = found / found.mean()
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
            self.done += piece.values.nbytes
            if self.progress is not None:
                self.progress("packing", self.done, self.total)
        yield from scales


def plan(
    source: OamSource, target: str, keep: Sequence[str] = (), q8: Sequence[str] = ()
) -> list[TensorQuantization]:
    """What packing would do with each weight.

    Dense f32, f16 and bf16 tensors of rank 2 and more are packed, as OA does; the rest, and what a pattern of ``keep``
    matches (shell style, on the whole name), stays as it is; what a pattern of ``q8``
    matches is packed to Q8. Tensors that are quantised already stay too (an importer may have taken some over without
    loss): packing them again would add the errors up.

    Raises:
        UsageError: an unknown target, a pattern that matches nothing, or nothing to pack.
        FormatError: the source is quantised already and has nothing dense left.
    """
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}; there are {', '.join(TARGETS)}")
    for option, patterns in (("--keep", keep), ("--q8", q8)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in source):
                raise UsageError(
                    f"{option} {pattern!r} matches no tensor of {source.path}; `oazoo inspect` lists them"
                )
    steps = [_plan_tensor(tensor, target, keep, q8) for tensor in source.values()]
    if any(step.reason == _KEPT for step in steps) and all(step.reason for step in steps):
        raise UsageError(f"--keep leaves nothing in {source.path} that would be packed")
    already = [step for step in steps if step.source in TARGETS]
    if already and all(step.reason for step in steps):
        raise FormatError(
            f"{source.path} is quantised already: {len(already)} tensors, the first is {already[0].name} "
            f"({already[0].source}), and nothing dense is left. Packing it again would add the errors up; quantize "
            "the dense model"
        )
    return steps


def _never(name: str) -> str:
    """Why a weight of this name stays dense; empty if it does not have to."""
    return next((why for patterns, why in _NEVER if any(fnmatchcase(name, p) for p in patterns)), "")


def _plan_tensor(
    tensor: SourceTensor, target: str, keep: Sequence[str], q8: Sequence[str]
) -> TensorQuantization:
    from oazoo.formats import encodings

    info = tensor.info
    if any(fnmatchcase(info.name, pattern) for pattern in q8):
        target = "q8"
    reason = ""
    if any(fnmatchcase(info.name, pattern) for pattern in keep):
        reason = _KEPT
    elif info.encoding in TARGETS:
        reason = f"already {info.encoding}"
    elif len(info.shape) < 2:
        reason = "fewer than 2 dimensions"
    elif never := _never(info.name):
        reason = f"never packed: {never}"
    elif info.encoding not in _PACKED_TYPES:
        reason = f"{info.encoding} is not packed"
    elif info.numel == 0:
        reason = "no elements"
    after = info.nbytes if reason else encodings.get(target).bytes_for(info.shape)
    kind = info.encoding if reason else target
    return TensorQuantization(info.name, info.shape, info.encoding, kind, info.nbytes, after, reason)


def quantize(
    source: str | Path,
    output: str | Path | None,
    to: str,
    *,
    keep: Sequence[str] = (),
    q8: Sequence[str] = (),
    method: str = "absmax",
    statistics: Statistics | str | Path | None = None,
    text: str | None = None,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    device: Device | None = None,
) -> QuantizeReport:
    """Pack the weights of an `.oam` file to Q4 or Q8 with the device's packing kernels.

    Tensors stream through the device in chunks, so device memory and host memory stay bounded whatever the model's size;
    the output appears under its name only when it is complete.

    Args:
        source: an `.oam` file with dense weights.
        output: the file to write; may be None for a dry run.
        to: ``q4`` (5 bits a weight with its scale) or ``q8`` (9 bits).
        keep: shell-style patterns of tensor names to leave dense.
        q8: shell-style patterns of tensor names to pack to Q8 where the others become Q4.
        method: ``absmax``, the format's own rule; for q4 also ``search``, the scale and codes of least squared error of each
            block, and ``weighted``, the same with every column's errors weighted by the mean square of what it is multiplied
            with.
        statistics: for ``weighted``: those mean squares, or the file that has them (:mod:`oazoo.zoo.statistics`); if
            None, the model is run to measure them.
        text: for ``weighted`` without statistics: what to run the model on; the general text of this package if None.
        allow_nonfinite: pack NaN and infinities as 0 instead of refusing them.
        overwrite: replace an existing output.
        dry_run: plan and check only; nothing is written and no device is needed.
        progress: called with how far packing has come.
        device: where to pack; the default device if None.

    Raises:
        UsageError: see :func:`plan`; or the output exists.
        FormatError: the source is damaged, quantised already, not an `.oam`, or holds non-finite values.
        DeviceError: no usable device, or out of its memory.
    """
    if isinstance(keep, str):
        keep = [keep]
    if isinstance(q8, str):
        q8 = [q8]
    check_method(to, method, statistics, text)
    if device is None and not dry_run:
        from oazoo.runtime import open_ahead

        open_ahead()
    with open_file(source) as opened:
        if not isinstance(opened, OamSource):
            raise FormatError(
                f"{source} is a {opened.format} file; quantize packs .oam files: oazoo convert {source} -o MODEL.oam"
            )
        steps = plan(opened, to, keep, q8)
        if all(step.reason for step in steps):
            raise UsageError(f"nothing in {source} would be packed; `oazoo inspect` lists its tensors")
        if output is not None:
            check_not_input(output, [opened.path])
            check_output(output, overwrite=overwrite)
        elif not dry_run:
            raise UsageError("say where to write: only a dry run needs no output")
        known: Statistics | None = None
        if method == "weighted" and not dry_run:
            known = _statistics(opened, statistics, text, device, progress)
        entries = [OamEntry(s.name, s.shape, s.target) for s in steps]
        entries += [
            OamEntry(name, t.info.shape, t.info.encoding, "state")
            for name, t in opened.state.items()
            if name != CARRIED_ASSET
        ]
        writer = OamWriter(
            output or "plan.oam",
            config=replace(opened.config, payload=_payload(opened, to, keep, q8, method, known)),
            entries=entries,
            progress=opened.progress,
            overwrite=overwrite,
        )
        dropped = ("the optimizer's state",) if opened.optimizer_kind is not None else ()
        report = QuantizeReport(
            source=str(source),
            output="" if output is None else str(output),
            target=to,
            tensors=tuple(steps),
            source_bytes=opened.path.stat().st_size,
            output_bytes=writer.size,
            dropped=dropped,
            method=method,
        )
        return report if dry_run else _run(report, opened, writer, allow_nonfinite, progress, device, known)


def check_method(to: str, method: str, statistics: Statistics | str | Path | None, text: str | None) -> None:
    """Refuse combinations that mean nothing.

    Raises:
        UsageError: an unknown method, one that the target has not, or statistics or a text for a method without any.
    """
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    if to == "q8" and method != "absmax":
        raise UsageError(f"q8 is packed by absmax; {method} is for q4")
    if method != "weighted" and (statistics is not None or text is not None):
        raise UsageError(f"statistics and a text to gather them on are for the method weighted, not {method}")
    if statistics is not None and text is not None:
        raise UsageError("give either statistics or a text to gather them on")


def _statistics(
    source: OamSource,
    given: Statistics | str | Path | None,
    text: str | None,
    device: Device | None,
    progress: Progress | None,
) -> Statistics:
    """What was given, read; or gathered now by running the model."""
    from oazoo.zoo.statistics import Statistics, load_statistics

    if isinstance(given, Statistics):
        found = given
    elif given is not None:
        found = load_statistics(given)
    else:
        from oazoo.zoo.calibrate import calibrate

        found = calibrate(source.path, text, device=device, progress=progress)
    if not any(name in source for name in found.shares):
        raise UsageError(
            f"the statistics are of {found.model}, which shares no weight's name with {source.path}: gather them with the "
            "model that is quantised (oazoo calibrate)"
        )
    return found


def _run(
    report: QuantizeReport,
    source: OamSource,
    writer: OamWriter,
    allow_nonfinite: bool,
    progress: Progress | None,
    device: Device | None,
    statistics: Statistics | None,
) -> QuantizeReport:
    from oazoo.runtime import get_device
    from oazoo.runtime.ops.pack import Packer

    start = time.perf_counter()
    device = device or get_device()
    largest = max(prod(step.shape) for step in report.tensors if not step.reason)
    # Whole blocks; no more than a buffer holds as f32, and no more than there is to pack.
    chunk = min(CHUNK_ELEMENTS, device.allocator.max_buffer_bytes // 4, -(-largest // 32) * 32)
    chunk = max(32, chunk // 32 * 32)
    packers = {
        target: Packer(
            device,
            target,
            chunk,
            "absmax" if target == "q8" or report.method == "absmax" else "search",
            SLOTS,
        )
        for target in sorted({step.target for step in report.tensors if not step.reason})
    }
    tied = statistics is not None and EMBEDDING in statistics.shares
    work = _Work(packers, allow_nonfinite, progress, report.packed_bytes, statistics, tied)
    tasks = [(source[step.name], step.target) for step in report.tensors if not step.reason]
    packed = PackStream(packers, tasks, chunk, work.weights)
    with writer:
        for step in report.tensors:
            tensor = source[step.name]
            try:
                kept = bool(step.reason)
                writer.write(
                    step.name, tensor.pieces(PIECE) if kept else work.stream(tensor, packed.pieces(step.name))
                )
            except OazooError as error:
                if str(source.path) not in str(error):
                    raise type(error)(f"{source.path}: {error}") from error
                raise
        for name, state in source.state.items():
            if name != CARRIED_ASSET:
                writer.write(name, state.pieces(PIECE))
    return replace(report, device=device.info.name, seconds=time.perf_counter() - start)


def _payload(
    source: OamSource,
    target: str,
    keep: Sequence[str],
    q8: Sequence[str],
    method: str,
    statistics: Statistics | None,
) -> bytes:
    """The architecture config with a note of what was done; somebody else's config is left alone."""
    if not source.metadata:
        return source.config.payload
    note: dict[str, Any] = {
        "to": target,
        "method": method,
        "keep": list(keep),
        "q8": list(q8),
        "tool": f"oazoo {__version__}",
    }
    note["source_weights"] = source.weights_checksum
    if statistics is not None:
        note["statistics"] = statistics.note()
    content = {**source.metadata, "quantization": note}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
