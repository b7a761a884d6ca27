"""Chat templates: the prompts that known templates give, and the ends that hostile ones meet."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from oazoo.errors import TokenizerError, UsageError
from oazoo.text.chat import ChatTemplate, check_messages
from oazoo.text.sandbox import MAX_CHARS

#: The template that SmolLM2-135M-Instruct carries.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: In the manner of Llama 2 and 3: namespace, slices, strip, refusals, macros, loop controls.
ELABORATE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- macro turn(role, text) %}[{{ role | upper }}] {{ text.strip() }}{{ eos_token }}{% endmacro %}
{%- set ns = namespace(count=0, words=[]) %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant!') }}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.words = ns.words + [message.content] %}
    {%- if ns.count == 1 and system %}{{ '<<' ~ system ~ '>>' }}{% endif %}
    {%- generation %}{{ turn(message.role, message.content) }}{% endgeneration %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}
({{ ns.words | length }} {{ {'ü': [1, none]} | tojson }} {{ tools is none }} {{ loop is defined }})
"""


def user(text: str = "Hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_chatml_default_system() -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(CHATML).render(user("What is the capital of France?")) == expected


def test_chatml_own_system_and_no_generation_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user(), {"role": "assistant", "content": "Yo"}]
    turns = ("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo")
    expected = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert ChatTemplate(CHATML).render(messages, add_generation_prompt=False) == expected


