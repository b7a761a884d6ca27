"""The set-up script's words and choices, and the apt source that it derives. Whole set-ups are what CI does."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def load_tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(f"oazoo_tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


backports_source = load_tool("debian_backports").backports_source


def apt(folder: Path, **files: str) -> Path:
    """An apt configuration folder: ``list`` is sources.list, other names lie in sources.list.d with _ for the dot."""
    (folder / "sources.list.d").mkdir(parents=True)
    for name, text in files.items():
        path = (
            folder / "sources.list" if name == "list" else folder / "sources.list.d" / name.replace("_", ".")
        )
        path.write_text(text)
    return folder


def test_one_line_source(tmp_path: Path) -> None:
    text = "# deb http://old.test/debian bookworm main\ndeb https://m.test/debian/ bookworm main contrib # comment\n"
    assert backports_source(apt(tmp_path, list=text), "bookworm") == (
        "Types: deb\nURIs: https://m.test/debian/\nSuites: bookworm-backports\nComponents: main\n"
    )


def test_one_line_source_with_options(tmp_path: Path) -> None:
    text = "deb [arch=amd64,arm64 signed-by=/k/debian.gpg lang=en] https://m.test/debian bookworm main\n"
    assert backports_source(apt(tmp_path, a_list=text), "bookworm") == (
        "Types: deb\nURIs: https://m.test/debian\nSuites: bookworm-backports\nComponents: main\n"
        "Architectures: amd64 arm64\nSigned-By: /k/debian.gpg\n"
    )


def test_deb822_source(tmp_path: Path) -> None:
    text = (
        "Types: deb\n# a comment inside\nURIs: http://m.test/debian http://second.test/debian\n"
        "Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/d.gpg\n\n"
        "Types: deb\nURIs: http://m.test/debian-security\nSuites: bookworm-security\nComponents: main\n"
    )
    assert backports_source(apt(tmp_path, debian_sources=text), "bookworm") == (
        "Types: deb\nURIs: http://m.test/debian\nSuites: bookworm-backports\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/d.gpg\n"
    )


def test_deb822_key_within_the_file_is_kept(tmp_path: Path) -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQINBGPL0BUBEADm\n"
    text = f"Types: deb deb-src\nURIs: mirror+file:/etc/apt/mirrors/d.list\nsuites: bookworm\nComponents: main\n{key}"
    made = backports_source(apt(tmp_path, debian_sources=text), "bookworm")
    assert made is not None
    assert made.startswith(
        "Types: deb\nURIs: mirror+file:/etc/apt/mirrors/d.list\nSuites: bookworm-backports\n"
    )
    assert made.endswith(key.replace("Signed-By:\n", "Signed-By: \n"))


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"list": "deb http://m.test/debian trixie main\n"},
        {"list": "deb-src http://m.test/debian bookworm main\n"},
        {"list": "deb http://m.test/debian bookworm contrib\n"},
        {"list": "deb cdrom:[Debian 12 _Bookworm_]/ bookworm main\n"},
        {"a_sources": "Types: deb\nURIs: http://m.test/d\nSuites: bookworm\nComponents: main\nEnabled: no\n"},
        {"a_disabled": "deb http://m.test/debian bookworm main\n"},
        {"a_sources": "nonsense\n : \n\n\n  continued\n"},
    ],
)
def test_no_source_serves_the_release(files: dict[str, str], tmp_path: Path) -> None:
    assert backports_source(apt(tmp_path, **files), "bookworm") is None


def test_the_command_prints_the_source_or_says_why_not(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "debian_backports.py"), "bookworm", "--apt-folder"]
    good = apt(tmp_path / "good", list="deb http://m.test/debian bookworm main\n")
    done = subprocess.run([*command, str(good)], capture_output=True, text=True)
    assert done.returncode == 0 and "Suites: bookworm-backports" in done.stdout
    none = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True)
    assert none.returncode == 1 and none.stdout == "" and "bookworm" in none.stderr


@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/mesa22.sh", ".ci/run"])
def test_shell_scripts_are_well_formed(script: str) -> None:
    shell = "bash" if script == ".ci/run" else "sh"
    done = subprocess.run([shell, "-n", str(ROOT / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def checkout(folder: Path) -> Path:
    """The part of a checkout that the script reads before it has an environment."""
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "setup.sh", folder / "tools")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def set_up(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell is not None
    command = [shell, str(folder / "tools" / "setup.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)


def test_an_unknown_option_is_misuse(tmp_path: Path) -> None:
    done = set_up(checkout(tmp_path / "a b"), "--drivers")
    assert done.returncode == 2
    assert "unknown option --drivers" in done.stderr


def test_a_python_that_is_too_old_is_named_with_its_version(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ncase "$2" in *"% sys"*) echo 3.9 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = set_up(checkout(tmp_path / "a b"), PYTHON=str(old))
    assert done.returncode == 1
    assert "is Python 3.9; oazoo needs 3.11 or newer" in done.stderr
    missing = set_up(tmp_path / "a b", PYTHON=str(tmp_path / "nothing"))
    assert missing.returncode == 1 and "is no program" in missing.stderr
    assert not (tmp_path / "a b" / ".venv").exists()


def test_a_system_without_python_and_apt_is_told_what_to_do(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("dirname", "id", "sed", "head", "cat", "cksum", "cut", "rm", "grep"):
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    done = set_up(checkout(tmp_path / "a b"), PATH=str(programs), PYTHON="")
    assert done.returncode == 1
    assert "make setup PYTHON=" in done.stderr
