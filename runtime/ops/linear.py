"""Matrix products with weights in any encoding, with what surrounds them in a model folded in.

Every product is ``x · wᵀ`` with w stored [outputs, inputs], as checkpoints have it. Weights stay packed in memory and are
decoded inside the kernel; sums are float32. Three variants compute the same:

- ``lanes``: CPU devices with 8 lanes, inputs a multiple of 32; one kernel for single rows and one for 8 rows at a time;
- ``wide``: the same devices and inputs: weights are decoded and turned over first, which many rows repay;
- ``group``: any device and size, a workgroup for 4 outputs of a row: for few rows;
- ``tile``: any device and size, tiles in shared memory: for many rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from oazoo.errors import DeviceError
from oazoo.runtime.ops.activation import activate, activate_gated
from oazoo.runtime.ops.common import MAX_ELEMENTS, eight_lanes, require, require_dense
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.norm import column_sums, rms_norm
from oazoo.runtime.ops.product import input_gradient, layer_gradients, weight_gradient
from oazoo.runtime.ops.routing import Groups
from oazoo.runtime.ops.scales import learned, learned_gradient
from oazoo.runtime.tape import no_grad, taped, taping
from oazoo.runtime.tensor import BLOCK_CODE_BYTES, Tensor
from oazoo.shaders.kernels import CODED_COLUMNS, COLUMNS, MANY_EIGHTS

#: Encodings that weights may have, and the alignment that kernels load them with.
ENCODINGS = ("f32", "f16", "bf16", "q8", "q4")
VARIANTS = ("lanes", "wide", "group", "tile")

_BIAS = (1, 2, 4)
_RESIDUAL, _NORM, _GELU = 8, 16, 32
#: Outputs of a workgroup (of each weight, if gated), and rows.
_GROUP_OUTPUTS, _TILE_OUTPUTS, _TILE_ROWS = 4, 32, 32
_LANES, _LANES_ROWS = 8, 8
#: Rows up to which a single-row kernel, run once a row, beats the kernel for many.
_FEW_ROWS = {"lanes": 2, "group": 4}
#: wide: rows from which turning weights over pays, and the bytes of them that stay in a processor's cache.
_MANY_ROWS, _TURNED_BYTES = 32, 4 << 20
#: Outputs up to which it does not pay whatever the rows: a workgroup has 64 of them.
_NARROW = 16
#: Columns of weights, turned over, that a workgroup reads.
TURNED_COLUMNS = 64


class Observer(Protocol):
    """Is told of every product."""

    def __call__(
        self, x: Tensor, weights: Sequence[Tensor], groups: Groups | None = None, by_token: bool = False
    ) -> None:
        """Of a product's input f32 [rows, inputs], after the norm if there is one, and its weights.

        With experts, ``groups`` says which rows each one reads, of those of tokens if ``by_token``, else of slots.
        """


_observers: list[Observer] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every product that is recorded inside; for statistics of what weights are multiplied with."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed() -> bool:
    """Whether somebody is told of products; what has them inside a larger kernel makes them with :func:`linear` then."""
    return bool(_observers)


def _tell(x: Tensor, norm: Tensor | None, eps: float, weights: Sequence[Tensor]) -> None:
    if _observers:
        x = x if norm is None else rms_norm(x, norm, eps)
        for observer in _observers:
            observer(x, weights)


def tell_experts(x: Tensor, weights: Sequence[Tensor], groups: Groups, by_token: bool) -> None:
    """Tell of a product with stacks of weights."""
    for observer in _observers:
        observer(x, weights, groups, by_token)


def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """``activation(norm(x) · weightᵀ + bias) + residual``.

    Args:
        x: f32 [rows, inputs].
        weight: [outputs, inputs] in f32, f16, bf16, q8 or q4; or several that read the same x, whose outputs are laid side
            by side in the result (query, key and value; parts of a large table). Up to three of one encoding are one run.
        bias: f32 [outputs], or one (or None) for each weight.
        norm: f32 [inputs]; if given, x first goes through RMSNorm with this weight and ``eps``.
        eps: of the norm.
        gelu: apply the tanh form of GELU before the residual is added.
        residual: f32 of the result's shape; may be ``out`` itself.
        out: f32 tensor to write the result to; a new one if None.
        variant: ``lanes``, ``wide``, ``group`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [rows, outputs of all weights].

    Raises:
        DeviceError: shapes, types or sizes that do not fit.
    """
    op = "linear"
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
    if bias is None:
        biases = [None] * len(weights)
    require(len(weights) > 0, op, "no weights")
    require(len(biases) == len(weights), op, f"{len(biases)} biases for {len(weights)} weights")
    rows = _check(op, x, weights, biases)
    outputs = sum(w.shape[0] for w in weights)
    y = out if out is not None else Tensor.empty(x.device, (rows, outputs))
    require_dense(y, op, "out", "f32", rows, outputs)
    if residual is not None:
        require_dense(residual, op, "residual", "f32", rows, outputs)
    _tell(x, norm, eps, weights)
    if taping(x, residual, norm, *map(learned, weights), *biases):
        require(out is None, op, "a product with a gradient goes into a tensor of its own")
        return _taped_linear(x, weights, biases, norm, eps, gelu, residual)
    x, norm, variant = _prepare(op, x, norm, eps, weights, variant)
    column = at = 0
    while at < len(weights):
        count = 1
        while count < 3 and at + count < len(weights) and weights[at + count].dtype == weights[at].dtype:
            count += 1
        some = weights[at : at + count]
        flags = (_RESIDUAL if residual is not None else 0) | (_GELU if gelu else 0)
        _run("linear", variant, x, some, biases[at : at + count], norm, eps, residual, y, column, flags)
        column += sum(w.shape[0] for w in some)
        at += count
    return y


def gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gelu: bool = False,
    variant: str | None = None,
) -> Tensor:
    """``silu(norm(x) · gateᵀ + gate_bias) * (norm(x) · upᵀ + up_bias)``: the first half of SwiGLU (arXiv:2002.05202).

    Args:
        x: f32 [rows, inputs].
        gate: [outputs, inputs] in f32, f16, bf16, q8 or q4.
        up: the same shape and encoding.
        gate_bias: f32 [outputs], or None.
        up_bias: f32 [outputs], or None.
        norm: f32 [inputs]; if given, x first goes through RMSNorm with this weight and ``eps``.
        eps: of the norm.
        gelu: the tanh form of GELU instead of SiLU (GeGLU).
        variant: ``lanes``, ``wide``, ``group`` or ``tile``; the fastest that fits if None.

    Returns:
        f32 [rows, outputs].

    Raises:
        DeviceError: shapes, types or sizes that do not fit.
    """
    op = "gated"
    require(gate.shape == up.shape, op, f"gate is {list(gate.shape)} and up {list(up.shape)}")
    require(
        gate.dtype == up.dtype, op, f"gate is {gate.dtype} and up {up.dtype}; they must have one encoding"
    )
    rows = _check(op, x, [gate, up], [gate_bias, up_bias])
    _tell(x, norm, eps, [gate, up])
    if taping(x, norm, learned(gate), learned(up), gate_bias, up_bias):
        both = _taped_linear(x, [gate, up], [gate_bias, up_bias], norm, eps, False, None)
        return activate_gated(both, "gelu_tanh" if gelu else "silu")
    y = Tensor.empty(x.device, (rows, gate.shape[0]))
    x, norm, variant = _prepare(op, x, norm, eps, [gate, up], variant)
    _run("gated", variant, x, [gate, up], [gate_bias, up_bias], norm, eps, None, y, 0, _GELU if gelu else 0)
    return y


def _taped_linear(
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    norm: Tensor | None,
    eps: float,
    gelu: bool,
    residual: Tensor | None,
) -> Tensor:
    """The product as steps that each have a gradient."""
    if norm is not None:
        x = rms_norm(x, norm, eps)
    with no_grad():
        y = linear(x, weights, biases)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        of_x = input_gradient(dy, weights) if want[0] else None
        of_weight = of_bias = None
        if any(want[1 + len(weights) :]):
            if any(want[1 : 1 + len(weights)]):
                of_weight, of_bias = layer_gradients(dy, x)
            else:
                of_bias, _ = column_sums(dy)
        elif any(want[1:]):
            of_weight = weight_gradient(dy, x)
        # Of several weights, the rows of one gradient.
        parts: list[Tensor | None] = [of_x]
        for whole, wanted in ((of_weight, want[1 : 1 + len(weights)]), (of_bias, want[1 + len(weights) :])):
            at = 0
            for w, own in zip(weights, wanted, strict=True):
                part = whole.rows(at, at + w.shape[0]) if whole is not None and own else None
                parts.append(learned_gradient(part, w) if part is not None and whole is of_weight else part)
                at += w.shape[0]
        return parts

    y = taped(y, (x, *map(learned, weights), *biases), back)
    if gelu:
        y = activate(y, "gelu_tanh")
    return y if residual is None else add(y, residual)


def _check(op: str, x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None]) -> int:
    require_dense(x, op, "x", "f32", -1, -1)
    rows, inputs = x.shape
    for w, b in zip(weights, biases, strict=True):
        require(w.dtype in ENCODINGS, op, f"weights cannot be {w.dtype}; they can be {', '.join(ENCODINGS)}")
        fits = len(w.shape) == 2 and w.shape[1] == inputs
        require(fits, op, f"a weight of shape {list(w.shape)} does not take rows of {inputs}")
        require(
            w.numel <= MAX_ELEMENTS, op, f"a weight of {w.numel:,} elements: give its rows in several tensors"
        )
        require(w.address % 4 == 0, op, "a weight must start at a multiple of 4 bytes")
        if b is not None:
            require_dense(b, op, "bias", "f32", w.shape[0])
    largest = rows * max(inputs, sum(w.shape[0] for w in weights))
    require(largest <= MAX_ELEMENTS, op, f"{rows:,} rows are too many for one run: give fewer at a time")
    return rows


def _prepare(
    op: str, x: Tensor, norm: Tensor | None, eps: float, weights: list[Tensor], variant: str | None
) -> tuple[Tensor, Tensor | None, str]:
    """Choose the variant; run the norm by itself where the kernel for many rows will not."""
    rows, inputs = x.shape
    if norm is not None:
        require_dense(norm, op, "norm", "f32", inputs)
    fits = inputs % 32 == 0 and inputs > 0 and x.address % 8 == 0 and all(w.address % 8 == 0 for w in weights)
    fits = fits and (norm is None or norm.address % 8 == 0)
    if variant is None:
        if fits and eight_lanes(x.device):
            narrow = sum(w.shape[0] for w in weights) <= _NARROW
            variant = "lanes" if rows < _MANY_ROWS or narrow else "wide"
        else:
            variant = "group" if rows <= _FEW_ROWS["group"] else "tile"
    require(variant in VARIANTS, op, f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
    if variant in ("lanes", "wide"):
        require(
            fits, op, f"{inputs} inputs (or how the tensors lie in memory) do not suit the {variant} variant"
        )
    if norm is not None and (
        variant in ("tile", "wide") or (variant == "lanes" and rows > _FEW_ROWS["lanes"])
    ):
        x, norm = rms_norm(x, norm, eps), None
    return x, norm, variant


def _run(
    form: str,
    variant: str,
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    y: Tensor,
    column: int,
    flags: int,
) -> None:
    if variant == "wide":
        _run_wide(form, x, weights, biases, residual, y, column, flags)
        return
    rows, inputs = x.shape
    encoding = weights[0].dtype
    if variant == "group":
        name, width, row_groups = variant, _GROUP_OUTPUTS, rows
    elif variant == "tile":
        name, width, row_groups = variant, _TILE_OUTPUTS, -(-rows // _TILE_ROWS)
    else:
        columns = COLUMNS
        if rows > _FEW_ROWS["lanes"]:
            name, row_groups = "lanes8", -(-rows // _LANES_ROWS)
        else:
            name, row_groups = "lanes1" if norm is None else "lanes1_norm", rows
            columns = CODED_COLUMNS if encoding in BLOCK_CODE_BYTES else COLUMNS
        width = _LANES * columns // (2 if form == "gated" else 1)
    device = x.device
    kernel = device.kernel(f"{form}_{name}_{encoding}")
    for index, b in enumerate(biases):
        flags |= _BIAS[index] if b is not None else 0
    flags |= _NORM if norm is not None else 0
    three: list[Tensor | None] = [*weights, None, None][:3]
    three_biases: list[Tensor | None] = [*biases, None, None][:3]
    outputs = [0 if w is None else w.shape[0] for w in three]
    tiles = -(-outputs[0] // width) if form == "gated" else sum(-(-n // width) for n in outputs)
    # Workgroups along x run first: on processors all rows of a tile of weights, which then stays in the nearest cache
    # instead of coming from memory once for every 8 rows.
    limits = device.info.max_groups[:2]
    tile_limit, row_limit = limits[::-1] if variant == "lanes" else limits
    if row_groups > row_limit:
        raise DeviceError(
            f"{form}: {rows:,} rows are too many for one run on this device: give fewer at a time"
        )
    for first in range(0, tiles, tile_limit):
        some_tiles = min(tiles - first, tile_limit)
        kernel.dispatch(
            (row_groups, some_tiles, 1) if variant == "lanes" else (some_tiles, row_groups, 1),
            {
                "x": x,
                "norm": norm,
                "w0": three[0],
                "w1": three[1],
                "w2": three[2],
                "b0": three_biases[0],
                "b1": three_biases[1],
                "b2": three_biases[2],
                "residual": residual,
            },
            {"y": y},
            work=rows * inputs * min(width * tile_limit, sum(outputs)),
            k=inputs,
            rows=rows,
            n0=outputs[0],
            n1=outputs[1],
            n2=outputs[2],
            stride=y.shape[1],
            column=column,
            first=first,
            flags=flags,
            eps=eps,
        )


def _run_wide(
    form: str,
    x: Tensor,
    weights: list[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    y: Tensor,
    column: int,
    flags: int,
) -> None:
    """Turn the weights over, as many columns at a time as the cache holds, and multiply."""
    rows, inputs = x.shape
    device = x.device
    both = form == "gated"
    for index, b in enumerate(biases):
        flags |= _BIAS[index] if b is not None else 0
    outputs = [w.shape[0] for w in weights]
    total = outputs[0] if both else sum(outputs)
    share = max(8, min(-(-total // 8) * 8, _TURNED_BYTES // (4 * inputs) // (16 if both else 8) * 8))
    room = 2 * share if both else share
    turned = Tensor.empty(device, (-(-room // TURNED_COLUMNS), inputs, TURNED_COLUMNS))
    three: list[Tensor | None] = [*biases, None, None][:3]
    sizes = [*outputs, 0, 0][:3]
    # Without what follows a bias, and with sizes in eights, results are stored by a kernel that does little besides.
    simple = not both and residual is None and not flags & _GELU and all(n % 8 == 0 for n in outputs)
    simple = simple and y.shape[1] % 2 == 0 and column % 2 == 0 and y.address % 8 == 0
    many = simple and rows >= _LANES_ROWS * MANY_EIGHTS
    kernel = device.kernel("linear_wide_many" if many else "linear_wide_plain" if simple else f"{form}_wide")
    row_groups = -(-rows // (_LANES_ROWS * (MANY_EIGHTS if many else 1)))
    for start in range(0, total, share):
        stop = min(start + share, total)
        at = 0
        for index, w in enumerate(weights):
            first = start if both else max(start, at)
            last = stop if both else min(stop, at + w.shape[0])
            if first < last:
                turn(
                    w,
                    turned,
                    first if both else first - at,
                    last - first,
                    4 * index if both else first - start,
                    both,
                )
            at += w.shape[0]
        columns = room if stop - start == share else -(-(stop - start) // 8) * 8 * (1 + both)
        kernel.dispatch(
            (row_groups, -(-columns // TURNED_COLUMNS), 1),
            {"x": x, "w": turned, "b0": three[0], "b1": three[1], "b2": three[2], "residual": residual},
            {"y": y},
            work=rows * inputs * columns,
            k=inputs,
            rows=rows,
            width=columns,
            start=start,
            n0=sizes[0],
            n1=0 if both else sizes[1],
            n2=sizes[2],
            stride=y.shape[1],
            column=column,
            flags=flags,
        )


def turn(w: Tensor, out: Tensor, first: int, rows: int, column: int, gap: bool) -> None:
    """Rows of ``w`` from ``first`` on as columns of ``out``, f32 [tiles, inputs, 64], from ``column`` on.

    ``w`` is [any, inputs] in any encoding, inputs a multiple of 16. With ``gap``, rows go in fours with four left free after
    each.
    """
    inputs = w.shape[1]
    w.device.kernel(f"turn_{w.dtype}").dispatch(
        (-(-rows // _LANES), -(-inputs // 64), 1),
        {"w": w},
        {"y": out},
        n=w.shape[0],
        k=inputs,
        row0=first,
        rows=rows,
        column=column,
        gap=int(gap),
    )
