"""Which experts each token goes to, and what the experts gave put back together: routing of a mixture of experts.

Top-k routing of softmax probabilities (arXiv:2101.03961, arXiv:2401.04088), with a bias for the choice alone that keeps
loads even without a loss (arXiv:2408.15664). Nothing is dropped, whatever the loads; the host learns none of it, so that all
of this can be captured; and results are the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oazoo.runtime.ops.arithmetic import total
from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, grid, lanes, require, require_dense
from oazoo.runtime.tape import no_grad, no_gradient, taped, taping
from oazoo.runtime.tensor import Tensor


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
        chosen: u32 [tokens, top], experts in falling order of their score.
        weights: f32 [tokens, top], what each counts; gradients flow through them to the logits.
        logits: f32 [tokens, experts].
        lse: f32 [tokens], ``log Σ exp(logits)``.
    """

    chosen: Tensor
    weights: Tensor
    logits: Tensor
    lse: Tensor

    @property
    def experts(self) -> int:
        """How many there are."""
        return self.logits.shape[1]


@dataclass(frozen=True)
class Groups:
    """The slots in which experts do their work: one for each token and expert that it goes to.

    Attributes:
        experts: how many there are.
        tokens: rows that are sent to them, each to ``top``.
        chosen: u32 [tokens, top]; None where nothing is multiplied.
        order: u32 [slots]: token · top + rank of what is at each slot, an expert's slots together; None: not sorted, and a
            slot is where it stands in ``chosen``.
        places: u32 [slots]: the inverse of ``order``.
        rows: u32 [slots]: the token at each slot.
        offsets: u32 [experts + 1]: where each expert's slots begin.
    """

    experts: int
    tokens: int
    top: int
    chosen: Tensor | None
    order: Tensor | None = None
    places: Tensor | None = None
    rows: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.tokens * self.top

    @property
    def sorted(self) -> bool:
        """Whether the slots of an expert lie together."""
        return self.order is not None


def route(
    logits: Tensor,
    top: int,
    *,
    bias: Tensor | None = None,
    normalize: bool = True,
    variant: str | None = None,
) -> Routing:
    """The ``top`` experts with the largest ``softmax(logits)``, or largest ``logits + bias``, of each token.

    Of equal ones the first is taken; NaN is the smallest. Their weights are the probabilities, divided by their sum if
    ``normalize``; the bias has no part in them.

    Args:
        logits: f32 [tokens, experts].
        top: 1 to experts.
        bias: f32 [experts], or None.
        normalize: whether the weights of a token add up to 1.
        variant: ``wave8`` or ``group32``; the device's own if None.
    """
    op = "route"
    require_dense(logits, op, "logits", "f32", -1, -1)
    tokens, experts = logits.shape
    require(1 <= top <= experts, op, f"{top} of {experts} experts cannot be chosen")
    if bias is not None:
        require_dense(bias, op, "bias", "f32", experts)
        no_gradient("the bias of route", bias)
    device, name, groups = logits.device, variant or lanes(logits.device), grid(tokens)
    chosen = Tensor.empty(device, (tokens, top), "u32")
    weights, lse = Tensor.empty(device, (tokens, top)), Tensor.empty(device, (tokens,))
    scalars = {
        "tokens": tokens,
        "experts": experts,
        "top": top,
        "columns": groups[0],
        "normal": int(normalize),
    }
    if tokens:
        device.kernel(f"route_{name}").dispatch(
            groups,
            {"logits": logits, "bias": bias},
            {"chosen": chosen, "weights": weights, "lse": lse},
            biased=int(bias is not None),
            **scalars,
        )

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx = Tensor.empty(device, logits.shape)
        if tokens:
            device.kernel(f"route_back_{name}").dispatch(
                groups,
                {"logits": logits, "chosen": chosen, "weights": weights, "lse": lse, "dy": dy},
                {"dx": dx},
                **scalars,
            )
        return (dx,)

    return Routing(chosen, taped(weights, (logits,), back), logits, lse)


def group_tokens(routing: Routing, *, sort: bool = True, variant: str | None = None) -> Groups:
    """The slots of a routing. Not sorted they serve few tokens, and no way back."""
    return group_chosen(routing.chosen, routing.experts, sort=sort, variant=variant)


