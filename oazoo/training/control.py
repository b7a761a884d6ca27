"""What a program outside a training loop may ask of it: pause, resume, stop, a checkpoint, other settings.

Requests come from any thread and are answered at safe points, between two steps, in the thread of the loop.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from oazoo.errors import UsageError

#: Settings that may change while a run goes on; each must be a number above 0 (weight decay: or 0).
CHANGEABLE = ("lr", "weight_decay", "validate_every", "checkpoint_every")


@dataclass(frozen=True)
class Requests:
    """What was asked for since the last safe point."""

    stop: bool = False
    checkpoint: bool = False
    changes: Mapping[str, float] = field(default_factory=dict)


class TrainingControl:
    """The handle by which a user interface steers a run.

    >>> control = TrainingControl()
    >>> threading.Thread(target=lambda: trainer.fit()).start()
    >>> control.pause(); control.change(lr=1e-4); control.resume()
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._stop = False
        self._checkpoint = False
        self._changes: dict[str, float] = {}

    @property
    def paused(self) -> bool:
        """Whether a pause is asked for."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """Whether the run is asked to end."""
        return self._stop

    def pause(self) -> None:
        """Hold the run at its next safe point."""
        self._set(_paused=True)

    def resume(self) -> None:
        """Let a held run go on."""
        self._set(_paused=False)

    def stop(self) -> None:
        """End the run at its next safe point, paused or not; what it has is saved."""
        self._set(_stop=True)

    def checkpoint(self) -> None:
        """Save a checkpoint at the next safe point, paused or not."""
        self._set(_checkpoint=True)

    def change(self, **settings: float) -> None:
        """Change settings at the next safe point.

        Args:
            settings: ``lr`` (then it follows no schedule any more), ``weight_decay``; ``validate_every`` and
                ``checkpoint_every`` in steps.

        Raises:
            UsageError: an unknown setting, or a value that it cannot have.
        """
        for name, value in settings.items():
            if name not in CHANGEABLE:
                raise UsageError(f"{name!r} cannot be changed while training; {', '.join(CHANGEABLE)} can")
            whole = name.endswith("_every")
            if not 0 <= value < float("inf") or (value == 0 and name != "weight_decay"):
                raise UsageError(f"{name} cannot be {value}")
            if whole and value != int(value):
                raise UsageError(f"{name} is a number of steps, not {value}")
        with self._changed:
            self._changes |= settings
            self._changed.notify_all()

    def _set(self, **values: bool) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()

    def answer(self, held: Callable[[bool], None] | None = None) -> Requests:
        """Called by the loop at a safe point: what is asked for, at once; while paused, when there is something.

        ``held`` is told when a pause begins (True) and when it ends (False). A pause ends by ``resume``, ``stop``, or for as
        long as a checkpoint or a change takes.
        """
        with self._changed:
            if self._paused and not self._waiting():
                if held is not None:
                    held(True)
                # With a time limit, so that Ctrl-C is answered on every platform.
                while self._paused and not self._waiting():
                    self._changed.wait(0.2)
                if held is not None:
                    held(False)
            requests = Requests(self._stop, self._checkpoint, self._changes)
            self._checkpoint, self._changes = False, {}
            return requests

    def _waiting(self) -> bool:
        return self._stop or self._checkpoint or bool(self._changes)


@contextmanager
def stop_on_signals(control: TrainingControl, notify: Callable[[str], None]) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM stop the run at its next safe point, with everything saved; a second one ends it at once.

    Only in the main thread, where signals can be handled; elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = [signal.SIGINT, signal.SIGTERM]
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def handle(number: int, frame: FrameType | None) -> None:
        for kind in kinds:
            signal.signal(kind, before[kind])
        control.stop()
        notify("stopping after this step; what was learned is saved (once more: end at once, without saving)")

    for kind in kinds:
        signal.signal(kind, handle)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])
