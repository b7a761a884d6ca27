"""What all optimizers share: groups of parameters, settings and counts in device memory, and their state.

A step only queues work for the device, so it can be captured and replayed. What changes between replays lies in device
memory: the settings (:meth:`Optimizer.set_lr` writes there) and the number of steps, which the device counts itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.runtime import Tensor
from oazoo.runtime.ops import optimizer as ops
from oazoo.runtime.ops.elementwise import dequantize, narrow
from oazoo.training.parameters import NARROW, Named, Parameters, check_distinct, named

Compat = Literal["oa"] | None


@dataclass(eq=False, slots=True)
class Group:
    """Parameters with settings of their own. ``settings`` is what kernels read, f32 [9]."""

    parameters: list[Named]
    options: dict[str, Any]
    settings: Tensor


class Optimizer:
    """What all optimizers are: parameters in groups, their state by name, and the number of steps.

    Args:
        parameters: (name, tensor) pairs, tensors, or modules' parameters; or groups, mappings with ``params`` and the
            settings in which they differ. Frozen parameters (``requires_grad`` false) are left out.
        options: settings of every group that has none of its own.
        compat: ``"oa"`` for the definitions of OA 0.8.6.

    Parameters stored as f16 or bf16 are updated in f32: a copy of theirs is kept, and what it becomes is rounded to nearest.

    Raises:
        UsageError: no parameter learns, one comes twice or is packed, or a setting is unknown or out of range.
    """

    #: As the Optimizer section of an `.oam` file says it.
    kind: ClassVar[str] = ""
    #: Vectors kept for every parameter, each of its shape: fields of a slot.
    moments: ClassVar[tuple[str, ...]] = ()
    #: Settings that can change between replays of a captured step.
    changeable: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")

    def __init__(self, parameters: Parameters, options: Mapping[str, Any], compat: Compat = None) -> None:
        if compat not in (None, "oa"):
            raise UsageError(f"compat is None or 'oa', not {compat!r}")
        self.compat = compat
        given = list(parameters)
        if not any(isinstance(item, Mapping) for item in given):
            given = [{"params": given}]
        self.groups: list[Group] = []
        count = 0
        for group in given:
            if not isinstance(group, Mapping) or "params" not in group:
                raise UsageError(
                    "parameter groups are mappings with the key 'params'; give all parameters in groups"
                )
            members = list(group["params"])
            own = {name: value for name, value in group.items() if name != "params"}
            unknown = sorted(set(own) - set(options))
            if unknown:
                raise UsageError(
                    f"{type(self).__name__} has no setting {unknown[0]!r}; it has {', '.join(options)}"
                )
            found = named(members, count)
            count += len(members)
            merged = {**options, **own}
            self._check(merged)
            if found:
                settings = Tensor.empty(found[0].tensor.device, (len(ops.SETTINGS),))
                settings.write(self._settings(merged))
                self.groups.append(Group(found, merged, settings))
        if not self.groups:
            raise UsageError("no parameter learns: all are frozen, or there are none")
        check_distinct(self.parameters)
        device = self.groups[0].parameters[0].tensor.device
        self._steps = Tensor.from_numpy(device, np.zeros(1, np.uint32))
        self._state: dict[str, dict[str, Tensor]] = {
            parameter.name: {name: _zeros(parameter.tensor) for name in self.kept(group)}
            for group in self.groups
            for parameter in group.parameters
        }

        #: f32 copies of parameters that are stored narrower, by name.
        self._masters = {p.name: dequantize(p.tensor) for p in self.parameters if p.tensor.dtype in NARROW}

    @property
    def parameters(self) -> list[Named]:
        """All parameters that learn, in order."""
        return [parameter for group in self.groups for parameter in group.parameters]

    @property
    def nbytes(self) -> int:
        """Device memory of moments, copies in f32, settings and the count."""
        kept = [tensor.nbytes for moments in self._state.values() for tensor in moments.values()]
        kept += [tensor.nbytes for tensor in self._masters.values()]
        return sum(kept) + sum(group.settings.nbytes for group in self.groups) + self._steps.nbytes

    @property
    def steps_taken(self) -> int:
        """How many steps have been taken; waits for the device."""
        return int(self._steps.numpy()[0])

    @property
    def steps(self) -> Tensor:
        """The device's count of steps, u32 [1]."""
        return self._steps

    def step(self, factor: Tensor | None = None, *, clear: bool = False) -> None:
        """Queue one update of all parameters that have a gradient.

        Args:
            factor: f32, the first of whose values all gradients are multiplied with; None for 1.
            clear: set the gradients to zero once they are used.
        """
        ops.advance(self._steps)
        for group in self.groups:
            slots = [
                ops.Slot(
                    self.master(p), p.tensor.grad, self._state[p.name].get("m"), self._state[p.name].get("v")
                )
                for p in group.parameters
                if p.tensor.grad is not None
            ]
            if slots:
                self._update(group, slots, factor, ops.CLEAR if clear else 0)
            for p in group.parameters:
                if p.name in self._masters and p.tensor.grad is not None:
                    narrow(self._masters[p.name], out=p.tensor)

    def master(self, parameter: Named) -> Tensor:
        """The f32 values that updates go to: the parameter itself, or the copy kept for one that is stored narrower."""
        return self._masters.get(parameter.name, parameter.tensor)

    def masters(self) -> dict[str, npt.NDArray[np.float32]]:
        """The values of these copies by the parameters' names; waits for the device."""
        return {name: tensor.numpy() for name, tensor in self._masters.items()}

    def load_masters(self, values: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Take up what :meth:`masters` gave; the parameters become what that rounds to."""
        for p in self.parameters:
            if p.name in self._masters:
                self._masters[p.name].write(values[p.name])
                narrow(self._masters[p.name], out=p.tensor)

    def zero_grad(self) -> None:
        """Forget all gradients; the next way back begins with new ones."""
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def set_lr(self, value: float, group: int | None = None) -> None:
        """Set the learning rate of a group, or of all; captured steps use it from their next replay on."""
        self.set_options(group, lr=value)

    def set_options(self, group: int | None = None, **changes: float) -> None:
        """Change settings of a group, or of all, between steps.

        Raises:
            UsageError: no such group, or a setting that cannot change (``changeable`` names those that can).
        """
        fixed = sorted(set(changes) - set(self.changeable))
        if fixed:
            raise UsageError(
                f"{type(self).__name__}: {fixed[0]!r} cannot change between steps; {', '.join(self.changeable)} can"
            )
        if group is not None and not 0 <= group < len(self.groups):
            raise UsageError(f"there is no group {group}; there are {len(self.groups)}, counted from 0")
        for chosen in self.groups if group is None else [self.groups[group]]:
            options = {**chosen.options, **changes}
            self._check(options)
            before, after = self._settings(chosen.options), self._settings(options)
            chosen.options = options
            if (before != after).any():
                chosen.settings.write(after)

    def state_dict(self) -> dict[str, Any]:
        """Settings as plain values, moments as float32 arrays by parameter; with :meth:`masters` all that a run needs."""
        return {
            "kind": type(self).__name__,
            "compat": self.compat,
            "steps": self.steps_taken,
            "groups": [
                {"params": [p.name for p in group.parameters], **group.options} for group in self.groups
            ],
            "moments": {
                name: {field: tensor.numpy() for field, tensor in kept.items()}
                for name, kept in self._state.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave; nothing is changed unless all of it fits.

        Raises:
            UsageError: another optimizer, other parameters or shapes, or settings that do not fit.
        """
        if state.get("kind") != type(self).__name__ or state.get("compat") != self.compat:
            raise UsageError(
                f"the state is that of {state.get('kind')} (compat {state.get('compat')}), not of {type(self).__name__} "
                f"(compat {self.compat})"
            )
        steps, groups = int(state["steps"]), state["groups"]
        self._check_steps(steps)
        names = [[p.name for p in group.parameters] for group in self.groups]
        if [group["params"] for group in groups] != names:
            raise UsageError("the state's groups have other parameters than these, or another order")
        loaded = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        for group, options in zip(self.groups, loaded, strict=True):
            if set(options) != set(group.options):
                raise UsageError("the state's settings are not those of this optimizer")
            self._check(options)
        moments = state["moments"]
        for name, kept in self._state.items():
            given = moments.get(name, {})
            if {field: np.shape(array) for field, array in given.items()} != {
                f: t.shape for f, t in kept.items()
            }:
                raise UsageError(f"{name}: the state's moments have other names or shapes")
        for group, options in zip(self.groups, loaded, strict=True):
            group.options = options
            group.settings.write(self._settings(options))
        for name, kept in self._state.items():
            for field, tensor in kept.items():
                tensor.write(moments[name][field])
        self.set_steps(steps)

    def set_steps(self, steps: int) -> None:
        """Say how many steps have been taken, when a run continues."""
        self._check_steps(steps)
        self._steps.write(np.array([steps], np.uint32))

    @staticmethod
    def _check_steps(steps: int) -> None:
        if not 0 <= steps < 2**32:
            raise UsageError(f"{steps} steps cannot have been taken; 0 to {2**32 - 1} can")

    def moment(self, name: str, field: str) -> Tensor:
        """What is kept for a parameter: the field ``m`` or ``v`` of :class:`oazoo.runtime.ops.optimizer.Slot`."""
        return self._state[name][field]

    # What each optimizer says

    def kept(self, group: Group) -> tuple[str, ...]:
        """The moments kept for each parameter of a group."""
        return self.moments

    def _betas(self, options: Mapping[str, Any]) -> tuple[float, float, float, float]:
        """beta1, its complement, beta2, its complement."""
        return 0.0, 1.0, 0.0, 1.0

    def _check(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            many = value if isinstance(value, tuple | list) else [value]
            numbers = [number for number in many if isinstance(number, int | float)]
            if name != "coefficients" and not all(math.isfinite(n) and n >= 0 for n in numbers):
                raise UsageError(f"{type(self).__name__}: {name} must be finite and not negative: {value}")
            if name in ("betas", "momentum") and not all(beta < 1 for beta in numbers):
                raise UsageError(f"{type(self).__name__}: {name} must be below 1, not {value}")

    def _settings(self, options: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        beta1, rest1, beta2, rest2 = self._betas(options)
        row = {
            "lr": options.get("lr", 0.0),
            "decay": options.get("weight_decay", 0.0),
            "beta1": beta1,
            "rest1": rest1,
            "log1": _log(beta1),
            "beta2": beta2,
            "rest2": rest2,
            "log2": _log(beta2),
            "eps": options.get("eps", 0.0),
        }
        return np.array([row[name] for name in ops.SETTINGS], np.float32)

    @abstractmethod
    def _update(self, group: Group, slots: list[ops.Slot], factor: Tensor | None, flags: int) -> None:
        """Queue the update of these parameters."""


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -100.0


def _zeros(like: Tensor) -> Tensor:
    return Tensor.from_numpy(like.device, np.zeros(like.shape, np.float32))
