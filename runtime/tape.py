"""Reverse-mode differentiation: ops note how to go back, and a tape walks the notes from the loss to the parameters.

An op that has a gradient calls :func:`taped` with its result, its inputs and a rule; the rule stands beside the op. Nothing
is noted while no tape is open, or where no input needs a gradient, so inference pays one comparison an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from oazoo.errors import DeviceError
from oazoo.runtime.tensor import Tensor

#: From the gradient of an op's result, and for each input whether its gradient is wanted, to the inputs' gradients.
Rule = Callable[[Tensor, Sequence[bool]], Sequence[Tensor | None]]

_open: ContextVar[GradientTape | None] = ContextVar("oazoo_gradient_tape", default=None)


@dataclass(frozen=True, slots=True)
class _Note:
    result: Tensor
    inputs: tuple[Tensor | None, ...]
    rule: Rule


class GradientTape:
    """Notes what is computed inside it, so that gradients of the result can be taken.

    Gradients are taken with respect to the tensors whose ``requires_grad`` is true; :meth:`backward` adds to their ``grad``,
    so several calls accumulate. A tape serves one :meth:`backward`; what it kept for it is given back then.

    >>> with GradientTape() as tape:
    ...     loss = cross_entropy(model(x), targets)
    >>> tape.backward(loss)
    """

    def __init__(self) -> None:
        self._notes: list[_Note] = []
        #: Tensors that depend on something with a gradient, by identity; the notes keep them alive.
        self._reached: set[int] = set()
        self._outer: list[GradientTape | None] = []
        self._spent = False

    def __enter__(self) -> Self:
        self._outer.append(_open.get())
        _open.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.set(self._outer.pop())

    def wants(self, tensor: Tensor | None) -> bool:
        """Whether a gradient of ``tensor`` is needed on the way back."""
        return tensor is not None and (tensor.requires_grad or id(tensor) in self._reached)

    def note(self, result: Tensor, inputs: Sequence[Tensor | None], rule: Rule) -> None:
        """Remember how ``result`` came about; called by ops."""
        self._notes.append(_Note(result, tuple(inputs), rule))
        self._reached.add(id(result))

    def backward(self, loss: Tensor, seed: Tensor | None = None) -> None:
        """Add the gradient of ``loss`` to the ``grad`` of every tensor that requires one.

        Args:
            loss: what was computed under this tape; one element, unless ``seed`` is given.
            seed: gradient of something further on with respect to ``loss``, f32 of its shape; 1 if None.

        Raises:
            DeviceError: the loss was not computed under this tape from anything that requires a gradient, it has more than
                one element and no seed, or the tape is spent.
        """
        # An op without a rule never gets here: its result is not reached, and that shows at once.
        from oazoo.runtime.ops.arithmetic import accumulate, copied, fill, summed

        if self._spent:
            raise DeviceError("this tape has gone backward already; open another for the next step")
        if id(loss) not in self._reached:
            raise DeviceError(
                "the loss does not depend on anything that requires a gradient, or was computed outside the tape"
            )
        if seed is None:
            if loss.numel != 1:
                raise DeviceError(
                    f"a loss must be one number, not {list(loss.shape)}: take its mean, or give a seed"
                )
            seed = fill(Tensor.empty(loss.device, loss.shape), 1.0)
        self._spent = True
        notes, self._notes = self._notes, []
        gradients: dict[int, Tensor] = {id(loss): seed}
        with no_grad():
            while notes:
                note = notes.pop()
                gradient = gradients.pop(id(note.result), None)
                if gradient is None:
                    continue
                wanted = [self.wants(tensor) for tensor in note.inputs]
                found = note.rule(gradient, wanted)
                for tensor, part, want in zip(note.inputs, found, wanted, strict=True):
                    if tensor is None or part is None or not want:
                        continue
                    if part.shape != tensor.shape:
                        raise DeviceError(f"a gradient of shape {part.shape} for a tensor of {tensor.shape}")
                    # A rule may hand the gradient on as it is, to several inputs: what is added to must be its own.
                    if part.memory is gradient.memory:
                        part = copied(part) if tensor.requires_grad else part
                    if tensor.requires_grad:
                        tensor.grad = part if tensor.grad is None else accumulate(tensor.grad, part)
                        continue
                    before = gradients.get(id(tensor))
                    gradients[id(tensor)] = part if before is None else summed(before, part)
        self._reached.clear()


def checkpoint(block: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``block(*inputs)``, keeping nothing of what happens inside: the way back computes it once more (arXiv:1604.06174).

    Gradients are those without it, bit by bit: random draws inside are the same the second time.

    Args:
        block: depends on ``inputs`` and on tensors with ``requires_grad``, and on nothing else that needs a gradient.
        inputs: what gradients flow on to.

    Returns:
        What ``block`` returns.
    """
    from oazoo.runtime.random import recorded_draws, replayed_draws

    tape = _open.get()
    if tape is None:
        return block(*inputs)

    def run(wanted: Sequence[bool]) -> tuple[GradientTape, list[Tensor], Tensor]:
        own = [detach(x) for x in inputs]
        for x, want in zip(own, wanted, strict=True):
            x.requires_grad = want
        with GradientTape() as inner:
            return inner, own, block(*own)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        with replayed_draws(draws):
            inner, own, y = run(want)
        inner.backward(y, dy)
        return [x.grad for x in own]

    # The first pass is taped as well, if only for a while: ops compute by parts under a tape, and by fused kernels, which
    # round otherwise, without one.
    with recorded_draws() as draws:
        inner, own, result = run([tape.wants(x) for x in inputs])
    for x, mine in zip(inputs, own, strict=True):
        if result is mine:
            return x
    if id(result) in inner._reached:
        tape.note(result, inputs, back)
    return result