def group_chosen(chosen: Tensor, experts: int, *, sort: bool = True, variant: str | None = None) -> Groups:
    """The same of experts' numbers alone.

    Args:
        chosen: u32 [tokens, top], each below ``experts``.
        experts: how many there are.
        sort: whether the slots of an expert are to lie together.
        variant: ``wave8`` or ``group32``; the device's own if None.
    """
    op = "group_chosen"
    require_dense(chosen, op, "chosen", "u32", -1, -1)
    tokens, top = chosen.shape
    require(0 < experts <= MAX_GROUPS, op, f"{experts} experts; there can be 1 to {MAX_GROUPS}")
    if not sort:
        return Groups(experts, tokens, top, chosen)
    device, slots = chosen.device, tokens * top
    order, places, rows = (Tensor.empty(device, (slots,), "u32") for _ in range(3))
    offsets = Tensor.empty(device, (experts + 1,), "u32")
    device.kernel(f"sort_experts_{variant or lanes(device)}").dispatch(
        (experts, 1, 1),
        {"chosen": chosen},
        {"order": order, "places": places, "rows": rows, "offsets": offsets},
        slots=slots,
        experts=experts,
        top=top,
    )
    return Groups(experts, tokens, top, chosen, order, places, rows, offsets)


def combine(
    x: Tensor,
    groups: Groups,
    weights: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    variant: str | None = None,
) -> Tensor:
    """What a token's experts gave, weighted and added up in the order of its experts: ``residual + Σ weight · x[slot]``.

    Args:
        x: f32 [slots, width].
        groups: whose slots these are.
        weights: f32 [tokens, top]; all 1 if None.
        residual: f32 [tokens, width] to add, or None.
        variant: of the way back, ``wave8`` or ``group32``; the device's own if None.

    Returns:
        f32 [tokens, width].
    """
    op = "combine"
    require_dense(x, op, "x", "f32", groups.slots, -1)
    tokens, top, width = groups.tokens, groups.top, x.shape[1]
    if weights is not None:
        require_dense(weights, op, "weights", "f32", tokens, top)
    if residual is not None:
        require_dense(residual, op, "residual", "f32", tokens, width)
    device, y = x.device, Tensor.empty(x.device, (tokens, width))
    require(y.numel <= MAX_ELEMENTS, op, f"{y.numel:,} elements are more than one run can address")
    runs = grid(-(-y.numel // 256))
    if y.numel:
        device.kernel("combine").dispatch(
            runs,
            {"x": x, "places": groups.places, "weights": weights, "residual": residual},
            {"y": y},
            count=y.numel,
            width=width,
            top=top,
            columns=runs[0],
            sorted=int(groups.sorted),
            weighted=int(weights is not None),
            added=int(residual is not None),
        )
    if weights is None:
        no_gradient("combine without weights", x)
        return y

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor | None, ...]:
        of_x = of_weights = None
        if want[0] or want[1]:
            of_x, of_weights = Tensor.empty(device, x.shape), Tensor.empty(device, weights.shape)
            rows = grid(tokens)
            if tokens:
                device.kernel(f"combine_back_{variant or lanes(device)}").dispatch(
                    rows,
                    {"x": x, "places": groups.places, "weights": weights, "dy": dy},
                    {"dx": of_x, "dw": of_weights},
                    tokens=tokens,
                    width=width,
                    top=top,
                    columns=rows[0],
                    sorted=int(groups.sorted),
                )
        return of_x, of_weights, dy

    return taped(y, (x, weights, residual), back)


def weighted_rows(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    """Every row times a number of its own: ``residual + weight · x``, f32 [rows, width], weights f32 [rows, 1]."""
    return combine(x, Groups(1, x.shape[0], 1, None), weights, residual=residual)


def spread(weights: Tensor, routing: Routing) -> Tensor:
    """Weights [tokens, top] of the experts that were chosen as f32 [tokens, experts], 0 for the others."""
    tokens, top = routing.chosen.shape
    require_dense(weights, "spread", "weights", "f32", tokens, top)
    experts, device = routing.experts, weights.device

    def run(kernel: str, x: Tensor, shape: tuple[int, int]) -> Tensor:
        y = Tensor.empty(device, shape)
        runs = grid(-(-y.numel // 64))
        if y.numel:
            device.kernel(kernel).dispatch(
                runs,
                {"x": x, "chosen": routing.chosen},
                {"y": y},
                count=y.numel,
                experts=experts,
                top=top,
                columns=runs[0],
            )
        return y

    y = run("spread", weights, (tokens, experts))
    return taped(y, (weights,), lambda dy, want: (run("spread_back", dy, (tokens, top)),))


def router_loss(
    routing: Routing, groups: Groups, *, balance: float = 0.0, z: float = 0.0, variant: str | None = None
) -> Tensor:
    """``balance · E Σ_e f_e P_e + z · mean(log² Σ exp(logits))``, f32 [1].

    f is the share of all assignments that an expert has, taken as constant, P its mean probability (arXiv:2101.03961); the
    second term keeps logits small (arXiv:2202.08906).

    Args:
        routing: of at least one token.
        groups: its slots, sorted.
        balance: the factor of the first term.
        z: of the second.
        variant: of the way back, ``wave8`` or ``group32``; the device's own if None.
    """
    op = "router_loss"
    logits, experts = routing.logits, routing.experts
    tokens = logits.shape[0]
    require(groups.offsets is not None, op, "the groups are not sorted")
    require(tokens > 0, op, "there are no tokens")
    device, parts = logits.device, Tensor.empty(logits.device, (experts + 1,))
    factors = {"balance": balance * experts / (groups.slots * tokens), "z": z / tokens}
    reads = {"logits": logits, "lse": routing.lse, "offsets": groups.offsets}
    device.kernel("router_loss").dispatch(
        (experts + 1, 1, 1), reads, {"y": parts}, tokens=tokens, experts=experts, **factors
    )
    with no_grad():
        loss = total(parts)

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx, runs = Tensor.empty(device, logits.shape), grid(tokens)
        device.kernel(f"router_loss_back_{variant or lanes(device)}").dispatch(
            runs,
            {**reads, "scale": dy},
            {"dx": dx},
            tokens=tokens,
            experts=experts,
            columns=runs[0],
            **factors,
        )
        return (dx,)

    return taped(loss, (logits,), back)


def add_loads(loads: Tensor, groups: Groups) -> None:
    """Add how many slots each expert has to u32 [experts]."""
    require_dense(loads, "add_loads", "loads", "u32", groups.experts)
    require(groups.offsets is not None, "add_loads", "the groups are not sorted")
    loads.device.kernel("add_loads").dispatch(
        (-(-groups.experts // 64), 1, 1),
        {"offsets": groups.offsets},
        {"loads": loads},
        experts=groups.experts,
    )


def balance_bias(bias: Tensor, loads: Tensor, rate: float) -> None:
    """``bias += rate · sign(mean load - load)``, and loads 0 (arXiv:2408.15664).

    Args:
        bias: f32 [experts].
        loads: u32 [experts], of what was routed since the last time.
        rate: how far a step goes.
    """
    op = "balance_bias"
    require_dense(bias, op, "bias", "f32", -1)
    require_dense(loads, op, "loads", "u32", bias.shape[0])
    if bias.numel:
        bias.device.kernel("balance").dispatch(
            (1, 1, 1), {}, {"bias": bias, "loads": loads}, experts=bias.shape[0], rate=rate
        )


def expert_squares(sums: Tensor, x: Tensor, groups: Groups, *, by_token: bool) -> None:
    """Add, for each expert, the squares of the rows that it reads: f32 [experts, width]; for statistics.

    ``x`` is f32 [tokens, width] if ``by_token``, else [slots, width].
    """
    op = "expert_squares"
    require_dense(x, op, "x", "f32", groups.tokens if by_token else groups.slots, -1)
    require_dense(sums, op, "sums", "f32", groups.experts, x.shape[1])
    require(groups.sorted and not taping(x), op, "the groups are not sorted, or a gradient is wanted")
    x.device.kernel("expert_squares").dispatch(
        (-(-x.shape[1] // 64), groups.experts, 1),
        {"x": x, "rows": groups.rows if by_token else None, "offsets": groups.offsets},
        {"sums": sums},
        width=x.shape[1],
        gathered=int(by_token),
    )
