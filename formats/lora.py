"""LoRA adapters as PEFT keeps them: a folder of ``adapter_config.json`` and ``adapter_model.safetensors``.

A module *m* of the published model has two tensors, ``base_model.model.<m>.lora_A.weight`` [rank, in] and
``….lora_B.weight`` [out, rank]; what they add to its weight is ``scale · B · A``, with scale alpha / rank, or alpha / √rank
with ``use_rslora``. What we write holds the config inside the tensors' file too, so that one file is enough.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, UsageError
from oazoo.formats.atomic import output_error, write_atomically
from oazoo.formats.messages import quoted, some
from oazoo.formats.safetensors import SafetensorsSource
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.formats.source import SourceTensor
from oazoo.formats.strict_json import decode_utf8, load_object

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
#: Under these names the file of the tensors tells of the config, and of the base model, as JSON.
CONFIG_KEY, BASE_KEY = "oazoo.adapter_config", "oazoo.base"
MAX_CONFIG = 1 << 20
MAX_RANK = 1 << 16

Floats = npt.NDArray[np.float32]

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
#: A pattern of ``rank_pattern`` and ``alpha_pattern`` that is a name and no program.
_PLAIN_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_]|\\?\.)+\$?")
#: Settings that change what an adapter means, with the values that leave it as described above.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "modules_to_save": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "layer_replication": ([],),
    "megatron_config": ({},),
    "kasa_config": ({},),
    "monteclora_config": ({},),
}
#: Ways to initialize an adapter that change the base model's weights too.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraPair:
    """What is added to a weight [out, in]: ``scale · b · a``.

    Attributes:
        a: float32 [rank, in].
        b: float32 [out, rank].
        alpha: the numerator of the scale.
        rslora: whether the scale is alpha / √rank rather than alpha / rank.
    """

    a: Floats
    b: Floats
    alpha: float
    rslora: bool = False

    @property
    def rank(self) -> int:
        """Rows of ``a``."""
        return int(self.a.shape[0])

    @property
    def scale(self) -> float:
        """What ``b · a`` is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def delta(self) -> Floats:
        """``scale · b · a``, float32 [out, in]."""
        result: Floats = np.float32(self.scale) * (self.b @ self.a)
        return result


def merge_delta(weight: Floats, pair: LoraPair) -> Floats:
    """``weight + scale · b · a`` in float32; all three are [out, in].

    Raises:
        FormatError: the shapes do not belong together.
    """
    wanted = (pair.b.shape[0], pair.a.shape[1])
    if weight.shape != wanted:
        raise FormatError(
            f"an adapter of shape {list(wanted)} is not for a weight of shape {list(weight.shape)}"
        )
    result: Floats = weight.astype(np.float32) + pair.delta()
    return result


@dataclass(frozen=True)
class Adapter:
    """An adapter: pairs by the published model's module names, and what its file says besides.

    Attributes:
        pairs: module, such as ``model.layers.0.self_attn.q_proj`` → its pair.
        fan_in_fan_out: whether the published model stores these weights as [in, out] (GPT-2).
        base: what is known of the model that it was trained on: ``name``, ``weights`` (a checksum), ``encoding``.
        dropout: of the training.
    """

    pairs: Mapping[str, LoraPair]
    fan_in_fan_out: bool = False
    base: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0


def write_adapter(
    folder: Path | str, adapter: Adapter, *, linear_modules: Collection[str] = (), overwrite: bool = False
) -> None:
    """Write an adapter as PEFT reads it.

    Args:
        folder: made if it does not exist.
        adapter: at least one pair.
        linear_modules: all modules of the model that could have one; where all of a name have one, the config says the
            name for all.
        overwrite: replace files of an adapter that are there.

    Raises:
        UsageError: an adapter is there already, or this one is empty.
        OutputError: the folder cannot be written.
    """
    where = Path(folder)
    if not adapter.pairs:
        raise UsageError(f"{where}: there is nothing to write: the adapter has no layers")
    if len({pair.rslora for pair in adapter.pairs.values()}) > 1:
        raise UsageError(f"{where}: an adapter scales either all its layers by alpha / √rank or none")
    for name in (CONFIG_FILE, TENSORS_FILE):
        if (where / name).exists() and not overwrite:
            raise UsageError(f"{where / name}: exists already; use --force (overwrite=True) to replace it")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(where, error) from error
    config = json.dumps(_config(adapter, linear_modules), indent=2, ensure_ascii=False)
    tensors = {}
    for module, pair in adapter.pairs.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = pair.a
        tensors[f"base_model.model.{module}.lora_B.weight"] = pair.b
    metadata = {"format": "pt", CONFIG_KEY: json.dumps(json.loads(config), ensure_ascii=False)}
    if adapter.base:
        metadata[BASE_KEY] = json.dumps(dict(adapter.base), ensure_ascii=False)
    write_safetensors(where / TENSORS_FILE, tensors, metadata=metadata, overwrite=overwrite)
    write_atomically(where / CONFIG_FILE, config.encode() + b"\n", overwrite=overwrite)


