"""The steps of a Mamba-3 block between its linear layers, which the way forward and the way back share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oazoo.runtime.device import Device
from oazoo.runtime.ops.arithmetic import accumulate, fill
from oazoo.runtime.ops.common import MAX_GROUPS, eight_lanes, grid, lanes, portable_only, require
from oazoo.runtime.ops.mamba3_form import Mamba3Form, Mamba3States, Mamba3Weights, form_of, state_shapes
from oazoo.runtime.tape import taped, taping
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import MAMBA3_TILES

#: Shortest stretch that a sequence is cut into, and how many walks a device has work for side by side.
_LEAST_CHUNK = 64
_WALKS = {True: 8, False: 2048}
#: Operands up to this size are kept for the way back: making them again takes longer than they are worth.
_KEPT_BYTES = 16 << 20
REVERSE, DIAGONAL, PLAIN, TRANSPOSED = 1, 2, 4, 8


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


def divided(p: Tensor, form: Mamba3Form, batch: int | Sequence[int], chunk: int | None) -> Runs:
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


def parts_of(whole: Tensor, form: Mamba3Form, runs: Runs) -> list[Tensor]:
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
    #: Operands that the way back need not make again.
    kept: Operands | None = None

    @property
    def device(self) -> Device:
        return self.p.device

    def forward(self, whole: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
        """The result [rows, H P], and what it was before norm and gate [rows, H, R, P]; final states go into ``whole``.

        ``keep``: a way back will follow, which small operands are kept for.
        """
        form, runs = self.form, self.runs
        finals = ssm = None
        y_shape = (runs.rows, form.inner)
        if whole is not None:
            y, angle, ssm, k, v = parts_of(Tensor.view(whole, *whole.shape), form, runs)
            ends = angle.numel + k.numel + v.numel
            finals = Tensor(self.device, (ends,), "f32", whole.memory, angle.offset)
        work = Operands(self, finals)
        if keep and work.work.nbytes <= _KEPT_BYTES:
            self.kept = work
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
            flags=DIAGONAL,
        )
        if not plain:
            self.gate(o, y)
        return y, o

    def step(self) -> Tensor:
        """The result for one token a sequence, [batch, H P]; the states are changed in place."""
        form, states, weights = self.form, self.states, self.weights
        assert states is not None
        batch = self.runs.rows
        work = Tensor.empty(self.device, (batch, form.heads, 2, form.rank, form.state_size))
        o = Tensor.empty(self.device, (batch, form.heads, form.rank, form.head_dim))
        self.device.kernel(f"mamba3_step_{self.kind(work, *states)}").dispatch(
            (form.heads, batch, 1),
            {
                "p": self.p,
                "dt_bias": weights.dt_bias,
                "b_norm": weights.b_norm,
                "c_norm": weights.c_norm,
                "b_bias": weights.b_bias,
                "c_bias": weights.c_bias,
                "d": weights.d,
                "mimo_x": weights.mimo_x,
                "form": form_of(self.device, form),
                **({} if states.angle.numel else {"angle": None}),
            },
            {
                **({"angle": states.angle} if states.angle.numel else {}),
                "ssm": states.ssm,
                "k": states.k,
                "v": states.v,
                "work": work,
                "o": o,
            },
            work=4 * batch * form.rank * form.inner * form.state_size,
        )
        y = Tensor.empty(self.device, (batch, form.inner))
        self.gate(o, y)
        return y

    def values(self) -> tuple[Tensor, int]:
        """x of each rank, and the stride of its rows."""
        form, rows = self.form, self.runs.rows
        if self.weights.mimo_x is None:
            return column(self.p, form.inner), form.width
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

    def kind(self, *tensors: Tensor) -> str:
        """How rows are worked on: ``even`` on CPU devices where all lies at even places, else ``wave8`` or ``group32``."""
        form = self.form
        even = eight_lanes(self.device) and not form.half_pairs and not form.width % 2
        even = even and not form.state_size % 2 and not form.head_dim % 2
        given = (self.p, *tensors, *(t for t in self.weights.all() if t is not None))
        return "even" if even and all(t.address % 8 == 0 for t in given) else lanes(self.device)

    def operands(self, finals: Tensor | None = None) -> Operands:
        """What the recurrence works on, made anew or kept."""
        found, self.kept = self.kept, None
        return found if found is not None else Operands(self, finals)

    def gate(self, o: Tensor, y: Tensor) -> None:
        """Norm, gate, and the sum over ranks."""
        count = self.runs.rows * self.form.heads
        # Processors gain nothing from many small workgroups, and each costs them a little.
        block = max(1, min(16, count // 64)) if eight_lanes(self.device) else 1
        groups = grid(-(-count // block))
        self.device.kernel(f"mamba3_gate_{self.kind(o, y)}").dispatch(
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
            block=block,
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
                reverse=flags & REVERSE,
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
        fast = b % MAMBA3_TILES[0] == 0 and a % 2 == 0 and eight_lanes(self.device)
        places = [read, drive, value, (work.coefs, 0), *([] if out is None else [out])]
        fast = fast and all(t.address % 8 == 0 and stride % 2 == 0 for t, stride in places)
        variant = self.variant or ("lanes" if fast else "group")
        require(
            variant in ("lanes", "group"),
            "mamba3",
            f"there is no variant {variant!r}; there are lanes, group",
        )
        if variant == "lanes" and fast:
            tile = max(d for d in MAMBA3_TILES if b % d == 0)
            name, across = f"mamba3_sweep_lanes_{tile}{'_one' if form.rank == 1 else ''}", -(-a // 16)
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
            device.kernel(name).dispatch(
                (form.heads, runs.stretches, 1),
                {name: tensor for name, tensor in reads.items() if name not in writes},
                writes,
                rows=runs.rows,
                sequences=runs.sequences,
                tokens=runs.tokens,
                chunk=runs.chunk,
            )

        unused: dict[str, Tensor | None] = {"totals": None, "finals": None}
        writes = {"work": self.work}
        if runs.parts > 1:
            self.totals = Tensor.empty(device, (runs.stretches, form.heads, 1 + form.num_angles))
            writes["totals"] = self.totals
        run(f"mamba3_coefs_{lanes(device)}", {**reads, **unused}, writes)
        if self.totals is not None and form.num_angles:
            given = {**reads, **unused, "work": self.work}
            run(f"mamba3_gains_{lanes(device)}", given, {"totals": self.totals})
        writes = {"work": self.work} | ({} if finals is None else {"finals": finals})
        run(f"mamba3_walk_{scan.kind(self.work)}", {**reads, **unused, "totals": self.totals}, writes)
