"""Finding stop texts in a stream, also where they are spread over several pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text on, except a stop text and what follows it.

    What may be the beginning of a stop text is held back until the next pieces decide. Of several stop texts
    the one that begins first counts, so the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take a piece; what can be passed on. Sets :attr:`found` when a stop text is complete."""
        if self.found is not None:
            return ""
        self._held += text
        return self._release(final=False)

    def flush(self) -> str:
        """What is still held back, when no more text will come."""
        return "" if self.found is not None else self._release(final=True)

    def _release(self, final: bool) -> str:
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        keep = len(self._held) if final else self._undecided()
        if hits:
            at, stop = min(hits)
            # A longer stop text that began earlier may still complete; until that is decided, wait.
            if at <= keep or final:
                self.found = stop
                keep = at
        released, self._held = self._held[:keep], "" if self.found else self._held[keep:]
        return released

    def _undecided(self) -> int:
        """Where the longest end of the held text that begins a stop text starts."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for start in range(max(0, len(self._held) - longest), len(self._held)):
            tail = self._held[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return len(self._held)
