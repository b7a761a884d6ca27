"""``load``: from a name, URI or path to a model on the device, ready to answer."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oazoo import __version__
from oazoo.configs import FlowConfig, ModelConfig, config_from_json
from oazoo.errors import DeviceError, FormatError, OazooError, UsageError
from oazoo.formats.detect import open_source
from oazoo.formats.mapped import open_regular
from oazoo.formats.oam import OamSource
from oazoo.formats.source import SourceTensor
from oazoo.generation.flow_model import FlowModel
from oazoo.generation.text_model import TextModel
from oazoo.models import build, why_not_run
from oazoo.models.flow import FlowDenoiser
from oazoo.nn.module import Buffer, Module, Parameter
from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor, get_device
from oazoo.runtime.ops.common import MAX_ELEMENTS
from oazoo.translators.convert import Progress
from oazoo.translators.convert import convert as translate
from oazoo.zoo.convert import fetch, provenance_of
from oazoo.zoo.oa_checkpoint import is_oa, transformer_config
from oazoo.zoo.pull import PulledModel
from oazoo.zoo.store import Store

#: Encodings that stay as they are on the device; vectors become f32, which holds every value of the others.
_DEVICE_ENCODINGS = ("f32", "f16", "bf16", "q4", "q8")
_FLOATS = ("f32", "f16", "bf16", "f64")
_OAM, _GGUF = b"OAM\0", b"GGUF"
#: What a conversion reads beside a SafeTensors file.
_SIDE_FILES = (".json", ".txt", ".model", ".jinja")


def load(
    model: str | Path,
    *,
    device: Device | None = None,
    adapter: str | Path | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> TextModel:
    """Load a model onto the device.

    Anything but an `.oam` file is converted once, into the store, and used from there afterwards.

    Args:
        model: a path, a name of the zoo, or a URI (see :func:`oazoo.zoo.pull.pull`).
        device: where to put it; by default the one that ``OAZOO_DEVICE`` chooses.
        adapter: a LoRA adapter to run it with (:func:`oazoo.zoo.with_adapter.use_adapter`).
        verify: compute the file's checksums while the weights are on their way.
        progress: called with how far the work has come.
        notify: called with a line for each thing worth knowing.

    Returns:
        The model with its tokenizer and chat template; its ``info`` has ``name``, ``path``, ``config``, ``device``,
        ``load_s`` (seconds), ``weights_bytes`` and ``elements``.

    Raises:
        OazooError: it cannot be fetched, converted, verified, or held by the device; the message says which.
    """
    loaded = _loaded(model, device, verify, progress, notify)
    if isinstance(loaded, FlowModel):
        raise UsageError(
            f"{loaded.name} makes images or sequences, not text: oazoo sample {model}, or oazoo.load_flow in Python"
        )
    if adapter is not None:
        from oazoo.zoo.with_adapter import use_adapter

        use_adapter(loaded, adapter, notify)
    return loaded


def load_flow(
    model: str | Path,
    *,
    device: Device | None = None,
    verify: bool = True,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> FlowModel:
    """Load a flow model, which makes images or sequences; arguments and errors as those of :func:`load`."""
    loaded = _loaded(model, device, verify, progress, notify)
    if not isinstance(loaded, FlowModel):
        raise UsageError(f"{loaded.name} is a language model; it makes no images or sequences")
    return loaded


def is_flow(
    model: str | Path,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> bool:
    """Whether a model of the zoo, a file or a URI is a flow model; it is fetched for that, and not loaded."""
    pulled = fetch(model, progress, notify)
    if _magic(pulled.path) != _OAM:
        return False
    with open_source(pulled.path) as source:
        return isinstance(source, OamSource) and source.metadata.get("family") == FlowConfig.family


def _loaded(
    model: str | Path,
    device: Device | None,
    verify: bool,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
) -> TextModel | FlowModel:
    start = time.perf_counter()
    pulled = fetch(model, progress, notify)
    if _magic(pulled.path) == _OAM:
        return _load(pulled.path, pulled.name, start, device, verify, progress)
    path = _converted(pulled, progress, notify)
    try:
        return _load(path, pulled.name, start, device, verify, progress)
    except FormatError as error:
        damage = str(error)
    # The copy in the store is ours and can be made again.
    (notify or (lambda line: None))(f"the converted copy of {pulled.name} is damaged: {damage}")
    path = _converted(pulled, progress, notify, anew=True)
    return _load(path, pulled.name, start, device, verify, progress)


def _load(
    path: Path, name: str, start: float, device: Device | None, verify: bool, progress: Progress | None
) -> TextModel | FlowModel:
    """The model of an `.oam` file; ``start`` is when its loading began."""
    with open_source(path) as source:
        if not isinstance(source, OamSource):
            raise FormatError(f"{path}: is a {source.format} file, not an .oam")
        config = model_config(source)
        where = device or get_device()
        built = FlowDenoiser(config, where) if isinstance(config, FlowConfig) else build(config, where)
        check_memory(source, where)
        checking = _Verification(source) if verify else None
        try:
            upload(built, source, where, progress)
        finally:
            failure = checking.wait() if checking is not None else None
        if failure is not None:
            raise failure
        assets = {
            name.removeprefix("asset/"): tensor.raw().tobytes()
            for name, tensor in source.state.items()
            if name.startswith("asset/") and tensor.info.encoding == "u8"
        }
        generation, tokens = (source.metadata.get(key) for key in ("generation", "tokenizer"))
        info = {
            "name": name,
            "path": str(path),
            "config": config,
            "device": where.info.name,
            "software_device": where.info.is_software,
            "weights_bytes": sum(t.info.nbytes for t in source.values()),
            "elements": sum(t.info.numel for t in source.values()),
            "load_s": time.perf_counter() - start,
        }
        if isinstance(built, FlowDenoiser):
            return FlowModel(built, info)
        try:
            return TextModel.from_assets(
                built,
                assets,
                generation if isinstance(generation, dict) else None,
                tokens if isinstance(tokens, dict) else None,
                info,
            )
        except OazooError as error:
            raise type(error)(f"{path}: {error}") from error


def _magic(path: Path) -> bytes:
    """The first four bytes of a file; nothing of a folder."""
    if path.is_dir():
        return b""
    with open_regular(path) as file:
        return file.read(4)


def _files_read(pulled: PulledModel) -> list[Path]:
    """Every file of a local model that its conversion may read.

    That is more than was named when a SafeTensors file or index is: configuration and tokenizer, or the shards, lie
    beside it; and an ONNX model names its own data files.
    """
    if pulled.path.is_dir() or _magic(pulled.path) == _GGUF:
        return list(pulled.files)
    kinds = (*_SIDE_FILES, ".safetensors") if pulled.path.suffix == ".json" else _SIDE_FILES
    beside = pulled.path.resolve().parent.iterdir()
    with open_source(pulled.path) as source:
        named = {*pulled.files, *source.files}
    return sorted({*named, *(file for file in beside if file.suffix in kinds and file.is_file())})


def _converted(
    pulled: PulledModel,
    progress: Progress | None,
    notify: Callable[[str], None] | None,
    *,
    anew: bool = False,
) -> Path:
    """The `.oam` of a model in another container: converted once, kept in the store; ``anew`` replaces it."""
    # A fetched file is known by its hash; a local one by place, size and time of change.
    facts = [f"{name} {digest}" for name, digest in sorted(pulled.sha256s.items())]
    if not facts:
        stats = [(file, file.stat()) for file in _files_read(pulled)]
        facts = [f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]
    key = hashlib.sha256("\n".join([__version__, *facts]).encode()).hexdigest()[:32]
    store = Store()
    path = store.root / "converted" / f"{key}.oam"
    if path.is_file() and not anew:
        return path
    say = notify or (lambda line: None)
    with store.lock(f"convert-{key}", say, f"converting {pulled.name}"):
        if anew or not path.is_file():
            say(f"converting {pulled.name} once; it stays in the store")
            path.parent.mkdir(parents=True, exist_ok=True)
            translate(pulled.path, path, provenance=provenance_of(pulled), overwrite=anew, progress=progress)
    return path


def model_config(source: OamSource) -> ModelConfig:
    """The typed configuration of a model file, checked against its tensors.

    Raises:
        FormatError: the file describes no model of ours, or its tensors are not those of the model.
    """
    metadata = source.metadata
    if metadata.get("family") == "raw":
        raise FormatError(
            f"{source.path}: holds tensors without a model (it was converted with --arch raw), so there is nothing to run; "
            "list them with: oazoo inspect, read them with oazoo.formats.detect.open_source"
        )
    if is_oa(source):
        shapes = {name: tensor.info.shape for name, tensor in source.items()}
        transformer_config(shapes, None, str(source.path))  # says so where it is none, or more must be told
        raise FormatError(
            f"{source.path}: OA wrote it, without its configuration; it is a ByteTransformer. Make it a file that runs, "
            f"with its optimizer's state: oazoo convert {source.path.name} -o OUT.oam"
        )
    if "family" not in metadata or "model" not in metadata:
        raise FormatError(
            f"{source.path}: an .oam file of architecture {source.config.architecture!r} that no model here can run; its "
            "tensors can be inspected and exported"
        )
    try:
        config = config_from_json(metadata["family"], metadata["model"])
    except OazooError as error:
        raise type(error)(f"{source.path}: {error}") from error
    why = why_not_run(config)
    if why is not None:
        raise FormatError(
            f"{source.path}: {why}. The file can be inspected, quantized, compared and exported"
        )
    wanted = config.parameters()
    for name, shape in wanted.items():
        if name not in source:
            raise FormatError(f"{source.path}: the weight {name} of the {config.family} model is missing")
        found = source[name].info
        if found.shape != shape:
            raise FormatError(
                f"{source.path}: {name} has shape {list(found.shape)}; the configuration asks for {list(shape)}"
            )
        allowed = _DEVICE_ENCODINGS if len(shape) > 1 else _FLOATS
        if found.encoding not in allowed:
            raise FormatError(
                f"{source.path}: {name} is {found.encoding}; a model runs from {', '.join(allowed)}. Convert it again"
            )
    extra = [name for name in source if name not in wanted]
    if extra:
        raise FormatError(
            f"{source.path}: {len(extra)} weights are not the model's, the first is {extra[0]!r}"
        )
    return config


def check_memory(source: OamSource, device: Device) -> None:
    """Refuse a model whose weights cannot fit before any is copied.

    Raises:
        OutOfDeviceMemoryError: with the sizes, and what would fit.
    """
    need = sum(tensor.info.nbytes for tensor in source.values())
    free = device.allocator.available_bytes
    if need <= free:
        return
    dense = sum(
        t.info.numel for t in source.values() if len(t.info.shape) > 1 and t.info.encoding not in ("q4", "q8")
    )
    advice = "; packed to q4 its dense weights would take about an eighth of f32" if dense else ""
    raise OutOfDeviceMemoryError(
        f"{source.path}: the weights take {need:,} bytes, and {device.info.name} has about {free:,} free{advice}. Use a "
        "smaller encoding (oazoo quantize), another device (OAZOO_DEVICE), or close what holds the device's memory"
    )


def upload(model: Module, source: OamSource, device: Device, progress: Progress | None = None) -> None:
    """Give every parameter its weights, in their encoding, on the device."""
    held = [*model.named_parameters(), *model.named_buffers()]
    total = sum(source[name].info.nbytes for name, _ in held)
    done = 0

    def provide(name: str, parameter: Parameter | Buffer) -> Sequence[Tensor]:
        nonlocal done
        tensor = source[name]
        try:
            shards = place(tensor, device, parameter.offset if isinstance(parameter, Parameter) else 0.0)
        except DeviceError as error:
            raise type(error)(f"{name} ({total:,} bytes of weights in all): {error}") from error
        done += tensor.info.nbytes
        if progress is not None:
            progress("loading", done, total)
        return shards

    model.load(provide)


def place(tensor: SourceTensor, device: Device, offset: float = 0.0) -> list[Tensor]:
    """A stored weight on the device: one tensor, or several by rows where one buffer cannot hold it.

    ``offset`` is added to the values of a vector.
    """
    info = tensor.info
    if len(info.shape) < 2:
        return [Tensor.from_numpy(device, tensor.numpy().astype(np.float32) + np.float32(offset))]
    limit = device.allocator.max_buffer_bytes
    if info.nbytes <= limit and info.numel < MAX_ELEMENTS:
        return [Tensor.from_bytes(device, info.shape, info.encoding, tensor.raw())]
    return _by_rows(tensor, device, limit)


def _by_rows(tensor: SourceTensor, device: Device, limit: int) -> list[Tensor]:
    info = tensor.info
    rows, width = info.shape[0], info.numel // max(1, info.shape[0])
    # Blocks of 32 run over the flattened tensor: a shard begins where a row and a block begin together.
    step = 1
    if info.encoding in ("q4", "q8"):
        while step * width % 32:
            step *= 2
    count = min(int(limit // (info.nbytes / rows)), MAX_ELEMENTS // width) // step * step
    if count < 1:
        what = "rows" if len(info.shape) == 2 else "experts"
        raise DeviceError(
            f"{step} {what} of {info.name} take more than one buffer may hold ({limit:,} bytes)"
        )
    shards = []
    for start in range(0, rows, count):
        stop = min(start + count, rows)
        piece = tensor.part(start * width, stop * width)
        shards.append(Tensor.from_bytes(device, (stop - start, *info.shape[1:]), info.encoding, piece))
    return shards


class _Verification:
    """The file's checksums, computed in a thread beside the upload (the hash runs outside the interpreter's lock)."""

    def __init__(self, source: OamSource) -> None:
        self._failure: OazooError | None = None
        self._thread = threading.Thread(target=self._run, args=(source,), name="oazoo-verify", daemon=True)
        self._thread.start()

    def _run(self, source: OamSource) -> None:
        try:
            source.verify()
        except OazooError as error:
            self._failure = error

    def wait(self) -> Any:
        """Wait for the end; the failure, or None."""
        self._thread.join()
        return self._failure
