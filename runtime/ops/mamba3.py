"""The Mamba-3 block between its two linear layers: a recurrence with an exponential-trapezoidal step and turning keys.

Formulas and symbols are those of "Mamba-3: Improved Sequence Modeling using State Space Principles" (2026). B sequences,
T tokens, H heads of width P, state N, G groups of B and C, rank R (1: SISO, more: MIMO), S rotary angles:

    h_t = α_t h_{t-1} + β_t Σ_r x_{t-1,r} k_{t-1,r}ᵀ + γ_t Σ_r x_{t,r} k_{t,r}ᵀ        o_{t,r} = h_t q_{t,r} + D x_{t,r}

The work grows with the tokens. Sequences are walked side by side, and where those are too few for a device, stretches of
a sequence: then each stretch is summed up from nothing first, and the sums are carried from stretch to stretch. What is
carried is not h but ``S_t = h_t + b_{t+1} Σ_r x_{t,r} k_{t,r}ᵀ``: a token's share in the next step is taken in at once.
After the last token they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np

from oazoo.runtime.ops.common import MAX_ELEMENTS, require, require_dense
from oazoo.runtime.ops.mamba3_back import gradients
from oazoo.runtime.ops.mamba3_form import (
    Mamba3Form,
    Mamba3States,
    Mamba3Weights,
    check_states,
    new_states,
    state_shapes,
)
from oazoo.runtime.ops.mamba3_scan import Scan, divided, parts_of
from oazoo.runtime.tape import detach, no_gradient, taped, taping
from oazoo.runtime.tensor import Tensor

__all__ = [
    "Mamba3Form",
    "Mamba3States",
    "Mamba3Weights",
    "check_states",
    "mamba3",
    "mamba3_step",
    "new_states",
    "state_shapes",
]


@overload
def mamba3(
    p: Tensor,
    form: Mamba3Form,
    weights: Mamba3Weights,
    batch: int | Sequence[int] = 1,
    *,
    states: Mamba3States | None = None,
    return_states: Literal[False] = False,
    chunk: int | None = None,
    variant: str | None = None,
) -> Tensor: ...


@overload
def mamba3(
    p: Tensor,
    form: Mamba3Form,
    weights: Mamba3Weights,
    batch: int | Sequence[int] = 1,
    *,
    states: Mamba3States | None = None,
    return_states: Literal[True],
    chunk: int | None = None,
    variant: str | None = None,
) -> tuple[Tensor, Mamba3States]: ...


def mamba3(
    p: Tensor,
    form: Mamba3Form,
    weights: Mamba3Weights,
    batch: int | Sequence[int] = 1,
    *,
    states: Mamba3States | None = None,
    return_states: bool = False,
    chunk: int | None = None,
    variant: str | None = None,
) -> Tensor | tuple[Tensor, Mamba3States]:
    """The block's result before its output projection.

    Args:
        p: f32 [rows, form.width]: sequences one after the other.
        form: sizes and choices.
        weights: parameters.
        batch: how many sequences, all of one length; or the length of each (packed sequences).
        states: where each sequence goes on from; a fresh start if None.
        return_states: also return where each sequence ends.
        chunk: longest stretch that is walked in order; what suits the device if None. It changes results by rounding only.
        variant: ``lanes`` (8-lane CPU devices, sizes in multiples of 16) or ``group``; the best that fits if None.

    Returns:
        f32 [rows, H · P]; and the states, if they are asked for. Gradients flow through both.
    """
    op = "mamba3"
    require_dense(p, op, "p", "f32", -1, form.width)
    weights.check(op, form)
    runs = divided(p, form, batch, chunk)
    if states is not None:
        check_states(op, states, form, runs.sequences)
    sizes = [
        runs.rows * form.heads * n
        for n in (form.rank * max(form.state_size, form.head_dim), form.coefficients)
    ]
    require(
        max(sizes) * 2 <= MAX_ELEMENTS,
        op,
        f"{runs.rows:,} rows are too many for one run: give fewer at a time",
    )
    scan = Scan(p, form, weights, runs, states, variant)
    inputs = (p, *weights.all(), *(states or (None,) * 4))
    if not return_states:
        y, o = scan.forward(None, taping(*inputs))
        return taped(y, inputs, lambda dy, want: gradients(scan, o, dy, None, want))
    # One tensor of everything, so that one rule goes back from all of it.
    ends = [np.prod(shape, dtype=int).item() for shape in state_shapes(form, runs.sequences)]
    whole = Tensor.empty(p.device, (runs.rows * form.inner + sum(ends),))
    y, o = scan.forward(whole, taping(*inputs))
    final = detach(parts_of(whole, form, runs)[2])

    def back(dwhole: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        dy, *dstates = parts_of(dwhole, form, runs)
        return gradients(scan, o, dy, (final, Mamba3States(*dstates)), want)

    y, *found = parts_of(taped(whole, inputs, back), form, runs)
    return y, Mamba3States(*found)


def mamba3_step(p: Tensor, form: Mamba3Form, weights: Mamba3Weights, states: Mamba3States) -> Tensor:
    """One token of each sequence: :func:`mamba3` of a single row each, with ``states`` changed in place.

    Args:
        p: f32 [batch, form.width].
        form: sizes and choices.
        weights: parameters.
        states: where each sequence stands.

    Returns:
        f32 [batch, H · P]. It has no gradient.
    """
    op = "mamba3_step"
    require_dense(p, op, "p", "f32", -1, form.width)
    weights.check(op, form)
    check_states(op, states, form, p.shape[0])
    no_gradient(op, p, *weights.all(), *states)
    return Scan(p, form, weights, divided(p, form, p.shape[0], None), states, None).step()
