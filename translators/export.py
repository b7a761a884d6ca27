"""Exporting an ``.oam`` to SafeTensors under Hugging Face names, or to GGUF: plan, stream, read again, publish."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import OutputError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.detect import open_source
from oazoo.formats.gguf_writer import write_gguf
from oazoo.formats.hf_folder import INDEX_SUFFIX
from oazoo.formats.oam import OamSource
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.formats.source import TensorInfo, WeightSource
from oazoo.formats.staging import check_folder, publish_files, publish_folder, staging
from oazoo.formats.streamed import StreamedTensor, as_bytes
from oazoo.translators.convert import ConversionReport, Progress, TensorReport, tensor_report
from oazoo.translators.engine import Measured
from oazoo.translators.export_plan import ExportPlan, plan_export, provenance_texts, stream_out
from oazoo.translators.exporter import NAMINGS, check_same_model
from oazoo.translators.gguf_tokenizer_out import gguf_text_settings
from oazoo.translators.hf_files import hf_files
from oazoo.translators.own_map import OwnMap
from oazoo.translators.translator import open_checkpoint

#: As the Hugging Face libraries cut models by default.
MAX_SHARD_BYTES = 5_000_000_000
#: ``general.file_type`` of GGUF by what most values are stored as.
_FILE_TYPES = {"f32": 0, "f16": 1, "gguf.q4_0": 2, "gguf.q8_0": 7, "bf16": 32}
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
_STEP = 1 << 22


@dataclass(frozen=True)
class ExportReport(ConversionReport):
    """The outcome of an export; ``translator`` is the architecture it was written as."""

    container: str
    #: Name → bytes of every file written.
    files: Mapping[str, int]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        values = super().to_json()
        values["architecture"] = values.pop("translator")
        return values | {"container": self.container, "files": dict(self.files)}


def container_for(output: Path | str, to: str | None = None) -> str:
    """The container that an output's name means, unless ``to`` says it: a folder or ``.safetensors``, or ``.gguf``.

    Raises:
        UsageError: the name and ``to`` contradict each other, or the name means nothing.
    """
    suffix = Path(output).suffix.lower()
    meant = {".gguf": "gguf", ".safetensors": "safetensors", "": "safetensors"}.get(suffix)
    if Path(output).is_dir() or str(output).endswith(("/", "\\")):
        meant = "safetensors"
    if to is not None and to not in NAMINGS:
        raise UsageError(f"cannot export to {to[:32]!r}; supported: {', '.join(NAMINGS)}")
    if to is not None and suffix in (".gguf", ".safetensors", ".oam", ".onnx") and to != meant:
        raise UsageError(f"{output}: the name means {suffix.removeprefix('.')}, --to says {to}")
    if to is None and meant is None:
        raise UsageError(
            f"{output}: what to export to? Name a folder, OUT.safetensors or OUT.gguf, or say --to: {', '.join(NAMINGS)}"
        )
    return to or str(meant)


def export(
    source: OamSource | Path | str,
    output: Path | str,
    *,
    to: str | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
    with_tokenizer: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    own: OwnMap | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write an ``.oam`` as a Hugging Face folder, one SafeTensors file, or a GGUF file, in bounded memory.

    The output is read again and compared with what was meant, tensor by tensor, before it gets its name.

    Args:
        source: the ``.oam`` file, or an opened one (which stays open).
        output: a folder; ``OUT.safetensors`` (config.json and tokenizer files go beside it); or ``OUT.gguf``.
        to: ``"safetensors"`` or ``"gguf"``, where the name does not say.
        dtype: ``keep``, ``f32``, ``f16`` or ``bf16``. ``keep`` leaves dense weights as they are. Q8 and Q4 become Q8_0
            and Q4_0 in GGUF where every scale is a float16, and f16 otherwise. Vectors are f32 in GGUF.
        overwrite: replace an existing output.
        with_tokenizer: ``False`` to leave tokenizer and chat template out.
        max_shard_bytes: a folder's weights are cut into files of about this size.
        own: a map of the caller's; see :func:`oazoo.translators.export_plan.plan_export`.
        progress: called with (label, bytes done, bytes in all).

    Raises:
        OazooError: UsageError, FormatError, TranslationError, TokenizerError or OutputError; nothing is left behind.
    """
    container = container_for(output, to)
    with nullcontext(source) if isinstance(source, OamSource) else as_model(open_source(source)) as model:
        plan = plan_export(model, container, dtype, with_tokenizer=with_tokenizer, own=own)
        work = _Export(plan, progress)
        named = Path(output)
        check_not_input(named, model.files)
        single = container == "gguf" or named.suffix.lower() == ".safetensors"
        side = work.side_files() if container == "safetensors" else {}
        if single:
            final = check_output(named, overwrite=overwrite)
            targets = [*(check_output(final.parent / name, overwrite=overwrite) for name in side), final]
        else:
            final = check_folder(named, _is_ours, overwrite=overwrite)
        _check_disk(plan, final)
        metadata = work.gguf_metadata() if container == "gguf" else {}
        work.verify_source()
        with staging(final, named.parent if single else named) as folder:
            if container == "gguf":
                work.write_gguf(folder / final.name, metadata)
            else:
                for name, data in side.items():
                    (folder / name).write_bytes(data)
                limit = None if single else max_shard_bytes
                work.write_safetensors(folder, final.name if single else "model.safetensors", limit)
            work.read_again(folder / final.name if container == "gguf" else folder)
            files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            if single:
                publish_files(folder, targets, overwrite=overwrite)
            else:
                publish_folder(folder, final)
        notes = list(plan.notes)
        if container == "safetensors" and single and final.name != "model.safetensors":
            notes.append(f"transformers looks for model.safetensors in a folder, not for {final.name}")
        return ExportReport(
            named,
            sum(files.values()),
            plan.out.architecture,
            plan.config,
            tuple(work.reports),
            (),
            (*notes, *work.notes),
            plan.provenance,
            container,
            files,
        )


