"""Optimizers: SGD, Adam, AdamW, Muon, and one that does nothing.

The definitions are those of the papers, and PyTorch's where a paper leaves something open. ``compat="oa"`` gives those of
OA 0.8.6 instead, so that its checkpoints continue exactly; each class says where they differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from oazoo.errors import UsageError
from oazoo.runtime import Tensor
from oazoo.runtime.ops import optimizer as ops
from oazoo.runtime.ops.arithmetic import fill
from oazoo.training.optimizer import Compat, Group, Optimizer
from oazoo.training.parameters import Parameters


class SGD(Optimizer):
    """Stochastic gradient descent: ``g ← g + λp; v ← μv + (1 - τ)g; p ← p - lr v``.

    The first v is g. With ``nesterov`` the step is ``g + μv``. As PyTorch defines it. ``compat="oa"`` with momentum:
    ``v ← μv + g; p ← p - lr v - λp``, the decay not multiplied by the learning rate.

    Args:
        parameters: see :class:`Optimizer`.
        lr: learning rate.
        momentum: μ; nothing is kept at 0.
        weight_decay: λ.
        dampening: τ.
        nesterov: as Sutskever et al. have it (ICML 2013).
        compat: see :class:`Optimizer`.
    """

    kind = "SGD"
    moments = ("m",)
    changeable = ("lr", "weight_decay", "momentum")

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        compat: Compat = None,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "dampening": dampening,
            "nesterov": nesterov,
        }
        super().__init__(parameters, options, compat)

    def _check(self, options: Mapping[str, Any]) -> None:
        super()._check(options)
        if options["nesterov"] and (options["momentum"] == 0 or options["dampening"] != 0):
            raise UsageError("SGD: nesterov needs momentum, and no dampening")

    def set_options(self, group: int | None = None, **changes: float) -> None:
        for each in self.groups:
            if "momentum" in changes and (changes["momentum"] == 0) != (each.options["momentum"] == 0):
                raise UsageError("SGD: momentum cannot begin or end between steps, only change")
        super().set_options(group, **changes)

    def kept(self, group: Group) -> tuple[str, ...]:
        """Nothing without momentum."""
        return self.moments if group.options["momentum"] else ()

    def _betas(self, options: Mapping[str, Any]) -> tuple[float, float, float, float]:
        return options["momentum"], 1 - options["dampening"], 0.0, 1.0

    def _update(self, group: Group, slots: list[ops.Slot], factor: Tensor | None, flags: int) -> None:
        options = group.options
        if options["momentum"]:
            flags |= ops.MOMENTUM | (ops.DECAY_WITHOUT_LR if self.compat == "oa" else 0)
        flags |= ops.NESTEROV if options["nesterov"] else 0
        ops.update("sgd", ops.SlotTable(slots), group.settings, self._steps, factor, flags)


class Adam(Optimizer):
    """Adam (arXiv:1412.6980) with bias correction, eps outside the root; weight decay is added to the gradient.

    Args:
        parameters: see :class:`Optimizer`.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: factor of L2 regularisation.
        compat: see :class:`Optimizer`; OA's definition is the same.
    """

    kind = "Adam"
    moments = ("m", "v")
    changeable = ("lr", "weight_decay", "betas", "eps")
    _flags: ClassVar[int] = 0

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        compat: Compat = None,
    ) -> None:
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, options, compat)

    def _betas(self, options: Mapping[str, Any]) -> tuple[float, float, float, float]:
        beta1, beta2 = options["betas"]
        return beta1, 1 - beta1, beta2, 1 - beta2

    def _update(self, group: Group, slots: list[ops.Slot], factor: Tensor | None, flags: int) -> None:
        ops.update("adam", ops.SlotTable(slots), group.settings, self._steps, factor, flags | self._flags)


class AdamW(Adam):
    """Adam with decoupled weight decay (arXiv:1711.05101): ``p ← (1 - lr λ)p`` first, as PyTorch does it.

    Args: as :class:`Adam`; ``weight_decay`` is λ.
    """

    kind = "AdamW"
    _flags = ops.DECOUPLED

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        compat: Compat = None,
    ) -> None:
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay, compat=compat)


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal (https://kellerjordan.github.io/posts/muon/).

    ``m ← μm + (1 - μ)g; u = μm + (1 - μ)g`` (``u = m`` without ``nesterov``), ``p ← (1 - lr λ)p``, then for parameters of
    rank 2 ``p ← p - lr s NS(u)``, NS being the Newton–Schulz iterations of :func:`oazoo.runtime.ops.optimizer.orthogonalize`
    in float32, and ``p ← p - lr u`` for all others. Embeddings and heads are usually left to another optimizer, or put
    into a group with ``matrices=False``.

    Args:
        parameters: see :class:`Optimizer`.
        lr: learning rate.
        momentum: μ.
        weight_decay: λ.
        nesterov: see above.
        iterations: of Newton–Schulz.
        coefficients: of its polynomial.
        eps: added to the norm that matrices are divided by.
        scale: s: ``"original"``, ``sqrt(max(1, rows / columns))``, as the reference implementation and PyTorch have it; or
            ``"match_rms_adamw"``, ``0.2 sqrt(max(rows, columns))`` (arXiv:2502.16982).
        matrices: whether parameters of rank 2 are made orthogonal.
        compat: ``"oa"`` always scales by ``0.2 sqrt(max(rows, columns))``.
    """

    kind = "Muon"
    moments = ("m",)
    changeable = ("lr", "weight_decay", "momentum")

    def __init__(
        self,
        parameters: Parameters,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        iterations: int = 5,
        coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        scale: Literal["original", "match_rms_adamw"] = "original",
        matrices: bool = True,
        compat: Compat = None,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "iterations": iterations,
            "coefficients": tuple(coefficients),
            "eps": eps,
            "scale": "match_rms_adamw" if compat == "oa" else scale,
            "matrices": matrices,
        }
        super().__init__(parameters, options, compat)

    def _check(self, options: Mapping[str, Any]) -> None:
        super()._check(options)
        if options["scale"] not in ("original", "match_rms_adamw"):
            raise UsageError(f"Muon: scale is 'original' or 'match_rms_adamw', not {options['scale']!r}")
        if len(options["coefficients"]) != 3 or not 1 <= options["iterations"] < 100:
            raise UsageError("Muon: there are three coefficients, and 1 to 99 iterations")

    def _betas(self, options: Mapping[str, Any]) -> tuple[float, float, float, float]:
        return options["momentum"], 1 - options["momentum"], 0.0, 1.0

    def _update(self, group: Group, slots: list[ops.Slot], factor: Tensor | None, flags: int) -> None:
        options = group.options
        flags |= ops.NESTEROV if options["nesterov"] else 0
        staged = [
            self._staged(slot) if options["matrices"] and len(slot.p.shape) == 2 else slot for slot in slots
        ]
        ops.update("muon", ops.SlotTable(staged), group.settings, self._steps, factor, flags)
        matrices = [slot for slot in staged if slot.matrix]
        if not matrices:
            return
        table = ops.SlotTable(matrices)
        found = ops.orthogonalize(table, options["iterations"], options["coefficients"], options["eps"])
        ends = [
            ops.Slot(slot.p, slot.g, v=v, scale=self._scale(slot.p.shape, options["scale"]))
            for slot, v in zip(matrices, found, strict=True)
        ]
        ops.update("apply", ops.SlotTable(ends), group.settings, self._steps)

    @staticmethod
    def _staged(slot: ops.Slot) -> ops.Slot:
        return ops.Slot(slot.p, slot.g, slot.m, Tensor.empty(slot.p.device, slot.p.shape), matrix=True)

    @staticmethod
    def _scale(shape: tuple[int, ...], name: str) -> float:
        rows, columns = shape
        return (
            math.sqrt(max(1, rows / columns)) if name == "original" else 0.2 * math.sqrt(max(rows, columns))
        )


class NoOp(Optimizer):
    """Counts steps and changes nothing: for updates written by hand."""

    moments = ()

    def __init__(self, parameters: Parameters, lr: float = 0.0, *, compat: Compat = None) -> None:
        super().__init__(parameters, {"lr": lr}, compat)

    def _update(self, group: Group, slots: list[ops.Slot], factor: Tensor | None, flags: int) -> None:
        if flags & ops.CLEAR:
            for slot in slots:
                fill(slot.g, 0.0)
