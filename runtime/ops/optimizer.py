"""Updates of many parameters at once, and the norm of their gradients: what optimizers queue.

A table in device memory names what each parameter consists of, so one run serves all. It lies within the commands
themselves, because gradients may have other addresses at every step, or belong to a captured program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oazoo.runtime.ops.arithmetic import accumulate
from oazoo.runtime.ops.common import grid, require, require_dense
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.ops.product import input_gradient, weight_gradient
from oazoo.runtime.tensor import Tensor

#: Flags of :func:`update` (optimizer.slang).
DECOUPLED, NESTEROV, DECAY_WITHOUT_LR, CLEAR, _SCALED, MOMENTUM = 1, 2, 4, 8, 16, 32
#: Elements of a workgroup.
_SHARE = 1024
_SLOT = np.dtype(
    [
        ("p", "<u8"),
        ("g", "<u8"),
        ("m", "<u8"),
        ("v", "<u8"),
        ("count", "<u4"),
        ("first", "<u4"),
        ("scale", "<f4"),
        ("matrix", "<u4"),
    ]
)
#: What the vector of an optimizer's settings holds, in order; ``rest`` is 1 - beta and ``log`` the logarithm of beta.
SETTINGS = ("lr", "decay", "beta1", "rest1", "log1", "beta2", "rest2", "log2", "eps")


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter with its gradient and what an optimizer keeps for it, all f32 of one number of elements.

    ``scale`` is a factor on the learning rate (:func:`update` with ``apply``); ``matrix`` says that Muon leaves the step in
    ``v``.
    """

    p: Tensor
    g: Tensor
    m: Tensor | None = None
    v: Tensor | None = None
    scale: float = 1.0
    matrix: bool = False


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Slots as kernels read them."""

    slots: Sequence[Slot]
    tensor: Tensor = field(init=False)
    groups: int = field(init=False)

    def __post_init__(self) -> None:
        rows, first = np.zeros(len(self.slots), _SLOT), 0
        for row, slot in zip(rows, self.slots, strict=True):
            parts = {"p": slot.p, "g": slot.g, "m": slot.m, "v": slot.v}
            for name, tensor in parts.items():
                if tensor is not None:
                    require_dense(tensor, "optimizer", name, "f32", *tensor.shape)
                    require(tensor.numel == slot.p.numel, "optimizer", f"{name} and p have different sizes")
                    row[name] = tensor.address
            row["count"], row["first"], row["scale"] = slot.p.numel, first, slot.scale
            row["matrix"] = slot.matrix
            first += -(-slot.p.numel // _SHARE)
        table = Tensor.empty(self.slots[0].p.device, (len(rows) * _SLOT.itemsize // 4,), "u32")
        table.inscribe(rows.view("<u4"))
        object.__setattr__(self, "tensor", table)
        object.__setattr__(self, "groups", first)

    def tensors(self, *names: str) -> list[Tensor]:
        """The tensors of these fields, of every slot that has them."""
        found = (getattr(slot, name) for slot in self.slots for name in names)
        return [tensor for tensor in found if tensor is not None]


def advance(step: Tensor) -> None:
    """Add one to a counter, u32 [1]."""
    require_dense(step, "advance", "step", "u32", 1)
    step.device.kernel("advance").dispatch((1, 1, 1), {}, {"step": step})


def update(
    kind: str, table: SlotTable, settings: Tensor, step: Tensor, factor: Tensor | None = None, flags: int = 0
) -> None:
    """One step of ``sgd``, ``adam`` or ``muon``, or ``apply``, which ends a step of Muon, for all slots.

    Args:
        table: what is updated. Muon leaves what becomes of matrices in their ``v``; :func:`orthogonalize` and ``apply``
            follow.
        settings: f32 [9], as :data:`SETTINGS` names them.
        step: u32 [1], how many steps have been taken, this one included.
        factor: f32 [any], the first of which all gradients are multiplied with, or None.
        flags: of this module.
    """
    require_dense(settings, "update", "settings", "f32", len(SETTINGS))
    require_dense(step, "update", "step", "u32", 1)
    groups = grid(table.groups)
    writes = {"apply": ("p",), "muon": ("p", "m", "v")}.get(kind, ("p", "m", "v"))
    reads = ("g", "v") if kind == "apply" else ("g",)
    clear = bool(flags & CLEAR)
    step.device.kernel(f"update_{kind}").dispatch(
        groups,
        {"slots": table.tensor, "settings": settings, "step": step, "factor": factor},
        {},
        also_reads=[] if clear else table.tensors(*reads),
        also_writes=table.tensors(*writes, "g") if clear else table.tensors(*writes),
        count=len(table.slots),
        groups=table.groups,
        columns=groups[0],
        flags=flags | (_SCALED if factor is not None else 0),
    )


def squares(table: SlotTable, field: str = "g") -> Tensor:
    """Sums of squares of the gradients (or of ``v``), f32 [workgroups], the parts of each slot one after the other."""
    sums, groups = Tensor.empty(table.tensor.device, (table.groups,)), grid(table.groups)
    sums.device.kernel("squares").dispatch(
        groups,
        {"slots": table.tensor},
        {"sums": sums},
        also_reads=table.tensors(field),
        count=len(table.slots),
        groups=table.groups,
        columns=groups[0],
        second=int(field == "v"),
    )
    return sums


def gradient_factor(table: SlotTable, most: float | None, weight: Tensor | None = None) -> Tensor:
    """What gradients are multiplied with, and the norm of them all together: f32 [2].

    Args:
        table: whose gradients.
        most: norm that is allowed; the factor is ``min(1, most / (norm + 1e-6))``, or 1 if None.
        weight: f32 [1]; the gradients are sums that are divided by it first. None for 1.
    """
    sums = squares(table)
    y = Tensor.empty(sums.device, (2,))
    sums.device.kernel("clip_factor").dispatch(
        (1, 1, 1),
        {"sums": sums, "weight": weight},
        {"y": y},
        count=table.groups,
        weighted=int(weight is not None),
        most=0.0 if most is None else most,
    )
    return y


def rescale(table: SlotTable, factor: Tensor) -> None:
    """All gradients times the first of ``factor``, in place."""
    _rescale("rescale", table, factor, "g", 0.0)


def _rescale(kernel: str, table: SlotTable, sums: Tensor, field: str, eps: float) -> None:
    groups = grid(table.groups)
    sums.device.kernel(kernel).dispatch(
        groups,
        {"slots": table.tensor, "sums": sums},
        {},
        also_writes=table.tensors(field),
        count=len(table.slots),
        groups=table.groups,
        columns=groups[0],
        eps=eps,
    )


def orthogonalize(
    table: SlotTable, iterations: int, coefficients: tuple[float, float, float], eps: float
) -> list[Tensor]:
    """Newton–Schulz iterations towards the orthogonal factor of every ``v``, a matrix [rows, columns] each.

    ``X ← aX + (bA + cA²)X`` with ``A = XXᵀ`` from ``X = v / (‖v‖ + eps)``; for matrices that are taller than wide the same
    of the transposed one, which is ``X ← aX + X(bA + cA²)`` with ``A = XᵀX``. Sums are float32.

    Source: Jordan et al., Muon (2024), https://kellerjordan.github.io/posts/muon/

    Returns:
        The matrices, f32 in the shape of each slot's parameter.
    """
    _rescale("unit_norm", table, squares(table, "v"), "v", eps)
    a, b, c = coefficients
    found = [slot.v for slot in table.slots if slot.v is not None]
    tall = [x.shape[0] > x.shape[1] for x in found]
    # Stage by stage over all matrices: they share nothing, so the device may work on them side by side.
    for _ in range(iterations):
        gram = [weight_gradient(x, x) if t else linear(x, x) for x, t in zip(found, tall, strict=True)]
        mixed = [linear(g, g) for g in gram]
        for square, g in zip(mixed, gram, strict=True):
            accumulate(square, g, b, c)
        steps = [
            input_gradient(x, m) if t else input_gradient(m, x)
            for x, m, t in zip(found, mixed, tall, strict=True)
        ]
        for new, x in zip(steps, found, strict=True):
            accumulate(new, x, a, 1.0)
        found = steps
    return found


def note_loss(loss: Tensor, place: Tensor, ring: Tensor, factor: Tensor | None = None) -> None:
    """Keep the loss of a step, f32 [1], in the ring where ``place``, u32 [1], says; that then counts on.

    Args:
        ring: f32 [size, 2], a loss and the norm of its gradient each.
        factor: what :func:`gradient_factor` gave for the step; without it the norm is NaN.
    """
    _note(0, {"loss": loss, "weight": None, "sums": None, "factor": factor}, {"place": place, "ring": ring})


def gather_loss(loss: Tensor, weight: Tensor, sums: Tensor) -> None:
    """Add the loss of a part of a batch, f32 [1], times its weight, f32 [1], and the weight itself, to ``sums``, f32 [2]."""
    reads = {"loss": loss, "weight": weight, "place": None, "ring": None, "factor": None}
    _note(1, reads, {"sums": sums})


def note_gathered(sums: Tensor, place: Tensor, ring: Tensor, factor: Tensor | None = None) -> None:
    """Keep the mean of what was gathered as :func:`note_loss` does, and begin anew."""
    writes = {"place": place, "ring": ring, "sums": sums}
    _note(2, {"loss": None, "weight": None, "factor": factor}, writes)


def _note(mode: int, reads: dict[str, Tensor | None], writes: dict[str, Tensor]) -> None:
    size = 1
    if "ring" in writes:
        require_dense(writes["ring"], "note", "ring", "f32", -1, 2)
        size = writes["ring"].shape[0]
    device = next(iter(writes.values())).device
    normed = int(reads["factor"] is not None)
    device.kernel("note").dispatch((1, 1, 1), reads, writes, size=size, normed=normed, mode=mode)
