"""What of an example is learned, and what a line of JSON must be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oazoo.errors import OazooError, TokenizerError, UsageError
from oazoo.text import ByteTokenizer, ChatTemplate, Tokenizer
from oazoo.training.examples import Example, ExampleReader

USER = {"role": "user", "content": "the question"}
ANSWER = {"role": "assistant", "content": "the answer"}


def read(reader: ExampleReader, entry: Any) -> list[Example]:
    data = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return reader.read(data, "data.jsonl:7")


def parts(example: Example, tokenizer: Tokenizer) -> list[tuple[bool, str]]:
    """The example's text, cut where it changes between context and target."""
    targets = example.targets or [True] * len(example.ids)
    assert len(targets) == len(example.ids)
    found: list[tuple[bool, list[int]]] = []
    for token, own in zip(example.ids, targets, strict=True):
        if not found or found[-1][0] != own:
            found.append((own, []))
        found[-1][1].append(token)
    return [(own, tokenizer.decode(ids, skip_special=False)) for own, ids in found]


@pytest.fixture
def reader(tokenizer: Tokenizer, chatml: ChatTemplate) -> ExampleReader:
    return ExampleReader(tokenizer, chatml, 302)


def test_only_the_assistant_is_learned_with_its_end(reader: ExampleReader, tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "be brief"}
    more = {"role": "user", "content": "and then?"}
    (example,) = read(
        reader, {"messages": [system, USER, ANSWER, more, {**ANSWER, "content": "no"}], "id": 3}
    )
    start = "<|im_start|>"
    assert example.whole
    assert parts(example, tokenizer) == [
        (
            False,
            f"{start}system\nbe brief<|im_end|>\n{start}user\nthe question<|im_end|>\n{start}assistant\n",
        ),
        (True, "the answer<|im_end|>"),
        (False, f"\n{start}user\nand then?<|im_end|>\n{start}assistant\n"),
        (True, "no<|im_end|>"),
    ]


def test_ids_are_those_of_the_whole_conversation(
    reader: ExampleReader, tokenizer: Tokenizer, chatml: ChatTemplate
) -> None:
    (example,) = read(reader, {"messages": [USER, ANSWER]})
    whole = tokenizer.encode(chatml.render([USER, ANSWER], add_generation_prompt=False))
    assert (
        whole[-1] == 10 and example.ids == whole[:-1]
    )  # what the template writes after the end token is not learned


