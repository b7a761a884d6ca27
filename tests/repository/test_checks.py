"""Lint, types and layering hold for the whole repository."""

from __future__ import annotations

import importlib.util
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


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_has_nothing_to_say(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_are_right() -> None:
    done = load_tool("check_tree").check_types()
    assert done.returncode == 0, done.stdout + done.stderr
    # It looked at the package, and not at nothing.
    assert "no issues found in" in done.stdout


def test_layers_are_kept() -> None:
    done = load_tool("check_tree").check_imports()
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout


def test_a_type_error_and_a_forbidden_import_are_found(tmp_path: Path) -> None:
    # The checks run on a staged tree; this proves, on a repository of the same shape, that they would speak.
    tools = load_tool("check_tree")
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(ROOT / "pyproject.toml", repository)
    for folder in tools.package_folders(repository).values():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    maps = [f"translators/{name}.py" for name in ("translator", "rules", "engine", "plan", "rope")]
    for leaf in ("oazoo/errors.py", "runtime/instance.py", *maps):
        (repository / leaf).touch()
    bad = "from oazoo.runtime import instance\n\nx: int = 'no'\nprint(instance)\n"
    (repository / "formats" / "bad.py").write_text(bad)
    tree = tools.stage(tmp_path / "tree", repository)
    types = tools.check_types(["--cache-dir", str(tmp_path / "cache")], tree)
    assert types.returncode == 1 and "bad.py:3" in types.stdout
    imports = tools.check_imports([], tree)
    assert imports.returncode == 1 and "oazoo.formats.bad -> oazoo.runtime.instance" in imports.stdout


def test_the_staged_tree_follows_the_sources(tmp_path: Path) -> None:
    tools = load_tool("check_tree")
    tree = tools.stage(tmp_path)
    for package, folder in tools.package_folders().items():
        staged = {path.name for path in tree.joinpath(*package.split(".")).glob("*.py")}
        assert staged == {path.name for path in folder.glob("*.py")}
    stale = tree / "oazoo" / "runtime" / "gone.py"
    stale.symlink_to(ROOT / "runtime" / "gone.py")
    tools.stage(tmp_path)
    assert not stale.is_symlink()