def test_elaborate_template() -> None:
    template = ChatTemplate(ELABORATE, {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [{"role": "system", "content": " S "}, *user(" a b "), {"role": "assistant", "content": "c"}]
    messages += user("d")
    text = template.render(messages)
    assert text == (
        '<s><<S>>[USER] a b</s>[ASSISTANT] c</s>[USER] d</s>[ASSISTANT](3 {"ü": [1, null]} True False)'
    )
    with pytest.raises(TokenizerError, match="refuses this conversation: Conversation roles must alternate"):
        template.render([*user(), *user()])


def test_whitespace_control_is_that_of_transformers() -> None:
    source = "{% if true %}\n  {% for m in messages %}\n{{ m.content }}\n  {% endfor %}\n{% endif %}\nend\n"
    assert ChatTemplate(source).render(user()) == "Hi\nend"


def test_the_time_is_available() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(user()).isdecimal()


def test_recursive_loops_and_break_and_undefined() -> None:
    source = (
        "{% for x in [[1, [2, 3]], 4] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
        "{% endif %}{% endfor %}{{ nothing_here }}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i > 3 %}{% break %}{% endif %}{{ i }}{{ loop.length }}{% endfor %}"
    )
    assert ChatTemplate(source).render(user()) == "(1(23))4091939"


def test_a_long_conversation_fits_the_bounds() -> None:
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": f"message {i} " * 40} for i in range(401)
    ]
    assert ChatTemplate(ELABORATE).render(messages).count("message 400") == 40


FLOOD = "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
LIMITED = {
    "endless range": "{% for i in range(10**12) %}x{% endfor %}",
    "large range": "{% for i in range(1000000000000) %}x{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "fixed text in a loop": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "string times": "{{ 'a' * 10000000000 }}",
    "times string": "{{ 10000000000 * 'a' }}",
    "list times": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "big integers": FLOOD + "{% set ns.x = (ns.x | int(3)) * (ns.x | int(3)) %}{% endfor %}",
    "plus": FLOOD + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "tilde": FLOOD + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "join": FLOOD + "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}{% endfor %}",
    "join method": FLOOD + "{% set ns.x = (ns.x ~ 'b').join(ns.x ~ 'c') %}{% endfor %}",
    "replace": FLOOD + "{% set ns.x = (ns.x ~ 'a').replace('a', ns.x ~ 'a') %}{% endfor %}",
    "replace filter": FLOOD + "{% set ns.x = (ns.x ~ 'a') | replace(new=ns.x ~ 'a', old='a') %}{% endfor %}",
    "format method": FLOOD + "{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "wide format method": "{{ '{:>9999999999}'.format(1) }}",
    "computed width": "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "percent": FLOOD + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "wide percent": "{{ '%9999999999d' % 1 }}",
    "star percent": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": FLOOD + "{% set ns.x = '%s%s' | format(ns.x, ns.x) %}{% endfor %}",
    "block set": FLOOD + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "center": "{{ 'a' | center(9999999999) }}",
    "center method": "{{ 'a'.center(9999999999) }}",
    "ljust": "{{ 'a'.ljust(9999999999) }}",
    "indent": "{{ 'a\nb' | indent(9999999999) }}",
    "tojson indent": "{{ [1, 2] | tojson(indent=9999999999) }}",
    "batch": "{{ [1] | batch(9999999999, 1) | list | length }}",
    "nested lists": FLOOD + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested dicts": FLOOD + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "list plus": FLOOD + "{% set ns.x = (ns.x | list) + (ns.x | list) %}{% endfor %}",
    "macro bomb": "".join(
        f"{{% macro m{i}() %}}{{{{ m{i + 1}() }}}}{{{{ m{i + 1}() }}}}{{% endmacro %}}" for i in range(40)
    ) + "{% macro m40() %}x{% endmacro %}{{ m0() }}",
    "block bomb": "".join(
        f"{{% block b{i} %}}{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}{{% endblock %}}" for i in range(40)
    ) + "{% block b40 %}x{% endblock %}",
}  # fmt: skip
ESCAPES = {
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "class": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "class by filter": "{{ (messages | attr('__class__')).__name__ }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format(messages) ~ undefined.x }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
    "changes the messages": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "wide time": "{{ strftime_now('%9999999d') }}",
    "division": "{{ 1 / 0 }}",
    "wrong types": "{{ messages + 1 }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_what_templates_may_not_do(name: str) -> None:
    with pytest.raises(TokenizerError, match=r"the chat template (was stopped|failed)"):
        ChatTemplate(ESCAPES[name]).render(user())


@pytest.mark.parametrize("name", LIMITED)
def test_templates_that_want_too_much_are_stopped(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match=r"the chat template (was stopped: it|failed: Range too big)"):
        ChatTemplate(LIMITED[name]).render(user())
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kilobytes on Linux
    assert grown < 400_000


def test_an_endless_template_ends_in_a_fresh_process_within_limits() -> None:
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30)); resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)\n"
        "from oazoo.errors import TokenizerError\nfrom oazoo.text.chat import ChatTemplate\n"
        "source = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'\n"
        "try:\n    ChatTemplate(source).render([{'role': 'user', 'content': 'x'}])\n"
        "except TokenizerError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "was stopped" in done.stdout


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ a",
        "{% for x in %}",
        "{{ a | nope }}",
        "{% endfor %}",
        "{{ " + "(" * 5000 + "1",
        "x" * (1 << 18) + "y",
    ],
)
def test_broken_templates_are_clear_errors(source: str) -> None:
    with pytest.raises(TokenizerError, match="chat template"):
        ChatTemplate(source).render(user())


def test_output_is_bounded_by_its_own_size() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    assert len(template.render(user("x" * 100_000))) == 100_000
    with pytest.raises(TokenizerError, match="characters"):
        template.render(user("x" * (MAX_CHARS + 1)))


@pytest.mark.parametrize(
    "messages",
    [[], "Hi", {"role": "user"}, ["Hi"], [{"role": "user"}], [{"role": "wizard", "content": "x"}],
     [{"role": "user", "content": None}], [{"role": "user", "content": ["x"]}], [{"content": "x"}],
     [{"role": "user", "content": "x", "tool_calls": []}], [{"role": "user", "content": "x", "name": 3}]],
)  # fmt: skip
def test_messages_are_checked(messages: Any) -> None:
    with pytest.raises(UsageError, match="message"):
        check_messages(messages)


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = user()
    ChatTemplate("{% set m = messages[0] %}{{ m.content }}").render(messages)
    assert messages == user()
