"""Planning an export: the import map of the wanted checkpoint, run backwards, checked and sized before a byte moves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.configs import ModelConfig, config_from_json
from oazoo.errors import TranslationError, UsageError
from oazoo.formats import encodings, quant
from oazoo.formats.oam import OamSource
from oazoo.formats.source import SourceTensor, TensorInfo
from oazoo.translators.assets import Assets
from oazoo.translators.carried import generation_defaults, special_tokens
from oazoo.translators.engine import CHUNK, DTYPES, Measured, TensorPlan, how_made, stream
from oazoo.translators.export_raw import is_raw
from oazoo.translators.exporter import NAMINGS, Outgoing, check_reads_back, outgoing
from oazoo.translators.plan import weights_table
from oazoo.translators.rules import Identity, Rule, invert

if TYPE_CHECKING:
    from rich.table import Table

    from oazoo.translators.own_map import OwnMap

_DENSE = ("f32", "f16", "bf16", "f64")
#: Weights of rank 2 and more that llama.cpp wants in f32 all the same.
_GGUF_F32 = ("position_embd.weight",)


@dataclass(frozen=True)
class ExportPlan:
    """An export that has been checked whole."""

    source: OamSource
    config: ModelConfig
    container: str
    dtype: str
    out: Outgoing
    tensors: tuple[TensorPlan, ...]
    assets: Assets
    notes: tuple[str, ...]
    #: The map of the caller's that is used, if any.
    own: OwnMap | None = None

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the weights come from, as the ``.oam`` records it."""
        record = self.source.metadata.get("source")
        return record if isinstance(record, Mapping) else {}

    @property
    def main_encoding(self) -> str:
        """What most values are stored as."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.encoding] = sizes.get(tensor.encoding, 0) + encodings.numel(tensor.shape)
        return max(sizes, key=lambda name: sizes[name])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors) + sum(v.nbytes for v in self.out.extra.values())

    @property
    def peak_bytes(self) -> int:
        """Upper estimate of the memory that streaming takes beyond the interpreter."""
        largest = 0
        for tensor in self.tensors:
            count = encodings.numel(tensor.shape)
            moved = 0
            if tensor.rule.transform.name != "Identity":
                decoded = tensor.action != "pack" and tensor.source_encodings[0] in quant.CODE_BYTES
                moved = 8 * count if decoded else tensor.nbytes
            largest = max(largest, moved + 24 * min(count, CHUNK))
        return largest + 16 * CHUNK

    def infos(self) -> list[TensorInfo]:
        """Every tensor that is written, in file order."""
        infos = [TensorInfo(t.target, t.shape, t.encoding, t.nbytes) for t in self.tensors]
        return infos + [TensorInfo(k, v.shape, "f32", v.nbytes) for k, v in self.out.extra.items()]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "container": self.container,
            "architecture": self.out.architecture,
            "family": self.config.family,
            "dtype": self.dtype,
            "weight_bytes": self.weight_bytes,
            "peak_bytes": self.peak_bytes,
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """The plan as a table for people, the same weight of all layers on one line."""
        from rich.text import Text

        title = f"{self.config.family} → {self.container} ({self.out.architecture})"
        table = weights_table(title, self.tensors)
        for name, values in self.out.extra.items():
            shape = "×".join(map(str, values.shape))
            table.add_row(*map(Text, (name, shape, "f32", "(config)", "", "", "1", f"{values.nbytes:,}")))
        return table


def plan_export(
    source: OamSource,
    container: str,
    dtype: str = "keep",
    *,
    with_tokenizer: bool = True,
    own: OwnMap | None = None,
) -> ExportPlan:
    """Plan the export of an opened ``.oam``.

    Args:
        source: the model.
        container: ``"safetensors"``, ``"gguf"`` or ``"onnx"``.
        dtype: ``"keep"``, ``"f32"``, ``"f16"`` or ``"bf16"``; see :func:`oazoo.translators.export.export`.
        with_tokenizer: ``False`` to leave tokenizer and chat template out.
        own: a map of the caller's (:func:`oazoo.translators.own_map.load_map`), to be used instead of all others.

    Raises:
        UsageError: an unknown container or dtype.
        TranslationError: the model's family or settings cannot be expressed there; the message says why.
    """
    if container not in NAMINGS:
        raise UsageError(f"cannot export to {container[:32]!r}; supported: {', '.join(NAMINGS)}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype[:32]!r}; known: {', '.join(DTYPES)}")
    if not source.metadata:
        raise TranslationError(
            f"{source.path}: was not converted by oazoo, so nothing in it says which model its tensors make"
        )
    if is_raw(source):
        raise TranslationError(
            f"{source.path}: holds tensors without a model (it was converted with --arch raw), so there is no map to plan; "
            "they can be written under their own names: oazoo export … -o OUT.safetensors"
        )
    try:
        config = config_from_json(source.metadata.get("family"), source.metadata.get("model"))
    except TranslationError as error:
        raise TranslationError(f"{source.path}: holds no model that can be exported: {error}") from error
    _check_complete(source, config)
    record = source.metadata.get("source")
    declared = record.get("architecture") if isinstance(record, Mapping) else None
    names = [name for name in declared if isinstance(name, str)] if isinstance(declared, list) else []
    out = outgoing(config, NAMINGS[container], names, own)
    if container == "onnx" and out.graph is None:
        raise TranslationError(f"the exporter {out.architecture!r} gives no graph, which an ONNX file is")
    assets, notes = _assets(source, with_tokenizer)
    order = {name: number for number, name in enumerate(config.parameters())}
    rules = sorted(invert(out.rules), key=lambda rule: order[rule.sources[0]])
    loose: dict[str, list[str]] = {}
    tensors = tuple(_plan_tensor(source, rule, container, dtype, loose) for rule in rules)
    for why, targets in loose.items():
        shown = ", ".join(targets[:4]) + (f" and {len(targets) - 4} more" if len(targets) > 4 else "")
        notes.append(f"{len(targets)} tensor{'s' if len(targets) != 1 else ''} {why}: {shown}")
    plan = ExportPlan(
        source, config, container, dtype, out, tensors, assets, (*source.notes, *out.notes, *notes), own
    )
    check_reads_back(out, config, plan.infos(), source.path, own.translators if own else ())
    return plan


def _check_complete(source: OamSource, config: ModelConfig) -> None:
    expected = config.parameters()
    for name, shape in expected.items():
        if name not in source:
            raise TranslationError(f"{source.path}: the parameter {name} is missing")
        if source[name].info.shape != shape:
            raise TranslationError(
                f"{source.path}: {name} has the shape {list(source[name].info.shape)}, the config asks for {list(shape)}"
            )
    extra = [name for name in source if name not in expected]
    if extra:
        raise TranslationError(f"{source.path}: the model has no parameter {extra[0][:128]!r}")


def _assets(source: OamSource, with_tokenizer: bool) -> tuple[Assets, list[str]]:
    """What travels with the model, its types checked."""
    where = str(source.path)
    generation = generation_defaults(source.metadata.get("generation") or {}, f"{where}: generation")
    if not with_tokenizer:
        return Assets(generation=generation), ["tokenizer and chat template left out, as asked"]
    tokens = special_tokens(source.metadata.get("tokenizer") or {}, f"{where}: tokenizer")
    template = source.asset("asset/chat_template.jinja")
    try:
        text = None if template is None else template.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TranslationError(f"{where}: the chat template is not UTF-8 text") from error
    return Assets(source.asset("asset/tokenizer.json"), text, tokens, generation), []


def _plan_tensor(
    source: OamSource, rule: Rule, container: str, dtype: str, loose: dict[str, list[str]]
) -> TensorPlan:
    infos = [source[name].info for name in rule.sources]
    shape = rule.transform.shape([info.shape for info in infos])
    kinds = tuple(info.encoding for info in infos)
    for info in infos:
        if info.encoding not in (*_DENSE, *quant.CODE_BYTES):
            raise TranslationError(
                f"{source.path}: {info.name} is stored as {info.encoding}, which is no weight; supported: "
                f"{', '.join((*_DENSE, *quant.CODE_BYTES))}"
            )
    encoding = _encoding(source, rule, shape, kinds, container, dtype, loose)
    action = "pack" if encoding.startswith("gguf.") else how_made(kinds, encoding, rule)
    return TensorPlan(rule, shape, encoding, encodings.get(encoding).bytes_for(shape), kinds, action)


def _encoding(
    source: OamSource,
    rule: Rule,
    shape: tuple[int, ...],
    kinds: tuple[str, ...],
    container: str,
    dtype: str,
    loose: dict[str, list[str]],
) -> str:
    if container == "gguf" and (len(shape) < 2 or rule.target in _GGUF_F32):
        return "f32"  # llama.cpp adds and multiplies these in f32 only
    packed = [kind for kind in kinds if kind in quant.CODE_BYTES]
    if not packed:
        if dtype != "keep":
            return dtype
        kind = kinds[0] if len(set(kinds)) == 1 else "f32"
        return "f32" if kind == "f64" and container == "gguf" else kind
    wanted = "f16" if dtype == "keep" else dtype
    if container == "gguf" and dtype == "keep":
        why = _why_not_packed(source, rule, shape, kinds)
        if why is None:
            return quant.GGML_TARGETS[kinds[0]]
        loose.setdefault(f"stored as {packed[0]} become {wanted}, because {why}", []).append(rule.target)
    else:
        loose.setdefault(
            f"stored as {packed[0]} become {wanted}; the precision that packing took does not come back", []
        ).append(rule.target)
    return wanted


def _why_not_packed(
    source: OamSource, rule: Rule, shape: tuple[int, ...], kinds: tuple[str, ...]
) -> str | None:
    """What keeps Q4 or Q8 from becoming Q4_0 or Q8_0 block for block; None if nothing does."""
    name = quant.GGML_TARGETS[kinds[0]].removeprefix("gguf.").upper()
    if len(set(kinds)) != 1 or not rule.transform.on_rows:
        return f"their rows are taken apart, which blocks of {name} do not allow"
    if any(source[part].info.shape[-1] % quant.BLOCK for part in rule.sources):
        return f"their rows are no multiple of the {quant.BLOCK} values in a block of {name}"
    if not all(quant.scales_fit_f16(scales) for p in rule.sources for _, scales in _planes(source[p])):
        return f"{name} keeps a 16-bit scale for each block, and theirs need 32 bits"
    return None


def _planes(tensor: SourceTensor) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]]:
    """Codes [blocks, bytes] and scales [blocks] of a Q4 or Q8 tensor, some blocks at a time."""
    info = tensor.info
    for start in range(0, info.numel, CHUNK):
        yield quant.planes(tensor.part(start, min(start + CHUNK, info.numel)), info.encoding)


def stream_out(plan: TensorPlan, source: OamSource, measured: Measured) -> Iterator[npt.NDArray[Any]]:
    """The stored bytes or values of a tensor on its way out, in file order; fills ``measured``."""
    if plan.action != "pack":
        yield from stream(plan, source, measured)
        return
    kind, rows = plan.source_encodings[0], []
    if isinstance(plan.rule.transform, Identity):
        for codes, scales in _planes(source[plan.rule.sources[0]]):
            yield from quant.to_ggml_stream(codes, scales, kind)
        return
    for name in plan.rule.sources:
        codes, scales = quant.planes(source[name].raw(), kind)
        count = source[name].info.shape[0]
        rows.append((codes.reshape(count, -1), scales.reshape(count, -1)))
    codes = np.ascontiguousarray(plan.rule.transform.apply([part[0] for part in rows]))
    scales = np.ascontiguousarray(plan.rule.transform.apply([part[1] for part in rows]))
    yield from quant.to_ggml_stream(codes.reshape(-1, quant.CODE_BYTES[kind]), scales.reshape(-1), kind)


def provenance_texts(plan: ExportPlan) -> dict[str, str]:
    """What the ``.oam`` says about where its weights come from, as texts for the new container's metadata."""
    found = {f"oazoo.{key}": plan.source.metadata.get(key) for key in ("source", "quantization", "tool")}
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for key, value in found.items()
        if value
    }
