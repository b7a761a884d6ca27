"""GPT-2 names, with and without prefix, masks left out, features refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import GPT2, gpt2_tensors, write_hf

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.formats.detect import open_source
from oazoo.translators import convert, plan


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_with_and_without_prefix(tmp_path: Path, prefix: str) -> None:
    tensors = gpt2_tensors(GPT2, prefix=prefix)
    report = convert(write_hf(tmp_path / "hf", GPT2, tensors), tmp_path / "m.oam")
    assert isinstance(report.config, NanoGPTConfig)
    assert report.config.intermediate_size == 64 and report.config.tied_embeddings
    assert any("tie_word_embeddings" in note for note in report.notes)
    with open_source(tmp_path / "m.oam") as source:
        fused = tensors[f"{prefix}h.1.attn.c_attn.weight"]
        assert np.array_equal(source["layers.1.attn.qkv.weight"].numpy(), fused.T)
        # The rows are q, then k, then v.
        assert np.array_equal(source["layers.1.attn.qkv.weight"].numpy()[16:32], fused[:, 16:32].T)
        assert np.array_equal(source["embed.weight"].numpy(), tensors[f"{prefix}wte.weight"])


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_masks_are_ignored_with_a_reason(tmp_path: Path, prefix: str) -> None:
    tensors = gpt2_tensors(GPT2, prefix=prefix)
    tensors[f"{prefix}h.0.attn.bias"] = np.tri(24, dtype=np.uint8)[None, None]
    tensors[f"{prefix}h.1.attn.bias"] = np.tri(24, dtype=bool)[None, None]
    tensors[f"{prefix}h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    report = convert(write_hf(tmp_path / "hf", GPT2, tensors), tmp_path / "m.oam")
    assert len(report.ignored) == 3 and all(reason for _, reason in report.ignored)


def test_a_name_that_only_looks_like_a_mask_is_refused(tmp_path: Path) -> None:
    tensors = gpt2_tensors(GPT2)
    tensors["transformer.h.0.attn.bias2"] = np.zeros(3, np.float32)
    with pytest.raises(TranslationError, match="bias2"):
        convert(write_hf(tmp_path / "hf", GPT2, tensors), tmp_path / "m.oam")
    assert not (tmp_path / "m.oam").exists()


def test_own_head(tmp_path: Path) -> None:
    tensors = gpt2_tensors(GPT2)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1
    folder = write_hf(tmp_path / "hf", GPT2 | {"tie_word_embeddings": False}, tensors)
    convert(folder, tmp_path / "m.oam")
    with open_source(tmp_path / "m.oam") as source:
        assert np.array_equal(source["head.weight"].numpy(), tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation_function": "relu"}, "relu"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_head": 3}, "num_heads"),
        ({"n_embd": 17}, "hidden_size"),
        ({"n_layer": 3}, r"h\.2"),
        ({"n_layer": 1}, r"h\.1"),
        ({"n_positions": 25}, "wpe"),
        ({"n_inner": 65}, "c_fc"),
        ({"vocab_size": None}, "vocab_size"),
        ({"tie_word_embeddings": False}, "lm_head"),
    ],
)
def test_misfits_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(TranslationError, match=named):
        plan(write_hf(tmp_path / "hf", GPT2 | changes, gpt2_tensors(GPT2)))
