"""RNN and GRU over whole sequences, with the loop over time in a kernel, and the way back through time.

Three variants compute the same:

- ``lanes``: CPU devices with 8 lanes, hidden a multiple of 8: 8 sequences a workgroup, of any width;
- ``group``: any device, up to 256 units: 4 sequences a workgroup, their states in shared memory;
- ``steps``: any device and size: a product and a small kernel for each token. For one token, and for wide layers, whose
  products are work enough for a whole device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from oazoo.runtime.ops.arithmetic import accumulate, fill, swap_axes
from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, eight_lanes, grid, require, require_dense
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.ops.linear import ENCODINGS, linear, observed
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.ops.product import input_gradient, layer_gradients, weight_gradient
from oazoo.runtime.tape import no_grad, taped, taping
from oazoo.runtime.tensor import Tensor
from oazoo.shaders.kernels import CELL_GATES

Cell = Literal["rnn", "gru"]
VARIANTS = ("lanes", "group", "steps")

_BIAS, _STATE, _KEEP = 1, 2, 4
#: Units that ``group`` has shared memory for.
_MAX_HIDDEN = 256
#: Sequences of a workgroup.
_SHARE = {"lanes": 8, "group": 4}
#: Units up to which the loop inside a kernel beats products over all of a CPU device: for one workgroup, which occupies one
#: of its threads, and for several.
_LANES_HIDDEN = 128, 512


def recurrence(
    cell: Cell,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    batch: int = 1,
    into: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """The states of a recurrent layer after each token of a batch of sequences.

    ``rnn``: h' = tanh(i + s). ``gru``: r = σ(i_r + s_r), z = σ(i_z + s_z), n = tanh(i_n + r s_n), h' = (1 - z) n + z h. The
    gates are rows of the weight in this order. s is ``h · weightᵀ + bias``, i what the token brings in.

    Args:
        cell: which.
        inputs: i, f32 [batch · tokens, gates · hidden], sequences one after the other: a product with all tokens at once.
        weight: [gates · hidden, hidden] in any encoding of :func:`~oazoo.runtime.ops.linear.linear`; with a gradient, f32.
        bias: f32 [gates · hidden], or None.
        state: f32 [batch, hidden], the states before the first tokens; zeros if None.
        batch: sequences, all of one length.
        into: f32 [batch, hidden] to write the states after the last tokens to; may be ``state``. Without gradients.
        variant: ``lanes``, ``group`` or ``steps``; the fastest that fits if None.

    Returns:
        f32 [batch · tokens, hidden]; see :func:`last_state`.

    Raises:
        DeviceError: shapes, types or sizes that do not fit.
    """
    op = f"{cell} recurrence"
    gates = CELL_GATES[cell]
    require(len(weight.shape) == 2, op, f"the weight must have two axes, not {list(weight.shape)}")
    require(weight.dtype in ENCODINGS, op, f"weights cannot be {weight.dtype}")
    wide, hidden = weight.shape
    require(
        hidden > 0 and wide == gates * hidden, op, f"a weight of {list(weight.shape)} is not {gates} gates"
    )
    require_dense(inputs, op, "inputs", "f32", -1, wide)
    rows = inputs.shape[0]
    require(batch > 0 and rows > 0 and rows % batch == 0, op, f"{rows} rows are not {batch} equal sequences")
    require(rows * max(4, gates) * hidden <= MAX_ELEMENTS, op, f"{rows:,} rows are too many for one run")
    if bias is not None:
        require_dense(bias, op, "bias", "f32", wide)
    if state is not None:
        require_dense(state, op, "state", "f32", batch, hidden)
    keeps = taping(inputs, weight, bias, state)
    require(not keeps or weight.dtype == "f32", op, f"there is no gradient with weights in {weight.dtype}")
    if into is not None:
        require_dense(into, op, "into", "f32", batch, hidden)
        require(not keeps, op, "with a gradient, take last_state of the result")
    run = _Run(cell, inputs, weight, bias, state, batch, variant, keeps)
    with no_grad():
        y = run.forward(into)
    return taped(y, (inputs, weight, bias, state), run.back)


def last_state(states: Tensor, batch: int, into: Tensor | None = None) -> Tensor:
    """The state after the last token of each sequence, f32 [batch, hidden], of what :func:`recurrence` returns.

    Args:
        states: f32 [batch · tokens, hidden].
        batch: sequences.
        into: f32 [batch, hidden] to write it to, without a gradient; a new tensor if None.
    """
    op = "last_state"
    require_dense(states, op, "states", "f32", -1, -1)
    rows, hidden = states.shape
    require(batch > 0 and rows > 0 and rows % batch == 0, op, f"{rows} rows are not {batch} equal sequences")
    require(batch <= MAX_GROUPS, op, f"{batch:,} sequences are more than the {MAX_GROUPS:,} of one run")
    require(into is None or not taping(states), op, "a state with a gradient is a tensor of its own")
    length = rows // batch * hidden
    y = into if into is not None else Tensor.empty(states.device, (batch, hidden))
    require_dense(y, op, "into", "f32", batch, hidden)

    def copy(x: Tensor, to: Tensor, x_width: int, y_width: int, x_column: int, y_column: int) -> None:
        x.device.kernel("columns").dispatch(
            (-(-hidden // 256), batch, 1),
            {"x": x},
            {"y": to},
            rows=batch,
            x_width=x_width,
            y_width=y_width,
            x_column=x_column,
            y_column=y_column,
            count=hidden,
        )

    copy(states, y, length, hidden, length - hidden, 0)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = fill(Tensor.empty(states.device, states.shape), 0.0)
        copy(dy, dx, hidden, length, 0, length - hidden)
        return (dx,)

    return taped(y, (states,), back)


class _Run:
    """One recurrence: what it is computed from, and what is kept for the way back."""

    def __init__(
        self,
        cell: Cell,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        batch: int,
        variant: str | None,
        keeps: bool,
    ) -> None:
        self.cell, self.inputs, self.weight, self.bias, self.state = cell, inputs, weight, bias, state
        self.device, self.batch, self.tokens = inputs.device, batch, inputs.shape[0] // batch
        self.gates, self.hidden = CELL_GATES[cell], weight.shape[1]
        self.variant = self._choose(variant)
        self.flags = _BIAS * (bias is not None) + _STATE * (state is not None) + _KEEP * keeps
        # Of an RNN the states alone are enough to go back.
        keeps = keeps and self.gates > 1
        self.kept = Tensor.empty(self.device, (inputs.shape[0], 4 * self.hidden)) if keeps else None
        self.y = Tensor.empty(self.device, (inputs.shape[0], self.hidden))

    def _choose(self, variant: str | None) -> str:
        op = f"{self.cell} recurrence"
        tensors = [t for t in (self.inputs, self.weight, self.state) if t is not None]
        fast = eight_lanes(self.device) and self.hidden % 8 == 0 and all(t.address % 8 == 0 for t in tensors)
        small = self.hidden <= _MAX_HIDDEN
        if variant is None:
            most = _LANES_HIDDEN[self.batch > _SHARE["lanes"]] if fast else _MAX_HIDDEN
            if self.tokens == 1 or self.hidden > most or observed():
                return "steps"
            return "lanes" if fast else "group"
        require(variant in VARIANTS, op, f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
        require(
            fast or variant != "lanes", op, "the lanes variant suits neither this device nor these tensors"
        )
        require(small or variant != "group", op, f"the group variant takes up to {_MAX_HIDDEN} units")
        return variant

    def forward(self, into: Tensor | None) -> Tensor:
        """The states after each token; the last ones go to ``into`` as well."""
        if self.variant == "steps":
            return self._forward_steps(into)
        weight = self.weight if self.weight.dtype == "f32" else dequantize(self.weight)
        if self.variant == "group":
            weight = swap_axes(weight.view(1, *weight.shape)).view(*reversed(weight.shape))
        self.device.kernel(f"{self.cell}_forward_{self.variant}").dispatch(
            (-(-self.batch // _SHARE[self.variant]), 1, 1),
            {
                "i": self.inputs,
                "w": weight,
                "bias": self.bias,
                "first": self.state,
                **({"gates": None} if self.kept is None else {}),
            },
            {"y": self.y, **self._kept()},
            work=self.inputs.numel * self.hidden,
            flags=self.flags,
            batch=self.batch,
            tokens=self.tokens,
            hidden=self.hidden,
        )
        if into is not None:
            last_state(self.y, self.batch, into)
        return self.y

    def _kept(self) -> dict[str, Tensor]:
        return {} if self.kept is None else {"gates": self.kept}

    def _forward_steps(self, into: Tensor | None) -> Tensor:
        state, groups = self.state, grid(-(-self.batch * self.hidden // 64))
        own = into
        if own is None:
            own = Tensor.empty(self.device, (self.batch, self.hidden)) if self.tokens > 1 else self.y
        for t in range(self.tokens):
            zeros = state
            if zeros is None:
                zeros = fill(Tensor.empty(self.device, (self.batch, self.hidden)), 0.0)
            s = linear(zeros, self.weight, self.bias)
            reads = {"i": self.inputs, "s": s, "state": state}
            writes = {"y": self.y, "after": own, **self._kept()}
            self.device.kernel(f"{self.cell}_forward_step").dispatch(
                groups,
                reads if self.kept is not None else {**reads, "gates": None},
                writes,
                flags=self.flags & _KEEP | _STATE * (state is not None),
                t=t,
                columns=groups[0],
                batch=self.batch,
                tokens=self.tokens,
                hidden=self.hidden,
            )
            state = own
        return self.y

    def back(self, dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        """Gradients of inputs, weight, bias and first state."""
        rows, wide = self.inputs.shape
        di = Tensor.empty(self.device, (rows, wide))
        ds = di if self.gates == 1 else Tensor.empty(self.device, (rows, wide))
        before = Tensor.empty(self.device, (rows, self.hidden))
        dh = Tensor.empty(self.device, (self.batch, self.hidden))
        reads: dict[str, Tensor | None] = {"dy": dy, "y": self.y, "gates": self.kept, "first": self.state}
        writes = {"di": di, "before": before, "dh": dh} | ({"ds": ds} if ds is not di else {})
        if ds is di:
            reads["ds"] = None
        if self.variant == "steps":
            self._back_steps(reads, writes)
        else:
            self.device.kernel(f"{self.cell}_back_{self.variant}").dispatch(
                (-(-self.batch // _SHARE[self.variant]), 1, 1),
                {**reads, "w": self.weight},
                writes,
                work=self.inputs.numel * self.hidden,
                flags=self.flags,
                batch=self.batch,
                tokens=self.tokens,
                hidden=self.hidden,
            )
        of_weight = of_bias = None
        if want[1] and want[2]:
            of_weight, of_bias = layer_gradients(ds, before)
        elif want[1]:
            of_weight = weight_gradient(ds, before)
        elif want[2]:
            of_bias, _ = column_sums(ds)
        return [di if want[0] else None, of_weight, of_bias, dh if want[3] else None]

    def _back_steps(self, reads: dict[str, Tensor | None], writes: dict[str, Tensor]) -> None:
        groups, dh = grid(-(-self.batch * self.hidden // 64)), writes["dh"]
        of_s = Tensor.empty(self.device, (self.batch, self.gates * self.hidden))
        for t in reversed(range(self.tokens)):
            self.device.kernel(f"{self.cell}_back_step").dispatch(
                groups,
                reads,
                {**writes, "of_s": of_s},
                flags=self.flags,
                t=t,
                columns=groups[0],
                batch=self.batch,
                tokens=self.tokens,
                hidden=self.hidden,
            )
            accumulate(dh, input_gradient(of_s, self.weight))
