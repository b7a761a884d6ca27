"""The loop: read the prompt, then choose a token, hand out its text, feed it back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator
from types import TracebackType
from typing import Self

import numpy as np

from oazoo.generation.protocol import Session
from oazoo.generation.result import FinishReason, GenerationResult
from oazoo.generation.sampling import Sampler
from oazoo.generation.stops import StopMatcher
from oazoo.text import StreamDecoder


class TextStream(Iterator[str]):
    """The pieces of an answer as they come; whole characters, never part of a stop text.

    :attr:`result` fills as the stream is read and is complete once it is exhausted. Leaving early, by
    :meth:`close`, the ``with`` block's end or an exception such as KeyboardInterrupt, gives the session back
    and leaves in :attr:`result` what there was, with the finish reason ``cancelled``.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        decoder: StreamDecoder,
        result: GenerationResult,
        *,
        max_tokens: int,
        eos_ids: Collection[int],
        stop_ids: Collection[int] = (),
        release: Callable[[Session, bool], None] | None = None,
    ) -> None:
        """``session`` holds the first ``result.reused_tokens`` ids of the prompt already.

        ``eos_ids`` end the answer as the model's own end, ``stop_ids`` as the caller's. ``release(session,
        clean)`` is called once at the end; without it the session is closed. ``clean`` tells that the
        session's memory is in order.
        """
        self.result = result
        self._session = session
        self._sampler = sampler
        self._decoder = decoder
        self._matcher = StopMatcher(sampler.settings.stop)
        self._max_tokens = max_tokens
        self._eos_ids = frozenset() if sampler.settings.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(stop_ids)
        self._release = release
        self._history = list(result.prompt_ids)
        self._open = True
        self._pieces = self._run()
        result.seed = sampler.seed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop here. Does nothing when the stream has ended."""
        self._pieces.close()
        self._end(clean=True)

    def _end(self, clean: bool) -> None:
        if not self._open:
            return
        self._open = False
        if self._release is not None:
            self._release(self._session, clean)
        else:
            self._session.close()

    def _run(self) -> Generator[str, None, None]:
        clean = False
        try:
            for piece in self._steps():
                if piece:
                    self.result.text += piece
                    # While the caller holds the piece the session rests: an end here leaves it in order.
                    clean = True
                    yield piece
                    clean = False
            clean = True
        finally:
            self._end(clean)

    def _steps(self) -> Iterator[str]:
        """The text of each step, empty strings included; sets the finish reason at the end."""
        result, timings = self.result, self.result.timings
        start = time.perf_counter()
        ids = np.asarray(result.prompt_ids[result.reused_tokens :], np.int32)
        logits = self._session.prefill(ids)
        timings.prefill_s = time.perf_counter() - start
        timings.prefill_tokens = len(ids)
        token = self._sampler.sample(logits, self._history)
        timings.first_token_s = time.perf_counter() - start
        while True:
            reason = self._reason_to_end(token)
            if reason is None:
                result.token_ids.append(token)
                self._history.append(token)
                yield self._matcher.push(self._decoder.push(token))
                if self._matcher.found is not None:
                    reason = "stop"
                elif len(result.token_ids) >= self._max_tokens:
                    reason = "length"
            if reason is not None:
                yield from self._finish(reason)
                return
            token = self._next_token(token)

    def _reason_to_end(self, token: int) -> FinishReason | None:
        if token in self._eos_ids:
            return "eos"
        return "stop" if token in self._stop_ids else None

    def _finish(self, reason: FinishReason) -> Iterator[str]:
        last = self._matcher.push(self._decoder.flush()) + self._matcher.flush()
        self.result.stop = self._matcher.found
        self.result.finish_reason = reason if self._matcher.found is None else "stop"
        yield last

    def _next_token(self, token: int) -> int:
        start = time.perf_counter()
        logits = self._session.decode(token)
        token = self._sampler.sample(logits, self._history)
        self.result.timings.decode_s += time.perf_counter() - start
        self.result.timings.decode_tokens += 1
        return token
