"""What a Mamba-3 block is made of: its form, its parameters, its states."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from oazoo.runtime.device import Device
from oazoo.runtime.ops.arithmetic import fill
from oazoo.runtime.ops.common import require, require_dense
from oazoo.runtime.tensor import Tensor


@dataclass(frozen=True, kw_only=True)
class Mamba3Form:
    """Sizes and choices of a block.

    An input row holds z [H, P], x [H, P], B [R, G, N], C [R, G, N], dt [H], A [H], trapezoid [H], angles [S].

    ``half_pairs``: components j and j + N/2 turn together, else neighbours. ``softplus_a``: A by softplus, else ``1 + r``
    or ``1 / (1 - r)``. ``clamp_dt``: dt is kept within ``dt_min`` and ``dt_max``. ``raw_angle``: angles enter as they are,
    else by π tanh. ``output_norm``: RMSNorm of each head before the gate. ``gated``: the result is multiplied by silu(z).
    ``direct``: the columns of dt and A hold dt and A·dt themselves; ``normed``: B and C are normalised already;
    ``own_angles``: every head has angles of its own, [H, S].
    """

    heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    rank: int = 1
    num_angles: int = 0
    half_pairs: bool = False
    softplus_a: bool = False
    clamp_dt: bool = False
    raw_angle: bool = False
    direct: bool = False
    normed: bool = False
    own_angles: bool = False
    output_norm: bool = False
    gated: bool = True
    dt_min: float = 1e-3
    dt_max: float = 0.1
    a_floor: float = 1e-4
    eps: float = 1e-5

    def __post_init__(self) -> None:
        op = "mamba3"
        sizes = (self.heads, self.head_dim, self.state_size, self.num_groups, self.rank)
        require(min(sizes) > 0 and self.num_angles >= 0, op, f"sizes must be positive, not {sizes}")
        require(
            self.heads % self.num_groups == 0,
            op,
            f"{self.heads} heads do not divide into {self.num_groups} groups",
        )
        require(
            2 * self.num_angles <= self.state_size,
            op,
            f"{self.num_angles} angles for a state of {self.state_size}",
        )
        require(
            not self.half_pairs or self.state_size % 2 == 0, op, "half-split pairs need an even state size"
        )

    @property
    def inner(self) -> int:
        """Width of the result: all heads."""
        return self.heads * self.head_dim

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the pieces of an input row."""
        keys = self.rank * self.num_groups * self.state_size
        angles = self.num_angles * (self.heads if self.own_angles else 1)
        return (self.inner, self.inner, keys, keys, self.heads, self.heads, self.heads, angles)

    @property
    def width(self) -> int:
        """Width of an input row."""
        return sum(self.widths)

    @property
    def coefficients(self) -> int:
        """Numbers that the recurrence needs for a token and head."""
        return 4 + 2 * self.rank**2

    def words(self) -> list[int]:
        """The form as kernels read it."""
        flags = [
            self.half_pairs,
            self.softplus_a,
            self.clamp_dt,
            self.raw_angle,
            self.direct,
            self.normed,
            self.own_angles,
            self.output_norm,
            self.gated,
        ]
        sizes = [
            self.heads,
            self.head_dim,
            self.state_size,
            self.num_groups,
            self.rank,
            self.num_angles,
            self.width,
        ]
        numbers = np.array([self.dt_min, self.dt_max, self.a_floor, self.eps], np.float32)
        return [*sizes, sum(flag << bit for bit, flag in enumerate(flags)), *numbers.view(np.uint32).tolist()]


