"""The Mamba-3 block ("Mamba-3: Improved Sequence Modeling using State Space Principles", 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Literal, overload

import numpy as np

from oazoo.configs import Mamba3Config
from oazoo.configs.mamba3 import VARIANTS
from oazoo.errors import DeviceError
from oazoo.nn.initial import Array, glorot, ones, uniform, zeros
from oazoo.nn.layers import Linear, RMSNorm
from oazoo.nn.module import Module, Parameter
from oazoo.runtime import Device, Tensor, get_device
from oazoo.runtime.ops.arithmetic import accumulate, reshaped
from oazoo.runtime.ops.mamba3 import (
    Mamba3Form,
    Mamba3States,
    Mamba3Weights,
    check_states,
    mamba3,
    mamba3_step,
    new_states,
)
from oazoo.runtime.tape import no_grad


class Mamba3Block(Module):
    """``out_proj(gate(scan(in_proj(x))))``, with a state of constant size; no residual and no norm of its own.

    Parameters have the names and shapes of the published module; with ``variant="oa"`` those, and the order, of OA 0.8.6.

    Args:
        d_model: width of the input and output.
        d_state: N, width of keys and queries.
        expand: inner width as a multiple of ``d_model``.
        headdim: P, width of a head.
        ngroups: G, groups of heads that share B and C.
        rope_fraction: the share of the state that turns.
        dt_min: least first value of dt; with ``variant="oa"`` dt is never below.
        dt_max: largest first value of dt; likewise.
        dt_init_floor: least first value of dt.
        A_floor: least decay.
        is_outproj_norm: RMSNorm of each head before the gate.
        is_mimo: ``mimo_rank`` keys, queries and values for each token and head.
        mimo_rank: R.
        chunk_size: longest stretch of tokens that is walked in order; what suits the device if None.
        a_form: how A follows from its raw value: ``heavy_tail``, or ``softplus``, as the reference had it before June 2026.
        variant: ``mamba3``, or ``oa``: dt is clamped, angles enter as they are, B and C are normalised without weights, and
            neighbours turn together at every rank.
        eps: of all norms.
        d_inner: the inner width itself.

    Raises:
        OazooError: sizes that do not fit.
    """

    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 128,
        expand: float = 2.0,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 1e-3,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        chunk_size: int | None = None,
        a_form: str = "heavy_tail",
        variant: str = "mamba3",
        eps: float = 1e-5,
        d_inner: int | None = None,
    ) -> None:
        inner = int(expand * d_model) if d_inner is None else d_inner
        if variant not in VARIANTS or a_form not in ("heavy_tail", "softplus"):
            raise DeviceError(f"Mamba3Block: there is no variant {variant!r} with a_form {a_form!r}")
        if inner <= 0 or headdim <= 0 or inner % headdim:
            raise DeviceError(
                f"Mamba3Block: an inner width of {inner} does not divide into heads of {headdim}"
            )
        oa = variant == "oa"
        self.form = Mamba3Form(
            heads=inner // headdim,
            head_dim=headdim,
            state_size=d_state,
            num_groups=ngroups,
            rank=mimo_rank if is_mimo else 1,
            num_angles=int(d_state * rope_fraction) // 2,
            half_pairs=is_mimo and not oa,
            softplus_a=a_form == "softplus",
            clamp_dt=oa,
            raw_angle=oa,
            output_norm=is_outproj_norm,
            dt_min=dt_min,
            dt_max=dt_max,
            a_floor=A_floor,
            eps=eps,
        )
        heads, rank = self.form.heads, self.form.rank
        self.d_model, self.chunk_size, self.variant = d_model, chunk_size, variant
        self.in_proj = Linear(d_model, self.form.width, bias=False)
        self.dt_bias = Parameter(
            heads, initial=lambda rng, shape: first_dt_bias(rng, shape, dt_min, dt_max, dt_init_floor)
        )
        if not oa:
            self.B_norm = RMSNorm(d_state, eps)
            self.C_norm = RMSNorm(d_state, eps)
        biases = (heads, d_state) if oa and rank == 1 else (heads, rank, d_state)
        self.B_bias = Parameter(*biases, initial=ones)
        self.C_bias = Parameter(*biases, initial=ones)
        if oa and is_mimo:
            self._add_mimo()
        self.D = Parameter(heads, initial=zeros if oa else ones)
        if not oa and is_mimo:
            self._add_mimo()
        if is_outproj_norm and not oa:
            self.norm = RMSNorm(inner, eps)
        self.out_proj = Linear(inner, d_model, bias=False)
        if is_outproj_norm and oa:
            self.norm_weight = Parameter(heads, headdim, initial=ones)
        if not oa:
            self.in_proj.weight.initial = lambda rng, shape: uniform(rng, shape, shape[1] ** -0.5)
            self.out_proj.weight.initial = lambda rng, shape: uniform(rng, shape, shape[1] ** -0.5)
        else:
            self.in_proj.weight.initial = self.out_proj.weight.initial = glorot

    def _add_mimo(self) -> None:
        shape = (self.form.heads, self.form.rank, self.form.head_dim)
        self.mimo_x = Parameter(*shape, initial=lambda rng, shape: ones(rng, shape) / np.float32(shape[1]))
        self.mimo_z = Parameter(*shape, initial=ones)
        self.mimo_o = Parameter(*shape, initial=lambda rng, shape: ones(rng, shape) / np.float32(shape[1]))

    @classmethod
    def from_config(cls, config: Mamba3Config) -> Mamba3Block:
        """A block of the model that ``config`` describes."""
        return cls(
            config.hidden_size,
            d_state=config.state_size,
            d_inner=config.inner_size,
            headdim=config.head_dim,
            ngroups=config.num_groups,
            rope_fraction=config.rope_fraction,
            dt_min=config.dt_min,
            dt_max=config.dt_max,
            dt_init_floor=config.dt_init_floor,
            A_floor=config.a_floor,
            is_outproj_norm=config.output_norm,
            is_mimo=config.mimo_rank is not None,
            mimo_rank=config.rank,
            chunk_size=config.chunk_size,
            a_form=config.a_form,
            variant=config.variant,
            eps=config.norm_eps,
        )

    def weights(self) -> Mamba3Weights:
        """The parameters between the two linear layers."""
        found = {
            "dt_bias": self.dt_bias,
            "b_bias": self.B_bias,
            "c_bias": self.C_bias,
            "d": self.D,
        }
        if self.variant == "mamba3":
            found |= {"b_norm": self.B_norm.weight, "c_norm": self.C_norm.weight}
        if self.form.output_norm:
            found["norm"] = self.norm.weight if self.variant == "mamba3" else self.norm_weight
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            if name in vars(self):
                found[name] = vars(self)[name]
        return Mamba3Weights(**{name: parameter.tensor for name, parameter in found.items()})

    def zero_state(self, batch: int, device: Device | None = None) -> Mamba3States:
        """The state of ``batch`` sequences before their first token."""
        shards = self.dt_bias.shards
        return new_states(device or (shards[0].device if shards else get_device()), self.form, batch)

    @overload
    def __call__(
        self,
        x: Tensor,
        batch: int = 1,
        *,
        lengths: Sequence[int] | None = None,
        states: Mamba3States | None = None,
        return_states: Literal[False] = False,
        into: Mamba3States | None = None,
        residual: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        x: Tensor,
        batch: int = 1,
        *,
        lengths: Sequence[int] | None = None,
        states: Mamba3States | None = None,
        return_states: Literal[True],
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Mamba3States]: ...

    def __call__(
        self,
        x: Tensor,
        batch: int = 1,
        *,
        lengths: Sequence[int] | None = None,
        states: Mamba3States | None = None,
        return_states: bool = False,
        into: Mamba3States | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Mamba3States]:
        """Whole sequences.

        Args:
            x: f32 [batch, tokens, d_model]; or [rows, d_model], ``batch`` sequences of one length, one after the other.
            batch: number of sequences, where x has two axes.
            lengths: of sequences that are packed in rows instead.
            states: where each sequence goes on from; a fresh start if None.
            return_states: also return where each sequence ends; gradients flow through both.
            into: states to write that to instead, perhaps ``states`` itself; no gradient flows through them.
            residual: f32 [rows, d_model], added to the result; where x has two axes.

        Returns:
            f32 like x; and the states, if they are asked for.

        Raises:
            DeviceError: shapes that do not fit.
        """
        if len(x.shape) == 3:
            if lengths is not None:
                raise DeviceError("Mamba3Block: packed sequences have one axis of rows")
            flat = reshaped(x, x.shape[0] * x.shape[1], x.shape[2])
            if return_states:
                y, final = self(flat, x.shape[0], states=states, return_states=True)
                return reshaped(y, *x.shape), final
            return reshaped(self(flat, x.shape[0], states=states, into=into), *x.shape)
        p = self.in_proj(x)
        sequences = batch if lengths is None else list(lengths)
        if not return_states and into is None:
            y = mamba3(p, self.form, self.weights(), sequences, states=states, chunk=self.chunk_size)
            return self.out_proj(y, residual=residual)
        y, final = mamba3(
            p, self.form, self.weights(), sequences, states=states, return_states=True, chunk=self.chunk_size
        )
        if into is None:
            return self.out_proj(y, residual=residual), final
        check_states("Mamba3Block", into, self.form, final.ssm.shape[0])
        for target, source in zip(into, final, strict=True):
            if source.numel:
                accumulate(target, source, 1.0, 0.0)
        return self.out_proj(y, residual=residual)

    def step(self, x: Tensor, states: Mamba3States, *, residual: Tensor | None = None) -> Tensor:
        """One token of each sequence; ``states`` is changed in place.

        Args:
            x: f32 [batch, d_model].
            states: where each sequence stands.
            residual: f32 like x, added to the result.

        Returns:
            f32 like x. It has no gradient.
        """
        with no_grad():
            y = mamba3_step(self.in_proj(x), self.form, self.weights(), states)
            return self.out_proj(y, residual=residual)


def first_dt_bias(
    rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float, floor: float
) -> Array:
    """dt spread evenly by its logarithm, and what softplus makes it from."""
    dt = np.maximum(np.exp(rng.random(shape) * (log(high) - log(low)) + log(low)), floor)
    return (dt + np.log(-np.expm1(-dt))).astype(np.float32)
