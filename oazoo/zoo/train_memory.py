"""Device memory of a run: what it takes, measured without taking it, and batches that fit into what is free."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from oazoo.errors import DeviceError
from oazoo.runtime import Device

#: Share of the free memory that ``--auto-batch`` fills; the rest is for the driver and for others.
_FILLED = 0.9


@dataclass(frozen=True)
class RunMemory:
    """Bytes of device memory of a run.

    Attributes:
        weights: of the model and what was attached to it.
        optimizer: moments and settings.
        step: inputs, gradients, and all that a step keeps and makes on its way.
        validation: the same of a validation.
        free: what step and validation may take, as the device tells; weights and optimizer are there already.
    """

    weights: int
    optimizer: int
    step: int
    validation: int
    free: int

    @property
    def total(self) -> int:
        """All that the run takes."""
        return self.weights + self.optimizer + self.step + self.validation

    @property
    def fits(self) -> bool:
        """Whether it can be had."""
        return self.step + self.validation <= self.free


#: (rows of a batch, batches of a step) to the bytes of step and validation.
Measure = Callable[[int, int], tuple[int, int]]


def divide(rows: int, free: int, measure: Measure) -> tuple[int, int]:
    """The largest batch that fits, and how many of them make a step of ``rows`` rows.

    Args:
        rows: of a step; batches are a divisor of it, so that the step stays what was asked for.
        free: bytes.
        measure: tells what a step takes.

    Returns:
        rows of a batch, batches of a step; a batch of one row if nothing fits.
    """
    small = [size for size in range(1, math.isqrt(rows) + 1) if rows % size == 0]
    sizes = sorted({*small, *(rows // size for size in small)})

    def fits(size: int) -> bool:
        try:
            return sum(measure(size, rows // size)) <= _FILLED * free
        except DeviceError:  # a tensor larger than a buffer may be, or more work than a kernel takes
            return False

    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(sizes[middle]):
            low = middle
        else:
            high = middle - 1
    return sizes[low], rows // sizes[low]


def refusal(memory: RunMemory, device: Device, rows: int, tokens: int, *, checkpointing: bool) -> str:
    """What to say of a run that does not fit."""
    ways = ["smaller batches (--batch-size, --auto-batch)"] if rows > 1 else []
    ways += [] if checkpointing else ["--checkpointing"]
    ways += ["shorter rows (--context)", "another device (OAZOO_DEVICE)"]
    return (
        f"a step over {rows} rows of {tokens} tokens takes {memory.step + memory.validation:,} bytes of device memory "
        f"beside weights and optimizer, and {device.info.name} has about {memory.free:,} free; use {', '.join(ways)}"
    )
