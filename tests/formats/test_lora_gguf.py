"""Adapters in llama.cpp's layout: one alpha for all, factors in B, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from oazoo.errors import FormatError, UsageError
from oazoo.formats.gguf_writer import write_gguf
from oazoo.formats.lora import Adapter, LoraPair
from oazoo.formats.lora_gguf import _tensor, read_gguf_adapter, write_gguf_adapter

META: dict[str, Any] = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}


def pair(rank: int, alpha: float, rslora: bool = False, seed: int = 0) -> LoraPair:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(rank, 6)), draw.normal(size=(8, rank))
    return LoraPair(a.astype(np.float32), b.astype(np.float32), alpha, rslora)


def test_what_llama_cpp_computes_from_it(tmp_path: Path) -> None:
    """alpha / rank · B · A with the file's one alpha, read by the gguf package."""
    pairs = {
        "blk.0.attn_q": pair(2, 4),
        "blk.0.attn_v": pair(2, 4, seed=1),
        "blk.1.ffn_up": pair(3, 5, seed=2),
    }
    pairs |= {"blk.1.ffn_down": pair(4, 2, rslora=True, seed=3), "output": pair(1, 0, seed=4)}
    write_gguf_adapter(tmp_path / "a.gguf", Adapter(pairs, base={"name": "tiny"}), "llama")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == "llama" and fields["general.base_model.0.name"] == "tiny"
    alpha = fields["adapter.lora.alpha"]
    assert alpha == 4
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    assert len(tensors) == 2 * len(pairs)
    for name, one in pairs.items():
        a, b = tensors[f"{name}.weight.lora_a"], tensors[f"{name}.weight.lora_b"]
        assert a.shape == (one.rank, 6) and b.shape == (8, one.rank)
        np.testing.assert_allclose(alpha / one.rank * (b @ a), one.delta(), rtol=1e-5, atol=1e-6)
    assert (tensors["blk.0.attn_q.weight.lora_b"] == pairs["blk.0.attn_q"].b).all()
    back = read_gguf_adapter(tmp_path / "a.gguf")
    assert back.base == {"name": "tiny"}
    for name, one in pairs.items():
        np.testing.assert_allclose(back.pairs[name].delta(), one.delta(), rtol=1e-5, atol=1e-6)


def test_an_alpha_of_zero_means_none(tmp_path: Path) -> None:
    write_gguf_adapter(tmp_path / "a.gguf", Adapter({"blk.0.attn_q": pair(2, 0)}), "llama")
    assert not read_gguf_adapter(tmp_path / "a.gguf").pairs["blk.0.attn_q"].delta().any()
    one = pair(2, 1)
    tensors = [_tensor("blk.0.attn_q.weight.lora_a", one.a), _tensor("blk.0.attn_q.weight.lora_b", one.b)]
    write_gguf(tmp_path / "b.gguf", META | {"adapter.lora.alpha": 0.0}, tensors)
    assert read_gguf_adapter(tmp_path / "b.gguf").pairs["blk.0.attn_q"].scale == 1


@pytest.mark.parametrize(
    ("meta", "names", "message"),
    [
        ({"general.type": "model"}, ("a", "b"), "no LoRA adapter: general.type is 'model'"),
        ({"adapter.type": "control"}, ("a", "b"), "adapter.type 'control'"),
        ({"adapter.lora.alpha": "4"}, ("a", "b"), "alpha must be a number"),
        ({}, ("a",), "attn_q.weight.lora_b is missing"),
        ({}, ("a", "b", "c"), "1 tensors are none of a LoRA"),
    ],
)
def test_refusals(tmp_path: Path, meta: dict[str, Any], names: tuple[str, ...], message: str) -> None:
    one = pair(2, 1)
    tensors = [_tensor(f"blk.0.attn_q.weight.lora_{n}", one.a if n == "a" else one.b) for n in names]
    write_gguf(tmp_path / "a.gguf", META | {"adapter.lora.alpha": 1.0} | meta, tensors)
    with pytest.raises(FormatError, match=message):
        read_gguf_adapter(tmp_path / "a.gguf")


def test_ranks_that_differ_and_nothing_to_write(tmp_path: Path) -> None:
    one, other = pair(2, 1), pair(3, 1)
    tensors = [_tensor("blk.0.attn_q.weight.lora_a", one.a), _tensor("blk.0.attn_q.weight.lora_b", other.b)]
    write_gguf(tmp_path / "a.gguf", META | {"adapter.lora.alpha": 1.0}, tensors)
    with pytest.raises(FormatError, match="lora_a has the rank 2, lora_b 3"):
        read_gguf_adapter(tmp_path / "a.gguf")
    with pytest.raises(UsageError, match="no layers"):
        write_gguf_adapter(tmp_path / "b.gguf", Adapter({}), "llama")
