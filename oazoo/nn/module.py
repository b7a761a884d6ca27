"""Module, Parameter and Buffer: how a model names its weights, gets them, and gives them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from oazoo.errors import DeviceError
from oazoo.nn.initial import Initial, zeros
from oazoo.runtime import Device, Tensor
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.tensor import DTYPES

Values = npt.NDArray[Any]


class Parameter:
    """A named weight of a module: its shape at once, its values when they are loaded or initialized.

    A weight larger than one device buffer comes as several tensors, split by rows; ``shards`` has them all. ``offset`` is
    what files leave off a vector's values: it is added when they are loaded, and taken away when they are saved.
    ``initial`` gives first values, as a file would have them.
    """

    __slots__ = ("initial", "offset", "shape", "shards")

    def __init__(self, *shape: int, offset: float = 0.0, initial: Initial = zeros) -> None:
        self.shape = shape
        self.offset = offset
        self.initial = initial
        self.shards: tuple[Tensor, ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The weight as one tensor; its ``grad`` is the weight's gradient.

        Raises:
            DeviceError: not loaded yet, or split over several buffers.
        """
        if len(self.shards) != 1:
            state = "is not loaded" if not self.shards else f"is split over {len(self.shards)} buffers"
            raise DeviceError(f"a parameter of shape {self.shape} {state}")
        return self.shards[0]

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are taken with respect to it."""
        return any(shard.requires_grad for shard in self.shards)

    def values(self) -> Values:
        """The values as a file has them: an array of the weight's type, float32 for q4 and q8; waits for the device."""
        self._check_loaded()
        parts = [s if s.dtype in DTYPES else dequantize(s) for s in self.shards]
        found = np.concatenate([part.numpy() for part in parts])
        return found - np.float32(self.offset) if self.offset else found

    def why_not_assign(self, shape: tuple[int, ...], device: Device | None) -> str | None:
        """Why :meth:`assign` would not take values of this shape; None if it would."""
        if shape != self.shape:
            return f"has shape {list(shape)}; the module's is {list(self.shape)}"
        if not self.shards and device is None:
            return "is not loaded: say on which device"
        packed = [shard.dtype for shard in self.shards if shard.dtype not in DTYPES]
        return f"is {packed[0]} and is not written; make it f32 first (Module.to_f32)" if packed else None

    def assign(self, values: npt.ArrayLike, device: Device | None = None) -> None:
        """Replace the values by those of a file: in place where there are some already, else as f32 on ``device``."""
        array = np.asarray(values)
        why = self.why_not_assign(array.shape, device)
        if why is not None:
            raise DeviceError(f"a parameter of shape {list(self.shape)} {why}")
        if self.offset:
            array = array.astype(np.float32) + np.float32(self.offset)
        if not self.shards:
            assert device is not None
            self.shards = (Tensor.from_numpy(device, array, dtype="f32"),)
            return
        first = 0
        for shard in self.shards:
            if shard.dtype not in DTYPES:
                raise DeviceError(
                    f"a {shard.dtype} parameter is not written; make it f32 first (Module.to_f32)"
                )
            shard.write(array[first : first + shard.shape[0]])
            first += shard.shape[0]

    def _check_loaded(self) -> None:
        if not self.shards:
            raise DeviceError(f"a parameter of shape {self.shape} is not loaded")


class Buffer:
    """A named tensor of a module that is kept but not learned, such as running statistics: it never gets a gradient."""

    __slots__ = ("dtype", "initial", "shape", "tensors")

    def __init__(self, *shape: int, dtype: str = "f32", initial: Initial = zeros) -> None:
        self.shape = shape
        self.dtype = dtype
        self.initial = initial
        self.tensors: tuple[Tensor, ...] = ()

    @property
    def tensor(self) -> Tensor:
        """The tensor; a DeviceError if there is none yet."""
        if not self.tensors:
            raise DeviceError(f"a buffer of shape {self.shape} is not initialized")
        return self.tensors[0]

    def values(self) -> Values:
        """The values as an array; waits for the device."""
        return self.tensor.numpy()

    def why_not_assign(self, shape: tuple[int, ...], device: Device | None) -> str | None:
        """Why :meth:`assign` would not take values of this shape; None if it would."""
        if shape != self.shape:
            return f"has shape {list(shape)}; the module's is {list(self.shape)}"
        return None if self.tensors or device is not None else "is not initialized: say on which device"

    def assign(self, values: npt.ArrayLike, device: Device | None = None) -> None:
        """Replace the values: in place where there are some already, else on ``device``."""
        array = np.asarray(values, DTYPES[self.dtype])
        why = self.why_not_assign(array.shape, device)
        if why is not None:
            raise DeviceError(f"a buffer of shape {list(self.shape)} {why}")
        if self.tensors:
            self.tensors[0].write(array)
        else:
            assert device is not None
            self.tensors = (Tensor.from_numpy(device, array),)


#: Gives a parameter's weight, or a buffer, by its name, as tensors that together hold its rows, usually one.
Provider = Callable[[str, Parameter | Buffer], Sequence[Tensor]]


