"""nanoGPT's checkpoints as its training script writes them: compiled names, masks, optimizer state, tied heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_models import CONTEXT, HEADS, INNER, LAYERS, VOCAB, WIDTH, weights
from reference_models import load_oam
from torch_files import View, contiguous, save, save_tensors

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError
from oazoo.translators import convert, plan

NAMES = {
    "embed": "wte",
    "positions": "wpe",
    "layers.": "h.",
    "attn_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attn.qkv": "attn.c_attn",
    "attn.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def checkpoint(params: dict[str, Any], prefix: str = "", **args: Any) -> dict[str, Any]:
    """What train.py saves, for parameters under our names."""
    model = {}
    for name, value in params.items():
        key = name
        for ours, theirs in NAMES.items():
            key = key.replace(ours, theirs)
        key = f"transformer.ln_f{key[4:]}" if key.startswith("norm.") else f"transformer.{key}"
        model[prefix + ("lm_head.weight" if name == "head.weight" else key)] = value
    settings = {
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "block_size": CONTEXT,
        "bias": "norm.bias" in params,
        "vocab_size": VOCAB,
        "dropout": 0.0,
    }
    return {
        "model": model,
        "optimizer": {
            "state": {0: {"step": np.float32([3]), "exp_avg": np.ones((2, 2), "f4")}},
            "param_groups": [],
        },
        "model_args": settings | args,
        "iter_num": 7,
        "best_val_loss": np.array(1.5, "f4"),
        "config": {"batch_size": 12},
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_a_training_checkpoint(prefix: str, bias: bool, tmp_path: Path) -> None:
    params = weights(bias=bias)
    value = checkpoint(params, prefix)
    value["model"][f"{prefix}transformer.h.0.attn.bias"] = np.tri(CONTEXT, dtype="f4")[None, None]
    report = convert(save_tensors(tmp_path / "ckpt.pt", value), tmp_path / "m.oam")
    found, config = load_oam(tmp_path / "m.oam")
    assert config == NanoGPTConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        norm_eps=1e-5,
        max_positions=CONTEXT,
        tied_embeddings=False,
        bias=bias,
        norm_bias=bias,
        activation="gelu",
    )
    assert found.keys() == params.keys()
    assert all(np.array_equal(found[name], value) for name, value in params.items())
    ignored = {name.rpartition(".")[2] for name, _ in report.ignored}
    assert ignored == {"step", "exp_avg", "best_val_loss", "bias"} and all(why for _, why in report.ignored)


def test_a_tied_head_shares_its_storage(tmp_path: Path) -> None:
    """As nanoGPT has it: one storage under two names. A head that is only equal is tied as well, one that is absent too."""
    params = weights()
    params["head.weight"] = params["embed.weight"]
    shared = checkpoint(params)
    copied = checkpoint(params | {"head.weight": params["embed.weight"].copy()})
    absent = checkpoint({name: value for name, value in params.items() if name != "head.weight"})
    for number, value in enumerate((shared, copied, absent)):
        path = save_tensors(tmp_path / f"{number}.pt", value)
        convert(path, tmp_path / f"{number}.oam")
        found, config = load_oam(tmp_path / f"{number}.oam")
        assert config.tied_embeddings and "head.weight" not in found
    # By storage alone: the same elements at another place of it are another tensor.
    storages = {"0": np.arange(2 * VOCAB * WIDTH, dtype="f4")}
    views = {
        name: View(str(k + 1), 0, v.shape, contiguous(v.shape)) for k, (name, v) in enumerate(params.items())
    }
    storages |= {str(k + 1): v.reshape(-1) for k, v in enumerate(params.values())}
    apart = {
        n: View("0", at, (VOCAB, WIDTH), (WIDTH, 1))
        for n, at in (("embed.weight", 0), ("head.weight", VOCAB * WIDTH))
    }
    value = {**checkpoint(views | apart), "optimizer": {}, "best_val_loss": 1.5}
    value["model_args"]["bias"] = True
    convert(save(tmp_path / "a.pt", value, storages), tmp_path / "a.oam")
    found, config = load_oam(tmp_path / "a.oam")
    assert not config.tied_embeddings and found["head.weight"][0, 0] == VOCAB * WIDTH


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"n_head": 5}, "num_heads"),
        ({"n_layer": 3}, r"h\.2"),
        ({"n_layer": 1}, r"h\.1"),
        ({"n_embd": 13}, "hidden_size"),
        ({"block_size": 99}, "wpe"),
        ({"vocab_size": 21}, "wte"),
        ({"bias": False}, "bias = False"),
        ({"n_head": None}, "n_head is missing"),
        ({"n_head": "3"}, "whole number"),
        ({"n_layer": 10**30}, None),
    ],
)
def test_settings_that_do_not_fit(args: dict[str, Any], words: str | None, tmp_path: Path) -> None:
    if words is None:
        args, words = {"n_layer": 2**62}, "out of range"
    path = save_tensors(tmp_path / "ckpt.pt", checkpoint(weights(), **args))
    with pytest.raises(TranslationError, match=words):
        plan(path)


def test_unknown_and_missing_tensors(tmp_path: Path) -> None:
    value = checkpoint(weights())
    value["model"]["transformer.h.0.attn.bias2"] = np.zeros(3, "f4")
    with pytest.raises(TranslationError, match="bias2"):
        plan(save_tensors(tmp_path / "a", value))
    value = checkpoint(weights())
    del value["model"]["transformer.wte.weight"]
    with pytest.raises(TranslationError, match=r"lacks model\.transformer\.wte\.weight"):
        plan(save_tensors(tmp_path / "b", value))
    with pytest.raises(TranslationError, match=r"model_args.*--arch raw"):
        plan(save_tensors(tmp_path / "c", {"weight": np.zeros(3, "f4")}))
