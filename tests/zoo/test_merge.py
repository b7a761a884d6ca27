"""Merging adapters: dense weights exactly, packed ones by the stated rule, everything else untouched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from exported import oam_bytes, oam_values, packed_oam, random_oam
from model_goldens import source_path
from reference_models import load_oam, logits
from safetensors.numpy import load_file, save_file

from oazoo.cli.main import main
from oazoo.configs import DecoderConfig
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats import quant
from oazoo.formats.lora import Adapter, LoraPair, write_adapter
from oazoo.formats.oam import OamSource
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.pack import pack
from oazoo.translators.convert import convert
from oazoo.translators.lora import lora_map, to_published
from oazoo.zoo.adapters import base_facts, merge
from oazoo.zoo.merge_check import MergeDifferenceError, compare

LORA = Path(__file__).parent.parent / "data" / "lora"
CONFIG = DecoderConfig(
    vocab_size=40, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    norm_eps=1e-5, rope_theta=1e4, max_positions=64, tied_embeddings=False,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_oam(tmp_path / "model.oam", CONFIG)


@pytest.fixture
def pairs() -> dict[str, LoraPair]:
    """Adapters of q, down and head, of different ranks."""
    draw = np.random.default_rng(1)
    found = {}
    for layer, rank in (("layers.0.attn.q", 2), ("layers.1.mlp.down", 3), ("head", 1)):
        out, width = lora_map(CONFIG).shapes[layer]
        a, b = draw.normal(size=(rank, width)) * 0.3, draw.normal(size=(out, rank)) * 0.3
        found[layer] = LoraPair(a.astype(np.float32), b.astype(np.float32), 4.0)
    return found


@pytest.fixture
def adapter(tmp_path: Path, pairs: dict[str, LoraPair]) -> Path:
    write_adapter(tmp_path / "adapter", Adapter(to_published(pairs, lora_map(CONFIG))))
    return tmp_path / "adapter"


def formula(weight: Any, pair: LoraPair) -> Any:
    return weight.astype(np.float32) + np.float32(4.0 / pair.rank) * (pair.b @ pair.a)


@pytest.mark.parametrize(
    ("encoding", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
def test_dense_weights_become_the_formula(
    tmp_path: Path, adapter: Path, pairs: dict[str, LoraPair], encoding: str, dtype: Any
) -> None:
    model = random_oam(tmp_path / "m.oam", CONFIG, encoding)
    report = merge(model, adapter, tmp_path / "out.oam")
    before, after = oam_bytes(model), oam_bytes(tmp_path / "out.oam")
    values = oam_values(model)
    assert before.keys() == after.keys()
    for name, (kind, shape, data) in after.items():
        pair = pairs.get(name.removesuffix(".weight"))
        wanted = before[name][2] if pair is None else formula(values[name], pair).astype(dtype).tobytes()
        assert (kind, shape) == before[name][:2] and data == wanted
    assert {t.name for t in report.tensors} == {f"{layer}.weight" for layer in pairs}
    for told in report.tensors:
        pair = pairs[told.name.removesuffix(".weight")]
        delta = pair.delta().astype(np.float64)
        assert told.rank == pair.rank
        assert told.change == pytest.approx(
            np.linalg.norm(delta) / np.linalg.norm(values[told.name]), rel=1e-3
        )
        assert (told.rounding == 0) == (encoding == "f32") and told.rounding < 0.02


@pytest.mark.parametrize("encoding", ["q4", "q8"])
def test_packed_weights_are_packed_anew(
    tmp_path: Path, model: Path, adapter: Path, pairs: dict[str, LoraPair], encoding: str
) -> None:
    packed = packed_oam(model, tmp_path / "packed.oam", encoding)
    report = merge(packed, adapter, tmp_path / "out.oam", method="absmax")
    values, after = oam_values(packed), oam_bytes(tmp_path / "out.oam")
    for layer, pair in pairs.items():
        codes, scales = quant.encode(formula(values[f"{layer}.weight"], pair), encoding)
        assert after[f"{layer}.weight"][0] == encoding
        assert after[f"{layer}.weight"][2] == codes.tobytes() + scales.tobytes()
    for name, before in oam_bytes(packed).items():
        assert name.removesuffix(".weight") in pairs or after[name] == before
    told = {t.name: t for t in report.tensors}["layers.0.attn.q.weight"]
    exact = formula(values["layers.0.attn.q.weight"], pairs["layers.0.attn.q"])
    lost = oam_values(tmp_path / "out.oam")["layers.0.attn.q.weight"] - exact
    delta = pairs["layers.0.attn.q"].delta()
    assert told.rounding == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(delta), rel=1e-3)

    merge(packed, adapter, tmp_path / "dense.oam", dtype="f32")
    dense = oam_values(tmp_path / "dense.oam")
    assert (dense["layers.0.attn.q.weight"] == exact).all()
    assert oam_bytes(tmp_path / "dense.oam")["layers.1.attn.q.weight"][0] == encoding


@pytest.mark.parametrize("encoding", ["f32", "q8", "q4"])
def test_the_check_tells_what_storing_the_sums_has_cost(
    tmp_path: Path, model: Path, adapter: Path, pairs: dict[str, LoraPair], encoding: str
) -> None:
    """FT-11: the largest difference is that of a NumPy model with the exact sums; search packs as quantize does."""
    base = model if encoding == "f32" else packed_oam(model, tmp_path / "packed.oam", encoding)
    merge(base, adapter, tmp_path / "out.oam")
    exact, config = load_oam(base)
    for layer, pair in pairs.items():
        exact[f"{layer}.weight"] = formula(exact[f"{layer}.weight"], pair)
    if encoding != "f32":
        name = "layers.1.mlp.down.weight"
        values = Tensor.from_numpy(get_device(), exact[name].astype(np.float32))
        assert oam_bytes(tmp_path / "out.oam")[name][2] == pack(values, encoding, "search").bytes().tobytes()
    stored, _ = load_oam(tmp_path / "out.oam")
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, CONFIG.vocab_size, 32).tolist() for _ in range(4)]
    pairs_of_logits = [(logits(exact, config, ids), logits(stored, config, ids)) for ids in prompts]
    found = compare(base, adapter, tmp_path / "out.oam")
    assert found.tokens == 128
    assert found.largest == pytest.approx(
        max(np.abs(a - b).max() for a, b in pairs_of_logits), rel=1e-2, abs=1e-4
    )
    same = np.mean([(a.argmax(-1) == b.argmax(-1)).mean() for a, b in pairs_of_logits])
    assert found.same_top == pytest.approx(same, abs=0.02)
    assert (found.kl < 1e-9) == (encoding == "f32")
    found.check(found.largest)
    with pytest.raises(MergeDifferenceError, match="differs by"):
        found.check(found.largest / 2)


def test_rows_that_come_in_pieces_are_the_same(
    tmp_path: Path, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for encoding in ("f32", "q4"):
        base = model if encoding == "f32" else packed_oam(model, tmp_path / "packed.oam", encoding)
        merge(base, adapter, tmp_path / "whole.oam", overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr("oazoo.zoo.adapters._STEP", 100)
            merge(base, adapter, tmp_path / "pieces.oam", overwrite=True)
        whole, pieces = oam_values(tmp_path / "whole.oam"), oam_values(tmp_path / "pieces.oam")
        for name, values in whole.items():
            np.testing.assert_allclose(pieces[name], values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_the_merged_model_computes_what_pefts_model_does(tmp_path: Path, name: str) -> None:
    convert(source_path(name), tmp_path / "m.oam")
    merge(tmp_path / "m.oam", LORA / name, tmp_path / "out.oam")
    weights, config = load_oam(tmp_path / "out.oam")
    (ids,) = np.load(source_path(name) / "reference.npz")["ids"][:1]
    (wanted,) = np.load(LORA / name / "reference.npz")["logits"]
    np.testing.assert_allclose(logits(weights, config, ids), wanted, rtol=1e-4, atol=2e-4)
    with OamSource(tmp_path / "m.oam") as before, OamSource(tmp_path / "out.oam") as after:
        after.verify()
        assert before.state.keys() == after.state.keys()
        assert {k: v for k, v in after.metadata.items() if k != "adapters"} == dict(before.metadata)
        (note,) = after.metadata["adapters"]
        assert note["name"] == name and note["base_weights"] == before.weights_checksum


def test_another_base_is_warned_about(tmp_path: Path, model: Path, pairs: dict[str, LoraPair]) -> None:
    packed = packed_oam(model, tmp_path / "packed.oam", "q4")
    with OamSource(packed) as source:
        facts = base_facts(source)
    write_adapter(tmp_path / "a", Adapter(to_published(pairs, lora_map(CONFIG)), base=facts))
    assert facts["encoding"] == "q4" and merge(packed, tmp_path / "a", None, dry_run=True).warnings == ()
    (line,) = merge(model, tmp_path / "a", None, dry_run=True).warnings
    assert "trained on other weights" in line and "(q4), not on" in line and "(f32)" in line


def test_the_command(tmp_path: Path, model: Path, adapter: Path) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(main, ["merge", *map(str, arguments)])

    out = tmp_path / "out.oam"
    plan = run(model, adapter, "--dry-run")
    assert plan.exit_code == 0 and "layers.1.mlp.down.weight" in plan.stdout and not out.exists()
    assert run(model, adapter).exit_code == 2
    done = run(model, adapter, "-o", out, "--json")
    said = json.loads(done.stdout)
    assert done.exit_code == 0 and len(said["tensors"]) == 3 and said["check"]["largest"] < 1e-3
    strict = run(model, adapter, "-o", tmp_path / "half.oam", "--dtype", "f16", "--tolerance", 1e-9)
    assert strict.exit_code == 1 and "more than the 1e-09 that are allowed" in strict.stderr
    assert run(model, adapter, "-o", out, "--no-check", "--tolerance", 1).exit_code == 2
    again = run(model, adapter, "-o", out)
    assert again.exit_code == 2 and "exists already" in again.stderr
    done = run(model, adapter, "-o", out, "--force", "--no-check")
    assert done.exit_code == 0 and "logits differ" not in done.stderr
    assert run(model, adapter, "-o", model, "--force").exit_code == 2
    assert run(model, tmp_path / "nothing", "-o", out, "--force").exit_code == 2
    wrong = run(adapter / "adapter_model.safetensors", adapter, "-o", out, "--force")
    assert wrong.exit_code == 1 and "merge takes .oam files" in wrong.stderr


def test_an_adapter_goes_to_llama_cpp_and_to_peft_and_adds_the_same(
    tmp_path: Path, model: Path, adapter: Path, pairs: dict[str, LoraPair]
) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(main, ["adapter", *map(str, arguments)])

    told = run(model, adapter, "--json")
    assert told.exit_code == 0
    layers = {entry["layer"]: entry for entry in json.loads(told.stdout)["layers"]}
    assert layers.keys() == pairs.keys() and layers["layers.1.mlp.down"]["shape"] == [24, 40]
    out, folder = tmp_path / "out.gguf", tmp_path / "peft"
    assert run(model, adapter, "-o", out).exit_code == 0
    assert run(model, out, "-o", folder).exit_code == 0
    merge(model, adapter, tmp_path / "one.oam")
    for other in (out, folder):
        merge(model, other, tmp_path / "other.oam", overwrite=True)
        wanted, found = oam_values(tmp_path / "one.oam"), oam_values(tmp_path / "other.oam")
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6)
    assert run(model, adapter, "-o", adapter, "--force").exit_code == 2
    assert run(model, adapter, "-o", folder).exit_code == 2
    assert run(model, LORA / "llama").exit_code == 1


def test_an_adapter_of_another_model_changes_nothing(tmp_path: Path, model: Path) -> None:
    with pytest.raises(FormatError, match=r"is for a weight of shape|none of this model"):
        merge(model, LORA / "llama", tmp_path / "out.oam")
    assert not (tmp_path / "out.oam").exists()


def test_sums_that_overflow_are_refused(tmp_path: Path, adapter: Path) -> None:
    model = random_oam(tmp_path / "m.oam", CONFIG, "f16")
    file = adapter / "adapter_model.safetensors"
    tensors = {name: values * 1e4 for name, values in load_file(file).items()}
    save_file(tensors, file)
    with pytest.raises(FormatError, match="values that f16 cannot"):
        merge(model, adapter, tmp_path / "out.oam")
    assert not (tmp_path / "out.oam").exists()
    merge(model, adapter, tmp_path / "out.oam", dtype="f32")


def test_models_that_have_no_layers_for_it(tmp_path: Path, adapter: Path, model: Path) -> None:
    with pytest.raises(UsageError, match="unknown type"):
        merge(model, adapter, tmp_path / "out.oam", dtype="f8")
    shutil.copy(
        Path(__file__).parent.parent / "data" / "oa" / "oam_linear_adamw.oam", tmp_path / "foreign.oam"
    )
    with pytest.raises(OazooError, match="holds no model that an adapter could be for"):
        merge(tmp_path / "foreign.oam", adapter, tmp_path / "out.oam")
