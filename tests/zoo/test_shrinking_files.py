"""A file that loses its end while a command reads it, at the worst moment: one error, exit status 1, nothing written.

The system kills a process that touches a mapped page which its file has lost, so no command may map a file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from model_goldens import DATA, source_path

import oazoo
from oazoo.formats.detect import open_source
from oazoo.formats.mapped import MappedFile

#: Runs each command whole, and then again and again; each time another one of its reads finds the file shorter than it was a
#: moment before, when that was checked. Prints a line for what came of each run.
PROGRAM = """
import json, os, sys
from pathlib import Path
from click.testing import CliRunner
from oazoo.cli import main
from oazoo.formats.mapped import MappedFile

check = MappedFile._check_usable
reads = shrink_at = 0

def checked(self):
    global reads
    check(self)
    if self.path.samefile(victim):
        reads += 1
        if reads == shrink_at:
            os.truncate(victim, size)

MappedFile._check_usable = checked

for name, victim, output, arguments in json.loads(sys.argv[1]):
    victim, output, last = Path(victim), Path(output), 0
    whole = victim.read_bytes()
    for size, part in ((0, 0), (0, 0.3), (4096, 0.6), (4096, 1)):
        shrink_at, reads = int(part * last), 0
        victim.write_bytes(whole)
        result = CliRunner().invoke(main, arguments)
        left = sorted(path.name for path in output.parent.iterdir())
        print(json.dumps([name, result.exit_code, result.stderr, left]), flush=True)
        for path in output.parent.iterdir():
            path.unlink()
        last = last or reads
"""

Outcome = tuple[int, str, list[str]]

COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    # what: (the model that shrinks, its file in a folder, the command)
    "convert a folder": ("llama", "model.safetensors", ["convert", "IN", "-o", "OUT", "--dtype", "f16"]),
    "convert gguf": ("Q8_0", "", ["convert", "IN", "-o", "OUT", "--dtype", "f32"]),
    "convert blocks": ("Q4_0", "", ["convert", "IN", "-o", "OUT"]),
    "convert onnx": ("nanogpt_script/model.onnx", "", ["convert", "IN", "-o", "OUT"]),
    "convert external data": ("external", "data", ["convert", "IN/model.onnx", "-o", "OUT"]),
    "convert torch": ("nanogpt_script/ckpt.pt", "", ["convert", "IN", "-o", "OUT"]),
    "convert as it is": ("phi3", "model.safetensors", ["convert", "IN", "-o", "OUT", "--arch", "raw"]),
    "convert and check": ("llama", "model.safetensors", ["convert", "IN", "-o", "OUT", "--check", "--force"]),
    "export safetensors": ("OAM", "", ["export", "IN", "-o", "OUT.safetensors"]),
    "export gguf": ("OAM", "", ["export", "IN", "-o", "OUT.gguf"]),
    "export onnx": ("OAM", "", ["export", "IN", "-o", "OUT.onnx"]),
    "quantize": (
        "OAM",
        "",
        ["quantize", "IN", "-o", "OUT", "--to", "q4", "--method", "search", "--keep", "embed*"],
    ),
    "quantize further": (
        "OAM q8",
        "",
        ["quantize", "IN", "-o", "OUT", "--to", "q4", "--method", "absmax", "--allow-requantize"],
    ),
    "unpack": ("OAM q8", "", ["quantize", "IN", "-o", "OUT", "--to", "f16"]),
    "diff": ("OAM", "", ["diff", "IN", "OTHER"]),
    "diff across containers": ("Q8_0", "", ["diff", "OTHER", "IN"]),
    "verify": ("OAM", "", ["verify", "IN"]),
    "inspect": ("OAM", "", ["inspect", "IN", "--json"]),
    "inspect onnx": ("nanogpt_script/model.onnx", "", ["inspect", "IN"]),
    "load": ("OAM", "", ["generate", "IN", "-p", "x", "--max-tokens", "1", "--raw"]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An ``.oam`` with dense weights, and one that is packed in part."""
    folder = tmp_path_factory.mktemp("models")
    oazoo.convert(source_path("F32"), folder / "dense.oam")
    oazoo.quantize(folder / "dense.oam", folder / "part.oam", "q8", keep=["layers.0.*"], method="absmax")
    return {"OAM": folder / "dense.oam", "OAM q8": folder / "part.oam"}


