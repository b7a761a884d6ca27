"""Outputs that cannot be written, through the commands: a disk that is full half way, and a folder that refuses.

One error that names the output, exit status 1, nothing left behind, and what was there before as it was.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from model_goldens import source_path

import oazoo

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX limits and rights")

#: Below what any of the outputs takes, above what goes before its weights.
LIMIT = 200_000
#: The command, and the files that stand for an output of an earlier run.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "convert": (["convert", "SOURCE", "-o", "OUT/m.oam", "--dtype", "f32"], ["m.oam"]),
    "convert raw": (["convert", "SOURCE", "-o", "OUT/m.oam", "--arch", "raw"], ["m.oam"]),
    # Software devices keep their memory in files too, which the limit meets when a model is run: packing alone takes little.
    "quantize": (["quantize", "MODEL", "-o", "OUT/m.oam", "--to", "q8", "--method", "absmax"], ["m.oam"]),
    "export gguf": (["export", "MODEL", "-o", "OUT/m.gguf"], ["m.gguf"]),
    "export onnx": (["export", "MODEL", "-o", "OUT/m.onnx"], ["m.onnx", "tokenizer.json"]),
    "export onnx, data beside": (
        ["export", "MODEL", "-o", "OUT/m.onnx", "--external"],
        ["m.onnx", "m.onnx.data"],
    ),
    "export safetensors": (["export", "MODEL", "-o", "OUT/m.safetensors"], ["m.safetensors", "config.json"]),
    "export a folder": (["export", "MODEL", "-o", "OUT/hf"], ["hf/model.safetensors", "hf/config.json"]),
    "export raw": (["export", "RAW", "-o", "OUT/m.safetensors"], ["m.safetensors"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("models")
    oazoo.convert(source_path("F32"), folder / "m.oam")
    oazoo.convert(source_path("F32"), folder / "raw.oam", arch="raw")
    return {"SOURCE": str(source_path("F32")), "MODEL": str(folder / "m.oam"), "RAW": str(folder / "raw.oam")}


def words(command: list[str], models: dict[str, str], out: Path) -> list[str]:
    """A command with its paths filled in."""
    return [
        models.get(word, word.replace("OUT", str(out), 1) if word.startswith("OUT") else word)
        for word in command
    ]


def state(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def earlier_run(folder: Path, names: list[str]) -> dict[str, bytes]:
    """Put something in the place of every output; returns the folder's state."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(b"of an earlier run")
    return state(folder)


def check_full(what: str, status: int, said: str, folder: Path, before: dict[str, bytes]) -> None:
    """One error that names a file of the output and the limit, and the folder as it was."""
    errors = [line for line in said.splitlines() if "error" in line]
    assert status == 1 and len(errors) == 1 and errors[0].startswith(f"error: {folder}"), (what, said)
    assert "ulimit -f" in errors[0] and "fault in oazoo" not in said, (what, said)
    assert state(folder) == before, what
    assert {path.name for path in folder.iterdir()} == {name.split("/")[0] for name in before}, what


@pytest.mark.parametrize("what", ["convert", "quantize", "export a folder"])
def test_a_full_disk(what: str, models: dict[str, str], tmp_path: Path) -> None:
    """A limit on the size of a file strikes as a full disk does, in the middle of writing."""
    command, old = COMMANDS[what]
    before = earlier_run(tmp_path, old)
    done = subprocess.run(
        [sys.executable, "-m", "oazoo", *words(command, models, tmp_path), "--force"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    )
    check_full(what, done.returncode, done.stderr, tmp_path, before)


ON_A_FULL_DISK = """
import json, resource, sys
from click.testing import CliRunner
from oazoo.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(main, command)
    print(json.dumps([result.exit_code, result.stderr]))
"""


def test_a_full_disk_by_every_way_out(models: dict[str, str], tmp_path: Path) -> None:
    """All commands, in one process: with nothing there before, and with an output that --force would replace."""
    jobs, commands = [], []
    for number, (what, (command, old)) in enumerate(COMMANDS.items()):
        for there in (False, True):
            folder = tmp_path / f"{number}{there}"
            folder.mkdir()
            jobs.append((what, folder, earlier_run(folder, old if there else [])))
            commands.append(words(command, models, folder) + ["--force"] * there)
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, json.dumps(commands), str(LIMIT)],
        capture_output=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    for (what, folder, before), (status, said) in zip(jobs, found, strict=True):
        check_full(what, status, said, folder, before)


AS_NOBODY = """
import json, os, sys
from click.testing import CliRunner
from oazoo.cli import main

# Everything that a command needs is loaded, by running it, before the rights to read it are given up.
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.stderr
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for command in json.loads(sys.argv[2]):
    result = CliRunner().invoke(main, command)
    print(json.dumps([result.exit_code, result.stderr]))
"""


def test_a_folder_that_refuses(models: dict[str, str]) -> None:
    """For whoever runs the command, who is never root here; with an output in it that --force would replace."""
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        copies = {key: str(shutil.copy(path, place)) for key, path in models.items()}
        kept, free = place / "kept", place / "free"
        before = earlier_run(kept, sorted({name for _, old in COMMANDS.values() for name in old}))
        for folder in (kept, kept / "hf"):
            folder.chmod(0o555)
        free.mkdir()
        commands = [[*command, "--force"] for command, _ in COMMANDS.values()]
        first = [words(command, copies, free) for command in commands]
        second = [words(command, copies, kept) for command in commands]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, json.dumps(first), json.dumps(second)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(found) == len(COMMANDS)
        for what, (status, said) in zip(COMMANDS, found, strict=True):
            assert status == 1, (what, said)
            assert said.startswith(f"error: {kept}") and said.count("error") == 1, (what, said)
            assert "permission denied" in said and "fault in oazoo" not in said, (what, said)
        assert state(kept) == before
    finally:
        for folder in (place / "kept", place / "kept" / "hf"):
            folder.chmod(0o755)
        shutil.rmtree(place)
