"""Lines of JSON as training examples: which ids, and which of them are to be learned.

A line is one of ``{"messages": [{"role": …, "content": …}, …]}``, ``{"prompt": …, "completion": …}`` and ``{"text": …}``.
Of a conversation only what the assistant says is learned, its end token included; of a prompt and its completion the
completion and the end token; of a text everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from oazoo.errors import TokenizerError, UsageError
from oazoo.formats.strict_json import load_object
from oazoo.text import BaseTokenizer, ChatTemplate
from oazoo.text.chat import check_messages
from oazoo.text.files import MAX_LINE_BYTES
from oazoo.text.plain import PlainText

#: What becomes of names of control tokens (``<|im_end|>``) in the data: an error, plain text, or those tokens.
Special = Literal["refuse", "plain", "tokens"]

FORMS = '{"messages": [{"role": …, "content": …}, …]}, {"prompt": …, "completion": …} or {"text": …}'
#: Keys that other trainers read text from: a line that has one means more than we would learn from it.
_TEXT_KEYS = frozenset(
    {"tools", "functions", "documents", "system", "instruction", "input", "output", "response"}
)
_TEXT_KEYS |= {"question", "answer", "conversations", "chosen", "rejected", "images"}


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it is a target; ``whole`` if it must not be cut in two."""

    ids: list[int]
    targets: list[bool] | None
    whole: bool