def as_model(source: WeightSource) -> OamSource:
    """An opened source that must be an ``.oam``.

    Raises:
        UsageError: it is of another container; it is closed then.
    """
    if not isinstance(source, OamSource):
        source.close()
        raise UsageError(
            f"{source.path}: is {source.format}, not .oam; convert it first: oazoo convert {source.path} -o MODEL.oam"
        )
    return source


def _is_ours(name: str) -> bool:
    shard = name.startswith("model") and name.endswith((".safetensors", INDEX_SUFFIX))
    return name in _SIDE_FILES or shard


def _check_disk(plan: ExportPlan, target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < plan.weight_bytes:
        raise OutputError(
            f"{target}: {plan.weight_bytes:,} bytes are needed, {free:,} are free; nothing was written"
        )


class _Export:
    """One run: streams tensors, remembers what was written, and reads it again."""

    def __init__(self, plan: ExportPlan, progress: Progress | None) -> None:
        self.plan = plan
        self.progress = progress
        self.reports: list[TensorReport] = []
        self.notes: list[str] = []
        self._sums: dict[str, int] = {}
        self._done = 0

    def side_files(self) -> dict[str, bytes]:
        """config.json and what else stands beside the weights of a Hugging Face model."""
        plan = self.plan
        return hf_files(plan.out.settings, plan.assets, plan.config, plan.main_encoding, plan.provenance)

    def gguf_metadata(self) -> dict[str, Any]:
        """All key/values of a GGUF file."""
        plan, record = self.plan, self.plan.provenance
        settings: dict[str, Any] = {"general.architecture": plan.out.architecture, "general.type": "model"}
        for key, name in (
            ("general.name", "name"),
            ("general.license", "license"),
            ("general.source.url", "uri"),
        ):
            if isinstance(record.get(name), str):
                settings[key] = record[name]
        settings["general.file_type"] = _FILE_TYPES[plan.main_encoding]
        if any(tensor.action == "pack" for tensor in plan.tensors):
            settings["general.quantization_version"] = 2
        settings |= plan.out.settings
        rows = plan.config.vocab_size
        text, notes = gguf_text_settings(plan.assets, rows, str(plan.source.path))
        self.notes += notes
        return settings | text | provenance_texts(plan)

    def tensors(self) -> list[StreamedTensor]:
        """Every tensor, made while it is written."""
        plan = self.plan
        streams = [
            StreamedTensor(TensorInfo(t.target, t.shape, t.encoding, t.nbytes), partial(self._pieces, number))
            for number, t in enumerate(plan.tensors)
        ]
        for name, values in plan.out.extra.items():
            info = TensorInfo(name, values.shape, "f32", values.nbytes)
            streams.append(StreamedTensor(info, partial(self._extra, name)))
        return streams

    def write_gguf(self, path: Path, metadata: Mapping[str, Any]) -> None:
        """One GGUF file."""
        write_gguf(path, metadata, self.tensors())

    def write_safetensors(self, folder: Path, name: str, limit: int | None) -> None:
        """One file, or several of about ``limit`` bytes and their index."""
        shards: list[list[StreamedTensor]] = [[]]
        size = 0
        for tensor in self.tensors():
            if limit is not None and shards[-1] and size + tensor.info.nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += tensor.info.nbytes
        metadata = {"format": "pt", **provenance_texts(self.plan)}
        names = [name]
        if len(shards) > 1:
            names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        for file, shard in zip(names, shards, strict=True):
            write_safetensors(folder / file, {t.info.name: t for t in shard}, metadata=metadata)
        if len(shards) > 1:
            weight_map = {t.info.name: file for file, shard in zip(names, shards, strict=True) for t in shard}
            index = {"metadata": {"total_size": self.plan.weight_bytes}, "weight_map": weight_map}
            path = folder / f"model{INDEX_SUFFIX}"
            path.write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def _pieces(self, number: int) -> Iterator[npt.NDArray[np.uint8]]:
        tensor, measured, total = self.plan.tensors[number], Measured(), 0
        for piece in stream_out(tensor, self.plan.source, measured):
            data = as_bytes(piece)
            total = zlib.crc32(data.data, total)
            self._tell("export", data.size)
            yield data
        self._sums[tensor.target] = total
        self.reports.append(tensor_report(tensor, measured))

    def _extra(self, name: str) -> Iterator[npt.NDArray[np.uint8]]:
        data = as_bytes(self.plan.out.extra[name])
        self._sums[name] = zlib.crc32(data.data)
        yield data

    def verify_source(self) -> None:
        """Check the checksums of the source: a damaged model must not travel on."""
        total = self.plan.source.checked_bytes
        self._done = 0
        self.plan.source.verify(lambda size: self._tell("check source", size, total))
        self._done = 0

    def read_again(self, path: Path) -> None:
        """Open what was written as any reader would, and compare every tensor and the config.

        Raises:
            OutputError: a tensor is not what was written.
        """
        self._done = 0
        with open_source(path) as written:
            infos = {info.name: info for info in self.plan.infos()}
            if {name: tensor.info for name, tensor in written.items()} != infos:
                raise OutputError(f"{path}: does not hold the tensors that were written")
            for name, tensor in written.items():
                raw, total = tensor.raw(), 0
                for start in range(0, raw.size, _STEP):
                    total = zlib.crc32(raw[start : start + _STEP].data, total)
                    self._tell("read again", min(_STEP, raw.size - start))
                if total != self._sums[name]:
                    raise OutputError(f"{path}: {name} was not written as it was meant: is the disk sound?")
            own = self.plan.own.translators if self.plan.own is not None else ()
            check_same_model(open_checkpoint(written), self.plan.out.reads_as or self.plan.config, own)

    def _tell(self, label: str, size: int, total: int | None = None) -> None:
        self._done += size
        if self.progress is not None:
            self.progress(label, self._done, self.plan.weight_bytes if total is None else total)