def _config(adapter: Adapter, linear_modules: Collection[str]) -> dict[str, Any]:
    ranks = {module: pair.rank for module, pair in adapter.pairs.items()}
    alphas = {module: _number(pair.alpha) for module, pair in adapter.pairs.items()}
    rank, alpha = (Counter(found.values()).most_common(1)[0][0] for found in (ranks, alphas))
    last = {module: module.rpartition(".")[2] for module in {*linear_modules, *ranks}}
    partial = {last[module] for module in linear_modules if module not in ranks}
    targets = sorted({module if last[module] in partial else last[module] for module in ranks})
    name = adapter.base.get("name")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name if isinstance(name, str) else None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": targets,
        "rank_pattern": _pattern(ranks, rank),
        "alpha_pattern": _pattern(alphas, alpha),
        "use_rslora": next(iter(adapter.pairs.values())).rslora,
        "fan_in_fan_out": adapter.fan_in_fan_out,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(value)


def _pattern(values: Mapping[str, Any], usual: Any) -> dict[str, Any]:
    """Values that are not the usual one: by the last part of the name where that is enough to say it."""
    groups: dict[str, set[Any]] = {}
    for module, value in values.items():
        groups.setdefault(module.rpartition(".")[2], set()).add(value)
    result: dict[str, Any] = {}
    for module, value in values.items():
        short = module.rpartition(".")[2]
        if value != usual:
            result[short if len(groups[short]) == 1 else module] = value
    return result


def read_adapter(path: Path | str) -> Adapter:
    """Read a PEFT folder, or its SafeTensors file alone where that holds the config too.

    Every tensor must be one of a complete pair of the rank that the config says, and the config must mean a plain LoRA;
    what else PEFT knows (DoRA, retrained modules, biases, embeddings, initializations that change the base) is refused.

    Raises:
        FormatError: it does not fit together; the message names tensor or setting.
        UsageError: there is no such adapter, or only a pickled one.
    """
    file = _tensors_file(Path(path))
    with SafetensorsSource(file) as source:
        config, where = _read_config(file, source.metadata.get(CONFIG_KEY))
        if config is None:
            raise _without_config(file, source)
        settings = _Settings(config, where)
        pairs = dict(_pairs(source, settings))
        stated = source.metadata.get(BASE_KEY)
    base = load_object(stated, f"{file}: {BASE_KEY}", limit=MAX_CONFIG) if stated else {}
    if not base and isinstance(config.get("base_model_name_or_path"), str):
        base = {"name": config["base_model_name_or_path"]}
    return Adapter(pairs, settings.flag("fan_in_fan_out"), base, settings.number("lora_dropout", 0.0))


def _tensors_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder; name the folder of an adapter")
    file = path / TENSORS_FILE
    if file.is_file():
        return file
    if (path / "adapter_model.bin").exists():
        raise UsageError(
            f"{path}: holds its weights as a pickle (adapter_model.bin), which can run anything when it is read; save the "
            "adapter as SafeTensors (PEFT: save_pretrained(…, safe_serialization=True))"
        )
    raise UsageError(f"{path}: has no {TENSORS_FILE}, so it is no adapter")


def _read_config(file: Path, inside: Any) -> tuple[dict[str, Any] | None, str]:
    beside = file.parent / CONFIG_FILE
    if file.name == TENSORS_FILE and beside.is_file():
        with beside.open("rb") as opened:
            data = opened.read(MAX_CONFIG + 1)
        return load_object(decode_utf8(data, str(beside)), str(beside), limit=MAX_CONFIG), str(beside)
    if isinstance(inside, str):
        where = f"{file}: {CONFIG_KEY}"
        return load_object(inside, where, limit=MAX_CONFIG), where
    return None, ""


def _without_config(file: Path, source: SafetensorsSource) -> UsageError:
    ranks = sorted(
        {t.info.shape[0] for n, t in source.items() if n.endswith(".lora_A.weight") and t.info.shape}
    )
    found = f"The tensors have the rank {', '.join(map(str, ranks[:4]))}, but " if ranks else ""
    return UsageError(
        f"{file}: {CONFIG_FILE} is missing beside it. {found}the scale (lora_alpha, use_rslora) is only there; without it "
        "lora_alpha would have to be guessed. Put the file beside the tensors"
    )


