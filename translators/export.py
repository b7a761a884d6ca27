"""Exporting an ``.oam`` to SafeTensors under Hugging Face names, GGUF or ONNX: plan, stream, read again, publish."""

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
from oazoo.formats.onnx_writer import GraphPlan, data_name, write_onnx
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.formats.source import TensorInfo, WeightSource
from oazoo.formats.staging import check_folder, publish_files, publish_folder, staging
from oazoo.formats.streamed import StreamedTensor, as_bytes
from oazoo.translators.convert import ConversionReport, Progress, TensorReport, tensor_report
from oazoo.translators.engine import Measured
from oazoo.translators.export_plan import ExportPlan, plan_export, provenance_texts, stream_out
from oazoo.translators.export_raw import is_raw, write_raw
from oazoo.translators.exporter import NAMINGS, check_same_model
from oazoo.translators.gguf_tokenizer_out import gguf_text_settings
from oazoo.translators.hf_files import hf_files
from oazoo.translators.onnx_ours import asset_texts
from oazoo.translators.own_map import OwnMap
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.translator import open_checkpoint

#: As the Hugging Face libraries cut models by default.
MAX_SHARD_BYTES = 5_000_000_000
#: An ONNX file is one protobuf message, which ends at 2 GiB; larger models have their weights beside it.
MAX_INLINE_BYTES = 1_500_000_000
#: ``general.file_type`` of GGUF by what most values are stored as.
_FILE_TYPES = {"f32": 0, "f16": 1, "gguf.q4_0": 2, "gguf.q8_0": 7, "bf16": 32}
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
#: Of these, what other programs look for beside an ONNX file.
_ONNX_SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
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
    """The container that an output's name means, unless ``to`` says it: a folder or ``.safetensors``, ``.gguf``, ``.onnx``.

    Raises:
        UsageError: the name and ``to`` contradict each other, or the name means nothing.
    """
    suffix = Path(output).suffix.lower()
    meant = {".gguf": "gguf", ".onnx": "onnx", ".safetensors": "safetensors", "": "safetensors"}.get(suffix)
    if Path(output).is_dir() or str(output).endswith(("/", "\\")):
        meant = "safetensors"
    if to is not None and to not in NAMINGS:
        raise UsageError(f"cannot export to {to[:32]!r}; supported: {', '.join(NAMINGS)}")
    if to is not None and suffix in (".gguf", ".safetensors", ".oam", ".onnx") and to != meant:
        raise UsageError(f"{output}: the name means {suffix.removeprefix('.')}, --to says {to}")
    if to is None and meant is None:
        raise UsageError(
            f"{output}: what to export to? Name a folder, OUT.safetensors, OUT.gguf or OUT.onnx, or say --to: "
            f"{', '.join(NAMINGS)}"
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
    external: bool = False,
    own: OwnMap | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write an ``.oam`` as a Hugging Face folder, one SafeTensors file, a GGUF file or an ONNX graph, in bounded memory.

    The output is read again and compared with what was meant, tensor by tensor, before it gets its name.

    Args:
        source: the ``.oam`` file, or an opened one (which stays open).
        output: a folder; ``OUT.safetensors`` (config.json and tokenizer files go beside it); ``OUT.gguf``; or ``OUT.onnx``
            (tokenizer files go beside it, and weights above 1.5 GB, into ``OUT.onnx.data``).
        to: ``"safetensors"``, ``"gguf"`` or ``"onnx"``, where the name does not say.
        dtype: ``keep``, ``f32``, ``f16`` or ``bf16``. ``keep`` leaves dense weights as they are. Q8 and Q4 become Q8_0
            and Q4_0 in GGUF where every scale is a float16, and f16 otherwise. Vectors are f32 in GGUF.
        overwrite: replace an existing output.
        with_tokenizer: ``False`` to leave tokenizer and chat template out.
        max_shard_bytes: a folder's weights are cut into files of about this size.
        external: put the weights of an ONNX graph into ``OUT.onnx.data`` however small they are.
        own: a map of the caller's; see :func:`oazoo.translators.export_plan.plan_export`.
        progress: called with (label, bytes done, bytes in all).

    Raises:
        OazooError: UsageError, FormatError, TranslationError, TokenizerError or OutputError; nothing is left behind.
    """
    container = container_for(output, to)
    if external and container != "onnx":
        raise UsageError("only an ONNX graph can have its weights in a file beside it (--external)")
    with nullcontext(source) if isinstance(source, OamSource) else as_model(open_source(source)) as model:
        if is_raw(model) and container == "safetensors" and own is None:
            named = Path(output)
            reports, files, notes = write_raw(
                model, named, dtype=dtype, overwrite=overwrite, progress=progress
            )
            shapes = {name: tensor.info.shape for name, tensor in model.items()}
            record = model.metadata.get("source")
            return ExportReport(
                named,
                sum(files.values()),
                "raw",
                RawConfig(shapes),
                tuple(reports),
                (),
                (*model.notes, *notes),
                record if isinstance(record, Mapping) else {},
                container,
                files,
            )
        plan = plan_export(model, container, dtype, with_tokenizer=with_tokenizer, own=own)
        work = _Export(plan, progress)
        named = Path(output)
        check_not_input(named, model.files)
        single = container != "safetensors" or named.suffix.lower() == ".safetensors"
        outside = container == "onnx" and (external or plan.weight_bytes > MAX_INLINE_BYTES)
        side = work.side_files()
        if single:
            final = check_output(named, overwrite=overwrite)
            beside = [*side, data_name(final.name)] if outside else [*side]
            if final.name in beside:
                raise UsageError(f"{named}: another file of this export has that name; choose another")
            targets = {name: check_output(final.parent / name, overwrite=overwrite) for name in beside}
            for target in targets.values():
                check_not_input(target, model.files)
            targets[final.name] = final
        else:
            final = check_folder(named, _is_ours, overwrite=overwrite)
        _check_disk(plan, final)
        texts = work.metadata()
        work.verify_source()
        with staging(final, named.parent if single else named) as folder:
            for name, data in side.items():
                (folder / name).write_bytes(data)
            written = folder / final.name if single else folder
            if container == "gguf":
                write_gguf(written, texts, work.tensors())
            elif container == "onnx":
                write_onnx(written, work.graph(), texts, work.tensors(), external=outside)
            else:
                limit = None if single else max_shard_bytes
                work.write_safetensors(folder, final.name if single else "model.safetensors", texts, limit)
            work.read_again(folder if container == "safetensors" else written)
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
        """What stands beside the weights of a model: config.json, the tokenizer and what else other programs look for."""
        plan = self.plan
        if plan.container == "gguf":
            return {}
        settings = plan.out.settings if plan.container == "safetensors" else {}
        files = hf_files(
            settings, plan.assets, plan.config, plan.main_encoding, plan.provenance, alone=plan.out.alone
        )
        return (
            files
            if plan.container == "safetensors"
            else {k: v for k, v in files.items() if k in _ONNX_SIDE_FILES}
        )

    def metadata(self) -> dict[str, Any]:
        """The metadata inside the file."""
        plan = self.plan
        if plan.container == "gguf":
            return self._gguf_metadata()
        if plan.container == "onnx":
            return {**plan.out.settings, **asset_texts(plan.assets), **provenance_texts(plan)}
        return {"format": "pt", **provenance_texts(plan)}

    def graph(self) -> GraphPlan:
        """The graph around the weights."""
        assert self.plan.out.graph is not None
        return self.plan.out.graph({info.name: info.encoding for info in self.plan.infos()})

    def _gguf_metadata(self) -> dict[str, Any]:
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
        named = settings.get("general.name")
        text, notes = gguf_text_settings(
            plan.assets, rows, str(plan.source.path), architecture=plan.out.architecture, name=named
        )
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

    def write_safetensors(
        self, folder: Path, name: str, metadata: Mapping[str, str], limit: int | None
    ) -> None:
        """One file, or several of about ``limit`` bytes and their index."""
        shards: list[list[StreamedTensor]] = [[]]
        size = 0
        for tensor in self.tensors():
            if limit is not None and shards[-1] and size + tensor.info.nbytes > limit:
                shards.append([])
                size = 0
            shards[-1].append(tensor)
            size += tensor.info.nbytes
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
            constants = self.graph().constants if self.plan.out.graph is not None else {}
            if {name: tensor.info for name, tensor in written.items() if name not in constants} != infos:
                raise OutputError(f"{path}: does not hold the tensors that were written")
            for name in infos:
                total = 0
                for piece in written[name].pieces(_STEP):
                    total = zlib.crc32(piece.data, total)
                    self._tell("read again", piece.size)
                if total != self._sums[name]:
                    raise OutputError(f"{path}: {name} was not written as it was meant: is the disk sound?")
            own = self.plan.own.translators if self.plan.own is not None else ()
            check_same_model(open_checkpoint(written), self.plan.out.reads_as or self.plan.config, own)

    def _tell(self, label: str, size: int, total: int | None = None) -> None:
        self._done += size
        if self.progress is not None:
            self.progress(label, self._done, self.plan.weight_bytes if total is None else total)
