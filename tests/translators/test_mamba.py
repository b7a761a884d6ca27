"""Mamba's weights in all their namings, and Mamba-3 checkpoints; what is never packed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoints import write_gguf, write_hf
from exported import gguf_bytes, oam_bytes, oam_values, safetensors_bytes
from mamba_models import GGUF, HF, ORIGINAL, gguf_tensors, tensors
from model_goldens import DATA
from safetensors.numpy import load_file, save_file
from torch_files import save_tensors

import oazoo
from oazoo.configs import Mamba3Config, MambaConfig
from oazoo.errors import FormatError, TranslationError, UsageError
from oazoo.translators import convert
from oazoo.translators.export import export

Array = npt.NDArray[Any]
MAMBA3 = ("lm_siso", "lm_mimo_mlp")


@pytest.mark.parametrize("form", ["transformers", "flat convolution", "original"])
def test_namings(form: str, tmp_path: Path) -> None:
    source = tensors("embedding" if form == "original" else "embeddings", form != "flat convolution")
    folder = write_hf(tmp_path / "hf", ORIGINAL if form == "original" else HF, source)
    report = convert(folder, tmp_path / "m.oam")
    assert isinstance(report.config, MambaConfig) and report.config.decay == "log"
    assert (report.config.vocab_size, report.config.inner_size, report.config.dt_rank) == (40, 64, 3)
    found, names = (
        oam_values(tmp_path / "m.oam"),
        {"conv.weight": "conv1d.weight", "a_log": "A_log", "dt.bias": "dt_proj.bias"},
    )
    for ours, theirs in names.items():
        wanted = source[f"backbone.layers.1.mixer.{theirs}"]
        assert np.array_equal(
            found[f"layers.1.mixer.{ours}"], wanted.reshape(64, -1) if wanted.ndim > 1 else wanted
        )
    export(tmp_path / "m.oam", tmp_path / "back")
    back = safetensors_bytes(tmp_path / "back")
    assert back["backbone.layers.0.mixer.conv1d.weight"][1] == (64, 1, 4)
    assert {name: data for name, (_, _, data) in back.items()} == {
        name.replace("embedding.", "embeddings."): value.tobytes() for name, value in source.items()
    }
    assert json.loads((tmp_path / "back" / "config.json").read_text())["expand"] == 2
    convert(tmp_path / "back", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == oam_bytes(tmp_path / "m.oam")


def test_gguf(tmp_path: Path) -> None:
    source = gguf_tensors()
    path = write_gguf(tmp_path / "m.gguf", GGUF, source)
    report = convert(path, tmp_path / "m.oam")
    assert isinstance(report.config, MambaConfig) and report.config.decay == "direct"
    found = oam_values(tmp_path / "m.oam")
    assert np.array_equal(found["layers.0.mixer.a"], source["blk.0.ssm_a"])
    assert np.array_equal(found["layers.1.mixer.conv.weight"], source["blk.1.ssm_conv1d.weight"])
    export(tmp_path / "m.oam", tmp_path / "back.gguf")
    assert gguf_bytes(tmp_path / "back.gguf") == gguf_bytes(path)
    with pytest.raises(TranslationError, match="stores the logarithm of the decay"):
        export(tmp_path / "m.oam", tmp_path / "back")


def test_a_logarithm_does_not_become_its_value(tmp_path: Path) -> None:
    convert(write_hf(tmp_path / "hf", HF, tensors()), tmp_path / "m.oam")
    with pytest.raises(TranslationError, match="stores the decay itself"):
        export(tmp_path / "m.oam", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HF | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (HF | {"state_size": 5}, "the config asks for"),
        (ORIGINAL | {"rms_norm": False}, "LayerNorm"),
        (ORIGINAL | {"attn_layer_idx": [1]}, "attn_layer_idx is not supported"),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba2"}}, "unsupported architecture 'Mamba2'"),
        (ORIGINAL | {"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple = 0"),
        ({"d_model": 32, "n_layer": 2, "vocab_size": 37}, "unsupported architecture none"),
    ],
)
def test_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    embedding = "embeddings" if "architectures" in config else "embedding"
    with pytest.raises(TranslationError, match=message):
        convert(write_hf(tmp_path / "hf", config, tensors(embedding)), tmp_path / "m.oam")


@pytest.mark.parametrize("name", MAMBA3)
def test_mamba3_goldens(name: str, tmp_path: Path) -> None:
    folder = DATA / "mamba3" / name
    report = convert(folder, tmp_path / "m.oam")
    source, found = safetensors_bytes(folder), oam_bytes(tmp_path / "m.oam")
    assert len(found) == len(source) + (2 if name == "lm_mimo_mlp" else 0)  # fc1 is two weights here
    names = {part: part for part in ("mixer.in_proj.weight", "mixer.B_bias", "mixer.D")}
    if name == "lm_mimo_mlp":
        names |= {"mixer.mimo_z": "mixer.mimo_z", "mixer.norm.weight": "mixer.norm.weight"}
        names |= {"mlp.down.weight": "mlp.fc2.weight", "mlp_norm.weight": "norm2.weight"}
        joined = b"".join(found[f"layers.1.mlp.{part}.weight"][-1] for part in ("up", "gate"))
        assert joined == source["backbone.layers.1.mlp.fc1.weight"][-1]
    for ours, theirs in names.items():
        assert found[f"layers.1.{ours}"][1:] == source[f"backbone.layers.1.{theirs}"][1:]
    export(tmp_path / "m.oam", tmp_path / "back")
    assert safetensors_bytes(tmp_path / "back") == source
    convert(tmp_path / "back", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == found
    config = report.config
    assert isinstance(config, Mamba3Config)
    if name == "lm_mimo_mlp":
        assert (config.mimo_rank, config.output_norm, config.mlp_width, config.tied_embeddings) == (
            2,
            True,
            128,
            False,
        )
        assert (config.vocab_size, config.used_vocab_size, config.num_heads, config.num_angles) == (
            64,
            61,
            4,
            4,
        )
    again = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in json.loads((folder / "config.json").read_text()).items():
        assert again[key] == value or key == "ssm_cfg"
    with pytest.raises(TranslationError, match="mamba3"):
        export(tmp_path / "m.oam", tmp_path / "m.gguf")


def pytorch_folder(folder: Path, name: str, dtype: Any) -> Path:
    """A golden as the reference itself saves it: a pickle, matrices in ``dtype``, the head always there."""
    source = DATA / "mamba3" / name
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    weights = load_file(source / "model.safetensors")
    for key, value in weights.items():
        if key.endswith("_proj.weight") or "norm" in key:
            weights[key] = value.astype(dtype)
    weights.setdefault("lm_head.weight", weights["backbone.embedding.weight"])
    save_tensors(folder / "pytorch_model.bin", weights)
    return folder


@pytest.mark.parametrize("name", MAMBA3)
def test_mamba3_as_the_reference_saves_it(name: str, tmp_path: Path) -> None:
    folder = pytorch_folder(tmp_path / "hf", name, np.float16)
    report = oazoo.convert(folder, tmp_path / "m.oam", check=True)
    assert report.check is not None and report.check.to_json()["passed"]
    stored = oam_bytes(tmp_path / "m.oam")
    assert stored["layers.0.mixer.in_proj.weight"][0] == "f16"
    assert stored["layers.0.mixer.B_bias"][0] == "f32"
    # Exported as SafeTensors it says the same, in the settings that the reference's own loader takes and no others.
    export(tmp_path / "m.oam", tmp_path / "back")
    settings = json.loads((tmp_path / "back" / "config.json").read_text())
    known = {
        "d_model",
        "d_intermediate",
        "n_layer",
        "vocab_size",
        "ssm_cfg",
        "attn_layer_idx",
        "attn_cfg",
        "rms_norm",
    }
    known |= {"residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings"}
    assert set(settings) == known
    convert(tmp_path / "back", tmp_path / "again.oam")
    assert oam_bytes(tmp_path / "again.oam") == stored


def test_mamba3_form_of_a(tmp_path: Path) -> None:
    """What no checkpoint states can be said, is kept, and makes a difference that source and result agree on."""
    folder = DATA / "mamba3" / "lm_siso"
    logits = {}
    for form in ("heavy_tail", "softplus"):
        out = tmp_path / f"{form}.oam"
        report = oazoo.convert(folder, out, chosen={"a_form": form}, check=True)
        assert report.config.a_form == form and report.check is not None and report.check.passed  # type: ignore[union-attr]
        assert not any("--set" in note for note in report.notes)
        logits[form] = oazoo.load(out).logits([1, 2, 3, 4, 5, 6])
    assert np.abs(logits["heavy_tail"] - logits["softplus"]).max() > 1e-2
    assert any("--set a_form=softplus" in note for note in convert(folder, tmp_path / "m.oam").notes)
    for chosen, message in {"a_form": "one of heavy_tail, softplus", "a_frm": "there is a_form"}.items():
        with pytest.raises(UsageError, match=message):
            oazoo.convert(folder, tmp_path / "n.oam", chosen={chosen: "rational"})
    with pytest.raises(UsageError, match="there is nothing"):
        oazoo.convert(DATA / "hf" / "llama", tmp_path / "n.oam", chosen={"a_form": "softplus"})


def test_mamba3_tied_head(tmp_path: Path) -> None:
    """The reference writes the head in any case; a copy is left out, another head is an error."""
    shutil.copytree(DATA / "mamba3" / "lm_siso", tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    assert convert(tmp_path / "hf", tmp_path / "m.oam").ignored == (
        ("lm_head.weight", "a copy of the tied embedding"),
    )
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(TranslationError, match="the two differ"):
        convert(tmp_path / "hf", tmp_path / "n.oam")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_layer_idx": [0]}, "layers of attention are not supported"),
        ({"rms_norm": False}, "LayerNorm"),
        ({"ssm_cfg": {"layer": "Mamba3", "headdim": 24}}, "multiple of head_dim"),
        ({"ssm_cfg": {"layer": "Mamba3", "rope_fraction": 0.3}}, "rope_fraction"),
        ({"ssm_cfg": {"layer": "Mamba3", "d_state": 16, "headdim": 16, "ngroups": 3}}, "num_groups = 3"),
        ({"ssm_cfg": {"layer": "Mamba4"}}, "unsupported architecture 'Mamba4'"),
        ({"d_intermediate": 64}, "mlp.fc1.weight"),
    ],
)
def test_mamba3_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "mamba3" / "lm_siso", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(TranslationError, match=message):
        convert(tmp_path / "hf", tmp_path / "m.oam")


@pytest.mark.parametrize(
    ("inner", "hidden"), [(64, 32), (48, 32), (100, 30), (1000003, 1000000), (7, 3), (999983, 7919)]
)
def test_mamba3_width_survives_its_ratio(inner: int, hidden: int) -> None:
    from oazoo.translators.mamba3 import _ratio

    assert int(float(_ratio(inner, hidden)) * hidden) == inner


def test_not_run(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "hf", HF, tensors())
    report = oazoo.convert(folder, tmp_path / "mamba.oam", check=True)
    assert report.check is not None and "not there yet" in report.check.to_json()["why_not"]
    with pytest.raises(FormatError, match="family 'mamba' is not there yet"):
        oazoo.load(tmp_path / "mamba.oam")


def test_state_is_never_packed(tmp_path: Path) -> None:
    """What a recurrence keeps feels every rounding; the list holds for packed files under any of the namings."""
    convert(write_hf(tmp_path / "hf", HF, tensors()), tmp_path / "m.oam")
    convert(tmp_path / "hf", tmp_path / "raw.oam", arch="raw")
    convert(write_gguf(tmp_path / "m.gguf", GGUF, gguf_tensors()), tmp_path / "g.oam")
    convert(tmp_path / "m.gguf", tmp_path / "graw.oam", arch="raw")
    convert(DATA / "mamba3" / "lm_mimo_mlp", tmp_path / "m3.oam")
    for path, kept in {
        "m.oam": {"conv.weight", "a_log"},
        "raw.oam": {"conv1d.weight", "A_log"},
        "g.oam": {"conv.weight", "a"},
        "graw.oam": {"ssm_conv1d.weight", "ssm_a"},
        "m3.oam": {"B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o"},
    }.items():
        out = tmp_path / f"packed-{path}"
        report = oazoo.quantize(tmp_path / path, out, "q4", method="absmax")
        never = {t.name for t in report.tensors if t.reason.startswith("never packed")}
        assert all(any(name.endswith(f".{end}") for name in never) for end in kept), never
        before, after = oam_bytes(tmp_path / path), oam_bytes(out)
        assert never and all(after[name] == before[name] for name in never)
        assert {after[t.name][0] for t in report.tensors if not t.reason} == {"q4"}
