"""The way back through the Mamba-3 block.

Nothing of the recurrence was kept: operands and states are computed once more, the latter in one run of the recurrence for
each kind of gradient (mamba3_scan.slang). What was kept is the input, and the output before norm and gate.
"""

from __future__ import annotations

from collections.abc import Sequence

from oazoo.runtime.ops.common import lanes
from oazoo.runtime.ops.mamba3_form import Mamba3States, form_of
from oazoo.runtime.ops.mamba3_scan import (
    DIAGONAL,
    PLAIN,
    REVERSE,
    TRANSPOSED,
    Scan,
    column,
)
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.tensor import Tensor

#: Rows whose shares in parameters' gradients a workgroup sums up, at least; and how many such blocks there are at most.
_BLOCK, _BLOCKS = 8, 256


def gradients(
    scan: Scan,
    o: Tensor,
    dy: Tensor,
    ends: tuple[Tensor, Mamba3States] | None,
    want: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of the input row, of the parameters in the order of their fields, and of the states.

    Args:
        scan: the run.
        o: its output before norm and gate.
        dy: gradient of its result.
        ends: the final state h, and the gradients of the final states; None where nothing depends on them.
        want: for p, each parameter and each state, whether its gradient is wanted.
    """
    return _Back(scan, o, dy, ends).found(want)


class _Back:
    def __init__(self, scan: Scan, o: Tensor, dy: Tensor, ends: tuple[Tensor, Mamba3States] | None) -> None:
        self.scan, self.form, self.runs = scan, scan.form, scan.runs
        self.device = scan.device
        self.shape = form_of(scan.device, scan.form)
        self.rows = scan.runs.rows
        self.block = max(_BLOCK, -(-self.rows // _BLOCKS))
        self.blocks = -(-self.rows // self.block)
        self.dp = Tensor.empty(self.device, (self.rows, scan.form.width))
        self.work = scan.operands()
        self._gate(o, dy)
        self._scan(ends)
        self._operands(ends)

    def empty(self, *shape: int) -> Tensor:
        return Tensor.empty(self.device, shape)

    def _gate(self, o: Tensor, dy: Tensor) -> None:
        """Through gate and norm: the gradient of o, of z, and what the current token's diagonal needs."""
        form, weights = self.form, self.scan.weights
        spread = form.rank * form.inner
        self.d_o = self.empty(self.rows, form.heads, form.rank, form.head_dim)
        self.products = self.empty(self.rows, form.heads, form.rank, form.rank)
        self.gate_sums = self.empty(self.blocks, form.inner + 2 * spread + form.heads)
        self.device.kernel(f"mamba3_gate_back_{self.scan.kind(o, dy)}").dispatch(
            (form.heads, self.blocks, 1),
            {
                "p": self.scan.p,
                "o": o,
                "norm": weights.norm,
                "mimo_x": weights.mimo_x,
                "mimo_z": weights.mimo_z,
                "mimo_o": weights.mimo_o,
                "form": self.shape,
                "dy": dy,
            },
            {"dp": self.dp, "d_o": self.d_o, "products": self.products, "sums": self.gate_sums},
            rows=self.rows,
            block=self.block,
        )

    def _scan(self, ends: tuple[Tensor, Mamba3States] | None) -> None:
        """Through the recurrence: gradients of turned queries and keys, of x, and of the state before the first token."""
        form, runs, scan, work = self.form, self.runs, self.scan, self.work
        mimo = scan.weights.mimo_x is not None
        keys, o_stride = work.key_stride, form.rank * form.inner
        over_states, over_dims = (form.state_size, form.head_dim), (form.head_dim, form.state_size)
        q, k, d_o, x = (work.q, keys), (work.k, keys), (self.d_o, o_stride), scan.values()
        self.dqk = self.empty(self.rows, 2, form.heads * form.rank * form.state_size)
        dssm = ends[1].ssm if ends is not None else None
        scan.sweep(work, over_states, d_o, k, x, (self.dqk, 2 * keys), initial=scan.start(), flags=TRANSPOSED)
        scan.sweep(
            work,
            over_states,
            x,
            q,
            d_o,
            (column(self.dqk, keys), 2 * keys),
            initial=dssm,
            flags=REVERSE | PLAIN | TRANSPOSED,
        )
        self.dstart = self.empty(*scan.states.ssm.shape) if scan.states is not None else None
        dx = self.empty(self.rows, form.heads, form.rank, form.head_dim) if mimo else None
        to = (dx, o_stride) if dx is not None else (column(self.dp, form.inner), form.width)
        scan.sweep(work, over_dims, k, d_o, q, to, initial=dssm, final=self.dstart, flags=REVERSE | DIAGONAL)
        starts = runs.sequences if scan.states is not None and mimo else 0
        self.mimo_sums = self.empty(self.blocks + starts, o_stride) if mimo else None
        if dx is not None and self.mimo_sums is not None:
            self.device.kernel("mamba3_spread_back").dispatch(
                (-(-form.inner // 8), self.blocks, 1),
                {"p": scan.p, "mimo_x": scan.weights.mimo_x, "form": self.shape, "dx": dx},
                {"dp": self.dp, "sums": self.mimo_sums.rows(0, self.blocks)},
                rows=self.rows,
                block=self.block,
            )
        self._start()

    def _start(self) -> None:
        """Through the state before the first token."""
        form, runs, scan = self.form, self.runs, self.scan
        self.db: Tensor | None = None
        if scan.states is None:
            return
        self.db = self.empty(runs.sequences, form.heads)
        self.dk, self.dv = self.empty(*scan.states.k.shape), self.empty(*scan.states.v.shape)
        writes = {"dk": self.dk, "dv": self.dv, "db": self.db}
        if self.mimo_sums is not None:
            writes["dmimo"] = self.mimo_sums.rows(self.blocks, self.blocks + runs.sequences)
        self.device.kernel(f"mamba3_start_back_{lanes(self.device)}").dispatch(
            (form.heads, runs.sequences, 1),
            {
                "p": scan.p,
                "dt_bias": scan.weights.dt_bias,
                "mimo_x": scan.weights.mimo_x,
                "k": scan.states.k,
                "v": scan.states.v,
                "dssm": self.dstart,
                "form": self.shape,
                "bounds": runs.bounds,
                **({} if "dmimo" in writes else {"dmimo": None}),
            },
            writes,
            tokens=runs.tokens,
        )

    def _operands(self, ends: tuple[Tensor, Mamba3States] | None) -> None:
        """From queries, keys and coefficients to the columns of the input."""
        form, runs, scan, work = self.form, self.runs, self.scan, self.work
        dfinals: Tensor | None = None
        if ends is not None:
            # Where the forward walk has them: θ, keys and x in a row.
            parts = [t for t in (ends[1].angle, ends[1].k, ends[1].v) if t.numel]
            size = sum(t.numel for t in parts)
            dfinals = Tensor(self.device, (size,), "f32", parts[0].memory, parts[0].offset)
        reads: dict[str, Tensor | None] = {
            "p": scan.p,
            "dt_bias": scan.weights.dt_bias,
            "form": self.shape,
            "bounds": runs.bounds,
            "products": self.products,
            "dfinals": dfinals,
            "dssm": ends[1].ssm if ends is not None else None,
            "ssm": ends[0] if ends is not None else None,
        }
        self.dangle = self.empty(runs.sequences, form.heads, form.num_angles)
        scalars = self.empty(self.rows, form.heads, 4)
        totals: Tensor | None = None
        groups = (form.heads, runs.stretches, 1)

        def run(name: str, reads: dict[str, Tensor | None], writes: dict[str, Tensor]) -> None:
            self.device.kernel(name).dispatch(
                groups,
                reads,
                writes,
                rows=runs.rows,
                sequences=runs.sequences,
                tokens=runs.tokens,
                chunk=runs.chunk,
            )

        if runs.parts > 1:
            totals = self.empty(runs.stretches, form.heads, 1 + form.num_angles)
            unused = {"dp": None, "scalars": None, "sums": None}
            given = {**reads, **unused, "work": work.work, "dqk": self.dqk}
            run(f"mamba3_gains_back_{lanes(self.device)}", given, {"totals": totals})
        kind = scan.kind(work.work)
        run(
            f"mamba3_walk_back_{kind}",
            {**reads, "totals": totals},
            {
                "work": work.work,
                "dqk": self.dqk,
                "dp": self.dp,
                "scalars": scalars,
                "sums": self.dangle,
            },
        )
        self.dt_sums = self.empty(runs.stretches, form.heads)
        self.device.kernel(f"mamba3_scalars_back_{lanes(self.device)}").dispatch(
            groups,
            {
                "p": scan.p,
                "dt_bias": scan.weights.dt_bias,
                "form": self.shape,
                "bounds": runs.bounds,
                "coefs": work.coefs,
                "products": self.products,
                "scalars": scalars,
                "db": self.db,
            },
            {"dp": self.dp, "sums": self.dt_sums},
            tokens=runs.tokens,
            chunk=runs.chunk,
        )
        self.norm_sums = self.empty(self.blocks, 2 * form.state_size)
        self.device.kernel(f"mamba3_fold_{kind}").dispatch(
            (2 if form.own_angles or not form.num_angles else 3, self.blocks, 1),
            {
                "p": scan.p,
                "b_norm": scan.weights.b_norm,
                "c_norm": scan.weights.c_norm,
                "form": self.shape,
                "dqk": self.dqk,
                "coefs": work.coefs,
                "angles": work.angles if form.num_angles else None,
            },
            {"dp": self.dp, "sums": self.norm_sums},
            rows=self.rows,
            block=self.block,
        )

    def found(self, want: Sequence[bool]) -> list[Tensor | None]:
        """The gradients that are wanted; those of parameters are sums over rows."""
        form, weights, scan = self.form, self.scan.weights, self.scan
        names = ["b_bias", "c_bias", "dt_bias", "b_norm", "c_norm", "d", "mimo_x", "mimo_z", "mimo_o", "norm"]
        wanted = {name for name, wish in zip(names, want[1:], strict=False) if wish}
        result: dict[str, Tensor] = {}

        def add(sums: Tensor | None, pieces: dict[str, int]) -> None:
            if sums is None or not wanted & set(pieces):
                return
            total, _ = column_sums(sums.view(sums.shape[0], sums.numel // sums.shape[0]))
            assert total is not None
            at = 0
            for name, size in pieces.items():
                if name in wanted:
                    result[name] = total.rows(at, at + size)
                at += size

        keys, spread = form.heads * form.rank * form.state_size, form.rank * form.inner
        add(self.dqk, {"c_bias": keys, "b_bias": keys})
        add(self.norm_sums, {"c_norm": form.state_size, "b_norm": form.state_size})
        add(self.dt_sums, {"dt_bias": form.heads})
        add(self.gate_sums, {"norm": form.inner, "mimo_z": spread, "mimo_o": spread, "d": form.heads})
        add(self.mimo_sums, {"mimo_x": spread})
        shaped: list[Tensor | None] = [self.dp if want[0] else None]
        for name in names:
            parameter: Tensor | None = getattr(weights, name)
            part = result.get(name)
            shaped.append(None if part is None or parameter is None else part.view(*parameter.shape))
        if scan.states is None:
            return [*shaped, None, None, None, None]
        assert self.dstart is not None
        return [*shaped, self.dangle, self.dstart, self.dk, self.dv]
