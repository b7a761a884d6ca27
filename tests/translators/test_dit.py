"""DiT and SiT: converted checkpoints against the published architecture, written down here in NumPy and float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from torch_files import save_tensors

import oazoo
from oazoo.configs import FlowConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.models.flow_tokens import to_tokens
from oazoo.runtime import Tensor, get_device
from oazoo.translators.dit import rules
from oazoo.translators.rules import invert

HIDDEN, HEADS, LAYERS, PATCH, CHANNELS, SIDE, CLASSES, FREQUENCIES = 24, 3, 2, 2, 3, 4, 5, 16
GRID = SIDE // PATCH
F64 = npt.NDArray[np.float64]
Weights = dict[str, npt.NDArray[np.float32]]


def checkpoint(learned_variance: bool = True) -> Weights:
    """A state dict with the names and shapes of models.py of DiT."""
    rng = np.random.default_rng(5)
    out = PATCH * PATCH * CHANNELS * (2 if learned_variance else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed": (1, GRID * GRID, HIDDEN),
        "x_embedder.proj.weight": (HIDDEN, CHANNELS, PATCH, PATCH),
        "x_embedder.proj.bias": (HIDDEN,),
        "t_embedder.mlp.0.weight": (HIDDEN, FREQUENCIES),
        "t_embedder.mlp.0.bias": (HIDDEN,),
        "t_embedder.mlp.2.weight": (HIDDEN, HIDDEN),
        "t_embedder.mlp.2.bias": (HIDDEN,),
        "y_embedder.embedding_table.weight": (CLASSES + 1, HIDDEN),
        "final_layer.linear.weight": (out, HIDDEN),
        "final_layer.linear.bias": (out,),
        "final_layer.adaLN_modulation.1.weight": (2 * HIDDEN, HIDDEN),
        "final_layer.adaLN_modulation.1.bias": (2 * HIDDEN,),
    }
    for n in range(LAYERS):
        for name, rows, columns in (
            ("attn.qkv", 3 * HIDDEN, HIDDEN),
            ("attn.proj", HIDDEN, HIDDEN),
            ("mlp.fc1", 4 * HIDDEN, HIDDEN),
            ("mlp.fc2", HIDDEN, 4 * HIDDEN),
            ("adaLN_modulation.1", 6 * HIDDEN, HIDDEN),
        ):
            shapes[f"blocks.{n}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{n}.{name}.bias"] = (rows,)
    return {
        name: (rng.standard_normal(s) * (0.3 if len(s) > 1 else 0.1)).astype(np.float32)
        for name, s in shapes.items()
    }


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def gelu(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_norm(x: F64) -> F64:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def published(weights: Weights, x: F64, t: F64, y: npt.NDArray[Any]) -> F64:
    """DiT.forward: images [N, C, H, W], times [N] and classes [N] to [N, outputs, H, W]."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def linear(name: str, v: F64) -> F64:
        return v @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    n, _, height, _ = x.shape
    p, g = PATCH, height // PATCH
    # A convolution whose stride is its kernel: each patch times the kernel.
    patches = np.stack(
        [x[:, :, i * p : i * p + p, j * p : j * p + p].reshape(n, -1) for i in range(g) for j in range(g)], 1
    )
    h = patches @ w["x_embedder.proj.weight"].reshape(HIDDEN, -1).T + w["x_embedder.proj.bias"]
    h = h + w["pos_embed"]
    half = FREQUENCIES // 2
    angles = t[:, None] * np.exp(-math.log(10000) * np.arange(half) / half)[None]
    embedded = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    told = linear("t_embedder.mlp.2", silu(linear("t_embedder.mlp.0", embedded)))
    told = silu(told + w["y_embedder.embedding_table.weight"][y])
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        parts = np.split(linear(f"{at}.adaLN_modulation.1", told)[:, None], 6, -1)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = parts
        v = plain_norm(h) * (1 + scale_a) + shift_a
        q, k, u = (
            linear(f"{at}.attn.qkv", v).reshape(n, g * g, 3, HEADS, HIDDEN // HEADS).transpose(2, 0, 3, 1, 4)
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True) @ u).transpose(0, 2, 1, 3).reshape(n, g * g, HIDDEN)
        h = h + gate_a * linear(f"{at}.attn.proj", mixed)
        v = plain_norm(h) * (1 + scale_m) + shift_m
        h = h + gate_m * linear(f"{at}.mlp.fc2", gelu(linear(f"{at}.mlp.fc1", v)))
    shift, scale = np.split(linear("final_layer.adaLN_modulation.1", told)[:, None], 2, -1)
    out = linear("final_layer.linear", plain_norm(h) * (1 + scale) + shift)
    # unpatchify: tokens hold rows, columns, channels.
    out = out.reshape(n, g, g, p, p, -1)
    return np.einsum("nhwpqc->nchpwq", out).reshape(n, -1, height, height)