class ExampleReader:
    """Turns lines into examples.

    Args:
        tokenizer: of the model.
        template: its chat template; without one, conversations are refused and prompts are continued as they are.
        eos_id: ends every document; None if the vocabulary has no such token.
        special: see :data:`Special`.
        raw: leave the template aside: a completion continues the prompt's text.
    """

    def __init__(
        self,
        tokenizer: BaseTokenizer,
        template: ChatTemplate | None,
        eos_id: int | None,
        special: Special = "refuse",
        raw: bool = False,
    ) -> None:
        self.tokenizer, self.eos_id, self.special = tokenizer, eos_id, special
        self.template = None if raw else template
        self._ends = {*tokenizer.eos_ids, *([] if eos_id is None else [eos_id])}
        self._raw = raw
        self._plain = PlainText(() if special == "tokens" else tokenizer.special_tokens)

    def read(self, line: bytes, where: str) -> list[Example]:
        """The examples of a line: one, or one for each answer where a template changes earlier turns as it goes on.

        Raises:
            OazooError: the line cannot be used. The message does not repeat ``where``, which only JSON errors have.
        """
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"is not UTF-8 text: byte {error.start} of the line is wrong") from None
        entry = load_object(text, where, limit=MAX_LINE_BYTES)
        forms = [
            form for form in (("messages",), ("prompt", "completion"), ("text",)) if set(form) & set(entry)
        ]
        if len(forms) != 1 or not set(forms[0]) <= set(entry):
            raise UsageError(f"has the keys {_names(entry)}; a line must be {FORMS}")
        foreign = sorted(_TEXT_KEYS & set(entry))
        if foreign:
            raise UsageError(f"has the key {foreign[0]!r}, which would be left out; a line must be {FORMS}")
        if forms[0] == ("messages",):
            return self._conversation(entry["messages"])
        for key in forms[0]:
            if not isinstance(entry[key], str):
                raise UsageError(f"{key!r} must be a text")
        if forms[0] == ("text",):
            return [self._text(entry["text"])]
        return self._completion(entry["prompt"], entry["completion"])

    def check_special(self, text: str) -> None:
        """Refuse the name of a control token, if such are to be refused."""
        if self.special != "refuse":
            return
        found = sorted(self.tokenizer.control_tokens_in(text) & set(self.tokenizer.special_tokens))
        if found:
            raise UsageError(
                f"has the name of the control token {found[0]}. Has a chat template been applied already? Say how it is "
                "meant: --special tokens reads such names as those tokens, --special plain as plain text"
            )

    # ------------------------------------------------------------------------------------------------ the forms

    def _text(self, text: str) -> Example:
        if not text:
            raise UsageError("has an empty text: there is nothing to learn")
        self.check_special(text)
        ids = self.tokenizer.encode_prompt(text, allow_special=self.special == "tokens")
        return Example(self._ended(ids), None, False)

    def _completion(self, prompt: str, completion: str) -> list[Example]:
        if not completion:
            raise UsageError("has an empty completion: there is nothing to learn")
        if self.template is not None:
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return self._conversation(turns)
        for text in (prompt, completion):
            self.check_special(text)
        plain = self._plain
        texts = [(plain.hide(prompt), False), (plain.hide(prompt) + plain.hide(completion), True)]
        ids, targets = self._grown(texts)
        return [self._example(ids, targets)]

    def _conversation(self, messages: Any) -> list[Example]:
        if self.template is None:
            why = "the template is left aside (raw)" if self._raw else "the model has no chat template"
            raise UsageError(f"is a conversation, but {why}")
        checked = check_messages(messages)
        answers = [number for number, message in enumerate(checked) if message["role"] == "assistant"]
        if not answers:
            raise UsageError("has no message of the assistant: there is nothing to learn")
        if answers[0] == 0:
            raise UsageError("begins with the assistant: a message that it answers must come first")
        for message in checked:
            self.check_special(message["content"])
        plain = self._plain
        hidden = [{**message, "content": plain.hide(message["content"])} for message in checked]
        turns = []
        for number in answers:
            before = self.template.render(hidden[:number], add_generation_prompt=True)
            after = self.template.render(hidden[: number + 1], add_generation_prompt=False)
            if not after.startswith(before):
                raise TokenizerError(
                    f"the chat template writes the prompt differently once message {number} has answered it, so what is "
                    "prompt and what is answer cannot be told apart; use another template, or lines of prompt and "
                    "completion without one (--raw)"
                )
            turns.append((before, after))
        goes_on = all(later[0].startswith(earlier[1]) for earlier, later in pairwise(turns))
        groups = [turns] if goes_on else [[turn] for turn in turns]
        examples = []
        for group in groups:
            ids, targets = self._grown(
                [(text, own) for turn in group for text, own in zip(turn, (False, True))]
            )
            examples.append(self._example(ids, targets))
        return examples

    # -------------------------------------------------------------------------------------------------- their ids

    def _grown(self, texts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Ids of texts that each continue the one before, and which are of those marked as targets.

        Where a token would reach across the border, the text is cut there, as it is when a model answers a prompt.
        """
        ids: list[int] = []
        targets: list[bool] = []
        done = ""
        for text, own in texts:
            whole = self._plain.encode(text, self.tokenizer)
            if whole[: len(ids)] == ids:
                new = whole[len(ids) :]
            else:
                new = self._plain.encode(text[len(done) :], self.tokenizer, begins=False)
            ids += new
            targets += self._until_end(new) if own else [False] * len(new)
            done = text
        return ids, targets

    def _until_end(self, ids: Sequence[int]) -> list[bool]:
        """An answer's ids are targets up to its end token; what the template writes behind it is not the model's."""
        last = max((number for number, token in enumerate(ids) if token in self._ends), default=len(ids) - 1)
        return [number <= last for number in range(len(ids))]

    def _example(self, ids: list[int], targets: list[bool]) -> Example:
        last = max((number for number, own in enumerate(targets) if own), default=-1)
        ids, targets = ids[: last + 1], targets[: last + 1]
        ended = self._ended(ids)
        return Example(ended, targets + [True] * (len(ended) - len(ids)), True)

    def _ended(self, ids: list[int]) -> list[int]:
        """Ids with the end token behind them, once."""
        if self.eos_id is None or (ids and ids[-1] in self._ends):
            return ids
        return [*ids, self.eos_id]


def _names(entry: dict[str, Any]) -> str:
    names = ", ".join(repr(name[:40]) for name in list(entry)[:6])
    return names or "none at all"