def source(name: str, models: dict[str, Path], folder: Path) -> Path:
    """A copy of a model to work on."""
    path = models.get(name) or (DATA / "onnx" / name if "nanogpt" in name else source_path(name))
    copy = folder / path.name
    if name == "external":
        copy.mkdir()
        model = onnx.load(source_path("nanogpt_script/model.onnx"))
        onnx.save(model, copy / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    elif path.is_dir():
        shutil.copytree(path, copy)
    else:
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, list[Outcome]]:
    """What came of all runs of all commands, in one process, so that its start is paid for once."""
    jobs = []
    for number, (what, (name, file, command)) in enumerate(COMMANDS.items()):
        folder = tmp_path_factory.mktemp(f"job{number}")
        (folder / "in").mkdir()
        (folder / "out").mkdir()
        model = source(name, models, folder / "in")
        paths = {"IN": model, "OTHER": models["OAM"], "OUT": folder / "out" / "m"}
        parts = (re.fullmatch("(IN|OTHER|OUT)(.*)", part) for part in command)
        words = [str(paths[m[1]]) + m[2] if m else part for m, part in zip(parts, command, strict=True)]
        out = next((word for word in words if word.startswith(str(paths["OUT"]))), str(paths["OUT"]))
        jobs.append((what, str(model / file if file else model), out, words))
    # This is about files, and the validation layer makes it many times as long.
    plain = {**os.environ, "OAZOO_VALIDATION": "0"}
    program = [sys.executable, "-c", PROGRAM, json.dumps(jobs)]
    done = subprocess.run(program, capture_output=True, text=True, env=plain)
    found: dict[str, list[Outcome]] = {what: [] for what in COMMANDS}
    for line in done.stdout.splitlines():
        what, *outcome = json.loads(line)
        found[what].append(tuple(outcome))
    assert done.returncode == 0, (done.returncode, done.stdout.splitlines()[-1:], done.stderr)
    return found


@pytest.mark.parametrize("what", COMMANDS)
def test_every_command(what: str, outcomes: dict[str, list[Outcome]]) -> None:
    (status, said, _), *shrunk = outcomes[what]
    assert status == (1 if what == "diff across containers" else 0), said  # which differ: one is packed
    assert len(shrunk) == 3
    for status, said, left in shrunk:
        errors = [line for line in said.splitlines() if "error" in line]
        assert status == 1 and len(errors) == 1, said
        assert errors[0].startswith("error: ") and "fault in oazoo" not in said
        assert "changed while it was read: the file is shorter than it was" in errors[0]
        assert not left or (what == "convert and check" and "is converted and kept" in said)


def test_no_command_maps_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where nothing shrinks: a mapped view is for those who ask for one."""

    def view(self: MappedFile, offset: int, size: int) -> None:
        raise AssertionError(f"{self.path} was mapped")

    monkeypatch.setattr(MappedFile, "view", view)
    for number, name in enumerate(
        ("gemma2", "Q4_K_M", "nanogpt_dynamo/model.onnx", "nanogpt_script/ckpt.pt")
    ):
        oazoo.convert(source_path(name), tmp_path / f"{number}.oam")
    for suffix in ("safetensors", "gguf", "onnx"):
        folder = tmp_path / suffix
        folder.mkdir()
        oazoo.export(tmp_path / "1.oam", folder / f"m.{suffix}")
    with open_source(tmp_path / "1.oam") as source, pytest.raises(AssertionError, match="was mapped"):
        source["norm.weight"].mapped()