class _Settings:
    """The config of an adapter, refused where it means more than a plain LoRA."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self.where = config, where
        kind = config.get("peft_type")
        if kind != "LORA":
            raise FormatError(f"{where}: peft_type is {quoted(str(kind))}; only LORA is supported")
        for key, neutral in _NEUTRAL.items():
            value = config.get(key)
            if value is not None and value not in neutral:
                raise FormatError(f"{where}: {key} = {str(value)[:60]} is not supported: only plain LoRA is")
        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
            raise FormatError(
                f"{where}: init_lora_weights = {quoted(start)} has changed the base model's weights, so the adapter "
                "does not fit the published ones; save it converted to a plain LoRA"
            )
        rank = config.get("r")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
            raise FormatError(f"{where}: r must be a whole number from 1 to {MAX_RANK}, not {str(rank)[:40]}")
        self.rank = rank
        self.alpha = self.number("lora_alpha", None)
        self.rslora = self.flag("use_rslora")
        self._ranks, self._alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")

    def number(self, key: str, default: float | None) -> float:
        value: Any = self._config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise FormatError(f"{self.where}: {key} must be a number, not {str(value)[:40]}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._config.get(key)
        if value is not None and not isinstance(value, bool):
            raise FormatError(f"{self.where}: {key} must be true or false, not {str(value)[:40]}")
        return bool(value)

    def _pattern(self, key: str) -> list[tuple[re.Pattern[str], float]]:
        value = self._config.get(key)
        if value is None:
            return []
        if not isinstance(value, Mapping) or len(value) > 1 << 16:
            raise FormatError(f"{self.where}: {key} must be an object")
        found = []
        for name, number in value.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
                raise FormatError(f"{self.where}: {key}: {quoted(name)} must be a number")
            if len(name) > 512 or not _PLAIN_PATTERN.fullmatch(name):
                raise FormatError(
                    f"{self.where}: {key}: {quoted(name)} is no plain name; only names are supported, no other patterns"
                )
            body = name.removeprefix("^").removesuffix("$")
            start = "" if name.startswith("^") else r"(?:.*\.)?"
            found.append((re.compile(start + body), float(number)))
        return found

    def of(self, module: str) -> tuple[float, float]:
        """Rank and alpha that the config states for a module: the first pattern that fits counts."""
        rank, alpha = float(self.rank), self.alpha
        rank = next((value for rule, value in self._ranks if rule.fullmatch(module)), rank)
        alpha = next((value for rule, value in self._alphas if rule.fullmatch(module)), alpha)
        return rank, alpha


def _pairs(source: SafetensorsSource, settings: _Settings) -> Iterator[tuple[str, LoraPair]]:
    found: dict[str, dict[str, SourceTensor]] = {}
    unknown = []
    for name, tensor in source.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            unknown.append(name)
        else:
            found.setdefault(match[1], {})[match[2]] = tensor
    if unknown:
        raise FormatError(
            f"{source.path}: {len(unknown)} tensors are none of a LoRA of linear layers: "
            f"{some([quoted(name) for name in unknown])}"
        )
    if not found:
        raise FormatError(f"{source.path}: holds no tensors")
    for module, both in found.items():
        for part in ("A", "B"):
            if part not in both:
                raise FormatError(
                    f"{source.path}: base_model.model.{module}.lora_{part}.weight is missing; its other half is there"
                )
        a, b = (matrix(source.path, both[part]) for part in ("A", "B"))
        rank, alpha = settings.of(module)
        if not a.shape[0] == b.shape[1] == rank:
            raise FormatError(
                f"{source.path}: {quoted(module)}: lora_A has the rank {a.shape[0]}, lora_B {b.shape[1]}, and "
                f"{settings.where} says {rank:g}"
            )
        yield module, LoraPair(a, b, alpha, settings.rslora)


def matrix(path: Path | str, tensor: SourceTensor) -> Floats:
    """The values of one half of a pair, float32; FormatError if it is no matrix of finite floats."""
    info = tensor.info
    if len(info.shape) != 2 or info.encoding not in ("f32", "f16", "bf16", "f64"):
        raise FormatError(
            f"{path}: {quoted(info.name)} is {info.encoding} of shape {list(info.shape)}; a matrix of floats is needed"
        )
    values = tensor.numpy().astype(np.float32)
    if not np.isfinite(values).all():
        raise FormatError(f"{path}: {quoted(info.name)} holds values that are not finite")
    return values
