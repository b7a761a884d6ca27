"""What the documents say exists."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from oazoo.cli import main as command_line

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FOLDERS = ("oazoo", "formats", "translators", "runtime", "shaders")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def test_the_readme_begins_with_the_two_commands() -> None:
    first = blocks((ROOT / "README.md").read_text("utf-8"), "sh")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert {"setup", "demo", "test", "bench", "shaders", "test-validation", "test-mesa22"} <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document: Path) -> None:
    named = set(re.findall(r"`make ([a-z0-9-]+)", document.read_text("utf-8")))
    assert named <= make_targets()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_their_options_exist(document: Path) -> None:
    context = click.Context(command_line)
    for block in blocks(document.read_text("utf-8"), "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["oazoo"]:
                continue
            command = command_line.get_command(context, words[1])
            assert command is not None, line
            known = {name for option in command.params for name in option.opts + option.secondary_opts}
            used = {word.partition("=")[0] for word in words[2:] if word.startswith("-")}
            assert used <= known, line


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for name in command_line.list_commands(click.Context(command_line)):
        assert re.search(rf"\boazoo {name}\b", text), name


def test_environment_variables_are_documented_and_exist() -> None:
    code = "\n".join(path.read_text("utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    used = set(re.findall(r"""["'](OAZOO_[A-Z0-9_]+)["']""", code))
    documented = set(re.findall(r"OAZOO_[A-Z0-9_]+", (ROOT / "README.md").read_text("utf-8")))
    assert used == documented


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_examples_are_python(document: Path) -> None:
    for block in blocks(document.read_text("utf-8"), "python"):
        ast.parse(block)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target


def test_the_architecture_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for folder in FOLDERS:
        assert f"`{folder}/`" in text
    for part in (ROOT / "oazoo").iterdir():
        if (part / "__init__.py").exists():
            assert f"`{part.name}`" in text, part.name