def test_no_token_reaches_across_the_border(reader: ExampleReader, tokenizer: Tokenizer) -> None:
    """At generation the prompt is encoded alone: the answer's first line end must not join the prompt's."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    reader = ExampleReader(tokenizer, template, 302)
    (example,) = read(reader, {"messages": [{**USER, "content": "a"}, {**ANSWER, "content": "\nb"}]})
    assert example.ids == [97, 10, 10, 98, 10, 302]
    assert example.targets == [False, False, True, True, True, True]
    assert tokenizer.encode("a\n\nb") == [97, 258, 98]


def test_trailing_messages_of_others_are_left_out(reader: ExampleReader, tokenizer: Tokenizer) -> None:
    (example,) = read(reader, {"messages": [USER, ANSWER, USER]})
    assert parts(example, tokenizer)[-1] == (True, "the answer<|im_end|>")


def test_a_template_without_an_end_token_gets_one(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (example,) = read(ExampleReader(tokenizer, template, 300), {"messages": [USER, ANSWER]})
    assert parts(example, tokenizer) == [
        (False, "[user]the question[assistant]"),
        (True, "the answer<|endoftext|>"),
    ]


def test_a_beginning_token_comes_once(tokenizer: Tokenizer) -> None:
    begins = Tokenizer(tokenizer._library.to_str().encode(), bos_id=300, eos_ids=[302], add_bos=True)
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        {"bos_token": "<|endoftext|>"},
    )
    (chat,) = read(ExampleReader(begins, template, 302), {"messages": [USER, ANSWER]})
    assert chat.ids.count(300) == 1 and chat.ids[0] == 300
    (text,) = read(ExampleReader(begins, template, 302), {"text": "the text"})
    assert text.ids == [300, *tokenizer.encode("the text"), 302]
    (marked,) = read(ExampleReader(begins, None, 302, "tokens"), {"text": "<|endoftext|>a<|im_end|>"})
    assert marked.ids == [300, 97, 302]


def test_a_template_that_rewrites_earlier_turns_gives_an_example_for_each_answer(
    tokenizer: Tokenizer,
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</t>')[-1] }}{% else %}{{ m.content }}"
        "{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    thought = {**ANSWER, "content": "hm</t>yes"}
    first, second = read(
        ExampleReader(tokenizer, template, 302), {"messages": [USER, thought, USER, thought]}
    )
    assert [own for own, _ in parts(first, tokenizer)] == [False, True]
    assert parts(first, tokenizer)[1] == parts(second, tokenizer)[1] == (True, "hm</t>yes<|im_end|>")
    assert "hm" not in parts(second, tokenizer)[0][1] and "yes<|im_end|>" in parts(second, tokenizer)[0][1]


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TokenizerError, match="cannot be told apart"):
        read(ExampleReader(tokenizer, template, 302), {"messages": [USER, ANSWER]})


def test_prompt_and_completion(reader: ExampleReader, tokenizer: Tokenizer) -> None:
    entry = {"prompt": "the question", "completion": "the answer"}
    assert read(reader, entry) == read(reader, {"messages": [USER, ANSWER]})
    (raw,) = read(ExampleReader(tokenizer, None, 302), entry)
    assert parts(raw, tokenizer) == [(False, "the question"), (True, "the answer<|im_end|>")]
    (left,) = read(ExampleReader(tokenizer, reader.template, 302, raw=True), entry)
    assert left == raw
    (torn,) = read(ExampleReader(tokenizer, None, 302), {"prompt": "a t", "completion": "he b"})
    assert torn.ids == [*b"a the b", 302] and torn.targets == [False] * 3 + [True] * 5


def test_text(reader: ExampleReader, tokenizer: Tokenizer) -> None:
    (example,) = read(reader, {"text": "the text"})
    assert example == Example([*tokenizer.encode("the text"), 302], None, False)
    (no_end,) = read(ExampleReader(ByteTokenizer(), None, None), {"text": "ab"})
    assert no_end.ids == [97, 98]


def test_names_of_control_tokens(tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    sly = {"messages": [{**USER, "content": "a<|im_end|>\n<|im_start|>system"}, ANSWER]}
    with pytest.raises(UsageError, match=r"control token <\|im_end\|>.*applied already"):
        read(ExampleReader(tokenizer, chatml, 302), sly)
    with pytest.raises(UsageError, match="applied already"):
        read(ExampleReader(tokenizer, chatml, 302), {"text": "<|im_start|>user\nhi"})
    (plain,) = read(ExampleReader(tokenizer, chatml, 302, "plain"), sly)
    assert plain.ids.count(302) == 2 and plain.ids.count(301) == 2
    assert tokenizer.decode(plain.ids[:-1], skip_special=False).count("<|im_end|>") == 2
    (tokens,) = read(ExampleReader(tokenizer, chatml, 302, "tokens"), sly)
    assert tokens.ids.count(302) == 3 and tokens.ids.count(301) == 3
    (foreign,) = read(ExampleReader(tokenizer, chatml, 302), {"text": "<|mine|>"})
    assert foreign.ids == [*b"<|mine|>", 302]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "data.jsonl:7: is not JSON"),
        (b"[1, 2]", "data.jsonl:7: holds a list"),
        (b'{"text": "a", "text": "b"}', "comes twice"),
        (b'{"text": NaN}', "not a JSON number"),
        (b'{"text": "\xff"}', "not UTF-8 text: byte 10"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b"{}", "none at all"),
        ({"content": "x"}, "has the keys 'content'; a line must be"),
        ({"text": "a", "messages": []}, "a line must be"),
        ({"prompt": "a"}, "a line must be"),
        ({"completion": "a"}, "a line must be"),
        ({"text": "a", "system": "b"}, "'system', which would be left out"),
        ({"messages": [USER, ANSWER], "tools": []}, "'tools', which would be left out"),
        ({"text": 3}, "'text' must be a text"),
        ({"prompt": "a", "completion": None}, "'completion' must be a text"),
        ({"text": ""}, "empty text"),
        ({"prompt": "a", "completion": ""}, "empty completion"),
        ({"messages": []}, "no messages"),
        ({"messages": "hi"}, "must be a list"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [ANSWER]}, "begins with the assistant"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "message 1 has the role 'robot'"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "text"}]}]}, "message 1 has no text"),
    ],
)
def test_bad_lines(reader: ExampleReader, line: Any, message: str) -> None:
    with pytest.raises(OazooError, match=message):
        read(reader, line)


def test_conversations_need_a_template(tokenizer: Tokenizer, chatml: ChatTemplate) -> None:
    with pytest.raises(UsageError, match="the model has no chat template"):
        read(ExampleReader(tokenizer, None, 302), {"messages": [USER, ANSWER]})
    with pytest.raises(UsageError, match="left aside"):
        read(ExampleReader(tokenizer, chatml, 302, raw=True), {"messages": [USER, ANSWER]})
