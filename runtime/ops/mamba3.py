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
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, overload
from weakref import WeakKeyDictionary

import numpy as np

from oazoo.runtime.device import Device
from oazoo.runtime.ops.common import (
    MAX_ELEMENTS,
    MAX_GROUPS,
    eight_lanes,
    grid,
    lanes,
    portable_only,
    require,
    require_dense,
)
from oazoo.runtime.tape import no_gradient, taped, taping
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import MAMBA3_TILES

#: Shortest stretch that a sequence is cut into, and how many walks a device has work for side by side.
_LEAST_CHUNK = 64
_WALKS = {True: 8, False: 2048}
_REVERSE, _DIAGONAL, _PLAIN, _TRANSPOSED = 1, 2, 4, 8


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
        return 3 + 2 * self.rank**2

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
        from oazoo.runtime.ops.arithmetic import fill

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


@dataclass(frozen=True)
class Runs:
    """How rows divide into sequences, and those into stretches that are walked side by side."""

    rows: int
    sequences: int
    tokens: int
    chunk: int
    bounds: Tensor | None = None

    @property
    def parts(self) -> int:
        """Stretches of a sequence."""
        return 1 if self.bounds is not None else -(-self.tokens // self.chunk)

    @property
    def stretches(self) -> int:
        return self.sequences * self.parts


_forms: WeakKeyDictionary[Device, dict[Mamba3Form, Tensor]] = WeakKeyDictionary()


def form_of(device: Device, form: Mamba3Form) -> Tensor:
    """The form in device memory; made once."""
    known = _forms.setdefault(device, {})
    if form not in known:
        with device.aside():
            known[form] = Tensor.from_numpy(device, np.array(form.words(), np.uint32))
    return known[form]


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
    runs = _runs(p, form, batch, chunk)
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
    no_gradient(op, p, *weights.all(), *(states or ()))
    if not return_states:
        return scan.forward(None)[0]
    ends = [np.prod(shape, dtype=int).item() for shape in state_shapes(form, runs.sequences)]
    whole = Tensor.empty(p.device, (runs.rows * form.inner + sum(ends),))
    scan.forward(whole)
    y, *final = _parts_of(whole, form, runs)
    return y, Mamba3States(*final)


def check_states(op: str, states: Mamba3States, form: Mamba3Form, sequences: int) -> None:
    """Refuse states that are not those of so many sequences."""
    names = ("angle", "ssm", "k", "v")
    for name, tensor, shape in zip(names, states, state_shapes(form, sequences), strict=True):
        require_dense(tensor, op, f"states.{name}", "f32", *shape)


def _runs(p: Tensor, form: Mamba3Form, batch: int | Sequence[int], chunk: int | None) -> Runs:
    op, rows = "mamba3", p.shape[0]
    if not isinstance(batch, int):
        lengths = [int(n) for n in batch]
        require(bool(lengths) and min(lengths) > 0, op, "every packed sequence has at least one token")
        require(sum(lengths) == rows, op, f"{rows} rows are not packed sequences of {sum(lengths)} tokens")
        require(len(lengths) <= MAX_GROUPS, op, f"{len(lengths):,} sequences are too many for one run")
        bounds = Tensor.empty(p.device, (len(lengths) + 1,), "u32")
        bounds.inscribe(np.cumsum([0, *lengths]).astype(np.uint32))
        return Runs(rows, len(lengths), max(lengths), max(lengths), bounds)
    require(batch > 0 and rows > 0 and rows % batch == 0, op, f"{rows} rows are not {batch} equal sequences")
    tokens = rows // batch
    if chunk is None:
        walks = _WALKS[p.device.info.is_software and not portable_only()]
        chunk = max(_LEAST_CHUNK, -(-tokens * batch * form.heads // walks))
    require(chunk > 0, op, f"a stretch of {chunk} tokens")
    runs = Runs(rows, batch, tokens, min(chunk, tokens))
    require(
        max(runs.stretches, form.heads) <= MAX_GROUPS, op, f"{batch:,} sequences are too many for one run"
    )
    return runs


def _parts_of(whole: Tensor, form: Mamba3Form, runs: Runs) -> list[Tensor]:
    """The result and the states that lie in one tensor, in the order that kernels write them: y, angle, k, v, ssm."""
    angle, ssm, k, v = state_shapes(form, runs.sequences)
    at, parts = 0, []
    for shape in ((runs.rows, form.inner), angle, k, v, ssm):
        parts.append(stretch(whole, at, shape))
        at += parts[-1].numel
    y, angle_, k_, v_, ssm_ = parts
    return [y, angle_, ssm_, k_, v_]


def stretch(x: Tensor, at: int, shape: Sequence[int]) -> Tensor:
    """Elements ``at`` on of f32 [n] as a tensor of ``shape``, sharing memory; with a gradient."""
    part = Tensor(x.device, tuple(shape), "f32", x.memory, x.offset + 4 * at)
    if not taping(x):
        return part

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        from oazoo.runtime.ops.arithmetic import accumulate, fill

        dx = fill(Tensor.empty(x.device, x.shape), 0.0)
        accumulate(Tensor(x.device, dy.shape, "f32", dx.memory, dx.offset + 4 * at), dy, 1.0, 0.0)
        return (dx,)

    return taped(part, (x,), back)


@dataclass
class Scan:
    """One run of the block: its inputs, and the steps that the way forward and the way back share."""

    p: Tensor
    form: Mamba3Form
    weights: Mamba3Weights
    runs: Runs
    states: Mamba3States | None
    variant: str | None
    kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> Device:
        return self.p.device

    def forward(self, whole: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result [rows, H P], and what it was before norm and gate [rows, H, R, P]; final states go into ``whole``."""
        form, runs = self.form, self.runs
        finals = ssm = None
        y_shape = (runs.rows, form.inner)
        if whole is not None:
            y, angle, ssm, k, v = _parts_of(Tensor.view(whole, *whole.shape), form, runs)
            ends = angle.numel + k.numel + v.numel
            finals = Tensor(self.device, (ends,), "f32", whole.memory, angle.offset)
        work = Operands(self, finals)
        plain = form.rank == 1 and not form.output_norm and not form.gated and self.weights.mimo_o is None
        if whole is None:
            y = Tensor.empty(self.device, y_shape)
        o = y if plain else Tensor.empty(self.device, (runs.rows, form.heads, form.rank, form.head_dim))
        x, x_stride = self.values()
        self.sweep(
            work,
            (form.head_dim, form.state_size),
            (work.q, work.key_stride),
            (x, x_stride),
            (work.k, work.key_stride),
            (o, form.rank * form.inner),
            initial=self.start(),
            final=ssm,
            flags=_DIAGONAL,
        )
        if not plain:
            self.gate(o, y)
        return y, o

    def values(self) -> tuple[Tensor, int]:
        """x of each rank, and the stride of its rows."""
        form, rows = self.form, self.runs.rows
        if self.weights.mimo_x is None:
            return column(self.p, form.inner), form.width
        if "values" in self.kept:
            return self.kept["values"], form.rank * form.inner
        y = Tensor.empty(self.device, (rows, form.heads, form.rank, form.head_dim))
        groups = grid(-(-y.numel // 64))
        self.device.kernel("mamba3_spread").dispatch(
            groups,
            {"p": self.p, "mimo_x": self.weights.mimo_x, "form": form_of(self.device, form)},
            {"y": y},
            count=y.numel,
            columns=groups[0],
        )
        return y, form.rank * form.inner

    def start(self) -> Tensor | None:
        """The carried state before the first token, f32 [sequences, H, P, N]; None for zeros."""
        if self.states is None:
            return None
        y = Tensor.empty(self.device, self.states.ssm.shape)
        groups = grid(-(-y.numel // 64))
        self.device.kernel("mamba3_start").dispatch(
            groups,
            {
                "p": self.p,
                "dt_bias": self.weights.dt_bias,
                "mimo_x": self.weights.mimo_x,
                "ssm": self.states.ssm,
                "k": self.states.k,
                "v": self.states.v,
                "form": form_of(self.device, self.form),
                "bounds": self.runs.bounds,
            },
            {"y": y},
            count=y.numel,
            columns=groups[0],
            tokens=self.runs.tokens,
        )
        return y

    def gate(self, o: Tensor, y: Tensor) -> None:
        """Norm, gate, and the sum over ranks."""
        count = self.runs.rows * self.form.heads
        groups = grid(count)
        self.device.kernel(f"mamba3_gate_{lanes(self.device)}").dispatch(
            groups,
            {
                "p": self.p,
                "o": o,
                "norm": self.weights.norm,
                "mimo_z": self.weights.mimo_z,
                "mimo_o": self.weights.mimo_o,
                "form": form_of(self.device, self.form),
            },
            {"y": y},
            count=count,
            columns=groups[0],
        )

    def sweep(
        self,
        work: Operands,
        sizes: tuple[int, int],
        read: tuple[Tensor, int],
        drive: tuple[Tensor, int],
        value: tuple[Tensor, int],
        out: tuple[Tensor, int],
        *,
        initial: Tensor | None = None,
        final: Tensor | None = None,
        flags: int = 0,
    ) -> None:
        """The recurrence (mamba3_scan.slang): tensors with the strides of their rows; states are [sequences, H, P, N]."""
        form, runs = self.form, self.runs
        if runs.parts > 1:
            sums = Tensor.empty(self.device, (runs.stretches, form.heads, form.head_dim, form.state_size))
            self._walk(work, sizes, read, drive, value, None, None, sums, flags)
            count = runs.sequences * form.heads * form.head_dim * form.state_size
            groups = grid(-(-count // 64))
            ends = {"initial": initial, **({} if final is not None else {"final": None})}
            assert work.totals is not None
            self.device.kernel("mamba3_pass").dispatch(
                groups,
                {"totals": work.totals, **ends},
                {"states": sums, **({} if final is None else {"final": final})},
                count=count,
                columns=groups[0],
                size=form.head_dim * form.state_size,
                heads=form.heads,
                parts=runs.parts,
                stride=1 + form.num_angles,
                reverse=flags & _REVERSE,
            )
            initial, final = sums, None
        self._walk(work, sizes, read, drive, value, out, initial, final, flags)

    def _walk(
        self,
        work: Operands,
        sizes: tuple[int, int],
        read: tuple[Tensor, int],
        drive: tuple[Tensor, int],
        value: tuple[Tensor, int],
        out: tuple[Tensor, int] | None,
        initial: Tensor | None,
        final: Tensor | None,
        flags: int,
    ) -> None:
        form, runs, (a, b) = self.form, self.runs, sizes
        fast = b % MAMBA3_TILES[0] == 0 and eight_lanes(self.device)
        fast = fast and all(t.address % 8 == 0 and stride % 2 == 0 for t, stride in (read, value))
        variant = self.variant or ("lanes" if fast else "group")
        require(
            variant in ("lanes", "group"),
            "mamba3",
            f"there is no variant {variant!r}; there are lanes, group",
        )
        if variant == "lanes" and fast:
            tile = max(d for d in MAMBA3_TILES if b % d == 0)
            name, across = f"mamba3_sweep_lanes_{tile}", -(-a // 8)
        else:
            name, across = "mamba3_sweep_group", -(-a // 64)
        writes = {"out": out[0]} if out is not None else {}
        writes |= {} if final is None else {"final": final}
        reads = {
            "read": read[0],
            "drive": drive[0],
            "value": value[0],
            "coefs": work.coefs,
            "initial": initial,
        }
        self.device.kernel(name).dispatch(
            (across, form.heads, runs.stretches),
            {**reads, "bounds": runs.bounds, **{n: None for n in ("out", "final") if n not in writes}},
            writes,
            work=2 * runs.rows * form.heads * form.rank * a * b,
            a=a,
            b=b,
            heads=form.heads,
            rank=form.rank,
            read_stride=read[1],
            drive_stride=drive[1],
            value_stride=value[1],
            out_stride=out[1] if out is not None else 0,
            tokens=runs.tokens,
            chunk=runs.chunk,
            flags=flags,
        )


def column(p: Tensor, first: int) -> Tensor:
    """The memory of a matrix from a column of its first row on: kernels step by its whole rows."""
    return Tensor(p.device, (p.numel - first,), "f32", p.memory, p.offset + 4 * first)


class Operands:
    """What the recurrence works on: queries and keys f32 [rows, H, R, N], coefficients [rows, H, …], θ [rows, H, S].

    ``totals`` f32 [stretches, H, 1 + S], where sequences are cut: the product of α, and what θ gains.
    """

    def __init__(self, scan: Scan, finals: Tensor | None = None) -> None:
        form, runs, device = scan.form, scan.runs, scan.device
        keys = runs.rows * form.heads * form.rank * form.state_size
        coefs = runs.rows * form.heads * form.coefficients
        angles = runs.rows * form.heads * form.num_angles
        #: Stride of rows of queries and keys.
        self.key_stride = form.heads * form.rank * form.state_size
        self.work = Tensor.empty(device, (2 * keys + coefs + angles,))
        per_head = (runs.rows, form.heads)
        self.qk = stretch(self.work, 0, (2, keys))
        self.q = stretch(self.work, 0, (*per_head, form.rank, form.state_size))
        self.k = stretch(self.work, keys, self.q.shape)
        self.coefs = stretch(self.work, 2 * keys, (*per_head, form.coefficients))
        self.angles = stretch(self.work, 2 * keys + coefs, (*per_head, form.num_angles))
        self.totals: Tensor | None = None
        reads: dict[str, Tensor | None] = {
            "p": scan.p,
            "dt_bias": scan.weights.dt_bias,
            "b_norm": scan.weights.b_norm,
            "c_norm": scan.weights.c_norm,
            "b_bias": scan.weights.b_bias,
            "c_bias": scan.weights.c_bias,
            "d": scan.weights.d,
            "form": form_of(device, form),
            "bounds": runs.bounds,
            "angle": scan.states.angle if scan.states is not None and form.num_angles else None,
        }

        def run(name: str, reads: dict[str, Tensor | None], writes: dict[str, Tensor]) -> None:
            device.kernel(f"{name}_{lanes(device)}").dispatch(
                (form.heads, runs.stretches, 1),
                reads,
                writes,
                rows=runs.rows,
                sequences=runs.sequences,
                tokens=runs.tokens,
                chunk=runs.chunk,
            )

        if runs.parts > 1:
            self.totals = Tensor.empty(device, (runs.stretches, form.heads, 1 + form.num_angles))
            run("mamba3_gains", {**reads, "work": None, "finals": None}, {"totals": self.totals})
        reads |= {"totals": self.totals} | ({} if finals is not None else {"finals": None})
        run("mamba3_walk", reads, {"work": self.work} | ({} if finals is None else {"finals": finals}))
