"""A conversation that keeps the model's memory of it from turn to turn."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from oazoo.errors import GenerationError
from oazoo.generation.engine import TextStream
from oazoo.generation.protocol import Session
from oazoo.generation.sampling import SamplingSettings
from oazoo.generation.text_model import TextModel
from oazoo.text import ChatTemplate

#: The least room a session is made with; it doubles as the conversation grows.
_LEAST_ROOM = 1024


class ChatSession:
    """Messages back and forth with one model.

    Each turn the whole conversation goes through the chat template; of its ids the model reads only those
    after the first difference from what it has read before. The answers are the same as if it read everything
    again.

    Example::

        with ChatSession(model, system="Be brief.", temperature=0) as chat:
            for piece in chat.send("Hello!"):
                print(piece, end="")
    """

    def __init__(
        self,
        model: TextModel,
        *,
        system: str | None = None,
        template: ChatTemplate | None = None,
        allow_special: bool = True,
        **settings: Any,
    ) -> None:
        self.model = model
        self.settings = SamplingSettings.make(model.generation, **settings)
        self.messages: list[dict[str, str]] = []
        self._template = template
        self._allow_special = allow_special
        self._session: Session | None = None
        self._capacity = 0
        self._read: list[int] = []  # the ids whose memory the session holds
        self._busy = False
        self.reset(system)
        # Without a template, or with one that cannot do it, say so now and not after the first message.
        model.encode_messages([*self.messages, {"role": "user", "content": "Hi"}], template=template)

    def reset(self, system: str | None = None) -> None:
        """Start again, with another system message or none. The model's memory is kept for what is equal
        again.
        """
        self._check_idle()
        self.messages = [{"role": "system", "content": system}] if system else []

    def send(self, text: str) -> TextStream:
        """Say something; the answer as a stream.

        The message and the answer join :attr:`messages` when the stream ends; of a cancelled answer what
        there was, and when there was nothing the message is taken back. Raises :class:`GenerationError` for
        an empty message and when the conversation no longer fits the context.
        """
        self._check_idle()
        if not text.strip():
            raise GenerationError("the message is empty: there is nothing to answer")
        messages = [*self.messages, {"role": "user", "content": text}]
        ids, _ = self.model.prompt_ids(
            messages=messages, template=self._template, allow_special=self._allow_special
        )
        max_tokens = self.model.room_for(len(ids), self.settings.max_tokens)
        session = self._session_for(len(ids) + max_tokens)
        reused = self._common_prefix(ids)
        if reused < session.position:
            session.truncate(reused)
            reused = session.position  # a model with a running state may have gone back further
        self._busy = True
        self.messages = messages
        stream = self.model.run(
            session,
            ids,
            self.settings,
            max_tokens=max_tokens,
            continues=False,
            reused=reused,
            release=lambda used, clean: self._end_turn(used, clean, stream),
        )
        return stream

    def _common_prefix(self, ids: Sequence[int]) -> int:
        """How many of ``ids`` the session holds. One at least is left to read: its logits are needed."""
        count = 0
        for new, old in zip(ids[:-1], self._read, strict=False):
            if new != old:
                break
            count += 1
        return count

    def _session_for(self, tokens: int) -> Session:
        """The session, made anew with more room when ``tokens`` do not fit the present one."""
        if self._session is not None and tokens <= self._capacity:
            return self._session
        self._drop()
        longest = self.model.model.max_positions
        # Where more room costs no memory, all of it is taken at once: a new session would read everything again.
        room = longest if getattr(self.model.model, "constant_state", False) else _LEAST_ROOM
        while room < tokens:
            room *= 2
        self._capacity = min(room, longest)
        self._session = self.model.model.new_session(self._capacity)
        return self._session

    def _end_turn(self, session: Session, clean: bool, stream: TextStream) -> None:
        self._busy = False
        result = stream.result
        if clean:
            self._read = [*result.prompt_ids, *result.token_ids][: session.position]
        else:  # interrupted inside a step: what the session holds is not known
            self._drop()
        if result.text or result.finish_reason != "cancelled":
            self.messages = [*self.messages, {"role": "assistant", "content": result.text}]
        else:
            self.messages = self.messages[:-1]

    def _check_idle(self) -> None:
        if self._busy:
            raise GenerationError("the answer before has not ended: read its stream to the end, or close it")

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session, self._capacity, self._read = None, 0, []

    def close(self) -> None:
        """Give the model's memory back."""
        self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
