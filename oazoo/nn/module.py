"""Module and Parameter: how a model names its weights and gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor


class Parameter:
    """A named weight of a module: its shape at once, its values when they are loaded.

    A weight larger than one device buffer comes as several tensors, split by rows; ``shards`` has them all. ``offset`` is
    what files leave off a vector's values: it is added when they are loaded.
    """

    __slots__ = ("offset", "shape", "shards")

    def __init__(self, *shape: int, offset: float = 0.0) -> None:
        self.shape = shape
        self.offset = offset
        self.shards: tuple[Tensor, ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The weight as one tensor.

        Raises:
            DeviceError: not loaded yet, or split over several buffers.
        """
        if len(self.shards) != 1:
            state = "is not loaded" if not self.shards else f"is split over {len(self.shards)} buffers"
            raise DeviceError(f"a parameter of shape {self.shape} {state}")
        return self.shards[0]


#: Gives a parameter's weight, by its name, as tensors that together hold its rows, usually one.
Provider = Callable[[str, Parameter], Sequence[Tensor]]


class Module:
    """A part of a model. Parameters and modules assigned to attributes are found, in order, by their attribute names."""

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Every parameter below this module with its dotted name, in the order of assignment."""
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value.named_parameters(f"{prefix}{name}.")

    def load(self, provider: Provider) -> None:
        """Fill every parameter from ``provider``."""
        for name, parameter in self.named_parameters():
            parameter.shards = tuple(provider(name, parameter))


M = TypeVar("M", bound=Module)


class ModuleList(Module, Generic[M]):
    """Modules in a row, named by their index."""

    def __init__(self, modules: Sequence[M]) -> None:
        self._modules = tuple(modules)

    def __iter__(self) -> Iterator[M]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        for index, module in enumerate(self._modules):
            yield from module.named_parameters(f"{prefix}{index}.")
