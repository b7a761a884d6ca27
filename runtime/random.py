"""Random numbers on the device, from a seed and a count of draws: Philox 4x32-10.

The count lives in device memory and a kernel advances it, so a captured program draws anew at every replay; what was drawn
follows from seed and count alone, on every device. The way back through a draw, and a second pass over what was not kept
(:func:`oazoo.runtime.tape.checkpoint`), see the numbers of the first pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import numpy as np

from oazoo.errors import DeviceError
from oazoo.runtime.device import Device
from oazoo.runtime.tensor import Tensor


class Generator:
    """A stream of draws.

    Attributes:
        state: u32 [4]: the seed's low and high word, and those of the number of draws so far.
    """

    def __init__(self, device: Device, seed: int = 0) -> None:
        with device.aside():
            self.state = Tensor.empty(device, (4,), "u32")
            self.seed(seed)

    def seed(self, seed: int, draws: int = 0) -> None:
        """Start over with ``seed``, after so many ``draws`` (both 0 to 2^64 - 1).

        Raises:
            DeviceError: out of that range.
        """
        words = []
        for name, value in (("seed", seed), ("number of draws", draws)):
            if not 0 <= value < 1 << 64:
                raise DeviceError(f"the {name} {value} is out of range (0 to 2^64 - 1)")
            words += [value & 0xFFFFFFFF, value >> 32]
        self.state.write(np.array(words, np.uint32))

    @property
    def position(self) -> tuple[int, int]:
        """The seed and the number of draws so far, for :meth:`seed` to resume from; waits for the device."""
        low, high, draws, more = (int(word) for word in self.state.numpy())
        return low | high << 32, draws | more << 32

    def draw(self) -> Tensor:
        """One draw, u32 [4], of which ops take as many numbers as they need; counts on."""
        replay = _replay.get()
        if replay is not None:
            again = next(replay, None)
            if again is None:
                raise DeviceError(
                    "a checkpointed block draws random numbers more often the second time than the first"
                )
            return again
        drawn = Tensor.empty(self.state.device, (4,), "u32")
        kernel = self.state.device.kernel("draw")
        kernel.dispatch((1, 1, 1), {}, {"state": self.state, "draw": drawn})
        record = _record.get()
        if record is not None:
            record.append(drawn)
        return drawn


_record: ContextVar[list[Tensor] | None] = ContextVar("oazoo_draws_recorded", default=None)
_replay: ContextVar[Iterator[Tensor] | None] = ContextVar("oazoo_draws_replayed", default=None)
_generators: WeakKeyDictionary[Device, Generator] = WeakKeyDictionary()


def generator(device: Device) -> Generator:
    """The device's own stream of draws, seeded with 0 unless :func:`seed` said otherwise."""
    found = _generators.get(device)
    if found is None:
        found = _generators[device] = Generator(device)
    return found


def seed(device: Device, number: int) -> Generator:
    """Start the device's own stream over with a seed; returns it."""
    found = generator(device)
    found.seed(number)
    return found


def replaying() -> bool:
    """Whether this is the second pass over what was done before: what counts on, such as running statistics, has counted."""
    return _replay.get() is not None


def checkpointed() -> bool:
    """Whether what is computed now is computed a second time, or will be."""
    return replaying() or _record.get() is not None


@contextmanager
def recorded_draws() -> Iterator[list[Tensor]]:
    """Collect the draws that are made inside, in their order; an outer recording gets them as well."""
    outer, inner = _record.get(), list[Tensor]()
    token = _record.set(inner)
    try:
        yield inner
    finally:
        _record.reset(token)
        if outer is not None:
            outer += inner


@contextmanager
def replayed_draws(draws: list[Tensor]) -> Iterator[None]:
    """Hand out these draws inside instead of new ones."""
    token = _replay.set(iter(draws))
    try:
        yield
    finally:
        _replay.reset(token)
