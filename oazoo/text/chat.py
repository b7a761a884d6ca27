"""Chat templates: from a list of messages to the prompt text that a model was trained on."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from oazoo.errors import TokenizerError, UsageError
from oazoo.text.sandbox import BoundedEnvironment, Budget, TemplateLimitError

#: The longest published templates have about 30 thousand characters.
MAX_TEMPLATE_CHARS = 1 << 18
ROLES = ("system", "user", "assistant", "tool")

Message = dict[str, str]


class ChatTemplate:
    """A jinja2 chat template in the Hugging Face convention.

    ``source`` comes from a model file and is not trusted: it runs in a sandbox, and within bounds of steps,
    memory and time (see :mod:`oazoo.text.sandbox`). ``tokens`` are the strings it may use, such as
    ``bos_token`` and ``eos_token``. Raises :class:`TokenizerError` when the source is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TokenizerError(
                f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read"
            )
        self.source = source
        self._tokens = dict(tokens or {})
        self._environment = BoundedEnvironment(_refuse)
        self._lock = threading.Lock()
        try:
            self._template = self._environment.load(source)
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, MemoryError):
            raise TokenizerError("the chat template is nested too deeply") from None
        except Exception as error:
            raise TokenizerError(f"the chat template cannot be compiled: {_detail(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        ``messages`` are mappings with ``role`` (system, user, assistant, tool) and ``content`` (str). With
        ``add_generation_prompt`` the text ends where the assistant is to speak. ``variables`` are further
        names that the template may ask for. Raises :class:`UsageError` for messages that are none,
        :class:`TokenizerError` when the template refuses the conversation, fails, or goes past its bounds.
        """
        values: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **(variables or {}),
            "messages": check_messages(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            self._environment.budget = Budget()
            try:
                return self._template.render(values)
            except TokenizerError:
                raise
            except TemplateLimitError as error:
                raise TokenizerError(f"the chat template was stopped: {error}") from error
            except jinja2.exceptions.SecurityError as error:
                raise TokenizerError(
                    f"the chat template was stopped: it does what templates may not: {_detail(error)}"
                ) from error
            except (RecursionError, MemoryError) as error:
                raise TokenizerError(f"the chat template was stopped: {_detail(error)}") from None
            except Exception as error:
                raise TokenizerError(f"the chat template failed: {_detail(error)}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as plain dictionaries of role and content; :class:`UsageError` says which one is none."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of {'role': …, 'content': …}")
    if not messages:
        raise UsageError("there are no messages: a conversation needs at least one")
    checked: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(
                f"message {number} is a {type(message).__name__}, not {{'role': …, 'content': …}}"
            )
        if message.get("role") not in ROLES:
            raise UsageError(
                f"message {number} has the role {message.get('role')!r}; use one of {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str):
            raise UsageError(f"message {number} has no text: 'content' must be a str")
        unknown = set(message) - {"role", "content", "name"}
        if unknown:
            raise UsageError(
                f"message {number} has fields that are not supported: {', '.join(map(str, unknown))}"
            )
        if not isinstance(message.get("name", ""), str):
            raise UsageError(f"message {number} has a 'name' that is not a str")
        checked.append({str(key): str(value) for key, value in message.items()})
    return checked


def _refuse(message: str) -> None:
    raise TokenizerError(f"the chat template refuses this conversation: {str(message)[:500]}")


def _detail(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text or type(error).__name__
