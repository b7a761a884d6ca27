"""What a translator is, what it sees, and how translators are found.

An architecture is one module of this package that defines ``TRANSLATORS``, a tuple of :class:`Translator`.
The registry finds it there; nothing else has to be edited.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from oazoo.configs import ModelConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats.hf_folder import TORCH_NAME
from oazoo.formats.source import WeightSource
from oazoo.translators.raw_config import RawConfig
from oazoo.translators.rules import Ignored, Rule
from oazoo.translators.settings import Settings, read_json

MAX_CONFIG_BYTES = 16 << 20
_SHARD = re.compile(r"-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors$")
#: The entry point group under which other packages offer translators.
GROUP = "oazoo.translators"
#: Whose tensor names and setting keys a checkpoint can use; see :class:`Checkpoint`.
NAMINGS = ("hf", "gguf", "torch", "onnx", "raw")


@dataclass(frozen=True)
class Checkpoint:
    """An opened source together with the settings that describe its model.

    ``naming`` says whose tensor names and setting keys are used: ``"gguf"``, ``"hf"``, ``"torch"`` (a checkpoint of
    nanoGPT), ``"onnx"`` (names prove nothing, the graph does), or ``"raw"`` (whatever the names are). ``config`` holds the
    metadata of the container, or the contents of ``config.json``. ``folder`` is where a Hugging Face checkpoint's other
    files lie. ``declared`` are the architecture names that the checkpoint gives itself.
    """

    source: WeightSource
    naming: str
    config: Mapping[str, Any]
    folder: Path | None
    declared: tuple[str, ...]

    @property
    def where(self) -> str:
        """The file that holds the settings, for messages."""
        if self.naming == "hf" and self.folder is not None:
            return str(self.folder / "config.json")
        return str(self.source.path)

    def settings(self) -> Settings:
        """Typed access to ``config``."""
        return Settings(self.config, self.where)


@dataclass(frozen=True)
class Translation:
    """What a translator says about one checkpoint: everything but the bytes."""

    config: ModelConfig | RawConfig
    rules: Sequence[Rule]
    ignored: Sequence[Ignored] = ()
    notes: Sequence[str] = ()
    #: Pairs of source tensors that must hold the same bytes: (ignored copy, the one that is used).
    equal: Sequence[tuple[str, str]] = ()
    #: What a checkpoint does not state and a person may: field of the config → its possible values (``--set``).
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Keep tensors of every type, also those that are no weights by themselves (integers, 8-bit floats, …).
    any_type: bool = False


@dataclass(frozen=True)
class Translator:
    """A map of one architecture.

    ``accepts`` lists what it reads, as ``"NAMING:ARCHITECTURE"`` (see :class:`Checkpoint`); ``translate``
    derives the typed config and the rules from a checkpoint and refuses, by name, what it does not support.
    """

    name: str
    title: str
    accepts: tuple[str, ...]
    translate: Callable[[Checkpoint], Translation] = field(repr=False)


def _found_in(module: str) -> Sequence[Translator]:
    import oazoo.translators as package

    return getattr(importlib.import_module(f"{package.__name__}.{module}"), "TRANSLATORS", ())


def _texts() -> dict[str, bytes | None]:
    """The modules of this package that can have translators, with their text; None where it is not to be had.

    Importing all that have none takes much longer than reading them.
    """
    import oazoo.translators as package

    found: dict[str, bytes | None] = {}
    for module in pkgutil.iter_modules(package.__path__):
        text = _text(package.__path__, module.name)
        if not module.ispkg and (text is None or b"\nTRANSLATORS" in text):
            found[module.name] = text
    return found


def _text(folders: Sequence[str], module: str) -> bytes | None:
    for folder in folders:
        try:
            return (Path(folder) / f"{module}.py").read_bytes()
        except OSError:
            continue
    return None


def _reading(declared: Sequence[str]) -> Translator | None:
    """The one translator of this package that reads a declared architecture, found by the text of its module.

    None where that does not tell: then all have to be asked.
    """
    names = [name.partition(":")[2].encode() for name in declared]
    modules = [
        module for module, text in _texts().items() if text is None or any(name in text for name in names)
    ]
    entries = [
        entry for module in modules for entry in _found_in(module) if set(declared) & set(entry.accepts)
    ]
    return entries[0] if len(entries) == 1 else None


def _ours() -> dict[str, Translator]:
    """The translators of this package by name."""
    found: dict[str, Translator] = {}
    for module in _texts():
        for entry in _found_in(module):
            if entry.name in found:
                raise TranslationError(f"two translators are named {entry.name!r}")
            found[entry.name] = entry
    return dict(sorted(found.items()))


@cache
def translators() -> dict[str, Translator]:
    """All translators by name: those of this package, then those of others (:mod:`oazoo.translators.own_map`)."""
    from oazoo.translators.own_map import plugins

    found = dict(_ours())
    for plugin in plugins():
        for entry in plugin.offers.translators:
            found.setdefault(entry.name, entry)
    return found


def offered() -> Sequence[EntryPoint]:
    """The entry points under which other packages offer maps."""
    return tuple(entry_points(group=GROUP))


def plugin_faults() -> list[str]:
    """A line for each translator of another package that cannot be used, or not under its name."""
    if not offered():
        return []
    from oazoo.translators.own_map import plugins

    lines = []
    for plugin in plugins():
        if plugin.fault:
            lines.append(str(plugin))
        taken = [entry.name for entry in plugin.offers.translators if translators()[entry.name] is not entry]
        lines += [
            f"the translator {name!r} of the package {plugin.package!r} is left out: the name is taken"
            for name in taken
        ]
    return lines


def supported() -> list[str]:
    """What can be translated, as lines ``"llama: gguf:llama, hf:LlamaForCausalLM, …"``."""
    return [f"{t.name}: {', '.join(t.accepts)}" for t in translators().values()]


def choose(checkpoint: Checkpoint, arch: str = "auto", own: Sequence[Translator] = ()) -> Translator:
    """The translator for a checkpoint.

    Args:
        checkpoint: what to translate.
        arch: ``"auto"`` to go by what the checkpoint declares, or a translator's name to insist on it.
        own: the translators of a map that was named; if there are any, one of them is taken.

    Raises:
        UsageError: ``arch`` is not the name of a translator.
        TranslationError: no translator reads the declared architecture; the message lists what is
            supported.
    """
    if own:
        return _choose_own(checkpoint, arch, own)
    if arch != "auto":
        known = translators()
        if arch not in known:
            _refuse_faulty(arch)
            raise UsageError(f"unknown architecture {arch[:64]!r}; known: auto, {', '.join(known)}")
        chosen = known[arch]
        if not any(a.startswith(f"{checkpoint.naming}:") for a in chosen.accepts):
            raise TranslationError(f"the translator {arch!r} does not read {checkpoint.naming} checkpoints")
        return chosen
    declared = [f"{checkpoint.naming}:{name}" for name in checkpoint.declared]
    if declared and (found := _reading(declared)) is not None:
        return found
    # Ours come first: only for what they do not read are other packages looked for.
    for entries in (_ours, translators):
        for entry in entries().values():
            if any(name in entry.accepts for name in declared):
                return entry
    shown = ", ".join(repr(name[:64]) for name in checkpoint.declared) or "none"
    raise TranslationError(
        f"{checkpoint.where}: unsupported architecture {shown}.\n"
        "Supported:\n  " + "\n  ".join([*supported(), *plugin_faults()]) + "\n"
        "A checkpoint of a compatible architecture can be read with an explicit --arch; --arch raw keeps the tensors of "
        "any other, but no model to run."
    )


def _choose_own(checkpoint: Checkpoint, arch: str, own: Sequence[Translator]) -> Translator:
    """One of the translators of a map: by name, by what the checkpoint declares, or the only one for such names."""
    if arch != "auto":
        chosen = next((entry for entry in own if entry.name == arch), None)
        if chosen is None:
            raise UsageError(
                f"the map has no translator {arch[:64]!r}; it has {', '.join(entry.name for entry in own)}"
            )
        return chosen
    reading = [entry for entry in own if any(a.startswith(f"{checkpoint.naming}:") for a in entry.accepts)]
    declared = {f"{checkpoint.naming}:{name}" for name in checkpoint.declared}
    matching = [entry for entry in reading if declared & set(entry.accepts)] or reading
    if len(matching) == 1:
        return matching[0]
    shown = "; ".join(f"{entry.name}: {', '.join(entry.accepts)}" for entry in own)
    why = "no translator" if not matching else "more than one translator"
    raise TranslationError(
        f"{checkpoint.where}: the map has {why} for {checkpoint.naming} checkpoints that declare "
        f"{', '.join(name[:64] for name in checkpoint.declared) or 'nothing'} ({shown}); --arch NAME chooses one"
    )


def _refuse_faulty(arch: str) -> None:
    """Say what is wrong with a translator of another package, if that is why it is not known."""
    from oazoo.translators.own_map import plugins

    for plugin in plugins():
        if plugin.fault and plugin.name == arch:
            raise TranslationError(str(plugin))


def _state_spaces(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The architecture of a checkpoint of the state-spaces/mamba repository, which names only the kind of its blocks."""
    block = config.get("ssm_cfg")
    if not isinstance(block, Mapping) or "d_model" not in config:
        return ()
    layer = block.get("layer", "Mamba1")
    return (layer,) if isinstance(layer, str) else ()


