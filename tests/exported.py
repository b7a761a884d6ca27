"""Reading exported files with the formats' own packages, and making models to export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from oazoo.configs import ModelConfig
from oazoo.formats import encodings, quant
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter

Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def safetensors_bytes(path: Path) -> Stored:
    """Name → (dtype, shape, bytes) of one SafeTensors file, or of all in a folder, straight from the published layout."""
    found: Stored = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                a, b = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[start + a : start + b])
    return found


def gguf_bytes(path: Path) -> Stored:
    """Name → (type, shape outermost first, bytes), read by the gguf package."""
    return {
        str(tensor.name): (
            tensor.tensor_type.name,
            tuple(int(size) for size in reversed(tensor.shape)),
            np.ascontiguousarray(tensor.data).tobytes(),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def gguf_values(path: Path) -> dict[str, Any]:
    """The key/values of a GGUF file, read by the gguf package."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def oam_bytes(path: Path) -> Stored:
    """Name → (encoding, shape, bytes) of the weights of an ``.oam``."""
    with OamSource(path) as source:
        return {n: (t.info.encoding, t.info.shape, t.raw().tobytes()) for n, t in source.items()}


def oam_values(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """The weights of an ``.oam``, decoded."""
    with OamSource(path) as source:
        return {name: tensor.numpy().astype(np.float64) for name, tensor in source.items()}


def random_oam(path: Path, config: ModelConfig, encoding: str = "f32", seed: int = 0) -> Path:
    """A model of ``config`` with random weights, matrices large enough that every part of it matters to the logits."""
    random = np.random.default_rng(seed)
    document = {"oazoo": 1, "family": config.family, "model": config.to_json()}
    entries = [OamEntry(name, shape, encoding) for name, shape in config.parameters().items()]
    settings = OamConfig(architecture=config.family, payload=json.dumps(document).encode())
    with OamWriter(path, config=settings, entries=entries) as writer:
        for entry in entries:
            values = random.normal(size=entry.shape) * (0.3 if len(entry.shape) > 1 else 0.2)
            values += len(entry.shape) == 1 and entry.name.endswith("norm.weight")
            writer.write(entry.name, values.astype(encodings.get(encoding).dtype))
    return path


def packed_oam(source: Path, out: Path, encoding: str, exact_scales: bool = False) -> Path:
    """The dense model of ``source`` with its matrices packed by the NumPy encoder; scales rounded to f16 if asked."""
    with OamSource(source) as model:
        entries = [
            OamEntry(name, t.info.shape, encoding if len(t.info.shape) > 1 else t.info.encoding)
            for name, t in model.items()
        ]
        config = OamConfig(architecture=model.config.architecture, payload=model.config.payload)
        assets = {
            name.removeprefix("asset/"): model.asset(name) or b""
            for name in model.state
            if name.startswith("asset/")
        }
        with OamWriter(out, config=config, entries=entries, assets=assets) as writer:
            for entry in entries:
                if entry.encoding != encoding:
                    writer.write(entry.name, model[entry.name].raw())
                    continue
                codes, scales = quant.encode(model[entry.name].numpy(), encoding)
                if exact_scales:
                    scales = scales.astype(np.float16).astype(np.float32)
                writer.write(entry.name, [codes, scales])
    return out