def by_rows(form: Callable[[Tensor, int, int], Tensor], x: Tensor, size: int) -> Tensor:
    """The sum of ``form(x.rows(start, stop), start, stop)`` over stretches of ``size`` rows, keeping one stretch at a time.

    For what is large for all rows at once, such as logits: the way back computes each stretch once more.

    Args:
        form: from some rows of x, and which they are, to a tensor of one shape; it depends on them and on tensors with
            ``requires_grad``, and draws no random numbers.
        x: f32 [rows, …], at least one row.
        size: rows of a stretch.

    Returns:
        A tensor of the shape that ``form`` gives.
    """
    from oazoo.runtime.ops.arithmetic import accumulate
    from oazoo.runtime.ops.elementwise import add

    stretches = [(start, min(start + size, x.shape[0])) for start in range(0, x.shape[0], size)]

    def run(start: int, stop: int, want: bool) -> tuple[GradientTape, Tensor, Tensor]:
        own = x.rows(start, stop)
        own.requires_grad = want
        with GradientTape() as inner:
            return inner, own, form(own, start, stop)

    def back(dy: Tensor, want: Sequence[bool]) -> list[Tensor | None]:
        dx = Tensor.empty(x.device, x.shape) if want[0] else None
        for start, stop in stretches:
            inner, own, y = run(start, stop, want[0])
            inner.backward(y, dy)
            if dx is not None and own.grad is not None:
                accumulate(dx.rows(start, stop), own.grad, 1.0, 0.0)
        return [dx]

    tape = _open.get()
    total: Tensor | None = None
    reached = False
    for start, stop in stretches:
        inner, _, y = run(start, stop, tape is not None and tape.wants(x))
        reached = reached or id(y) in inner._reached
        with no_grad():
            total = y if total is None else add(total, y)
    assert total is not None
    if tape is not None and reached:
        tape.note(total, (x,), back)
    return total


def loss_by_rows(form: Callable[[Tensor, int, int], Tensor], x: Tensor, size: int) -> Tensor:
    """:func:`by_rows` for a sum that is itself the loss that the tape goes back from: nothing is computed twice.

    The gradient of the sum is known to be 1, so each stretch goes back at once: gradients of what ``form`` depends on are
    there when this returns, and that of x is kept.

    Args: as :func:`by_rows`; ``form`` gives one number, f32 [1].

    Returns:
        f32 [1]; :meth:`GradientTape.backward` of it takes no seed, and nothing else may depend on it.
    """
    from oazoo.runtime.ops.arithmetic import accumulate
    from oazoo.runtime.ops.elementwise import add

    tape = _open.get()
    if tape is None or not tape.wants(x):
        return by_rows(form, x, size)
    dx = Tensor.empty(x.device, x.shape)
    total: Tensor | None = None
    for start in range(0, x.shape[0], size):
        stop = min(start + size, x.shape[0])
        own = x.rows(start, stop)
        own.requires_grad = True
        with GradientTape() as inner:
            y = form(own, start, stop)
        inner.backward(y)
        assert own.grad is not None
        with no_grad():
            accumulate(dx.rows(start, stop), own.grad, 1.0, 0.0)
            total = y if total is None else add(total, y)
    assert total is not None
    tape.note(total, (x,), lambda dy, want: [dx])
    return total


def taped(result: Tensor, inputs: Sequence[Tensor | None], rule: Rule) -> Tensor:
    """``result``, noted on the open tape if there is one and any of ``inputs`` needs a gradient."""
    tape = _open.get()
    if tape is not None and any(tape.wants(tensor) for tensor in inputs):
        tape.note(result, inputs, rule)
    return result


def taping(*inputs: Tensor | None) -> bool:
    """Whether a tape is open and any of ``inputs`` needs a gradient: ops then take the way whose parts have rules."""
    tape = _open.get()
    return tape is not None and any(tape.wants(tensor) for tensor in inputs)


def no_gradient(op: str, *inputs: Tensor | None) -> None:
    """Refuse an op that has no gradient where one is needed, at once rather than when the way back misses it.

    Raises:
        DeviceError: a tape is open and one of ``inputs`` needs a gradient.
    """
    if taping(*inputs):
        raise DeviceError(f"{op} has no gradient; compute it outside the tape, or within no_grad()")


@contextmanager
def no_grad() -> Iterator[None]:
    """Note nothing inside."""
    token = _open.set(None)
    try:
        yield
    finally:
        _open.reset(token)


def detach(x: Tensor) -> Tensor:
    """The same values, through which no gradient flows."""
    return x.view(*x.shape)
