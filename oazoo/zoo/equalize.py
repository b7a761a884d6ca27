"""Scaling the columns of weights up where inputs are large, and what makes these inputs down by as much.

The model computes what it computed before, and blocks of 4 bits hold it better: a column that counts more than its
neighbours gets finer steps. It is what AWQ does (Lin et al., arXiv:2306.00978). Columns are scaled by h^p, h the mean
square of their inputs, and p is tried out, for each place where inputs are made:

- the norm before query, key and value, and the norm before gate and up: its weight is divided;
- up, before down: its rows are divided;
- value, before the output projection: its rows are divided, by one number for all heads that read them.

Divided rows cost nothing, because scales of blocks are divided with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_rewrite import Change, write_with_weights
from oazoo.formats.source import SourceTensor
from oazoo.runtime.ops.pack import Packer
from oazoo.zoo.statistics import Statistics

if TYPE_CHECKING:
    from oazoo.runtime import Device
    from oazoo.zoo.progress import Progress

Floats = npt.NDArray[np.float32]

#: Powers of the mean square that are tried.
POWERS = (0.0, 0.07, 0.14, 0.21, 0.28, 0.35)
#: Rows of a weight that they are tried on, and how far a column may be scaled.
_SAMPLE, _LARGEST = 256, 16.0
_DENSE = ("f32", "f16", "bf16")
_CHUNK = 4 << 20


@dataclass
class _Place:
    """Where inputs are made: what is divided (vectors, or the rows of a matrix), and whose columns are multiplied."""

    divided: list[str]
    multiplied: list[str]
    heads: tuple[int, int] = (1, 1)  # key and value heads, and how many query heads read each


@dataclass(frozen=True)
class _Scaling:
    """What a tensor is multiplied with: its columns, its rows (or, a vector, itself)."""

    columns: Floats | None = None
    rows: Floats | None = None


def equalize(
    source: OamSource,
    statistics: Statistics,
    output: str | Path,
    device: Device,
    progress: Progress | None = None,
) -> Statistics:
    """Write a dense model that computes the same and packs better; tensors that were scaled become f32.

    Args:
        source: a decoder with a norm before each part of a layer.
        statistics: its mean squares.
        output: the file to write.
        device: where powers are tried.
        progress: called with the layers that are done.

    Returns:
        The statistics of the scaled model.

    Raises:
        UsageError: another kind of model, or statistics of another.
    """
    model = source.metadata.get("model")
    if (
        source.metadata.get("family") != "decoder"
        or not isinstance(model, Mapping)
        or not model.get("pre_norm")
    ):
        raise UsageError(f"{source.path}: only decoders with norms before attention and MLP can be equalized")
    scalings: dict[str, _Scaling] = {}
    powers: dict[str, float] = {}
    layers = int(model["num_layers"])
    packer = Packer(device, "q4", _SAMPLE * max(t.info.shape[-1] for t in source.values()), "search")
    for layer in range(layers):
        for place in _places(source, model, layer):
            power, scale = _best(source, statistics, place, packer)
            if power:
                powers[place.multiplied[0]] = power
                _note(scalings, source, place, scale)
        if progress is not None:
            progress("equalizing", layer + 1, layers, "layers")
    _write(source, output, scalings, powers, float(model.get("norm_offset") or 0.0))
    return _scaled(statistics, scalings)


def _places(source: OamSource, model: Mapping[str, Any], layer: int) -> Iterator[_Place]:
    prefix = f"layers.{layer}."
    names = {name[len(prefix) :] for name in source if name.startswith(prefix)}
    qkv, mlp = [f"attn.{r}.weight" for r in "qkv"], ["mlp.gate.weight", "mlp.up.weight"]
    known = {*qkv, *mlp, "attn.o.weight", "mlp.down.weight"}
    large = {name for name in names if len(source[prefix + name].info.shape) > 1}
    # Anything else may read the same inputs, and what is packed already cannot be scaled.
    if not large <= known or any(source[prefix + n].info.encoding not in _DENSE for n in large):
        return

    def place(divided: str, multiplied: list[str], heads: tuple[int, int] = (1, 1)) -> _Place:
        bias = divided.replace(".weight", ".bias")
        made = [prefix + name for name in (divided, bias) if name in names]
        return _Place(made, [prefix + name for name in multiplied], heads)

    two_norms = {"attn_norm.weight", "mlp_norm.weight"} <= names
    if two_norms and {*qkv} <= large:
        yield place("attn_norm.weight", qkv)
    if {"attn.v.weight", "attn.o.weight"} <= large:
        kv_heads = int(model["num_kv_heads"])
        yield place("attn.v.weight", ["attn.o.weight"], (kv_heads, int(model["num_heads"]) // kv_heads))
    if two_norms and {*mlp} <= large:
        yield place("mlp_norm.weight", mlp)
    if {*mlp, "mlp.down.weight"} <= large:
        yield place("mlp.up.weight", ["mlp.down.weight"])


def _best(source: OamSource, statistics: Statistics, place: _Place, packer: Packer) -> tuple[float, Floats]:
    """The power under which the weights' errors are least, each relative to its outputs; and the columns' scales."""
    inputs = source[place.multiplied[0]].info.shape[-1]
    found = [statistics.moment(name, inputs) for name in place.multiplied]
    moment = found[0]
    if moment is None or any(m is None for m in found) or not moment.mean() > 0:
        return 0.0, np.ones(inputs, np.float32)
    h = np.maximum(moment / moment.mean(), 1e-6).astype(np.float64)
    kv_heads, readers = place.heads
    shared = h.reshape(kv_heads, readers, -1).mean(1, keepdims=True)
    shared = np.broadcast_to(shared, (kv_heads, readers, shared.shape[-1])).reshape(-1)
    samples = [_sample(source[name]) for name in place.multiplied]
    best: tuple[float, float, Floats] | None = None
    for power in POWERS:
        scale = (shared / np.exp(np.log(shared).mean())) ** power
        scale = np.clip(scale, 1 / _LARGEST, _LARGEST).astype(np.float32)
        weights = packer.place(np.maximum(h / scale.astype(np.float64) ** 2, 1e-9).astype(np.float32))
        cost = 0.0
        for values in samples:
            scaled = (values * scale).reshape(-1)
            codes, scales, _ = packer(scaled, weights)
            raw = np.concatenate([codes.reshape(-1).view(np.uint8), scales.view(np.uint8)])
            error = values - quant.decode(raw, "q4", scaled.size).reshape(values.shape) / scale
            cost += float(
                (error.astype(np.float64) ** 2 * h).sum() / ((values.astype(np.float64) ** 2) * h).sum()
            )
        if best is None or cost < best[0]:
            best = cost, power, scale
    assert best is not None
    return best[1], best[2]


def _sample(tensor: SourceTensor) -> Floats:
    """Some rows from all over a matrix."""
    values = tensor.numpy()
    step = -(-values.shape[0] // _SAMPLE)
    return np.ascontiguousarray(values[::step], np.float32)


def _note(scalings: dict[str, _Scaling], source: OamSource, place: _Place, scale: Floats) -> None:
    for name in place.multiplied:
        scalings[name] = replace(scalings.get(name, _Scaling()), columns=scale)
    kv_heads, readers = place.heads
    made = scale.reshape(kv_heads, readers, -1)[:, 0].reshape(-1)
    for name in place.divided:
        scalings[name] = replace(scalings.get(name, _Scaling()), rows=np.float32(1) / made)


def _apply(tensor: SourceTensor, scaling: _Scaling, offset: float) -> Iterator[Floats]:
    """A tensor's values, scaled, as f32. ``offset``: what the file leaves off the weights of norms."""
    info = tensor.info
    inputs = info.shape[-1] if len(info.shape) > 1 else 1
    row = 0
    for chunk in tensor.chunks(max(1, _CHUNK // inputs) * inputs):
        values = chunk.astype(np.float32).reshape(-1, inputs)
        if scaling.columns is not None:
            values = values * scaling.columns
        if scaling.rows is not None:
            left_off = offset if len(info.shape) == 1 and "norm.weight" in info.name else 0.0
            rows = scaling.rows[row : row + values.shape[0], None]
            values = (values + left_off) * rows - left_off
        row += values.shape[0]
        yield values.astype(np.float32, copy=False)


def _write(
    source: OamSource,
    output: str | Path,
    scalings: Mapping[str, _Scaling],
    powers: Mapping[str, float],
    offset: float,
) -> None:
    note = {"source_weights": source.weights_checksum, "powers": dict(powers)}
    content = {**source.metadata, "equalized": note}
    payload = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    changes: dict[str, Change] = {
        name: ("f32", partial(_apply, source[name], scaling, offset)) for name, scaling in scalings.items()
    }
    write_with_weights(source, output, payload, changes)


def _scaled(statistics: Statistics, scalings: Mapping[str, _Scaling]) -> Statistics:
    moments, covariances = dict(statistics.moments), dict(statistics.covariances)
    done: set[str] = set()
    for name, scaling in scalings.items():
        shared = statistics.shares.get(name)
        if scaling.columns is None or shared is None or shared in done:
            continue
        done.add(shared)
        inverse = np.float32(1) / scaling.columns
        moments[shared] = moments[shared] * inverse**2
        if shared in covariances:
            covariances[shared] = covariances[shared] * inverse[:, None] * inverse
    return replace(statistics, moments=moments, covariances=covariances)
