"""oazoo generate and oazoo chat: what goes to stdout, what to stderr, and the exit status."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oazoo.cli import chat, generate
from oazoo.cli._text import summary
from oazoo.errors import GenerationError, OazooError, TokenizerError, UsageError
from oazoo.generation import GenerationResult, TextModel
from oazoo.generation.result import Timings
from oazoo.text import Tokenizer

Recite = Callable[..., Any]
Capture = pytest.CaptureFixture[str]


def reciter(recite: Recite, tokenizer: Tokenizer, text: str, prompt: str = "Hello", **more: Any) -> TextModel:
    """A model that answers one raw prompt with one text."""
    return TextModel(recite(len(tokenizer.encode(prompt)), [*tokenizer.encode(text), 2]), tokenizer, **more)


@pytest.mark.parametrize("stream", [True, False])
def test_stdout_is_the_text_and_nothing_else(
    recite: Recite, tokenizer: Tokenizer, capsys: Capture, stream: bool
) -> None:
    model = reciter(recite, tokenizer, ", the end 🙂", info={"load_s": 1.5})
    assert generate.run(model, "Hello", {"temperature": 0.0}, stream=stream) == 0
    out, err = capsys.readouterr()
    assert out == ", the end 🙂\n"
    assert err.count("\n") == 1 and "tokens/s" in err and "ended by eos" in err and "loaded in 1.5 s" in err
    assert "seed" not in err and "\x1b" not in err


def test_a_drawn_seed_is_printed_and_repeats_the_text(
    transformer: Any, tokenizer: Tokenizer, capsys: Capture
) -> None:
    model = TextModel(transformer, tokenizer)
    settings = {"temperature": 2.0, "max_tokens": 20, "ignore_eos": True}
    generate.run(model, "Hello", {**settings, "seed": -1})
    out, err = capsys.readouterr()
    seed = int(err.rsplit("seed ", 1)[1])
    generate.run(model, "Hello", {**settings, "seed": seed})
    assert capsys.readouterr().out == out


def test_json(recite: Recite, tokenizer: Tokenizer, capsys: Capture) -> None:
    model = reciter(recite, tokenizer, ", the end", info={"name": "tiny"})
    assert (
        generate.run(model, "Hello", {"temperature": 0.0, "stop": ("end",)}, as_json=True, show_tokens=True)
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == ", the " and document["finish_reason"] == "stop" and document["stop"] == "end"
    assert document["model"] == "tiny" and document["prompt_tokens"] == len(document["prompt"])
    assert [t["id"] for t in document["prompt"]] == tokenizer.encode("Hello")
    assert document["answer_tokens"] == len(document["token_ids"])


def test_show_tokens(recite: Recite, tokenizer: Tokenizer, capsys: Capture, chatml: str) -> None:
    model = TextModel(recite(0, [2]), tokenizer, chatml)
    generate.run(model, "Hello", {"temperature": 0.0}, show_tokens=True, system="world")
    out, err = capsys.readouterr()
    assert out == "\n"
    ids = [int(line.split()[0]) for line in err.splitlines() if "'" in line]
    assert ids == model.prompt_ids("Hello", system="world")[0]
    assert "       1  '<|im_start|>'" in err


def test_an_interruption_prints_what_there_is_and_exits_130(
    recite: Recite, tokenizer: Tokenizer, capsys: Capture
) -> None:
    for stream in (True, False):
        model = reciter(recite, tokenizer, ", the end of the world")
        model.model.fail_at = len(tokenizer.encode("Hello")) + 4  # type: ignore[attr-defined]
        model.model.failure = KeyboardInterrupt()  # type: ignore[attr-defined]
        assert generate.run(model, "Hello", {"temperature": 0.0}, stream=stream) == 130
        out, err = capsys.readouterr()
        assert out.endswith("\n") and len(out) > 1 and ", the end of the world".startswith(out[:-1])
        assert "ended by cancelled" in err
        assert model.model.sessions[-1].closed == 1  # type: ignore[attr-defined]


def test_an_interruption_before_the_first_token_tells_no_speeds(
    recite: Recite, tokenizer: Tokenizer, capsys: Capture
) -> None:
    model = reciter(recite, tokenizer, ", the end")
    model.model.fail_at = 1  # type: ignore[attr-defined]
    model.model.failure = KeyboardInterrupt()  # type: ignore[attr-defined]
    assert generate.run(model, "Hello", {"temperature": 0.0}) == 130
    assert capsys.readouterr().err == "answer 0 tokens; ended by cancelled\n"


def test_times_and_speeds_of_the_summary_agree() -> None:
    timings = Timings(
        prefill_tokens=37, prefill_s=2.0, first_token_s=2.1, decode_tokens=63, decode_s=7.0, load_s=0.0
    )
    result = GenerationResult(
        prompt_ids=[1] * 37, token_ids=[1] * 64, finish_reason="length", timings=timings
    )
    assert summary(result, sampled=False) == (
        "prompt 37 tokens in 2.0 s (18.5 tokens/s); answer 64 tokens in 7.0 s (9.0 tokens/s); ended by length"
    )
    one = GenerationResult(prompt_ids=[1], token_ids=[1], timings=Timings(prefill_tokens=1, prefill_s=0.5))
    assert "prompt 1 token in 500 ms (2.0 tokens/s); answer 1 token; ended" in summary(one, sampled=False)


def test_a_template_of_ones_own(recite: Recite, tokenizer: Tokenizer, capsys: Capture) -> None:
    model = TextModel(recite(0, [2]), tokenizer)
    generate.run(
        model, "Hello", {"temperature": 0.0}, template="<|im_start|>{{ messages[0].content }}", as_json=True
    )
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 1 + len(tokenizer.encode("Hello"))


def oazoo(*arguments: str | bytes, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "import oazoo.cli; oazoo.cli.main()", *arguments]
    return subprocess.run(command, input=data, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a prompt"),
        (["-p", "a", "-f", "-"], "give a prompt"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "", "--raw"], "the prompt is empty"),
        (["-p", b"a\xff"], "the prompt is not UTF-8 text: character 1"),
        (["-p", "a", "--system", b"\xff"], "the system message is not UTF-8 text"),
        (["-p", "a", "--temperature", "-1"], "temperature must be"),
        (["-p", "a", "--temperature", "nan"], "temperature must be"),
        (["-p", "a", "--top-p", "1.5"], "top_p must be"),
        (["-p", "a", "--max-tokens", "0"], "max_tokens must be"),
        (["-p", "a", "--stop", ""], "a stop text must"),
        (["-f", "-"], "not UTF-8 text: byte 1 is 0xff"),
        (["-p", "a", "--raw", "--template", __file__], "exclude each other"),
    ],
)
def test_misuse_is_told_before_anything_is_loaded(arguments: list[str | bytes], message: str) -> None:
    done = oazoo("generate", "no-such-model", *arguments, data=b"a\xff")
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.startswith(b"error: ") and message in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_prompts_from_files(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("Grüße\r\n".encode())
    assert generate._prompt(None, path, raw=False) == "Grüße"
    assert generate._prompt(None, path, raw=True) == "Grüße\r\n"
    with pytest.raises(UsageError, match="no such file"):
        generate._prompt(None, tmp_path / "absent", raw=False)


# -----------------------------------------------------------------------------------------------------------
# chat


def talk(monkeypatch: pytest.MonkeyPatch, model: TextModel, lines: bytes, **more: Any) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    return chat.run(model, {"temperature": 0.0, "max_tokens": 6}, **more)


@pytest.fixture
def model(transformer: Any, tokenizer: Tokenizer, chatml: str) -> TextModel:
    return TextModel(transformer, tokenizer, chatml, info={"name": "tiny"})


def test_piped_questions_give_the_answers_of_a_conversation(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert talk(monkeypatch, model, b"Hello\n\nworld\r\n", system="the end") == 0
    out, err = capsys.readouterr()
    messages = [{"role": "system", "content": "the end"}]
    expected = ""
    for text in ("Hello", "world"):
        messages.append({"role": "user", "content": text})
        answer = model.generate(messages=messages, temperature=0, max_tokens=6).text
        messages.append({"role": "assistant", "content": answer})
        expected += answer if answer.endswith("\n") else answer + "\n"
    assert out == expected and err == ""


def test_commands_of_a_conversation(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    lines = f"Hello\n/system the end\n//world\n/save {path}\n/reset\n/help\n/exit\nnever read\n"
    assert talk(monkeypatch, model, lines.encode()) == 0
    saved = json.loads(path.read_text("utf-8"))
    assert saved["model"] == "tiny"
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]
    assert [m["content"] for m in saved["messages"][:2]] == ["the end", "/world"]
    assert "3 messages written" in capsys.readouterr().err
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        talk(monkeypatch, model, f"/save {path}\n".encode())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "error", "message"),
    [
        (b"/nope\n", UsageError, "no command /nope"),
        (b"/save\n", UsageError, "needs the name"),
        (b"/save /no/such/folder/talk.json\n", OazooError, "no/such/folder"),
        (b"\xff\n", UsageError, "not UTF-8"),
        (b"world " * 500 + b"\n", GenerationError, "context of 256"),
    ],
)
def test_errors_end_a_piped_conversation(
    model: TextModel, monkeypatch: pytest.MonkeyPatch, lines: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        talk(monkeypatch, model, lines)


def test_a_conversation_needs_a_template(
    transformer: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: Capture, chatml: str
) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        talk(monkeypatch, TextModel(transformer, tokenizer), b"Hello\n")
    assert talk(monkeypatch, TextModel(transformer, tokenizer), b"Hello\n", template=chatml) == 0
    assert capsys.readouterr().out


def test_an_interruption_ends_a_piped_conversation(
    recite: Recite, tokenizer: Tokenizer, chatml: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    reciting = recite(0, tokenizer.encode("the end of the world"))
    model = TextModel(reciting, tokenizer, chatml)
    reciting.fail_at, reciting.failure = len(model.prompt_ids("Hello")[0]) + 2, KeyboardInterrupt()
    assert talk(monkeypatch, model, b"Hello\nworld\n") == 130
    assert capsys.readouterr().out.count("\n") == 1


TERMINAL = """
import importlib.util, sys
from oazoo.cli import chat
from oazoo.cli.common import run_and_exit
from oazoo.generation import TextModel
from oazoo.text import Tokenizer
spec = importlib.util.spec_from_file_location("models", sys.argv[1])
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
tokenizer = Tokenizer(open(sys.argv[2], "rb").read(), bos_id=1, eos_ids=[2])
said = tokenizer.encode("the end \\x1b[2J of the world. ")
model = TextModel(models.Reciting(tokenizer.vocab_size, 0, said, 4000), tokenizer, models.CHATML)
run_and_exit(lambda: chat.run(model, {"temperature": 0.0, "max_tokens": int(sys.argv[3])}))
"""


class Terminal:
    """The chat command behind a pseudo-terminal, as a person has it."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, max_tokens: int) -> None:
        pty = pytest.importorskip("pty")
        path = folder / "tokenizer.json"
        path.write_text(tokenizer._library.to_str(), "utf-8")
        models = Path(__file__).with_name("conftest.py")
        self.master, other = pty.openpty()
        command = [sys.executable, "-c", TERMINAL, str(models), str(path), str(max_tokens)]
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, start_new_session=True
        )
        os.close(other)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str) -> None:
        while text not in self.seen:
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        before, _, self.seen = self.seen.partition(text)
        self.before = before

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        status = self.process.wait(60)
        os.close(self.master)
        return status


def test_a_conversation_at_a_terminal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    terminal = Terminal(tokenizer, tmp_path, 30)
    terminal.wait_for("/help")
    terminal.wait_for("> ")
    terminal.type("Hello\n")
    terminal.wait_for("the end \\x1b[2J of")  # a model's escape codes are shown, not obeyed
    terminal.wait_for("ended by length")
    terminal.type("/nope\n")
    terminal.wait_for("error: there is no command /nope")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_ctrl_c_ends_an_answer_and_then_the_program(tokenizer: Tokenizer, tmp_path: Path) -> None:
    terminal = Terminal(tokenizer, tmp_path, 3900)
    terminal.wait_for("> ")
    terminal.type("Hello\n")
    terminal.wait_for("the end")
    terminal.interrupt()
    terminal.wait_for("ended by cancelled")
    terminal.wait_for("> ")
    # Python looks for a signal when reading is interrupted, and may not have begun to read yet: press again.
    for _ in range(10):
        terminal.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            terminal.process.wait(5)
            break
    assert terminal.end() == 130
