"""Converting a checkpoint to ``.oam``: plan, stream every tensor, report what happened."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from oazoo.configs import ModelConfig
from oazoo.errors import FormatError, OutputError, TranslationError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.messages import some
from oazoo.formats.oam_writer import Filling, OamWriter
from oazoo.formats.source import WeightSource
from oazoo.translators.engine import Fill, Measured, TensorPlan, filling, same_bytes, stream
from oazoo.translators.plan import Plan, any_layer, plan
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.source_hashes import SourceHashes
from oazoo.translators.translator import Translator

if TYPE_CHECKING:
    from rich.table import Table


class Progress(Protocol):
    """Told how far a step has come: ``done`` of ``total`` bytes."""

    def __call__(self, label: str, done: int, total: int | None, unit: str = "bytes") -> None: ...


class Findings(Protocol):
    """What a check of the result found (:class:`oazoo.zoo.check.CheckReport`; checking needs a device, converting none)."""

    @property
    def passed(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class TensorReport:
    """What happened to one tensor. ``max_error`` is the largest change of a finite value; 0 if none changed."""

    target: str
    shape: tuple[int, ...]
    encoding: str
    nbytes: int
    sources: tuple[str, ...]
    source_encodings: tuple[str, ...]
    transform: str
    action: str
    rounded: bool
    max_error: float
    nan: int
    infinite: int

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "target": self.target,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "bytes": self.nbytes,
            "sources": list(self.sources),
            "source_encodings": list(self.source_encodings),
            "transform": self.transform,
            "action": self.action,
            "rounded": self.rounded,
            "max_error": self.max_error,
            "nan": self.nan,
            "infinite": self.infinite,
        }


@dataclass(frozen=True)
class ConversionReport:
    """The outcome of a conversion."""

    output: Path
    output_bytes: int
    translator: str
    config: ModelConfig | RawConfig
    tensors: tuple[TensorReport, ...]
    ignored: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    source: Mapping[str, Any]
    #: What comparing the result with its source found, if that was asked for.
    check: Findings | None = field(default=None, kw_only=True)

    @property
    def rounded(self) -> tuple[TensorReport, ...]:
        """Tensors of which some value changed."""
        return tuple(tensor for tensor in self.tensors if tensor.rounded)

    @property
    def nonfinite(self) -> tuple[TensorReport, ...]:
        """Tensors that hold NaN or infinity."""
        return tuple(tensor for tensor in self.tensors if tensor.nan or tensor.infinite)

    @property
    def max_error(self) -> float:
        """Largest change of any value."""
        return max((tensor.max_error for tensor in self.tensors), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "output": str(self.output),
            "output_bytes": self.output_bytes,
            "translator": self.translator,
            "family": self.config.family,
            "config": self.config.to_json(),
            "max_error": self.max_error,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "ignored": [{"source": name, "reason": reason} for name, reason in self.ignored],
            "notes": list(self.notes),
            "source": dict(self.source),
            **({} if self.check is None else {"check": self.check.to_json()}),
        }

    def summary(self) -> list[str]:
        """A few lines for people: size, encodings, what was rounded, what was ignored, notes."""
        kinds: dict[str, int] = {}
        for tensor in self.tensors:
            kinds[tensor.encoding] = kinds.get(tensor.encoding, 0) + 1
        shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines = [f"{len(self.tensors)} tensors ({shown}), {self.output_bytes:,} bytes"]
        if self.rounded:
            worst = max(self.rounded, key=lambda tensor: tensor.max_error)
            lines.append(
                f"{len(self.rounded)} tensors were rounded, by {worst.max_error:.3g} at most ({worst.target})"
            )
        else:
            lines.append("no value was changed")
        for (source, kind), count in self._widened().items():
            lines.append(f"{count} tensors of {source} became {kind}, which holds every value")
        if self.nonfinite:
            nan, infinite = sum(t.nan for t in self.nonfinite), sum(t.infinite for t in self.nonfinite)
            names = some([tensor.target for tensor in self.nonfinite])
            lines.append(
                f"{len(self.nonfinite)} tensors hold {nan} NaN and {infinite} infinite values: {names}"
            )
        reasons: dict[str, list[str]] = {}
        for name, reason in self.ignored:
            reasons.setdefault(reason, []).append(name)
        lines += [f"ignored {some(names)}: {reason}" for reason, names in list(reasons.items())[:8]]
        if len(reasons) > 8:
            lines.append(
                f"ignored {sum(map(len, list(reasons.values())[8:]))} more tensors, for other reasons"
            )
        return lines + list(self.notes)

    def _widened(self) -> dict[tuple[str, str], int]:
        """How many tensors of 8-bit floats became which wider type."""
        found: dict[tuple[str, str], int] = {}
        for tensor in self.tensors:
            small = [kind for kind in tensor.source_encodings if kind.startswith("f8_")]
            if small and tensor.encoding not in small and not tensor.rounded:
                key = small[0], tensor.encoding
                found[key] = found.get(key, 0) + 1
        return found

    def rounded_groups(self) -> list[tuple[str, str, str, int, float]]:
        """What was rounded, the same weight of all layers together: name (``*`` for the layer), from, to, tensors, error."""
        groups: dict[tuple[str, str, str], list[float]] = {}
        for tensor in self.rounded:
            name = any_layer(tensor.target)
            kinds = ", ".join(dict.fromkeys(tensor.source_encodings))
            groups.setdefault((name, kinds, tensor.encoding), []).append(tensor.max_error)
        return [(*key, len(errors), max(errors)) for key, errors in groups.items()]

    def nonfinite_table(self) -> Table:
        """The tensors that hold NaN or infinity as a table for people, a line for each."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Not finite", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("tensor", overflow="fold")
        for heading in ("NaN", "infinite"):
            table.add_column(heading, justify="right")
        for tensor in self.nonfinite:
            table.add_row(
                *(Text(cell) for cell in (tensor.target, f"{tensor.nan:,}", f"{tensor.infinite:,}"))
            )
        return table

    def table(self) -> Table:
        """The rounded tensors as a table for people, a line for the same weight of all layers."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Rounded", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("tensor", "from", "to"):
            table.add_column(heading, overflow="fold")
        table.add_column("tensors", justify="right")
        table.add_column("largest change", justify="right")
        for name, source, target, count, error in self.rounded_groups():
            cells = (name, source, target, str(count), f"{error:.3g}")
            table.add_row(*(Text(cell) for cell in cells))
        return table


def convert(
    src: WeightSource | Path | str,
    out: Path | str,
    arch: str = "auto",
    dtype: str = "keep",
    overwrite: bool = False,
    progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
    with_tokenizer: bool = True,
    own: Sequence[Translator] = (),
) -> ConversionReport:
    """Convert a checkpoint to an ``.oam`` file, in memory bounded by its largest tensor.

    The file appears under its name only when it is complete and on disk.

    Args:
        src: a file or folder, or an opened source.
        out: the file to write.
        arch: a translator's name, or ``"auto"``.
        dtype: ``"keep"``, ``"f32"``, ``"f16"`` or ``"bf16"``; see :func:`oazoo.translators.plan.plan`.
        overwrite: replace an existing file.
        progress: called with (label, bytes done, bytes in all).
        provenance: what is known of the source: ``name``, ``revision``, ``license``, ``uri``, and
            ``files``, a mapping from file name to the SHA-256 that the file must have; ``generation``, defaults of
            sampling for where the source has none of its own.
        with_tokenizer: ``False`` to store the weights only.
        own: translators of a map of the caller's; see :func:`oazoo.translators.plan.plan`.

    Raises:
        OazooError: see :func:`oazoo.translators.plan.plan` for the source and
            :func:`oazoo.formats.atomic.check_output` for the output; TranslationError also when a value
            does not fit ``dtype``.
    """
    target = check_output(out, overwrite=overwrite)
    with plan(src, arch, dtype, with_tokenizer=with_tokenizer, provenance=provenance, own=own) as planned:
        files = planned.hashed_files()
        check_not_input(out, files)
        known = _known_hashes(planned.provenance)
        _check_disk(planned, target)
        stamps = _stamps(planned)
        _check_ties(planned)
        source = planned.checkpoint.source
        tensors, followed = planned.in_file_order()
        writer = OamWriter(
            out,
            config=planned.oam_config({}),
            entries=planned.entries(),
            assets=planned.oam_assets(),
            overwrite=overwrite,
        )
        total = sum(tensor.nbytes for tensor in planned.tensors)
        reports: dict[str, TensorReport] = {}
        told = _Told(progress, total)
        with SourceHashes(files, known, followed) as hashes, writer:
            for tensor in tensors:
                measured = Measured()
                fill = filling(tensor, source, measured)
                if fill is None:
                    writer.write(tensor.target, told.pieces(stream(tensor, source, measured)))
                else:
                    place = source[tensor.rule.sources[0]].place
                    follow = hashes.follow if place is not None and place[0] in followed else None
                    writer.write(tensor.target, told.filling(tensor.nbytes, fill, place, follow))
                reports[tensor.target] = tensor_report(tensor, measured)
            found = hashes.result(None if progress is None else partial(progress, "hash"))
            _check_unchanged(stamps)
            writer.replace_config(planned.oam_config(found))
        return ConversionReport(
            Path(out),
            writer.size,
            planned.translator.name,
            planned.config,
            tuple(reports[tensor.target] for tensor in planned.tensors),
            planned.checked.ignored,
            planned.notes,
            planned.source_record(found),
        )


class _Told:
    """Tells ``progress`` of what has come, of ``total`` bytes."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._done = 0
        self._total = total

    def _came(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress("convert", self._done, self._total)

    def pieces(self, pieces: Iterator[Any]) -> Iterator[Any]:
        for piece in pieces:
            yield piece
            self._came(piece.nbytes)

    def filling(
        self,
        size: int,
        fill: Fill,
        place: tuple[Path, int] | None,
        follow: Callable[[Path, int, memoryview], None] | None,
    ) -> Filling:
        def told(start: int, out: Any) -> None:
            fill(start, out)
            self._came(out.nbytes)

        def seen(start: int, data: memoryview) -> None:
            assert place is not None and follow is not None
            follow(place[0], place[1] + start, data)

        return Filling(size, told, None if follow is None else seen)


def tensor_report(tensor: TensorPlan, measured: Measured) -> TensorReport:
    """What happened to a tensor, from its plan and what streaming it found."""
    return TensorReport(
        tensor.target,
        tensor.shape,
        tensor.encoding,
        tensor.nbytes,
        tensor.rule.sources,
        tensor.source_encodings,
        tensor.rule.transform.name,
        tensor.action,
        measured.rounded,
        measured.max_error,
        measured.nan,
        measured.infinite,
    )


def _check_disk(planned: Plan, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < planned.output_bytes:
        raise OutputError(
            f"{target}: {planned.output_bytes:,} bytes are needed, {free:,} are free; nothing was written"
        )


def _stamps(planned: Plan) -> dict[Path, tuple[int, ...]]:
    """What shows whether a file of the source is replaced or written to while it is read."""
    return {path: _stamp(path) for path in planned.hashed_files()}


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_unchanged(stamps: Mapping[Path, tuple[int, ...]]) -> None:
    """Refuse to publish what was made of files that are no longer what was hashed."""
    for path, stamp in stamps.items():
        if _stamp(path) != stamp:
            raise FormatError(f"{path}: changed while it was converted; nothing was written. Try again")


def _check_ties(planned: Plan) -> None:
    """A stored copy of a tied weight must be a copy: otherwise the config is wrong about the tie."""
    source = planned.checkpoint.source
    for copy, used in planned.translation.equal:
        if not same_bytes(source, copy, used):
            raise TranslationError(
                f"{source.path}: the config ties {copy} to {used}, but the two differ; "
                "set tie_word_embeddings to false in config.json if the head is its own"
            )


def _known_hashes(provenance: Mapping[str, Any]) -> Mapping[str, str]:
    files = provenance.get("files") or {}
    for name, digest in files.items():
        if not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            raise UsageError(
                f"provenance: {str(digest)[:64]!r} is not the SHA-256 of {name!r} in hexadecimal"
            )
    return dict(files)
