"""Masks and rotary caches that some exporters save beside the weights: left out by name, with a reason, in every family."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oazoo.errors import TranslationError
from oazoo.formats.detect import open_source
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.translators import convert, plan

HF = Path(__file__).resolve().parent.parent / "data" / "hf"
FOLDERS = sorted(path.name for path in HF.iterdir() if (path / "config.json").is_file())
Array = np.ndarray[Any, Any]
TRIANGLE = np.tril(np.ones((1, 1, 8, 8), np.int64))


def extras(family: str) -> dict[str, Array]:
    """What exporters of several ages leave in a checkpoint of a family, in the types that were seen."""
    if family == "gpt2":
        return {
            "transformer.h.0.attn.bias": TRIANGLE.astype(np.uint8),
            "transformer.h.1.attn.bias": TRIANGLE.astype(np.bool_),
            "transformer.h.0.attn.masked_bias": np.array(-1e4, np.float32),
        }
    model, attention = ("gpt_neox", "attention") if family.startswith("gpt_neox") else ("model", "self_attn")
    layer = f"{model}.layers.0.{attention}"
    return {
        f"{layer}.rotary_emb.inv_freq": np.ones(4, np.float32),
        f"{model}.rotary_emb.inv_freq": np.ones(4, np.float16),
        f"{layer}.rotary_emb.cos_cached": np.ones((1, 1, 16, 8), np.float32),
        f"{layer}.rotary_emb.sin_cached": np.ones((1, 1, 16, 8), np.float32),
        f"{layer}.bias": TRIANGLE,
        f"{model}.layers.1.{attention}.bias": TRIANGLE.astype(np.bool_),
        f"{layer}.masked_bias": np.array(-1e9, np.float32),
    }


def with_tensors(folder: Path, name: str, more: Mapping[str, Array]) -> Path:
    """A copy of a reference folder with further tensors in it."""
    folder.mkdir()
    for path in (HF / name).iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    with open_source(HF / name) as source:
        write_safetensors(folder / "model.safetensors", {**source, **more})
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_they_are_left_out_with_a_reason(name: str, tmp_path: Path) -> None:
    more = extras(name)
    folder = with_tensors(tmp_path / "hf", name, more)
    report = convert(folder, tmp_path / "m.oam", with_tokenizer=False)
    plain = convert(HF / name, tmp_path / "plain.oam", with_tokenizer=False)
    ignored = dict(report.ignored)
    assert set(ignored) - set(dict(plain.ignored)) == set(more)
    for tensor in more:
        assert ("rotary" if "rotary" in tensor else "mask") in ignored[tensor], (tensor, ignored[tensor])
    assert report.config == plain.config
    with open_source(tmp_path / "m.oam") as found, open_source(tmp_path / "plain.oam") as wanted:
        assert set(found) == set(wanted)
        assert all(np.array_equal(found[key].raw(), wanted[key].raw()) for key in found)


@pytest.mark.parametrize("name", FOLDERS)
def test_what_only_looks_like_them_is_not(name: str, tmp_path: Path) -> None:
    for number, tensor in enumerate(extras(name)):
        for odd in (f"{tensor}2", f"{tensor}.weight", f"x{tensor}!"):
            folder = with_tensors(tmp_path / f"{number}{odd[-1]}", name, {odd: np.zeros(2, np.int64)})
            with pytest.raises(TranslationError, match="has no use for 1 tensor"):
                plan(folder, with_tokenizer=False)
            shutil.rmtree(folder)
