"""Conversations: what is read again and what is not, and that it makes no difference to the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oazoo.errors import GenerationError, TokenizerError, UsageError
from oazoo.generation import ChatSession, TextModel
from oazoo.text import Tokenizer


@pytest.fixture
def model(transformer: Any, tokenizer: Tokenizer, chatml: str) -> TextModel:
    transformer.max_positions = 256
    return TextModel(transformer, tokenizer, chatml)


def fresh_answer(model: TextModel, messages: list[dict[str, str]], **settings: Any) -> str:
    return model.generate(messages=messages, **settings).text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reusing_the_prefix_equals_reading_everything_again(model: TextModel, temperature: float) -> None:
    settings: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 12}
    with ChatSession(model, system="the end", **settings) as chat:
        previous: list[int] = []
        for text in ["Hello", "world", "the world"]:
            messages = [*chat.messages, {"role": "user", "content": text}]
            stream = chat.send(text)
            answer = "".join(stream)
            assert answer == fresh_answer(model, messages, **settings)
            assert chat.messages == [*messages, {"role": "assistant", "content": answer}]
            assert stream.result.reused_tokens >= len(previous)
            previous = stream.result.prompt_ids
        session = chat._session
        assert session is not None
        assert session.fed < 256  # type: ignore[attr-defined]  # three turns, read from the start each: more
    assert session.closed == 1  # type: ignore[attr-defined]


def test_only_new_tokens_are_read(model: TextModel) -> None:
    with ChatSession(model, temperature=0, max_tokens=5) as chat:
        first = chat.send("Hello")
        list(first)
        second = chat.send("world")
        list(second)
        result = second.result
        assert result.timings.prefill_tokens == result.prompt_tokens - result.reused_tokens
        assert result.reused_tokens >= first.result.prompt_tokens


def test_reset_with_the_same_system_message_reuses_it(model: TextModel) -> None:
    with ChatSession(model, system="the end", temperature=0, max_tokens=5) as chat:
        list(chat.send("Hello"))
        chat.reset("the end")
        assert chat.messages == [{"role": "system", "content": "the end"}]
        again = chat.send("Hello")
        answer = "".join(again)
        assert again.result.reused_tokens == again.result.prompt_tokens - 1
        assert answer == fresh_answer(model, [*chat.messages[:2]], temperature=0, max_tokens=5)


def test_a_closed_answer_stays_as_far_as_it_came(model: TextModel) -> None:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    with ChatSession(model, **settings) as chat:
        with chat.send("Hello") as stream:
            said = next(stream)
        assert chat.messages[-1] == {"role": "assistant", "content": said}
        messages = [*chat.messages, {"role": "user", "content": "world"}]
        assert "".join(chat.send("world")) == fresh_answer(model, messages, **settings)
        chat.reset()
        chat.send("Hello").close()
        assert chat.messages == []


def test_an_interruption_drops_the_session_and_the_conversation_goes_on(
    recite: Callable[..., Any], tokenizer: Tokenizer, chatml: str
) -> None:
    reciting = recite(0, tokenizer.encode("the end of the world"))
    chat = ChatSession(TextModel(reciting, tokenizer, chatml), temperature=0, max_tokens=8)
    size = len(chat.model.prompt_ids("Hello")[0])
    reciting.fail_at, reciting.failure = size, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(chat.send("Hello"))
    assert reciting.sessions[-1].closed == 1
    assert chat.messages == []
    reciting.fail_at = -1
    assert "".join(chat.send("Hello"))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_the_session_grows_with_the_conversation(tokenizer: Tokenizer, chatml: str, transformer: Any) -> None:
    big = type(transformer)(tokenizer.vocab_size, max_positions=3000)
    with ChatSession(TextModel(big, tokenizer, chatml), temperature=0, max_tokens=4) as chat:
        list(chat.send("Hello"))
        assert big.sessions[-1].room == 1024
        list(chat.send("world " * 1100))
        assert big.sessions[-1].room == 2048 and big.sessions[0].closed == 1
        list(chat.send("world " * 1100))
        assert big.sessions[-1].room == 3000


def test_errors(model: TextModel, transformer: Any, tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        ChatSession(TextModel(transformer, tokenizer))
    with pytest.raises(UsageError, match="temperature"):
        ChatSession(model, temperature=-1)
    chat = ChatSession(model, temperature=0)
    with pytest.raises(GenerationError, match="empty"):
        chat.send(" \n")
    with pytest.raises(GenerationError, match="context of 256"):
        chat.send("world " * 400)
    assert chat.messages == []
    stream = chat.send("Hello")
    with pytest.raises(GenerationError, match="has not ended"):
        chat.send("world")
    stream.close()
    list(chat.send("world"))
