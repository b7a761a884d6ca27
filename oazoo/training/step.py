"""One step of training: forward, backward, clipping, optimizer; recorded once and replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.runtime import Device, Tensor
from oazoo.runtime.memory import ALIGNMENT
from oazoo.runtime.ops import optimizer as ops
from oazoo.runtime.program import Program
from oazoo.runtime.sizing import measuring
from oazoo.runtime.tape import GradientTape
from oazoo.training.losslog import LossLog
from oazoo.training.optimizer import Optimizer

#: Steps that may be queued before the host waits: enough to keep a device busy, few enough to stop soon.
_AHEAD = 4


class TrainingStep:
    """Trains on batches of one shape: ``step(tokens, targets)``.

    The first call captures what ``forward`` and the optimizer do, later ones write their arrays into the same tensors and
    replay it. A call returns before the device is done; :meth:`losses` tells what came of it. Results are the same, bit for
    bit, as without capturing.

    With ``accumulation``, that many calls make one step, as one batch of all their parts would: their gradients are
    weighted by ``weight``, which is to be the number of what the part's loss is the mean of (sequences, or tokens that
    count), and divided by the sum of the weights. :meth:`finish` takes the step of a window that did not become full.

    Args:
        forward: from the inputs' tensors to the loss, f32 [1].
        optimizer: over the parameters.
        clip: largest norm of all gradients together (:func:`oazoo.training.clip_grad_norm`), or None.
        accumulation: calls that make one step.
        captured: False runs every step anew, slowly, for comparison.
        kept: losses that fit on the device before the host must look.
        norms: measure the norm of every step's gradient, also where nothing needs it.
    """

    def __init__(
        self,
        forward: Callable[..., Tensor],
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        accumulation: int = 1,
        captured: bool = True,
        kept: int = 1024,
        norms: bool = False,
    ) -> None:
        if accumulation < 1 or kept < 2:
            raise UsageError("a step takes at least one call, and keeps at least two losses")
        if clip is not None and not clip > 0:
            raise UsageError(f"clip must be positive, or None, not {clip}")
        self.optimizer, self.accumulation, self.clip = optimizer, accumulation, clip
        self._forward, self._captured, self._norms = forward, captured, norms
        self._device: Device = optimizer.parameters[0].tensor.device
        self._inputs: list[Tensor] = []
        self._programs: dict[str, Program] = {}
        self._log = LossLog(self._device, kept)
        self._recent: deque[int] = deque(maxlen=_AHEAD)
        #: Calls since the last step, and what they are weighted with.
        self.pending = 0
        self._weight_value = 1.0
        if accumulation > 1:
            self._weight = Tensor.from_numpy(self._device, np.ones(1, np.float32))
            self._sums = Tensor.from_numpy(self._device, np.zeros(2, np.float32))

    def __call__(self, *arrays: npt.NDArray[Any], weight: float = 1.0) -> bool:
        """Queue the work for one batch; returns whether the optimizer took a step.

        Args:
            arrays: the inputs of ``forward``, of the shapes and types of the first call.
            weight: of this batch within its step; positive.

        Raises:
            UsageError: arrays of other shapes or types than at first.
        """
        if not weight > 0:
            raise UsageError(f"the weight of a batch must be positive, not {weight}")
        if len(self._recent) == _AHEAD:
            self._device.wait(self._recent[0])
        self._give(arrays)
        if self.accumulation == 1:
            self._run("step", self._step)
            self._log.submitted(self._device.submitted)
            return True
        if weight != self._weight_value:
            self._weight.write(np.array([weight], np.float32))
            self._weight_value = weight
        if not self._programs and not self.pending:
            self._prepare()
        self._run("part", self._part)
        self.pending += 1
        if self.pending == self.accumulation:
            self.finish()
            return True
        return False

    def finish(self) -> bool:
        """Take the step of the calls since the last one, fewer than ``accumulation``; returns whether there were any."""
        if not self.pending:
            return False
        self._run("end", self._end)
        self._log.submitted(self._device.submitted)
        self.pending = 0
        return True

    def losses(self, *, wait: bool = True) -> npt.NDArray[np.float32]:
        """The losses, one a step, since the last call; without ``wait`` those of the steps that are done by now."""
        return self.figures(wait=wait)[:, 0]

    def figures(self, *, wait: bool = True) -> npt.NDArray[np.float32]:
        """Losses, and norms of the gradients before clipping, f32 [steps, 2], since the last call of this or :meth:`losses`.

        Norms are NaN where they are not measured: without clipping, accumulation and ``norms``.
        """
        return self._log.read(wait=wait)

    def seconds(self) -> float | None:
        """Device time of the last step, all its calls like the last one; None where the device has no clock, or its work is
        not captured. To be asked for after :meth:`losses`, which waits.
        """
        calls = {"part": self.accumulation}
        found = [(program.seconds(), calls.get(name, 1)) for name, program in self._programs.items()]
        known = [seconds * times for seconds, times in found if seconds is not None]
        return sum(known) if found and len(known) == len(found) else None

    def measure(self, *inputs: tuple[tuple[int, ...], str]) -> int:
        """Bytes of device memory that calls with inputs of these shapes and types take: them, all intermediates, and with
        accumulation the gradients. Nothing is run, and none of it is allocated.

        Raises:
            UsageError: the step has been called already.
            OutOfDeviceMemoryError: a tensor would be larger than one buffer of the device may be.
        """
        if self._inputs:
            raise UsageError("a step is measured before its first call")
        with measuring(self._device):
            self._inputs = [Tensor.empty(self._device, shape, dtype) for shape, dtype in inputs]
            total = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in self._inputs)
        try:
            if self.accumulation == 1:
                with measuring(self._device) as arena:
                    self._step()
                return total + arena.nbytes
            self._prepare(measured=True)
            kept = [p.tensor.grad for p in self.optimizer.parameters if p.tensor.grad is not None]
            total += sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in kept)
            for work in (self._part, self._end):
                with measuring(self._device) as arena:
                    work()
                total += arena.nbytes
            return total
        finally:
            self._inputs = []
            self._forget()

    @property
    def nbytes(self) -> int:
        """Device memory that the captured work takes for its intermediates; 0 before the first call."""
        return sum(program.nbytes for program in self._programs.values())

    @property
    def commands(self) -> int:
        """Kernel runs and copies of one call, and those of its step."""
        return sum(program.commands for program in self._programs.values())

    def _give(self, arrays: tuple[npt.NDArray[Any], ...]) -> None:
        if not self._inputs:
            self._inputs = [Tensor.from_numpy(self._device, array) for array in arrays]
            self._types = [(np.shape(array), np.asarray(array).dtype) for array in arrays]
            return
        given = [(np.shape(array), np.asarray(array).dtype) for array in arrays]
        if given != self._types:
            raise UsageError(f"a step was captured for inputs {self._types}; these are {given}")
        for tensor, array in zip(self._inputs, arrays, strict=True):
            tensor.write(array)

    def _run(self, name: str, work: Callable[[], None]) -> None:
        if self._captured:
            program = self._programs.get(name)
            if program is None:
                with self._device.capture(timed=True) as program:
                    work()
                self._programs[name] = program
            program.run()
        else:
            work()
            self._device.flush()
        self._recent.append(self._device.submitted)

    def _forget(self) -> None:
        self.optimizer.zero_grad()

    def _step(self) -> None:
        """A whole step. Gradients are made anew, and belong to the program."""
        self._forget()
        with GradientTape() as tape:
            loss = self._forward(*self._inputs)
        tape.backward(loss)
        measured = self.clip is not None or self._norms
        factor = ops.gradient_factor(self._table(), self.clip) if measured else None
        self.optimizer.step(factor if self.clip is not None else None)
        self._log.note(loss, factor=factor)
        self._forget()

    def _prepare(self, *, measured: bool = False) -> None:
        """Give the parameters that the loss depends on gradients that outlive a program, all zero."""
        self._forget()
        # Which these are shows when the work is gone through; it is not done.
        with measuring(self._device), GradientTape() as tape:
            tape.backward(self._forward(*self._inputs), self._weight)
        for parameter in self.optimizer.parameters:
            tensor = parameter.tensor
            if tensor.grad is not None and not measured:
                tensor.grad = Tensor.from_numpy(self._device, np.zeros(tensor.shape, np.float32))

    def _part(self) -> None:
        with GradientTape() as tape:
            loss = self._forward(*self._inputs)
        tape.backward(loss, self._weight)
        ops.gather_loss(loss, self._weight, self._sums)

    def _end(self) -> None:
        factor = ops.gradient_factor(self._table(), self.clip, self._sums.rows(1, 2))
        self.optimizer.step(factor, clear=True)
        self._log.note(None, self._sums, factor)

    def _table(self) -> ops.SlotTable:
        found = [p.tensor.grad for p in self.optimizer.parameters if p.tensor.grad is not None]
        return ops.SlotTable([ops.Slot(gradient, gradient) for gradient in found])
