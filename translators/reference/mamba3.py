"""What a Mamba-3 checkpoint of the state-spaces repository means, token by token, as its specification states it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.formats.source import WeightSource
from oazoo.translators.reference.description import NoReferenceError
from oazoo.translators.reference.maths import Array, rms_norm, silu
from oazoo.translators.reference.weights import Weights

Ids = npt.NDArray[np.int64]
Wide = npt.NDArray[np.float64]
_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Mamba3:
    """The settings of a checkpoint that matter to its logits."""

    layers: int
    inner: int
    head_dim: int
    states: int
    groups: int
    rank: int
    mimo: bool
    angles: int
    floor: float
    softplus: bool
    head_norm: bool
    mlp: bool
    tied: bool

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return self.inner // self.head_dim


def describe(config: Mapping[str, Any], chosen: Mapping[str, str]) -> Mamba3:
    """From config.json; ``chosen`` has what a person said of the checkpoint, ``a_form``."""
    block: Mapping[str, Any] = config["ssm_cfg"]
    if config.get("attn_layer_idx") or not config.get("rms_norm", True):
        raise NoReferenceError("layers of attention and LayerNorm have no reference")
    states = int(block.get("d_state", 128))
    turned = int(states * float(block.get("rope_fraction", 0.5)))
    mimo = bool(block.get("is_mimo", False))
    return Mamba3(
        layers=int(config["n_layer"]),
        inner=int(float(block.get("expand", 2)) * int(config["d_model"])),
        head_dim=int(block.get("headdim", 64)),
        states=states,
        groups=int(block.get("ngroups", 1)),
        rank=int(block.get("mimo_rank", 4)) if mimo else 1,
        mimo=mimo,
        angles=turned // 2,
        floor=float(block.get("A_floor", 1e-4)),
        softplus=chosen.get("a_form") == "softplus",
        head_norm=bool(block.get("is_outproj_norm", False)),
        mlp=bool(config.get("d_intermediate", 0)),
        tied=bool(config.get("tie_embeddings", True)),
    )


def mamba3_logits(
    source: WeightSource, model: Mamba3, sequences: Sequence[Ids], rounded: Mapping[str, str] | None = None
) -> list[Array]:
    """Logits after every token; arguments and result as for
    :func:`oazoo.translators.reference.forward.decoder_logits`.
    """
    w = Weights(source, rounded)
    ends = np.cumsum([len(ids) for ids in sequences])
    parts = [slice(int(end) - len(ids), int(end)) for end, ids in zip(ends, sequences, strict=True)]
    x = w.gather("backbone.embedding.weight", np.concatenate(list(sequences)))
    for layer in range(model.layers):
        at = f"backbone.layers.{layer}"
        h = rms_norm(x, w.vector(f"{at}.norm.weight"), _EPS)
        x = x + _mixer(w, model, f"{at}.mixer", h, parts)
        if model.mlp:
            h = rms_norm(x, w.vector(f"{at}.norm2.weight"), _EPS)
            value, gate = np.split(w.linear(f"{at}.mlp.fc1", h), 2, axis=1)
            x = x + w.linear(f"{at}.mlp.fc2", value * silu(gate))
    x = rms_norm(x, w.vector("backbone.norm_f.weight"), _EPS)
    logits = w.linear("backbone.embedding" if model.tied else "lm_head", x)
    return [logits[part] for part in parts]


def _mixer(w: Weights, m: Mamba3, at: str, h: Array, parts: Sequence[slice]) -> Array:
    heads, dim, rank = m.heads, m.head_dim, m.rank
    keys = m.states * m.groups * rank
    widths = [m.inner, m.inner, keys, keys, heads, heads, heads, m.angles]
    projected = w.linear(f"{at}.in_proj", h).astype(np.float64)
    z, x, b, c, dt, a, trap, angle = np.split(projected, np.cumsum(widths)[:-1], axis=1)
    k = _keys(w, m, at, "B", b)
    q = _keys(w, m, at, "C", c)
    dt = np.logaddexp(0, dt + w.vector(f"{at}.dt_bias"))
    if m.softplus:
        size = np.logaddexp(0, a)
    else:
        size = np.where(a >= 0, 1 + a, 1 / (1 + np.abs(a)))
    decay = np.exp(-np.maximum(size, m.floor) * dt)
    share = 1 / (1 + np.exp(-trap))
    turn = np.pi * np.tanh(angle)[:, None, :] * dt[:, :, None]
    x, z = x.reshape(-1, heads, 1, dim), z.reshape(-1, heads, 1, dim)
    ranked = {part: _ranked(w, f"{at}.mimo_{part}", m) for part in "xzo"}
    x, z = x * ranked["x"], z * ranked["z"]
    skip = w.vector(f"{at}.D")[:, None, None]
    norm = w.vector(f"{at}.norm.weight").reshape(heads, 1, dim) if m.head_norm else None
    y = np.empty((len(h), heads, dim))
    for part in parts:
        state = np.zeros((heads, dim, m.states))
        before = np.zeros_like(state)
        theta = np.zeros((heads, m.angles))
        for t in range(part.start, part.stop):
            theta = theta + turn[t]
            added = np.einsum("hrp,hrn->hpn", x[t], _turned(k[t], theta, m.mimo))
            alpha, new, old = (v[:, None, None] for v in (decay[t], share[t] * dt[t], (1 - share[t]) * dt[t]))
            state = alpha * (state + old * before) + new * added
            before = added
            o = np.einsum("hpn,hrn->hrp", state, _turned(q[t], theta, m.mimo)) + skip * x[t]
            if norm is not None:
                o = o / np.sqrt(np.mean(o * o, axis=-1, keepdims=True) + _EPS) * norm
            gate = z[t] / (1 + np.exp(-z[t]))
            y[t] = (o * gate * ranked["o"]).sum(1)
    return w.linear(f"{at}.out_proj", y.reshape(len(h), m.inner).astype(np.float32))


def _keys(w: Weights, m: Mamba3, at: str, name: str, values: Wide) -> Wide:
    """B or C of every head, [tokens, heads, rank, states]: normalised, given to the heads of its group, biased."""
    each = values.reshape(-1, m.rank, m.groups, m.states)
    each = each / np.sqrt(np.mean(each * each, axis=-1, keepdims=True) + _EPS)
    each = each * w.vector(f"{at}.{name}_norm.weight")
    of_heads = np.repeat(each, m.heads // m.groups, axis=2).swapaxes(1, 2)
    biased: Wide = of_heads + w.array(f"{at}.{name}_bias", 3)
    return biased


def _ranked(w: Weights, name: str, m: Mamba3) -> Wide:
    return w.array(name, 3).astype(np.float64) if m.mimo else np.ones((1, 1, 1))


def _turned(v: Wide, theta: Wide, half: bool) -> Wide:
    """Pairs of [heads, rank, states] turned by [heads, angles]: (j, j + states / 2) if ``half``, else neighbours."""
    count = theta.shape[1]
    first = np.arange(count) if half else 2 * np.arange(count)
    second = first + (v.shape[-1] // 2 if half else 1)
    cos, sin = np.cos(theta)[:, None, :], np.sin(theta)[:, None, :]
    turned = v.copy()
    turned[..., first] = v[..., first] * cos - v[..., second] * sin
    turned[..., second] = v[..., first] * sin + v[..., second] * cos
    return turned
