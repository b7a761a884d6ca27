"""TextModel: a language model with its tokenizer and chat template. This is what ``oazoo.load`` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from oazoo.errors import GenerationError, TokenizerError, UsageError
from oazoo.generation.engine import TextStream
from oazoo.generation.protocol import LanguageModel, Session
from oazoo.generation.result import GenerationResult, Timings
from oazoo.generation.sampling import Sampler, SamplingSettings
from oazoo.text import BaseTokenizer, ChatTemplate, StreamDecoder
from oazoo.text.chat import ROLES, check_messages
from oazoo.text.plain import PlainText
from oazoo.text.streaming import ByteStreamDecoder
from oazoo.text.vocabulary import listed_ids, tokenizer_of

#: Length limit of an answer when none is asked for.
DEFAULT_MAX_TOKENS = 512

Messages = Sequence[Mapping[str, Any]]


def _array(ids: npt.ArrayLike) -> npt.NDArray[Any]:
    """Token ids as an array; :class:`UsageError` for rows of unequal lengths."""
    try:
        return np.asarray(ids)
    except ValueError:
        raise UsageError("token ids must be a list, or rows of equal lengths") from None


class TextModel:
    """A model that takes and gives text.

    ``model`` computes; ``tokenizer`` and ``chat_template`` (its jinja2 source) may be missing, then only ids,
    or only raw prompts, can be used. ``generation`` are the model's own settings: ``eos_ids``, and defaults
    for what :class:`SamplingSettings` has. ``info`` is told on (name, path, ``load_s`` …); :attr:`config` is
    its ``config``.

    Example::

        model = oazoo.load("smollm2-135m-instruct")
        print(model.generate("What is the capital of France?", temperature=0).text)
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: BaseTokenizer | None = None,
        chat_template: str | None = None,
        generation: Mapping[str, Any] | None = None,
        info: Mapping[str, Any] | None = None,
        *,
        tokens: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.generation = dict(generation or {})
        self.info = dict(info or {})
        self._tokenizer = tokenizer
        own = tokenizer.eos_ids if tokenizer is not None else ()
        listed = (i for i in listed_ids(self.generation.get("eos_ids")) if isinstance(i, int))
        self.eos_ids: frozenset[int] = frozenset(own).union(listed)
        self._tokens = {k: v for k, v in (tokens or {}).items() if isinstance(v, str)}
        self._template_source = chat_template
        self._template: ChatTemplate | None = None

    @classmethod
    def from_assets(
        cls,
        model: LanguageModel,
        assets: Mapping[str, bytes],
        generation: Mapping[str, Any] | None = None,
        tokens: Mapping[str, Any] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Self:
        """A text model from what a model file carries.

        ``assets`` may hold a tokenizer (``oazoo.text.vocabulary.TOKENIZER_ASSETS``) and ``chat_template.jinja``;
        ``generation`` the ids ``bos_id`` and ``eos_ids`` besides sampling defaults. Raises
        :class:`TokenizerError` when an asset is damaged.
        """
        settings = dict(generation or {})
        tokenizer = tokenizer_of(assets, settings)
        template = None
        if "chat_template.jinja" in assets:
            try:
                template = assets["chat_template.jinja"].decode("utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"the chat template is not UTF-8: {error}") from None
        return cls(model, tokenizer, template, settings, info, tokens=tokens)

    # ------------------------------------------------------------------------------------------------ parts

    @property
    def tokenizer(self) -> BaseTokenizer:
        """The tokenizer; :class:`TokenizerError` when the model has none."""
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self.name} has no tokenizer, so it takes no text. Convert it again from a folder that has its "
                f"tokenizer.json, or give token ids: generate(ids=[…])."
            )
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model can take text."""
        return self._tokenizer is not None

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template, or None; compiled when first asked for, so a broken one does not bar raw
        prompts.
        """
        if self._template is None and self._template_source is not None:
            self._template = self.make_template(self._template_source)
        return self._template

    @property
    def config(self) -> Any:
        """The architecture's typed configuration, as the loader put it into ``info``."""
        return self.info.get("config")

    @property
    def name(self) -> str:
        """What to call the model in a message."""
        return str(self.info.get("name") or "the model")

    def make_template(self, source: str) -> ChatTemplate:
        """A chat template for this model's vocabulary: it knows ``bos_token``, ``eos_token`` and the like."""
        tokens = dict(self._tokens)
        tokenizer = self._tokenizer
        if tokenizer is not None:
            first_eos = next(iter(tokenizer.eos_ids), min(self.eos_ids, default=None))
            for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", first_eos)):
                token = tokenizer.token(token_id) if token_id is not None else None
                if token is not None:
                    tokens.setdefault(name, token)
        return ChatTemplate(source, tokens)

    # ---------------------------------------------------------------------------------------------- prompts

    def encode_messages(
        self,
        messages: Messages,
        *,
        template: ChatTemplate | None = None,
        add_generation_prompt: bool = True,
        allow_special: bool = True,
    ) -> list[int]:
        """The prompt ids of a conversation, through the chat template.

        Names of control tokens become those tokens, and one that the vocabulary lacks is an error, unless the
        assistant itself has written it. With ``allow_special=False`` that holds for what the template writes
        only; in the messages such names are plain text, so that nobody can end a turn from inside it. A
        beginning token comes first exactly once.
        """
        template = template or self.chat_template
        if template is None:
            raise TokenizerError(
                f"{self.name} has no chat template, so it cannot be talked to. Give one with --template FILE "
                f"(template=…), or continue a text as it is with 'oazoo generate --raw' (raw=True)."
            )
        checked = check_messages(messages)
        tokenizer = self.tokenizer
        plain = PlainText(tokenizer.special_tokens if not allow_special else ())
        hidden = [{**message, "content": plain.hide(message["content"])} for message in checked]
        authors = ("assistant",) if allow_special else ROLES
        said = (tokenizer.control_tokens_in(m["content"]) for m in checked if m["role"] in authors)
        ignored: set[str] = set().union(*said)
        for message in checked if allow_special else ():
            # Before the template has put its own text around it, so that the place told is one in the message.
            tokenizer.check_special(message["content"], ignore=ignored)
        text = template.render(hidden, add_generation_prompt=add_generation_prompt)
        tokenizer.check_special(text, ignore=ignored)
        return plain.encode(text, tokenizer)

    def encode_text(self, text: str, *, allow_special: bool = True) -> list[int]:
        """The prompt ids of a text that is to be continued as it is."""
        if not text:
            raise GenerationError("the prompt is empty: there is nothing to continue. Give some text.")
        if allow_special:
            self.tokenizer.check_special(text)
        return self.tokenizer.encode_prompt(text, allow_special=allow_special)

    def prompt_ids(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        ids: Sequence[int] | None = None,
        system: str | None = None,
        raw: bool = False,
        template: ChatTemplate | None = None,
        allow_special: bool = True,
    ) -> tuple[list[int], bool]:
        """The prompt's ids, and whether the answer continues the prompt's text (as against being a text of
        its own).

        Exactly one of ``prompt``, ``messages`` and ``ids`` must be given. A ``prompt`` is a user's message
        when there is a chat template, and a text to continue when there is none or with ``raw``.
        """
        if sum(x is not None for x in (prompt, messages, ids)) != 1:
            raise UsageError("give exactly one of a prompt, messages and ids")
        if ids is not None:
            return self._checked(ids), True
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"a prompt must be a str, not {type(prompt).__name__}")
        template = template or (None if raw else self.chat_template)
        if messages is None and (raw or template is None):
            if system is not None:
                why = "with --raw" if raw else f"because {self.name} has no chat template"
                raise UsageError(f"a system message cannot be used {why}")
            return self._checked(self.encode_text(prompt or "", allow_special=allow_special)), True
        if raw:
            raise UsageError("messages cannot be raw: they go through the chat template")
        if messages is None:
            if not (prompt or "").strip():
                raise GenerationError("the prompt is empty: there is nothing to answer. Give some text.")
            messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        chosen = self.encode_messages(messages, template=template, allow_special=allow_special)
        return self._checked(chosen), False

    def _checked(self, ids: Sequence[int] | npt.NDArray[Any]) -> list[int]:
        array = _array(ids)
        if array.ndim != 1:
            raise UsageError(
                f"token ids must be one list of integers; these have the shape {list(array.shape)}"
            )
        if not array.size:
            raise GenerationError("the prompt is empty: it has no tokens")
        if array.dtype.kind not in "iu":
            raise UsageError(f"token ids must be integers, not {array.dtype}")
        self._check_range(array)
        return [int(i) for i in array]

    def _check_range(self, ids: npt.NDArray[Any]) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.model.vocab_size:
            raise GenerationError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of {self.model.vocab_size}: the "
                f"tokenizer and the model do not belong together"
            )

    # ------------------------------------------------------------------------------------------- generation

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        ids: Sequence[int] | None = None,
        system: str | None = None,
        raw: bool = False,
        template: ChatTemplate | str | None = None,
        allow_special: bool = True,
        **settings: Any,
    ) -> TextStream:
        """An iterator over the pieces of the answer as they come; its ``result`` is complete at the end.

        Arguments as for :meth:`generate`. Everything is checked before this returns; the model runs as it is
        read.
        """
        made = SamplingSettings.make(self.generation, **settings)
        chosen, continues = self.prompt_ids(
            prompt,
            messages=messages,
            ids=ids,
            system=system,
            raw=raw,
            template=self.make_template(template) if isinstance(template, str) else template,
            allow_special=allow_special,
        )
        max_tokens = self.room_for(len(chosen), made.max_tokens)
        session = self.model.new_session(len(chosen) + max_tokens)
        return self.run(session, chosen, made, max_tokens=max_tokens, continues=continues)

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        ids: Sequence[int] | None = None,
        system: str | None = None,
        raw: bool = False,
        template: ChatTemplate | str | None = None,
        allow_special: bool = True,
        **settings: Any,
    ) -> GenerationResult:
        """Answer, or continue, a prompt.

        ``prompt`` is a user's message if the model has a chat template (or ``template`` is given); else, or
        with ``raw``, a text to continue. In its place: ``messages``, a list of ``{"role": …, "content": …}``,
        or token ``ids``. ``system`` is put before the conversation. ``template`` replaces the model's own (a text:
        its jinja2 source). ``allow_special=False`` reads names of control tokens in a raw prompt as plain text.
        ``settings`` are those of :class:`SamplingSettings`.

        Raises :class:`GenerationError` (an empty prompt, one too long for the context, logits that are not
        finite), :class:`TokenizerError` (no tokenizer or template, an unknown special token) or
        :class:`UsageError` (settings that mean nothing), the model not having run except in the case of the
        logits.
        """
        with self.stream(
            prompt, messages=messages, ids=ids, system=system, raw=raw, template=template,
            allow_special=allow_special, **settings,
        ) as stream:  # fmt: skip
            for _ in stream:
                pass
            return stream.result

    def room_for(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """How many tokens may be made after a prompt; :class:`GenerationError` when they do not fit the
        context.
        """
        context = self.model.max_positions
        room = context - prompt_tokens
        if room < 1:
            raise GenerationError(
                f"the prompt has {prompt_tokens} tokens, but {self.name} has a context of {context}, which must also hold "
                f"the answer. Shorten the prompt by at least {1 - room} tokens."
            )
        if max_tokens is not None and max_tokens > room:
            raise GenerationError(
                f"the prompt has {prompt_tokens} tokens and the answer may have {max_tokens}, together "
                f"{prompt_tokens + max_tokens}, but {self.name} has a context of {context}. Use --max-tokens {room} or "
                f"less, or a shorter prompt."
            )
        return min(room, DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens

    def run(
        self,
        session: Session,
        ids: Sequence[int],
        settings: SamplingSettings,
        *,
        max_tokens: int,
        continues: bool,
        reused: int = 0,
        release: Callable[[Session, bool], None] | None = None,
    ) -> TextStream:
        """The stream of an answer in a given session that holds the first ``reused`` of ``ids`` already."""
        result = GenerationResult(
            prompt_ids=list(ids),
            reused_tokens=reused,
            timings=Timings(load_s=float(self.info.get("load_s") or 0.0)),
        )
        special_stops: list[int] = []
        decoder: StreamDecoder = ByteStreamDecoder(lambda *_: None)  # ids only: no text comes out
        if self._tokenizer is not None:
            decoder = self._tokenizer.stream(after=ids if continues else ())
            known = self._tokenizer.special_tokens
            special_stops = [known[text] for text in settings.stop if text in known]
        return TextStream(
            session,
            Sampler(settings),
            decoder,
            result,
            max_tokens=max_tokens,
            eos_ids=self.eos_ids,
            stop_ids=special_stops,
            release=release,
        )

    def logits(self, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Logits after each token: ids [tokens] or [batch, tokens] → float32 [..., tokens, vocabulary].

        Each row is a sequence of its own that starts at position 0.
        """
        array = _array(ids)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
            raise UsageError(
                f"ids must be whole numbers of shape [tokens] or [batch, tokens] and not empty; these are {array.dtype} "
                f"of shape {list(array.shape)}"
            )
        self._check_range(array)
        if array.shape[-1] > self.model.max_positions:
            raise GenerationError(
                f"{array.shape[-1]} tokens do not fit the context of {self.model.max_positions} that {self.name} has"
            )
        rows = array.astype(np.int32)
        if rows.ndim == 1:
            return self.model.logits(rows)
        result = np.empty((*rows.shape, self.model.vocab_size), np.float32)
        for row, place in zip(rows, result, strict=True):
            place[:] = self.model.logits(row)
        return result

    def close(self) -> None:
        """Give the model's device memory back, if it has a way to."""
        close = getattr(self.model, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