@dataclass(frozen=True, kw_only=True)
class Mamba3Weights:
    """Parameters of a block, f32; None for those that its form does without.

    ``dt_bias`` [H]; ``b_norm``, ``c_norm`` [N]; ``b_bias``, ``c_bias`` [H, R, N]; ``d`` [H]; ``mimo_x``, ``mimo_z``,
    ``mimo_o`` [H, R, P]; ``norm`` [H, P]. Other shapes of as many elements do as well.
    """

    b_bias: Tensor
    c_bias: Tensor
    dt_bias: Tensor | None = None
    b_norm: Tensor | None = None
    c_norm: Tensor | None = None
    d: Tensor | None = None
    mimo_x: Tensor | None = None
    mimo_z: Tensor | None = None
    mimo_o: Tensor | None = None
    norm: Tensor | None = None

    def check(self, op: str, form: Mamba3Form) -> None:
        """Refuse parameters that are not the form's."""
        spread = form.heads * form.rank * form.head_dim
        sizes = {"b_norm": form.state_size, "c_norm": form.state_size, "norm": form.inner}
        sizes |= dict.fromkeys(("dt_bias", "d"), form.heads)
        sizes |= dict.fromkeys(("b_bias", "c_bias"), form.heads * form.rank * form.state_size)
        sizes |= dict.fromkeys(("mimo_x", "mimo_z", "mimo_o"), spread)
        for name, size in sizes.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None:
                require(
                    tensor.dtype == "f32" and tensor.numel == size,
                    op,
                    f"{name} must be f32 with {size} elements, not {tensor.dtype}{list(tensor.shape)}",
                )
        require(form.direct or self.dt_bias is not None, op, "dt_bias is missing")
        mimo = {self.mimo_x is None, self.mimo_z is None, self.mimo_o is None}
        require(len(mimo) == 1, op, "of mimo_x, mimo_z, mimo_o all are given, or none")
        require(form.rank == 1 or mimo == {False}, op, f"rank {form.rank} needs mimo_x, mimo_z, mimo_o")
        require(self.norm is None or form.output_norm, op, "a norm's weight, but no norm")

    def all(self) -> list[Tensor | None]:
        """The parameters in the order of the fields."""
        return [getattr(self, f.name) for f in fields(self)]


class Mamba3States(NamedTuple):
    """What a sequence leaves behind, f32: all that its continuation needs; zeros before the first token.

    ``angle`` [B, H, S], within [0, 2π]; ``ssm`` [B, H, P, N]; ``k`` [B, R, H, N], the last token's keys, biased and turned;
    ``v`` [B, H, P], its x.
    """

    angle: Tensor
    ssm: Tensor
    k: Tensor
    v: Tensor

    @property
    def nbytes(self) -> int:
        """Device memory that they take."""
        return sum(tensor.nbytes for tensor in self)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four, in order."""
        return (self.angle, self.ssm, self.k, self.v)

    def clear(self) -> None:
        """Set all to zeros: a fresh start. Recorded like any op."""
        for tensor in self:
            if tensor.numel:
                fill(tensor, 0.0)


def state_shapes(form: Mamba3Form, sequences: int) -> list[tuple[int, ...]]:
    """Shapes of the states of so many sequences."""
    return [
        (sequences, form.heads, form.num_angles),
        (sequences, form.heads, form.head_dim, form.state_size),
        (sequences, form.rank, form.heads, form.state_size),
        (sequences, form.heads, form.head_dim),
    ]


def new_states(device: Device, form: Mamba3Form, sequences: int) -> Mamba3States:
    """Zero states of so many sequences."""
    states = Mamba3States(*(Tensor.empty(device, shape) for shape in state_shapes(form, sequences)))
    states.clear()
    return states


def check_states(op: str, states: Mamba3States, form: Mamba3Form, sequences: int) -> None:
    """Refuse states that are not those of so many sequences."""
    names = ("angle", "ssm", "k", "v")
    for name, tensor, shape in zip(names, states, state_shapes(form, sequences), strict=True):
        require_dense(tensor, op, f"states.{name}", "f32", *shape)


_forms: WeakKeyDictionary[Device, dict[Mamba3Form, Tensor]] = WeakKeyDictionary()


def form_of(device: Device, form: Mamba3Form) -> Tensor:
    """The form in device memory; made once."""
    known = _forms.setdefault(device, {})
    if form not in known:
        with device.aside():
            known[form] = Tensor.from_numpy(device, np.array(form.words(), np.uint32))
    return known[form]
