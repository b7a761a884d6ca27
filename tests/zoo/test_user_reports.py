"""Small things that people stumble over in other tools, through the command line."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from model_goldens import source_path
from safetensors.numpy import save_file
from torch_files import save_tensors

from oazoo.cli import main
from oazoo.formats.detect import open_source


def run(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_part_or_a_config_is_named_instead_of_the_folder(tmp_path: Path) -> None:
    """What stands for the whole model in other tools: the message says what to name."""
    folder = source_path("qwen2")
    for name, words in (
        ("model-00002-of-00004.safetensors", "is part 2 of a model in 4 files; name the folder"),
        ("config.json", "is no index of weights; name the model's folder instead"),
    ):
        done = run("convert", folder / name, "-o", tmp_path / "m.oam")
        assert done.exit_code == 1 and words in " ".join(done.stderr.split()), done.output
        assert not (tmp_path / "m.oam").exists()
    assert run("convert", folder / "model.safetensors.index.json", "-o", tmp_path / "m.oam").exit_code == 0
    part = folder / "model-00002-of-00004.safetensors"
    assert run("convert", part, "--arch", "raw", "-o", tmp_path / "part.oam").exit_code == 0


def test_a_file_of_metadata_alone_is_shown(tmp_path: Path) -> None:
    header = b'{"__metadata__":{"format":"pt"}}'
    path = tmp_path / "none.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    shown = run("inspect", path)
    assert shown.exit_code == 0 and re.search(r"\b0 tensors", shown.output), shown.output
    assert json.loads(run("inspect", path, "--json").stdout)["tensors"] == []
    refused = run("convert", path, "-o", tmp_path / "m.oam", "--arch", "raw")
    assert refused.exit_code == 1 and "holds no tensors" in refused.output
    assert not (tmp_path / "m.oam").exists()


@pytest.mark.parametrize("command", ["quantize", "convert", "export"])
def test_every_type_that_the_help_names_is_taken(command: str, tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 32), "f4")}, tmp_path / "a.safetensors")
    assert (
        run("convert", tmp_path / "a.safetensors", "-o", tmp_path / "m.oam", "--arch", "raw").exit_code == 0
    )
    option = "--to" if command == "quantize" else "--dtype"
    (words,) = re.findall(rf"{option} \[([^\]]*)\]", run(command, "--help").output)
    source = tmp_path / ("a.safetensors" if command == "convert" else "m.oam")
    packed = tmp_path / "packed.oam"
    assert run("quantize", tmp_path / "m.oam", "-o", packed, "--to", "q8").exit_code == 0
    for word in re.sub(r"\s", "", words).split("|"):
        if command == "quantize" and not word.startswith("q"):
            source = packed  # the dense types unpack
        out = tmp_path / f"{word}.{'safetensors' if command == 'export' else 'oam'}"
        done = run(
            command, source, "-o", out, option, word, *(["--arch", "raw"] if command == "convert" else [])
        )
        assert done.exit_code == 0, done.output
        with open_source(out) as result:
            assert result["w"].info.encoding == ("f32" if word == "keep" else word)


@pytest.mark.parametrize("stored", ["twice", "once"])
def test_two_names_for_one_tensor_are_both_kept(stored: str, tmp_path: Path) -> None:
    """Without a model there is no tie to record: both names hold the values."""
    value = np.arange(12, dtype="f4").reshape(3, 4)
    path = tmp_path / "a"
    if stored == "twice":
        save_file({"embed": value, "head": value.copy()}, path)
    else:
        save_tensors(path, {"embed": value, "head": value})
    assert run("convert", path, "-o", tmp_path / "m.oam", "--arch", "raw").exit_code == 0
    with open_source(tmp_path / "m.oam") as source:
        assert np.array_equal(source["embed"].numpy(), value) and np.array_equal(
            source["head"].numpy(), value
        )


def test_a_failing_command_says_which_shard_to_fetch_again(tmp_path: Path) -> None:
    """Three shards, the second one byte short: its name, both sizes and what to do, and nothing is written."""
    weight_map = {}
    for number in range(1, 4):
        name = f"model-0000{number}-of-00003.safetensors"
        save_file({f"t{number}": np.zeros(100, "f4")}, tmp_path / name)
        weight_map[f"t{number}"] = name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    done = run("convert", tmp_path, "-o", tmp_path / "m.oam", "--arch", "raw")
    said = done.output.replace("\n", "")
    assert done.exit_code == 1 and shard.name in said and "fetch this file again" in said
    assert str(len(whole)) in said and str(len(whole) - 1) in said
    assert not (tmp_path / "m.oam").exists()
