"""Run the type checker and the layer check on the package as it installs.

    python tools/check_tree.py types|imports [more arguments for the tool]

The top-level folders install as subpackages of ``oazoo`` (``package-dir`` in pyproject.toml), which neither
mypy nor import-linter follows. So this lays ``build/tree/oazoo`` out as an installation has it, of links to
the real files, and runs the tools there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "tree"


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """The import packages of pyproject.toml and the folder of each."""
    settings = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    mapped: dict[str, str] = settings["package-dir"]
    folders = {}
    for name in settings["packages"]:
        base = name
        while base not in mapped:
            base = base.rpartition(".")[0]
        folders[name] = root.joinpath(mapped[base], *name[len(base) :].split("."))
    return folders


def stage(tree: Path = TREE, root: Path = ROOT) -> Path:
    """Lay out ``tree/oazoo`` as links to the sources; returns ``tree``. What is right already stays
    untouched.
    """
    wanted = {
        tree.joinpath(*package.split("."), source.name): source
        for package, folder in package_folders(root).items()
        for source in folder.iterdir()
        if source.is_file() and source.suffix in (".py", ".pyi", ".typed")
    }
    for folder, _, names in os.walk(tree):
        for name in names:
            link = Path(folder, name)
            if link.is_symlink() and (link not in wanted or link.readlink() != wanted[link]):
                link.unlink()
    for link, source in wanted.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(source)
    return tree


def check_types(arguments: Sequence[str] = (), tree: Path | None = None) -> subprocess.CompletedProcess[str]:
    """mypy over the package as it stands in ``tree``; the sources, freshly staged, by default."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *arguments, "-p", "oazoo"]
    return _run(command, tree or stage())


def check_imports(
    arguments: Sequence[str] = (), tree: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """import-linter's contracts of ``.importlinter`` over the package, as for :func:`check_types`."""
    script = "import importlinter.cli as c, sys; sys.exit(c.lint_imports(sys.argv[1], no_cache=True))"
    return _run([sys.executable, "-c", script, str(ROOT / ".importlinter"), *arguments], tree or stage())


def _run(command: list[str], tree: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(tree), "MYPYPATH": str(tree), "COLUMNS": "120"}
    return subprocess.run(command, cwd=tree, env=environ, text=True, capture_output=True)


def main(arguments: list[str]) -> int:
    """Command line."""
    checks = {"types": check_types, "imports": check_imports}
    if not arguments or arguments[0] not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    done = checks[arguments[0]](arguments[1:])
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