class Module:
    """A part of a model.

    Parameters, buffers and modules assigned to attributes, or kept there in lists, tuples and dictionaries, are found in the
    order of assignment; their names are those of the attributes, with dots between, and indices or keys for what is kept.
    """

    #: Whether the module trains: dropout drops then. :meth:`train` and :meth:`eval` switch.
    training = False

    def children(self) -> Iterator[tuple[str, Parameter | Buffer | Module]]:
        """What this module itself holds, by name."""
        for name, value in vars(self).items():
            yield from _held(name, value)

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Every module below this one with its dotted name, in the order of assignment, those above before those below."""
        for name, child in self.children():
            if isinstance(child, Module):
                yield prefix + name, child
                yield from child.named_modules(f"{prefix}{name}.")

    def modules(self) -> Iterator[Module]:
        """This module and every one below it."""
        yield self
        for _, module in self.named_modules():
            yield module

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Every parameter below this module with its dotted name, in the order of assignment; a shared one once."""
        yield from self._named(prefix, Parameter, set())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        """Every buffer, likewise."""
        yield from self._named(prefix, Buffer, set())

    def _named(self, prefix: str, kind: type[N], seen: set[int]) -> Iterator[tuple[str, N]]:
        for name, child in self.children():
            if isinstance(child, Module):
                yield from child._named(f"{prefix}{name}.", kind, seen)
            elif isinstance(child, kind) and id(child) not in seen:
                seen.add(id(child))
                yield prefix + name, child

    def parameters(self) -> list[Parameter]:
        """Every parameter, in order."""
        return [parameter for _, parameter in self.named_parameters()]

    def load(self, provider: Provider) -> None:
        """Fill every parameter and buffer from ``provider``."""
        for name, parameter in self.named_parameters():
            parameter.shards = tuple(provider(name, parameter))
        for name, buffer in self.named_buffers():
            buffer.tensors = tuple(provider(name, buffer))

    def initialize(self, device: Device, seed: int = 0) -> Self:
        """First values for every parameter and buffer, f32; gradients are taken with respect to the parameters.

        Weights of linear layers are drawn evenly within ±sqrt(6 / (inputs + outputs)), tables within ±1 / sqrt(width);
        biases are 0, weights of norms 1. The same seed gives the same values everywhere.
        """
        rng = np.random.default_rng(seed)
        for _, parameter in self.named_parameters():
            parameter.assign(parameter.initial(rng, parameter.shape), device)
            parameter.tensor.requires_grad = True
        for _, buffer in self.named_buffers():
            buffer.assign(buffer.initial(rng, buffer.shape), device)
        return self

    def state_dict(self) -> dict[str, Values]:
        """Name to values of every parameter and buffer, as a file has them; waits for the device."""
        found: dict[str, Values] = {name: parameter.values() for name, parameter in self.named_parameters()}
        return found | {name: buffer.values() for name, buffer in self.named_buffers()}

    def load_state_dict(self, values: Mapping[str, npt.ArrayLike], device: Device | None = None) -> None:
        """Replace parameters and buffers by those of ``values``, which has exactly theirs; nothing changes on an error.

        Tensors that exist are written in place, so captured programs see it; others are made on ``device``.

        Raises:
            DeviceError: names or shapes that are not the module's, or no device for a tensor that is not there yet.
        """
        mine: dict[str, Parameter | Buffer] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        missing = [name for name in mine if name not in values]
        unknown = [name for name in values if name not in mine]
        if missing or unknown:
            what = [f"{len(missing)} missing, the first is {missing[0]!r}"] if missing else []
            what += [f"{len(unknown)} unknown, the first is {unknown[0]!r}"] if unknown else []
            raise DeviceError(f"these values are not the module's: {'; '.join(what)}")
        for name, held in mine.items():
            why = held.why_not_assign(np.shape(values[name]), device)
            if why is not None:
                raise DeviceError(f"{name} {why}")
        for name, held in mine.items():
            held.assign(values[name], device)

    def train(self, mode: bool = True) -> Self:
        """Switch this module and all below it to training, or back."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Switch this module and all below it to use."""
        return self.train(False)

    def requires_grad_(self, wanted: bool = True) -> Self:
        """Take gradients with respect to the f32 parameters, or to none; weights in other encodings stay as they are."""
        for parameter in self.parameters():
            for shard in parameter.shards:
                shard.requires_grad = wanted and shard.dtype == "f32"
        return self

    def freeze(self) -> Self:
        """Take no gradients with respect to any parameter of this module; they still flow through it."""
        return self.requires_grad_(False)

    def to_f32(self) -> Self:
        """Decode every parameter to f32, on the device: what learns must be."""
        for parameter in self.parameters():
            parameter.shards = tuple(s if s.dtype == "f32" else dequantize(s) for s in parameter.shards)
        return self

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            for shard in parameter.shards:
                shard.grad = None


N = TypeVar("N", Parameter, Buffer)
M = TypeVar("M", bound=Module)


def _held(name: str, value: Any) -> Iterator[tuple[str, Parameter | Buffer | Module]]:
    if isinstance(value, (Parameter, Buffer, Module)):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _held(f"{name}.{index}", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _held(f"{name}.{key}", item)


class ModuleList(Module, Generic[M]):
    """Modules in a row, named by their index."""

    def __init__(self, modules: Sequence[M]) -> None:
        self._modules = tuple(modules)

    def __iter__(self) -> Iterator[M]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def children(self) -> Iterator[tuple[str, Parameter | Buffer | Module]]:
        for index, module in enumerate(self._modules):
            yield str(index), module
