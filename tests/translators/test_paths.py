"""Links, odd names and refused folders on the way in and out, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_folder
from click.testing import CliRunner
from safetensors.numpy import save_file

from oazoo.cli import main
from oazoo.formats.detect import open_source


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output.replace("\n", " ")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": np.arange(6, dtype="f4")}, folder / "a.safetensors")
    return folder / "a.safetensors"


def names_in(path: Path) -> list[str]:
    with open_source(path) as source:
        return list(source)


def test_input_by_a_link(weights: Path, tmp_path: Path) -> None:
    link, chain = tmp_path / "link", tmp_path / "chain"
    link.symlink_to(weights)
    chain.symlink_to("link")
    for number, path in enumerate((link, chain)):
        assert run("convert", path, "-o", tmp_path / f"{number}.oam", "--arch", "raw")[0] == 0
        assert names_in(tmp_path / f"{number}.oam") == ["w"]
    assert weights.exists() and link.is_symlink()


def test_a_folder_of_links_as_a_cache_has_it(tmp_path: Path) -> None:
    """The Hub's cache: names are links to files kept elsewhere under their hash."""
    real = llama_folder(tmp_path / "real")
    snapshot, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    snapshot.mkdir()
    blobs.mkdir()
    for number, file in enumerate(sorted(real.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..", "blobs", str(number)))
    assert run("convert", snapshot, "-o", tmp_path / "m.oam", "--no-tokenizer")[0] == 0
    assert len(names_in(tmp_path / "m.oam")) > 5


@pytest.mark.parametrize("what", ["dangling", "loop"])
def test_a_link_to_nothing(what: str, weights: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to("gone" if what == "dangling" else link.name)
    status, said = run("convert", link, "-o", tmp_path / "m.oam", "--arch", "raw")
    assert status != 0 and "link.safetensors" in said and "Traceback" not in said
    assert not (tmp_path / "m.oam").exists()
    # A folder in which a shard is such a link: named, as a file that is missing is.
    link.rename(weights.parent / "b.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    status, said = run("convert", weights.parent, "-o", tmp_path / "m.oam", "--arch", "raw")
    assert status == 1 and "b.safetensors' (1 tensors)" in said


def test_output_by_a_link(weights: Path, tmp_path: Path) -> None:
    """The file that the link leads to is written, as any program would; the link stays one."""
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / "m.oam"
    link.symlink_to(other / "real.oam")
    assert run("convert", weights, "-o", link, "--arch", "raw")[0] == 0
    assert link.is_symlink() and names_in(other / "real.oam") == ["w"]
    status, said = run("convert", weights, "-o", link, "--arch", "raw")
    assert status == 2 and "exists already" in said
    assert run("convert", weights, "-o", link, "--arch", "raw", "--force")[0] == 0
    assert link.is_symlink() and not list(tmp_path.glob("**/.oazoo-*"))


def test_output_by_a_link_that_leads_nowhere(weights: Path, tmp_path: Path) -> None:
    link = tmp_path / "m.oam"
    link.symlink_to(tmp_path / "no" / "such" / "m.oam")
    status, said = run("convert", weights, "-o", link, "--arch", "raw")
    assert status == 1 and "no such folder" in said and link.is_symlink()
    loop = tmp_path / "l.oam"
    loop.symlink_to(loop.name)
    status, said = run("convert", weights, "-o", loop, "--arch", "raw")
    assert status != 0 and "l.oam" in said and "Traceback" not in said


def test_output_that_is_the_input_by_another_name(weights: Path, tmp_path: Path) -> None:
    before = weights.read_bytes()
    link, hard = tmp_path / "m.oam", tmp_path / "h.oam"
    link.symlink_to(weights)
    hard.hardlink_to(weights)
    for out in (link, hard):
        status, said = run("convert", weights, "-o", out, "--arch", "raw", "--force")
        assert status == 2 and "is the source itself" in said
    assert weights.read_bytes() == before


NAMES = [
    "with space",
    " leading and trailing ",
    "模型 é 🙂",
    unicodedata.normalize("NFD", "é ü"),
    "-o",
    "quote'\"",
    "per%cent&$HOME;",
    "[red]markup",
    "new\nline",
]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    llama_folder(folder)
    out = folder / f"{name}.oam"
    assert run("convert", folder, "--no-tokenizer", f"--output={out}")[0] == 0
    for arguments in (("inspect", out), ("verify", out), ("diff", folder, out)):
        status, said = run(*arguments)
        assert status == 0, said
    shown = CliRunner().invoke(main, ["inspect", str(out), "--json"])
    assert json.loads(shown.stdout)["path"] == str(out)
    assert run("export", out, "-o", folder / "out.gguf", "--no-tokenizer")[0] == 0
    assert run("export", out, "-o", folder / "hf")[0] == 0
    assert run("diff", folder / "hf", folder / "out.gguf")[0] == 0


@pytest.mark.parametrize("mode", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}], ids=["C", "ASCII"])
def test_odd_names_where_the_locale_has_none(mode: dict[str, str], tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "模型 é 🙂")
    environ = {**os.environ, "LC_ALL": "C", "LANG": "C", **mode}
    for arguments in (
        ("convert", folder, "-o", folder / "ü.oam", "--no-tokenizer"),
        ("inspect", folder / "ü.oam"),
        ("convert", folder, "-o", folder / "ü.oam", "--no-tokenizer"),
    ):
        script = "import sys; from oazoo.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", script, *arguments], env=environ, capture_output=True)
        assert b"Traceback" not in done.stderr and b"fault in oazoo" not in done.stderr, done.stderr
    assert done.returncode == 2 and b"exists already" in done.stderr
    assert len(names_in(folder / "ü.oam")) > 5


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name in Latin-1, from an old disk."""
    folder = llama_folder(tmp_path / os.fsdecode(b"mod\xe8le"))
    out = folder / os.fsdecode(b"\xfc.oam")
    script = "import sys; from oazoo.cli import main; main()"
    for arguments in (
        ("convert", folder, "-o", out, "--no-tokenizer"),
        ("inspect", out),
        ("inspect", out, "--json"),
        ("verify", out),
        ("export", out, "-o", folder / "hf", "--no-tokenizer"),
        ("diff", folder / "hf", out),
    ):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True)
        assert done.returncode == 0, (arguments, done.stderr)
    with open_source(out) as source:
        assert source.metadata["source"]["name"] == "mod\ufffdle"


def test_a_folder_that_refuses() -> None:
    """Read-only for whoever runs the command, who is never root here."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        save_file({"w": np.arange(6, dtype="f4")}, place / "a.safetensors")
        (place / "kept").mkdir(mode=0o555)
        script = (
            "import os, sys\n"
            "from oazoo.cli import main\n"
            "from click.testing import CliRunner\n"
            # Everything that a failure needs is loaded before the rights to read it are given up.
            "CliRunner().invoke(main, [*sys.argv[1:-1], '/no/such/folder/m.oam'])\n"
            "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
            "main()\n"
        )
        command = [sys.executable, "-c", script, "convert", place / "a.safetensors", "--arch", "raw"]
        for name in ("kept/m.oam", "kept/new/m.oam", "kept"):
            done = subprocess.run([*command, "-o", place / name], capture_output=True, text=True)
            assert done.returncode == 1 and str(place / name) in done.stderr, done.stderr
            assert "Traceback" not in done.stderr and "fault in oazoo" not in done.stderr
            reason = {"kept/m.oam": "permission denied", "kept": "is a folder"}.get(name, "no such folder")
            assert reason in done.stderr, done.stderr
        assert not list((place / "kept").iterdir())
    finally:
        (place / "kept").chmod(0o755)
        shutil.rmtree(place)


def test_a_file_system_that_refuses(weights: Path) -> None:
    """No new file in /proc, not even for root."""
    status, said = run("convert", weights, "-o", "/proc/m.oam", "--arch", "raw")
    assert status == 1 and "/proc/m.oam" in said and "nothing was written" in said
