"""The wheel holds the whole package, and puts nothing but ``oazoo`` into site-packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOLDERS: dict[str, str] = SETTINGS["tool"]["setuptools"]["package-dir"]
PACKAGES: list[str] = SETTINGS["tool"]["setuptools"]["packages"]
#: What is installed: Python, type marker, shaders and their results, model cards and their pictures.
INSTALLED = {".py", ".typed", ".slang", ".spv", ".json", ".md", ".txt", ".oam", ".png"}


def expected_files() -> set[str]:
    """Every file of the package's folders, by its name in the wheel."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in INSTALLED and "__pycache__" not in path.parts:
                found.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that nothing lands in the checkout."""
    base = tmp_path_factory.mktemp("wheel")
    source = base / "a folder with spaces"
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "tests"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    done = subprocess.run([*command, "-w", str(base), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = base.glob("*.whl")
    return built


def test_every_subpackage_is_declared() -> None:
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.parent.relative_to(ROOT / folder)
            name = ".".join([package, *relative.parts])
            assert name in PACKAGES, f"{path.relative_to(ROOT)} belongs to no package of pyproject.toml"


def test_the_wheel_holds_everything_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/" in name}
    assert names == expected_files()
    assert "LICENSE" in metadata and "entry_points.txt" in metadata
    for kind in ("shaders/spirv/manifest.json", "shaders/spirv/add_f32.spv", "py.typed", "model_cards/"):
        assert any(kind in name for name in names), kind


def test_an_installed_wheel_stands_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*command, str(wheel)], check=True)
    version = SETTINGS["project"]["version"]
    assert {path.name for path in target.iterdir()} == {"oazoo", f"oazoo-{version}.dist-info", "bin"}
    assert {path.name for path in (target / "bin").iterdir()} == {"oazoo"}
    code = (
        "import importlib, sys\n"
        "from pathlib import Path\n"
        "target = Path(sys.argv[1])\n"
        "for file in sorted((target / 'oazoo').rglob('*.py')):\n"
        "    name = '.'.join(file.relative_to(target).with_suffix('').parts).removesuffix('.__init__')\n"
        "    module = importlib.import_module(name)\n"
        "    assert Path(module.__file__) == file, (module.__file__, file)\n"
        "from oazoo.shaders import manifest\n"
        "assert all(kernel.code()[:4] == bytes.fromhex('03022307') for kernel in manifest().values())\n"
        "import oazoo.model_cards\n"
        "assert list(Path(oazoo.model_cards.__file__).parent.glob('*.md'))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(target)}
    run = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = subprocess.run(
        [sys.executable, str(target / "bin" / "oazoo"), "--version"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == f"oazoo {version}"
