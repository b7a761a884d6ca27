"""Planning a conversion: everything is decided, checked and sized before a byte moves."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oazoo.configs import FlowConfig, ModelConfig
from oazoo.errors import UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.oam_layout import ASSET_PREFIX, OamConfig
from oazoo.formats.oam_layout import DTYPES as OAM_DTYPES
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.formats.source import WeightSource
from oazoo.translators.assets import Assets
from oazoo.translators.engine import CHUNK, DTYPES, Checked, TensorPlan, check, is_copy
from oazoo.translators.fp8 import decode_fp8
from oazoo.translators.gguf_tokenizer import gguf_assets
from oazoo.translators.hf_assets import hf_assets
from oazoo.translators.packed import refuse_packed
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.settings import read_small
from oazoo.translators.translator import (
    Checkpoint,
    Translation,
    Translator,
    choose,
    open_checkpoint,
    plugin_faults,
)
from oazoo.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

_PROVENANCE = ("name", "revision", "license", "files", "uri", "generation")
_NO_HASH = "0" * 64


def any_layer(name: str) -> str:
    """A tensor's name with ``*`` for the number of its layer, so that all layers read alike."""
    return re.sub(r"\.[0-9]+\.", ".*.", name)


def weights_table(title: str, tensors: Sequence[TensorPlan]) -> Table:
    """What becomes of each weight as a table for people, the same weight of all layers on one line."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("target", "shape", "encoding", "source", "stored as", "transform"):
        table.add_column(heading, overflow="fold")
    for heading in ("tensors", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups: dict[tuple[str, ...], list[int]] = {}
    for tensor in tensors:
        cells = (
            any_layer(tensor.target),
            "×".join(map(str, tensor.shape)),
            tensor.encoding,
            any_layer(", ".join(tensor.rule.sources)),
            ", ".join(dict.fromkeys(tensor.source_encodings)),
            tensor.rule.transform.name,
        )
        groups.setdefault(cells, []).append(tensor.nbytes)
    for row, sizes in groups.items():
        # Names come from the file: Text keeps them from being read as markup.
        table.add_row(*map(Text, (*row, str(len(sizes)), f"{sum(sizes):,}")))
    return table


@dataclass(frozen=True)
class Plan:
    """A conversion that has been checked whole.

    ``close()`` (or leaving a ``with`` block) closes the source if this plan opened it.
    """

    checkpoint: Checkpoint
    translator: Translator
    translation: Translation
    checked: Checked
    assets: Assets
    dtype: str
    #: Files beside the weights that were read (config.json, tokenizer.json, …).
    side_files: tuple[Path, ...] = ()
    #: What is known of the source from outside: see :func:`oazoo.translators.convert.convert`.
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    owns_source: bool = field(default=False, repr=False)

    @property
    def config(self) -> ModelConfig | RawConfig:
        """The typed configuration of the model."""
        return self.translation.config

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """What is written, in the order of the config's parameters."""
        order = {name: number for number, name in enumerate(self.config.parameters())}
        return tuple(sorted(self.checked.tensors, key=lambda tensor: order[tensor.target]))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know about this conversion."""
        notes = [*self.checkpoint.source.notes, *self.translation.notes, *self.assets.notes, *plugin_faults()]
        if any(tensor.encoding == "f64" for tensor in self.checked.tensors):
            notes.append(
                "weights of 64 bits are kept as they are; no model runs in them: --dtype f32 makes them usable"
            )
        return tuple(notes)

    @cached_property
    def output_bytes(self) -> int:
        """Exact size of the ``.oam`` file."""
        return OamWriter(
            Path("plan.oam"), config=self.oam_config({}), entries=self.entries(), assets=self.oam_assets()
        ).size

    @property
    def peak_bytes(self) -> int:
        """Upper estimate of the memory that streaming takes beyond the interpreter."""
        source = self.checkpoint.source
        largest = max((tensor.working_bytes(source) for tensor in self.checked.tensors), default=0)
        return largest + sum(map(len, self.assets.files().values())) + 16 * CHUNK

    def entries(self) -> list[OamEntry]:
        """The weights as the writer takes them."""
        return [OamEntry(tensor.target, tensor.shape, tensor.encoding) for tensor in self.in_file_order()[0]]

    def in_file_order(self) -> tuple[Sequence[TensorPlan], frozenset[Path]]:
        """The tensors in the order in which they are written, and the files of the source that this reads from begin to end.

        Where all are copies of what lies in the files, the order is that of the files, so that reading them once gives their
        SHA-256, too. Otherwise it is that of the plan, and no file is named.
        """
        source = self.checkpoint.source
        files = {path: index for index, path in enumerate(source.files)}
        places: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            place = source[tensor.rule.sources[0]].place
            if place is None or place[0] not in files or not is_copy(tensor):
                return self.tensors, frozenset()
            places[tensor.target] = files[place[0]], place[1]
        return sorted(self.tensors, key=lambda tensor: places[tensor.target]), frozenset(files)

    def oam_assets(self) -> dict[str, bytes]:
        """Asset name (without the prefix) → bytes."""
        return {name.removeprefix(ASSET_PREFIX): data for name, data in self.assets.files().items()}

    def oam_config(self, hashes: Mapping[str, str]) -> OamConfig:
        """The Config section. ``hashes`` are the SHA-256 of source files by name (zeros stand in for absent ones)."""
        config = self.config
        document: dict[str, Any] = {
            "oazoo": 1,
            "family": config.family,
            "model": config.to_json(),
            "source": self.source_record(hashes),
            "generation": {**(self.provenance.get("generation") or {}), **self.assets.generation},
            "tokenizer": dict(self.assets.tokens),
            "tool": f"oazoo {__version__}",
        }
        kinds = [tensor.encoding for tensor in self.tensors if tensor.encoding in OAM_DTYPES]
        return OamConfig(
            architecture=config.family,
            d_model=config.hidden_size,
            n_layers=config.num_layers,
            vocab_size=config.vocab_size,
            weight_dtype=max(kinds, key=kinds.count, default="f32"),
            payload=json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8"),
        )

    def source_record(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Where the weights come from, without any path of this machine."""
        provenance = self.provenance
        source = self.checkpoint.source
        files = [
            {
                "name": _text_of(path.name),
                "bytes": path.stat().st_size,
                "sha256": hashes.get(path.name, _NO_HASH),
            }
            for path in self.hashed_files()
        ]
        weights = [str(entry["sha256"]) for entry in files[: len(source.files)]]
        # One file: its own hash. Several: the hash of their hashes, in the order of "files".
        digest = weights[0] if len(weights) == 1 else hashlib.sha256("\n".join(weights).encode()).hexdigest()
        record = {
            "format": source.format,
            "name": provenance.get("name") or _own_name(self.checkpoint),
            "revision": provenance.get("revision"),
            "license": provenance.get("license") or _own_license(self.checkpoint),
            "uri": provenance.get("uri"),
            "architecture": list(self.checkpoint.declared),
            "sha256": digest,
            "files": files,
        }
        return {key: value for key, value in record.items() if value is not None}

    def hashed_files(self) -> tuple[Path, ...]:
        """The files named in the provenance: the weights first."""
        return (*self.checkpoint.source.files, *self.side_files)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "translator": self.translator.name,
            "family": self.config.family,
            "config": self.config.to_json(),
            "dtype": self.dtype,
            "output_bytes": self.output_bytes,
            "peak_bytes": self.peak_bytes,
            "tensors": [{**tensor.to_json(), "may_round": tensor.may_round} for tensor in self.tensors],
            "ignored": [{"source": name, "reason": reason} for name, reason in self.checked.ignored],
            "assets": {name: len(data) for name, data in self.assets.files().items()},
            "generation": dict(self.assets.generation),
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """The plan as a table for people, the same weight of all layers on one line; ignored tensors come last."""
        from rich.text import Text

        table = weights_table(f"{self.translator.title} → {self.config.family}", self.tensors)
        reasons: dict[tuple[str, str], int] = {}
        for name, reason in self.checked.ignored:
            key = any_layer(name), reason
            reasons[key] = reasons.get(key, 0) + 1
        for (name, reason), count in reasons.items():
            table.add_row("(ignored)", "", "", Text(name), "", Text(reason), str(count), "")
        return table

    def close(self) -> None:
        """Close the source, if :func:`plan` opened it."""
        if self.owns_source:
            self.checkpoint.source.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plan(
    source: WeightSource | Path | str,
    arch: str = "auto",
    dtype: str = "keep",
    *,
    with_tokenizer: bool = True,
    provenance: Mapping[str, Any] | None = None,
    own: Sequence[Translator] = (),
    chosen: Mapping[str, str] | None = None,
    stated: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan the conversion of a checkpoint.

    Args:
        source: a file or folder, or an opened source (which stays open).
        arch: a translator's name, ``"auto"`` to go by what the checkpoint declares, or ``"raw"`` to keep every tensor under
            its own name, without a model.
        dtype: ``"keep"``, or the dense type of every weight: ``"f32"``, ``"f16"``, ``"bf16"``. With
            ``"keep"``, Q8_0 and Q4_0 weights become Q8 and Q4 without loss, other block encodings f16.
        with_tokenizer: ``False`` to leave tokenizer and chat template out.
        provenance: what is known of the source; see :func:`oazoo.translators.convert.convert`.
        own: translators of a map of the caller's (:func:`oazoo.translators.own_map.load_map`), to be used instead of all
            others.
        chosen: what the checkpoint does not state: names and values that the translator lets a person choose.
        stated: settings that the checkpoint does not say: ``num_heads`` of a DiT or SiT.

    Raises:
        UsageError: an unknown ``arch`` or ``dtype``, unknown provenance, nothing of that name to choose, or no such file.
        FormatError: a damaged file.
        TranslationError: an unsupported architecture or feature; tensors that are missing, unexpected or
            misshapen.
        TokenizerError: a tokenizer that cannot be carried over exactly.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype[:32]!r}; known: {', '.join(DTYPES)}")
    unknown = sorted(set(provenance or ()) - set(_PROVENANCE))
    if unknown:
        raise UsageError(f"unknown provenance {unknown[0]!r}; known: {', '.join(_PROVENANCE)}")
    opened = source if isinstance(source, WeightSource) else open_source(source)
    try:
        if own and arch == "raw":
            raise UsageError("a map of your own and --arch raw exclude each other")
        checkpoint = open_checkpoint(opened, arch, own_map=bool(own), stated=stated)
        checkpoint = decode_fp8(checkpoint)
        refuse_packed(checkpoint)
        translator = choose(checkpoint, arch, own)
        translation = _with_choices(translator.translate(checkpoint), chosen or {}, checkpoint.where)
        checked = check(checkpoint, translation, dtype)
        rows = translation.config.vocab_size
        side_files: tuple[Path, ...] = ()
        if isinstance(translation.config, FlowConfig):
            assets = Assets()
            settings = checkpoint.source.path.parent / "config.json"
            side_files = (settings,) if settings.is_file() else ()
        elif checkpoint.naming == "gguf":
            assets = gguf_assets(checkpoint, rows, with_tokenizer)
        elif checkpoint.naming == "onnx" and checkpoint.declared == ("oazoo",):
            from oazoo.translators.onnx_ours import our_assets  # brings the writing of graphs along

            assets, read = our_assets(checkpoint, rows, with_tokenizer)
            side_files = tuple(read)
        elif checkpoint.naming != "hf":
            said = "the container carries no tokenizer, so the model takes and gives token ids"
            assets = Assets(notes=() if checkpoint.naming == "raw" else (said,))
        else:
            assets, read = hf_assets(checkpoint, rows, with_tokenizer)
            assert checkpoint.folder is not None
            settings = checkpoint.folder / "config.json"
            side_files = (*((settings,) if settings.is_file() else ()), *read)
        return Plan(
            checkpoint,
            translator,
            translation,
            checked,
            assets,
            dtype,
            side_files,
            dict(provenance or {}),
            owns_source=opened is not source,
        )
    except BaseException:
        if opened is not source:
            opened.close()
        raise


