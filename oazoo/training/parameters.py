"""What optimizers and clipping take: parameters by name, alone or in groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from oazoo.errors import UsageError
from oazoo.runtime import Tensor

#: Types that learn through a copy in f32.
NARROW = ("f16", "bf16")


class HasTensor(Protocol):
    """What holds a parameter's values, as :class:`oazoo.nn.Parameter` does."""

    @property
    def tensor(self) -> Tensor: ...


#: A parameter: its tensor, or what holds it, with or without its name.
ParameterLike: TypeAlias = "Tensor | HasTensor | tuple[str, Tensor | HasTensor]"
#: Parameters, or groups of them: ``{"params": parameters, "lr": 0.1, …}``.
Parameters: TypeAlias = "Iterable[ParameterLike | Mapping[str, Any]]"


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter and its name."""

    name: str
    tensor: Tensor


def named(parameters: Iterable[ParameterLike], start: int = 0) -> list[Named]:
    """The parameters that learn (``requires_grad``), in order; those without a name are called ``p0``, ``p1`` …

    Raises:
        UsageError: something that is no parameter, or is packed.
    """
    found: list[Named] = []
    for index, given in enumerate(parameters, start):
        name, value = given if isinstance(given, tuple) else (f"p{index}", given)
        tensor = value if isinstance(value, Tensor) else getattr(value, "tensor", None)
        if not isinstance(tensor, Tensor):
            raise UsageError(
                f"{name}: a {type(value).__name__} is no parameter; give tensors, or (name, tensor)"
            )
        if not tensor.requires_grad:
            continue
        if tensor.dtype not in ("f32", *NARROW):
            raise UsageError(
                f"{name}: a parameter that learns must be f32, f16 or bf16, not {tensor.dtype}; freeze it"
            )
        found.append(Named(name, tensor))
    return found


def check_distinct(parameters: Sequence[Named]) -> None:
    """Raise a UsageError where two parameters have one name or one memory: a step would be taken twice."""
    names: set[str] = set()
    places: dict[int, str] = {}
    for parameter in parameters:
        if parameter.name in names:
            raise UsageError(f"two parameters are called {parameter.name!r}")
        names.add(parameter.name)
        twin = places.setdefault(parameter.tensor.address, parameter.name)
        if twin != parameter.name:
            raise UsageError(f"{twin} and {parameter.name} are the same tensor; name it once")
