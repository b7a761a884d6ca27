"""Products in which every row has a weight of its own out of a stack: what the experts of a mixture compute.

Weights are [experts, outputs, inputs] in any encoding. The cost is that of the rows there are, however they are spread over
the experts: none for an expert without any. Variants compute the same:

- ``lanes8``: CPU devices with 8 lanes, sorted slots, inputs a multiple of 32 (dense: of 16), 8 rows of an expert at a time;
- ``lanes1``: the same devices, inputs a multiple of 32, any slots, one at a time: for few;
- ``few``: any device and size, any slots, a workgroup for 4 outputs of one;
- ``tile``: any device and size, sorted slots, tiles of 32 rows of an expert in shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oazoo.errors import DeviceError
from oazoo.runtime.ops.activation import activate_gated
from oazoo.runtime.ops.arithmetic import join_columns
from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, eight_lanes, require, require_dense
from oazoo.runtime.ops.linear import ENCODINGS, tell_experts
from oazoo.runtime.ops.routing import Groups, combine
from oazoo.runtime.tape import taped, taping
from oazoo.runtime.tensor import BLOCK_CODE_BYTES, Tensor
from oazoo.shaders.kernels import CODED_COLUMNS, COLUMNS

VARIANTS = ("lanes8", "lanes1", "few", "tile")
_BIAS = (1, 2)
_GELU = 4
_LANES = 8
#: Rows that a workgroup has of one expert, and its columns (of each weight, if gated).
_ROWS = {"lanes8": 8, "tile": 32}
#: Slots an expert has on the average up to which they are best done one by one.
_FEW = 2


def few_slots(tokens: int, top: int, experts: int) -> bool:
    """Whether so few rows are best left unsorted, each multiplied by itself."""
    return tokens * top <= _FEW * min(experts, tokens * top)


def grouped_linear(
    x: Tensor,
    groups: Groups,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    by_token: bool,
    out: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """``x[row of the slot] · weight[expert of the slot]ᵀ + bias[expert]`` for every slot.

    Args:
        x: f32 [tokens, inputs] if ``by_token``, else [slots, inputs].
        groups: the slots and their experts; sorted if a gradient is taken.
        weight: [experts, outputs, inputs] in f32, f16, bf16, q8 or q4; or two such, whose outputs are laid side by side.
        bias: f32 [experts, outputs], or one (or None) for each weight.
        by_token: whether all slots of a token read one row.
        out: f32 [slots, outputs] to write the result to; a new tensor if None.
        variant: one of ``VARIANTS``; the fastest that fits if None.

    Returns:
        f32 [slots, outputs of all weights].

    Raises:
        DeviceError: shapes, types or sizes that do not fit.
    """
    op = "grouped_linear"
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
    if bias is None:
        biases = [None] * len(weights)
    _check(op, x, groups, weights, biases, by_token)
    tell_experts(x, weights, groups, by_token)
    outputs = sum(w.shape[1] for w in weights)
    y = out if out is not None else Tensor.empty(x.device, (groups.slots, outputs))
    require_dense(y, op, "out", "f32", groups.slots, outputs)
    if len({w.dtype for w in weights}) > 1:
        raise DeviceError(f"{op}: the weights have different encodings")
    _run("linear", x, groups, weights, biases, by_token, y, 0, variant)
    if not taping(x, *weights, *biases):
        return y
    require(groups.sorted and out is None, op, "a gradient needs sorted groups, and a tensor of its own")

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        count = len(weights)
        of_x = _input_gradient(dy, groups, weights) if want[0] else None
        if of_x is not None and by_token:
            of_x = combine(of_x, groups)
        of_weights: list[Tensor | None] = []
        of_biases: list[Tensor | None] = []
        column = 0
        for w, b, want_w, want_b in zip(weights, biases, want[1 : 1 + count], want[1 + count :], strict=True):
            one = other = None
            if want_w or want_b:
                one, other = _weight_gradient(dy, x, groups, w, column, by_token, b is not None and want_b)
            of_weights.append(one)
            of_biases.append(other)
            column += w.shape[1]
        return [of_x, *of_weights, *of_biases]

    return taped(y, (x, *weights, *biases), back)


def grouped_gated(
    x: Tensor,
    groups: Groups,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    by_token: bool,
    gelu: bool = False,
    out: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """``silu(x · gateᵀ + gate_bias) * (x · upᵀ + up_bias)`` with each slot's expert; arguments as of :func:`grouped_linear`.

    Args:
        gate: [experts, outputs, inputs].
        up: the same shape and encoding.
        gelu: the tanh form of GELU instead of SiLU.

    Returns:
        f32 [slots, outputs].
    """
    op = "grouped_gated"
    require(gate.shape == up.shape and gate.dtype == up.dtype, op, "gate and up differ in shape or encoding")
    if taping(x, gate, up, gate_bias, up_bias):
        require(out is None, op, "a product with a gradient goes into a tensor of its own")
        both = grouped_linear(x, groups, [gate, up], [gate_bias, up_bias], by_token=by_token, variant=variant)
        return activate_gated(both, "gelu_tanh" if gelu else "silu")
    weights, biases = [gate, up], [gate_bias, up_bias]
    _check(op, x, groups, weights, biases, by_token)
    tell_experts(x, weights, groups, by_token)
    y = out if out is not None else Tensor.empty(x.device, (groups.slots, gate.shape[1]))
    require_dense(y, op, "out", "f32", groups.slots, gate.shape[1])
    _run("gated", x, groups, weights, biases, by_token, y, _GELU if gelu else 0, variant)
    return y


def _check(
    op: str,
    x: Tensor,
    groups: Groups,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    by_token: bool,
) -> None:
    require(len(weights) in (1, 2), op, f"{len(weights)} weights; there can be one or two")
    require(len(biases) == len(weights), op, f"{len(biases)} biases for {len(weights)} weights")
    require_dense(x, op, "x", "f32", groups.tokens if by_token else groups.slots, -1)
    inputs = x.shape[1]
    for w, b in zip(weights, biases, strict=True):
        require(w.dtype in ENCODINGS, op, f"weights cannot be {w.dtype}; they can be {', '.join(ENCODINGS)}")
        fits = len(w.shape) == 3 and w.shape[0] == groups.experts and w.shape[2] == inputs
        require(
            fits, op, f"a weight of shape {list(w.shape)} for rows of {inputs} and {groups.experts} experts"
        )
        require(w.shape[1] > 0 and inputs > 0, op, "a weight has no elements")
        require(
            w.numel <= MAX_ELEMENTS, op, f"{w.numel:,} elements of a weight are more than one run can address"
        )
        require(w.address % 4 == 0, op, "a weight must start at a multiple of 4 bytes")
        if b is not None:
            require_dense(b, op, "bias", "f32", groups.experts, w.shape[1])
    largest = groups.slots * max(inputs, sum(w.shape[1] for w in weights))
    require(
        largest <= MAX_ELEMENTS, op, f"{groups.slots:,} slots are too many for one run: give fewer at a time"
    )


def _variant(op: str, x: Tensor, groups: Groups, weights: Sequence[Tensor], variant: str | None) -> str:
    inputs = x.shape[1]
    coded = any(w.dtype in BLOCK_CODE_BYTES for w in weights)
    eight = eight_lanes(x.device) and x.address % 8 == 0 and all(w.address % 8 == 0 for w in weights)
    fits = {
        "lanes8": groups.sorted and eight and inputs % (32 if coded else 16) == 0,
        "lanes1": not groups.sorted and eight and inputs % 32 == 0,
        "few": not groups.sorted,
        "tile": groups.sorted,
    }
    if variant is None:
        return next(name for name in VARIANTS if fits[name])
    require(variant in VARIANTS, op, f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
    require(fits[variant], op, f"the {variant} variant suits neither this device nor these tensors")
    return variant


def _row_groups(op: str, groups: Groups, rows: int, limit: int) -> int:
    """Workgroups that are enough for tiles of ``rows`` slots of one expert each, however slots are spread."""
    busy = min(groups.experts, groups.slots)
    count = (groups.slots + busy * (rows - 1)) // rows
    if count > limit:
        raise DeviceError(
            f"{op}: {groups.slots:,} slots are too many for one run on this device: give fewer at a time"
        )
    return count


def _run(
    form: str,
    x: Tensor,
    groups: Groups,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    by_token: bool,
    y: Tensor,
    flags: int,
    variant: str | None,
) -> None:
    if not y.numel:
        return
    op, device, encoding = f"grouped_{form}", x.device, weights[0].dtype
    variant = _variant(op, x, groups, weights, variant)
    gated = form == "gated"
    coded = variant == "lanes1" and encoding in BLOCK_CODE_BYTES
    width = {
        "lanes8": _LANES * COLUMNS,
        "lanes1": _LANES * (CODED_COLUMNS if coded else COLUMNS),
        "few": 4,
        "tile": 32,
    }[variant]
    if gated and variant.startswith("lanes"):
        width //= 2
    for index, b in enumerate(biases):
        flags |= _BIAS[index] if b is not None else 0
    sizes = [w.shape[1] for w in weights]
    tiles = -(-sizes[0] // width) if gated else sum(-(-n // width) for n in sizes)
    row_limit, tile_limit = device.info.max_groups[:2]
    if groups.sorted:
        row_groups = _row_groups(op, groups, _ROWS[variant], row_limit)
    else:
        row_groups = groups.slots
        require(row_groups <= row_limit, op, f"{row_groups:,} slots are too many; sort them")
    second = weights[1] if len(weights) > 1 else None
    for first in range(0, tiles, tile_limit):
        some = min(tiles - first, tile_limit)
        device.kernel(f"{op}_{variant}_{encoding}").dispatch(
            (row_groups, some, 1),
            {
                "x": x,
                "rows": groups.rows if by_token else None,
                "experts": groups.offsets if groups.sorted else groups.chosen,
                "w0": weights[0],
                "w1": second,
                "b0": biases[0],
                "b1": biases[1] if len(biases) > 1 else None,
            },
            {"y": y},
            work=groups.slots * x.shape[1] * min(width * some, sum(sizes)),
            k=x.shape[1],
            n0=sizes[0],
            n1=0 if second is None else sizes[1],
            count=groups.experts,
            slots=groups.slots,
            share=groups.top if by_token else 0,
            gathered=int(groups.sorted and by_token),
            first=first,
            flags=flags,
        )


def _input_gradient(
    dy: Tensor, groups: Groups, weights: Sequence[Tensor], variant: str | None = None
) -> Tensor:
    """``dy[slot] · weight[expert]``: f32 [slots, inputs]."""
    op, device, columns = "grouped_inputs", dy.device, weights[0].shape[2]
    y = Tensor.empty(device, (groups.slots, columns))
    if not y.numel:
        return y
    require(y.numel <= MAX_ELEMENTS, op, f"{groups.slots:,} slots are too many for one run")
    dense = all(w.dtype == "f32" for w in weights)
    fast = eight_lanes(device) and dy.address % 8 == 0 and all(w.address % 8 == 0 for w in weights)
    if dense:
        fast = fast and columns % 4 == 0 and all(w.shape[1] % 4 == 0 for w in weights)
        share = 8 if columns >= 128 and columns % 8 == 0 else 4
        kernel = f"grouped_inputs_lanes{share}"
    else:
        fast, share = fast and columns % 8 == 0, 8
        kernel = f"grouped_inputs_lanes_{weights[0].dtype}"
    if variant == "tile" or not fast:
        kernel, width, rows = f"grouped_inputs_tile_{weights[0].dtype}", 32, 32
    else:
        width, rows = _LANES * share, 8
    row_limit, tile_limit = device.info.max_groups[:2]
    row_groups, tiles = _row_groups(op, groups, rows, row_limit), -(-columns // width)
    second = weights[1] if len(weights) > 1 else None
    for first in range(0, tiles, tile_limit):
        device.kernel(kernel).dispatch(
            (row_groups, min(tiles - first, tile_limit), 1),
            {
                "a": dy,
                "b": None,
                "rows": None,
                "experts": groups.offsets,
                "w0": weights[0],
                "w1": second,
            }
            | {"sums": None},
            {"y": y},
            work=dy.numel * columns,
            columns=columns,
            n0=weights[0].shape[1],
            n1=0 if second is None else second.shape[1],
            count=groups.experts,
            gathered=0,
            a_width=dy.shape[1],
            first=first,
            summed=0,
        )
    return y


def _weight_gradient(
    dy: Tensor,
    x: Tensor,
    groups: Groups,
    weight: Tensor,
    column: int,
    by_token: bool,
    summed: bool,
    variant: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of a weight, from the columns of dy from ``column`` on, and of its bias; 0 where an expert has no slot."""
    op, device = "grouped_weights", dy.device
    experts, outputs, columns = weight.shape
    y = Tensor.empty(device, weight.shape)
    sums = Tensor.empty(device, (experts, outputs)) if summed else None
    a = Tensor(device, (dy.numel - column,), "f32", dy.memory, dy.offset + 4 * column)
    fast = eight_lanes(device) and columns % 4 == 0
    fast = fast and x.address % 8 == 0 and y.address % 8 == 0
    if variant == "tile" or not fast:
        kernel, rows, width = "grouped_weights_tile", 32, 32
    else:
        share = 8 if columns >= 128 and columns % 8 == 0 else 4
        kernel, rows, width = f"grouped_weights_lanes{share}", 8, _LANES * share
    row_limit, tile_limit = device.info.max_groups[:2]
    row_groups, tiles = -(-outputs // rows), -(-columns // width)
    require(row_groups <= row_limit and experts <= MAX_GROUPS, op, "the weight is too large for one run")
    reads: dict[str, Tensor | None] = {
        "a": a,
        "b": x,
        "rows": groups.rows if by_token else None,
        "experts": groups.offsets,
    }
    reads |= {"w0": None, "w1": None} | ({} if sums is not None else {"sums": None})
    for first in range(0, tiles, tile_limit):
        device.kernel(kernel).dispatch(
            (row_groups, min(tiles - first, tile_limit), experts),
            reads,
            {"y": y} | ({} if sums is None else {"sums": sums}),
            work=groups.slots * outputs * columns,
            columns=columns,
            n0=outputs,
            n1=0,
            count=experts,
            gathered=int(by_token),
            a_width=dy.shape[1],
            first=first,
            summed=int(summed),
        )
    return y, sums


def expert_mlp(
    x: Tensor,
    groups: Groups,
    gate_up: Sequence[Sequence[Tensor]],
    down: Sequence[Tensor],
    gate_up_biases: Sequence[Tensor | None] | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` with each slot's expert (SwiGLU, arXiv:2002.05202).

    Each stack is given as the tensors that together hold its experts, usually one.

    Args:
        x: f32 [tokens, inputs].
        groups: the slots; sorted if a stack is in several tensors.
        gate_up: gate and up, [experts, inner, inputs] each; or one stack that has gate's rows above up's.
        down: [experts, outputs, inner].
        gate_up_biases: f32 [experts, inner] each, or of the one stack.
        down_bias: f32 [experts, outputs].
        activation: of the gate, as :func:`oazoo.runtime.ops.activation.activate` has them.

    Returns:
        f32 [slots, outputs].
    """
    biases = [None] * len(gate_up) if gate_up_biases is None else list(gate_up_biases)
    if len(down) > 1:
        return _by_parts(x, groups, gate_up, down, biases, down_bias, activation)
    stacks = [shards[0] for shards in gate_up]
    inner = _inner(x, groups, stacks, biases, activation)
    return grouped_linear(inner, groups, down[0], down_bias, by_token=False)


def _inner(
    x: Tensor, groups: Groups, stacks: Sequence[Tensor], biases: Sequence[Tensor | None], activation: str
) -> Tensor:
    if len(stacks) == 2 and stacks[0].dtype == stacks[1].dtype and activation != "gelu":
        gelu = activation == "gelu_tanh"
        return grouped_gated(x, groups, *stacks, *biases, by_token=True, gelu=gelu)
    parts = [grouped_linear(x, groups, w, b, by_token=True) for w, b in zip(stacks, biases, strict=True)]
    return activate_gated(parts[0] if len(parts) == 1 else join_columns(parts), activation)


def _by_parts(
    x: Tensor,
    groups: Groups,
    gate_up: Sequence[Sequence[Tensor]],
    down: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    down_bias: Tensor | None,
    activation: str,
) -> Tensor:
    """The same with stacks that are split by experts: each part does the slots of its own."""
    op = "expert_mlp"
    require(groups.offsets is not None, op, "stacks in several tensors need sorted groups")
    counts = [[shard.shape[0] for shard in shards] for shards in (*gate_up, down)]
    require(counts.count(counts[0]) == len(counts), op, "the stacks are split in different places")
    assert groups.offsets is not None
    y = Tensor.empty(x.device, (groups.slots, down[0].shape[1]))
    first = 0
    for index, own in enumerate(counts[0]):
        stop = first + own
        some = replace(groups, experts=own, offsets=groups.offsets.rows(first, stop + 1))
        own_biases = [None if b is None else b.rows(first, stop) for b in biases]
        inner = _inner(x, some, [shards[index] for shards in gate_up], own_biases, activation)
        bias = None if down_bias is None else down_bias.rows(first, stop)
        grouped_linear(inner, some, down[index], bias, by_token=False, out=y)
        first = stop
    require(not taping(x, *down, *biases), op, "stacks in several tensors have no gradient")
    return y
