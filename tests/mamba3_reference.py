"""The Mamba-3 block in NumPy and float64, token by token as its definition has it, on packed input rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.runtime.ops.mamba3 import Mamba3Form

F64 = npt.NDArray[np.float64]


def sigmoid(x: F64) -> F64:
    result: F64 = np.exp(-np.logaddexp(0, -x))
    return result


def softplus(x: F64) -> F64:
    result: F64 = np.logaddexp(0, x)
    return result


def rms(x: F64, weight: F64 | float, eps: float) -> F64:
    result: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def turn(v: F64, angle: F64, half: bool) -> F64:
    """Rotate [..., N] by [..., S]."""
    pairs, n = angle.shape[-1], v.shape[-1]
    first = np.arange(pairs) if half else 2 * np.arange(pairs)
    second = first + n // 2 if half else first + 1
    y = v.copy()
    a, b, c, s = v[..., first], v[..., second], np.cos(angle), np.sin(angle)
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y


def block(
    p: F64, form: Mamba3Form, batch: int, w: dict[str, Any], states: tuple[F64, ...] | None = None
) -> tuple[F64, tuple[F64, ...]]:
    """Result [rows, H P] and final states (angle, ssm, k, v), as the op defines them."""
    heads, dims, n, rank = form.heads, form.head_dim, form.state_size, form.rank
    tokens = p.shape[0] // batch
    z, x, b, c, dt, a, trap, raw = np.split(p.reshape(batch, tokens, -1), np.cumsum(form.widths)[:-1], axis=2)
    z, x = z.reshape(batch, tokens, heads, dims), x.reshape(batch, tokens, heads, dims)
    share = heads // form.num_groups

    def keys(v: F64, weight: F64 | float, bias: F64) -> F64:
        v = rms(v.reshape(batch, tokens, rank, form.num_groups, n), weight, form.eps)
        v = np.repeat(v, share, axis=3) + bias.reshape(heads, rank, n).transpose(1, 0, 2)
        return v.transpose(0, 1, 3, 2, 4)  # [B, T, H, R, N]

    k, q = keys(b, w.get("b_norm", 1.0), w["b_bias"]), keys(c, w.get("c_norm", 1.0), w["c_bias"])
    dt = softplus(dt + w["dt_bias"])
    if form.clamp_dt:
        dt = np.clip(dt, form.dt_min, form.dt_max)
    a = softplus(a) if form.softplus_a else np.where(a >= 0, 1 + a, 1 / (1 - np.minimum(a, 0)))
    alpha, lam = np.exp(-np.maximum(a, form.a_floor) * dt), sigmoid(trap)
    speed = raw if form.raw_angle else np.pi * np.tanh(raw)
    shape = (heads, rank, dims)
    mx, mz, mo = (w[m].reshape(shape) if m in w else np.ones(shape) for m in ("mimo_x", "mimo_z", "mimo_o"))
    d = w.get("d", np.zeros(heads))
    if states is None:
        angle, state = np.zeros((batch, heads, form.num_angles)), np.zeros((batch, heads, dims, n))
        old_k, old_x = np.zeros((batch, heads, rank, n)), np.zeros((batch, heads, dims))
    else:
        angle, state, old_k, old_x = (s.copy() for s in states)
        old_k = old_k.transpose(0, 2, 1, 3)
    y = np.empty((batch, tokens, heads, dims))
    for t in range(tokens):
        angle = angle + speed[:, t, None, :] * dt[:, t, :, None]
        k_t, q_t = (turn(v[:, t], angle[:, :, None, :], form.half_pairs) for v in (k, q))
        x_t = x[:, t, :, None, :] * mx
        before = (1 - lam[:, t]) * dt[:, t] * alpha[:, t]
        state = (
            alpha[:, t, :, None, None] * state
            + before[..., None, None] * np.einsum("bhrp,bhrn->bhpn", old_x[:, :, None] * mx, old_k)
            + (lam[:, t] * dt[:, t])[..., None, None] * np.einsum("bhrp,bhrn->bhpn", x_t, k_t)
        )
        o = np.einsum("bhpn,bhrn->bhrp", state, q_t) + d[:, None, None] * x_t
        if form.output_norm:
            o = rms(o, w["norm"].reshape(heads, 1, dims) if "norm" in w else 1.0, form.eps)
        if form.gated:
            gate = z[:, t, :, None, :] * mz
            o = o * gate * sigmoid(gate)
        y[:, t] = (o * mo).sum(2)
        old_k, old_x = k_t, x[:, t]
    return y.reshape(-1, heads * dims), (angle % (2 * np.pi), state, old_k.transpose(0, 2, 1, 3), old_x)


def circular(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """The largest difference of two sets of angles on the circle."""
    difference = (found.astype(np.float64) - wanted + np.pi) % (2 * np.pi) - np.pi
    return float(np.abs(difference).max(initial=0.0))