def written(folder: Path, kind: str, weights: Weights, **settings: Any) -> Path:
    """A checkpoint in a file of a kind, with settings beside it if there are any."""
    if settings:
        (folder / "config.json").write_text(json.dumps(settings))
    path = folder / f"model.{kind}"
    if kind == "pt":
        save_tensors(path, weights)
    else:
        save_file(weights, path)
    return path


@pytest.mark.parametrize(
    ("kind", "arch", "variance"), [("pt", "dit", True), ("safetensors", "sit", True), ("pt", "sit", False)]
)
def test_forward_is_that_of_the_published_model(tmp_path: Path, kind: str, arch: str, variance: bool) -> None:
    weights = checkpoint(variance)
    name = {"dit": "DiT", "sit": "SiT"}[arch]
    path = written(tmp_path, kind, weights, architectures=[name], num_heads=HEADS)
    report = oazoo.convert(path, tmp_path / "out.oam")
    assert isinstance(report.config, FlowConfig) and report.translator == arch
    model = oazoo.load_flow(tmp_path / "out.oam")
    config = model.config
    assert (config.num_classes, config.tokens, config.num_layers) == (CLASSES, GRID * GRID, LAYERS)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, CHANNELS, SIDE, SIDE)).astype(np.float32)
    t = np.array([0.0, 0.37, 1.0] if arch == "sit" else [0.0, 411.0, 999.0], np.float32)
    y = np.array([0, 4, CLASSES], np.int32)
    tokens = to_tokens(config, np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
    found = model.model(*(Tensor.from_numpy(get_device(), a) for a in (tokens, t, y))).numpy()
    wanted = published(weights, x.astype(np.float64), t.astype(np.float64), y)
    # Ours has the values of a patch channel by channel.
    shape = (3, GRID, GRID, wanted.shape[1], PATCH, PATCH)
    ours = found.reshape(shape).transpose(0, 3, 1, 4, 2, 5).reshape(wanted.shape)
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    if arch == "dit":
        with pytest.raises(UsageError, match="predicts noise"):
            model.sample(0)
        return


def test_sit_samples_go_from_noise_at_0_to_data_at_1(tmp_path: Path) -> None:
    """Two Euler steps in float64, from the device's own noise."""
    weights = checkpoint()
    path = written(tmp_path, "safetensors", weights)
    oazoo.convert(path, tmp_path / "out.oam", arch="sit", heads=HEADS)
    model = oazoo.load_flow(tmp_path / "out.oam")
    from oazoo.runtime.ops.flow import random_normal
    from oazoo.runtime.random import Generator

    noise = random_normal(Generator(get_device(), 9), (1, GRID * GRID, CHANNELS * PATCH**2)).numpy()
    x = noise.reshape(1, GRID, GRID, CHANNELS, PATCH, PATCH).transpose(0, 3, 1, 4, 2, 5)
    x = x.reshape(1, CHANNELS, SIDE, SIDE).astype(np.float64)
    for t in (0.0, 0.5):
        with_it = published(weights, x, np.array([t]), np.array([2]))[:, :CHANNELS]
        without = published(weights, x, np.array([t]), np.array([CLASSES]))[:, :CHANNELS]
        x = x + 0.5 * (without + 1.5 * (with_it - without))
    found = model.sample(2, steps=2, seed=9, guidance=1.5).values
    np.testing.assert_allclose(found, x.transpose(0, 2, 3, 1), rtol=1e-3, atol=1e-3 * np.abs(x).max())


def test_the_map_runs_backwards(tmp_path: Path) -> None:
    weights = checkpoint()
    path = written(tmp_path, "safetensors", weights, architectures=["SiT"], num_heads=HEADS)
    report = oazoo.convert(path, tmp_path / "out.oam", dtype="f32")
    assert isinstance(report.config, FlowConfig)
    with OamSource(tmp_path / "out.oam") as source:
        for rule in invert(rules(report.config)):
            back = rule.transform.apply([source[name].numpy() for name in rule.sources])
            np.testing.assert_array_equal(back, weights[rule.target])


def test_what_a_checkpoint_does_not_say_must_be_told(tmp_path: Path) -> None:
    path = written(tmp_path, "pt", checkpoint())
    with pytest.raises(TranslationError, match="--arch dit"):
        oazoo.convert(path, tmp_path / "out.oam")
    with pytest.raises(TranslationError, match="--heads N"):
        oazoo.convert(path, tmp_path / "out.oam", arch="sit")
    with pytest.raises(TranslationError, match="multiple of num_heads = 5"):
        oazoo.convert(path, tmp_path / "out.oam", arch="sit", heads=5)
    weights = checkpoint()
    weights["final_layer.linear.weight"] = weights["final_layer.linear.weight"][:7]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(TranslationError, match="neither a prediction"):
        oazoo.convert(written(other, "safetensors", weights), tmp_path / "out.oam", arch="dit", heads=HEADS)
    del weights["pos_embed"]
    with pytest.raises(TranslationError, match="lacks pos_embed"):
        oazoo.convert(written(other, "safetensors", weights), tmp_path / "out.oam", arch="dit", heads=HEADS)
    assert not (tmp_path / "out.oam").exists()