def _with_choices(translation: Translation, chosen: Mapping[str, str], where: str) -> Translation:
    """A translation with what a person chose in place of what would be assumed."""
    config = translation.config
    for name, value in chosen.items():
        options = translation.choices.get(name)
        if options is None or isinstance(config, RawConfig):
            known = ", ".join(translation.choices) or "nothing"
            raise UsageError(
                f"{where}: there is no {name[:40]!r} to set for a {config.family} model; there is {known}"
            )
        if value not in options:
            raise UsageError(f"{name} is one of {', '.join(options)}, not {value[:40]!r}")
        changed: dict[str, Any] = {name: value}
        config = replace(config, **changed)
    notes = [note for note in translation.notes if not any(f"--set {name}=" in note for name in chosen)]
    return replace(translation, config=config, notes=notes)


def _own_name(checkpoint: Checkpoint) -> str:
    path = checkpoint.folder or checkpoint.source.path
    return _stated(checkpoint, "name") or _text_of(path.resolve().name)


def _text_of(name: str) -> str:
    """A file's name as text for a file: its bytes need not be text, nor the locale able to tell."""
    return os.fsencode(name).decode("utf-8", "replace")


def _stated(checkpoint: Checkpoint, key: str) -> str | None:
    """The name or license in the metadata of a GGUF file, or of an ONNX file of our own."""
    value = None
    if checkpoint.naming == "gguf":
        value = checkpoint.config.get(f"general.{key}")
    elif checkpoint.naming == "onnx":
        from oazoo.translators.onnx_ours import our_provenance

        value = our_provenance(checkpoint).get(key)
    return value[:256] if isinstance(value, str) and value else None


def _own_license(checkpoint: Checkpoint) -> str | None:
    """The licence that the checkpoint itself states: metadata, or the front matter of a model card."""
    if checkpoint.naming in ("gguf", "onnx"):
        return _stated(checkpoint, "license")
    if checkpoint.folder is None:
        return None
    card = checkpoint.folder / "README.md"
    if not card.is_file():
        return None
    lines = read_small(card, 16 << 20).decode("utf-8", "replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:200]:
        if line.strip() == "---":
            break
        key, _, value = line.partition(":")
        if key == "license" and value.strip():
            return value.strip().strip("\"'")[:256]
    return None