#: A weight that DiT and SiT have and others have not.
_PATCHES = "x_embedder.proj.weight"


def _diffusion(source: WeightSource, stated: Mapping[str, Any], arch: str) -> Checkpoint:
    """A DiT or SiT: what its file does not say, a config.json beside it or the caller does."""
    folder = source.path if source.path.is_dir() else source.path.parent
    path = folder / "config.json"
    config = read_json(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    if not isinstance(config, Mapping):
        raise TranslationError(f"{path}: expected an object, found {type(config).__name__}")
    names = config.get("architectures") or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise TranslationError(f"{path}: architectures must be a list of texts")
    if arch == "auto" and not names:
        raise TranslationError(
            f"{source.path}: is a DiT or a SiT, and no tensor tells which: --arch dit (it says noise), or --arch sit (a "
            "velocity)"
        )
    naming = "torch" if source.format == "torch" else "hf"
    return Checkpoint(source, naming, {**config, **stated}, folder, tuple(names))


def open_checkpoint(
    source: WeightSource,
    arch: str = "auto",
    *,
    own_map: bool = False,
    stated: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Find the settings that belong to an opened source; none are looked for when ``arch`` is ``"raw"``.

    With ``own_map`` a checkpoint may come without settings: the map that was named may need none. ``stated`` are settings
    that a caller knows and the checkpoint, a DiT or SiT, does not say.

    Raises:
        TranslationError: no settings are found, or the container is not one that is translated.
    """
    if arch == "raw" and source.format != "oam":
        return Checkpoint(source, "raw", {}, None, ())
    if source.format == "onnx":
        own = "oazoo.graph" in (source.metadata.get("properties") or {})
        return Checkpoint(source, "onnx", source.metadata, None, ("oazoo" if own else "graph",))
    if any(f"{prefix}{_PATCHES}" in source for prefix in ("", "ema.", "model.")):
        return _diffusion(source, stated or {}, arch)
    if stated:
        raise TranslationError(
            f"{source.path}: says itself what {', '.join(stated)} is; that is for checkpoints of DiT and SiT"
        )
    beside = source.format == "torch" and source.path.name == TORCH_NAME
    beside = beside and (source.path.parent / "config.json").is_file()
    if source.format == "torch" and not beside:
        if not isinstance(source.metadata.get("model_args"), Mapping):
            if own_map:
                return Checkpoint(source, "torch", source.metadata, None, ())
            raise TranslationError(
                f"{source.path}: a PyTorch checkpoint that does not say what model it is (nanoGPT's has model_args). Take "
                "the model's SafeTensors folder, or keep the tensors without a model: --arch raw"
            )
        return Checkpoint(source, "torch", source.metadata, None, ("nanogpt",))
    if source.format == "gguf":
        name = source.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise TranslationError(f"{source.path}: the GGUF metadata has no general.architecture")
        return Checkpoint(source, "gguf", source.metadata, None, (name,))
    if source.format == "safetensors" or beside:
        folder = source.path if source.path.is_dir() else source.path.parent
        path = folder / "config.json"
        shard = _SHARD.search(source.path.name)
        if shard is not None and int(shard[2]) > 1 and not own_map:
            raise TranslationError(
                f"{source.path}: is part {int(shard[1])} of a model in {int(shard[2])} files; name the folder that has all "
                "of them and their index (from the Hub: hf:org/name, without the file)"
            )
        if not path.is_file():
            if own_map:
                return Checkpoint(source, "hf", {}, folder, ())
            raise TranslationError(
                f"{source.path}: no config.json beside the weights, so the architecture is unknown; "
                "place the checkpoint's config.json in the same folder, or keep the tensors without a model: --arch raw"
            )
        config = read_json(path, MAX_CONFIG_BYTES)
        if not isinstance(config, Mapping):
            raise TranslationError(f"{path}: expected an object, found {type(config).__name__}")
        names = config.get("architectures") or ()
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise TranslationError(f"{path}: architectures must be a list of texts")
        return Checkpoint(source, "hf", config, folder, tuple(names) or _state_spaces(config))
    if source.format == "oam":
        raise TranslationError(
            f"{source.path} is an .oam already; to pack it: "
            f"oazoo quantize {source.path.name} -o OUT.oam --to q8"
        )
    raise TranslationError(f"{source.path}: {source.format} checkpoints cannot be translated")
