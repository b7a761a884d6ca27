"""Scaling columns and what feeds them: the same function, and less error when packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.runtime import get_device
from oazoo.zoo.calibrate import calibrate
from oazoo.zoo.equalize import equalize
from oazoo.zoo.quantize import quantize
from oazoo.zoo.statistics import Statistics, save_statistics

TEXT = "She counted the boats twice, and both times one was missing that nobody had seen go out. " * 5


def uneven(path: Path, name: str, tmp_path: Path) -> Statistics:
    """Statistics in which some inputs of every layer are far larger than others; as a model with outliers has them."""
    rng = np.random.default_rng(0)
    with OamSource(path) as source:
        names = [n for n, t in source.items() if len(t.info.shape) == 2 and n.startswith("layers.")]
        moments = {n: rng.lognormal(0, 2, source[n].info.shape[1]).astype(np.float32) for n in names}
    shares = {n: n for n in names}
    for layer in {n.split(".")[1] for n in names}:
        for first, rest in (("attn.q", ("attn.k", "attn.v")), ("mlp.gate", ("mlp.up",))):
            for other in rest:
                shares[f"layers.{layer}.{other}.weight"] = f"layers.{layer}.{first}.weight"
    kept = {n: m for n, m in moments.items() if n in shares.values()}
    return Statistics(name, "", "t", "", 16, shares, kept, {}, {})


@pytest.mark.parametrize("name", ["F32", "gemma2", "qwen2", "phi3", "llama_tied_bf16"])
def test_the_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """With grouped heads, offsets of norms, biases of value projections, norms behind as well, and 16-bit sources."""
    dense, out = tmp_path / "dense.oam", tmp_path / "even.oam"
    oazoo.convert(source_path(name), dense, dtype="keep" if name == "llama_tied_bf16" else "f32")
    statistics = uneven(dense, name, tmp_path)
    with OamSource(dense) as source:
        equalize(source, statistics, out, get_device())
    ids = [1, 5, 9, 30, 2, 77, 41]
    wanted, got = oazoo.load(dense).logits(ids), oazoo.load(out).logits(ids)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4 * np.abs(wanted).max())
    with OamSource(out) as source, OamSource(dense) as before:
        source.verify()
        note = source.metadata["equalized"]
        assert note["source_weights"] == before.weights_checksum and note["powers"]
        changed = [n for n in source if not np.array_equal(source[n].numpy(), before[n].numpy())]
        assert {"layers.0.attn.q.weight", "layers.0.attn_norm.weight", "layers.0.mlp.down.weight"} <= {
            *changed
        }
        assert not any(n.startswith(("embed", "norm", "head")) for n in changed)


def test_packed_errors_are_less(tmp_path: Path) -> None:
    """The weighted error of packed columns, over what it is scaled with, beats weighted search without."""
    dense, out = tmp_path / "dense.oam", tmp_path / "even.oam"
    oazoo.convert(source_path("F32"), dense)
    statistics = uneven(dense, "dense", tmp_path)
    with OamSource(dense) as source:
        scaled = equalize(source, statistics, out, get_device())
    plain, even = tmp_path / "plain.oam", tmp_path / "q.oam"
    quantize(dense, plain, "q4", method="weighted", statistics=statistics)
    quantize(out, even, "q4", method="weighted", statistics=scaled)
    total: dict[str, float] = {}
    for path, original, moments in ((plain, dense, statistics), (even, out, scaled)):
        with OamSource(path) as packed, OamSource(original) as source:
            for name in moments.shares:
                values = source[name].numpy().astype(np.float64)
                back = quant.decode(packed[name].raw(), "q4", values.size).reshape(values.shape)
                h = moments.moment(name, values.shape[1])
                assert h is not None
                # Rows that were divided are as much smaller, and what they make counts as much more.
                share = ((values - back) ** 2 * h).sum() / (values**2 * h).sum()
                total[path.name] = total.get(path.name, 0) + float(share)
    assert total["q.oam"] < 0.9 * total["plain.oam"]


def test_command(tmp_path: Path) -> None:
    """The file is ordinary, says what was done, and nothing is left beside it."""
    dense, stats, out = tmp_path / "dense.oam", tmp_path / "s.safetensors", tmp_path / "o.oam"
    oazoo.convert(source_path("F32"), dense)
    save_statistics(uneven(dense, "dense", tmp_path), stats)
    arguments = ["quantize", str(dense), "-o", str(out), "--to", "q4", "--equalize"]
    done = CliRunner().invoke(main, [*arguments, "--stats", str(stats)])
    assert done.exit_code == 0, done.output
    with OamSource(out) as source, OamSource(dense) as before:
        source.verify()
        assert source.metadata["equalized"]["source_weights"] == before.weights_checksum
        assert source["layers.0.attn.q.weight"].info.encoding == "q4"
    assert {p.name for p in tmp_path.iterdir()} == {"dense.oam", "s.safetensors", "o.oam"}
    assert np.isfinite(oazoo.load(out).logits([1, 2, 3])).all()
    for more, why in (
        (["--method", "search"], "does not mind"),
        (["--report", str(tmp_path / "r.html")], "has scaled"),
    ):
        done = CliRunner().invoke(main, [*arguments, "--force", *more])
        assert done.exit_code == 2 and why in done.output, done.output


def test_statistics_go_along(tmp_path: Path) -> None:
    """What is measured on the scaled model is what the scaled statistics say."""
    dense, out = tmp_path / "dense.oam", tmp_path / "even.oam"
    oazoo.convert(source_path("F32"), dense)
    statistics = calibrate(dense, TEXT, covariance=True)
    outlier = statistics.moments["layers.0.attn.q.weight"].copy()
    outlier[::7] *= 1000
    statistics = replace(statistics, moments={**statistics.moments, "layers.0.attn.q.weight": outlier})
    with OamSource(dense) as source:
        scaled = equalize(source, statistics, out, get_device())
    measured = calibrate(out, TEXT, covariance=True)
    for name in scaled.shares:
        inputs = scaled.covariances[scaled.shares[name]].shape[0]
        got, wanted = scaled.covariance(name, inputs), measured.covariance(name, inputs)
        assert got is not None and wanted is not None
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max(), err_msg=name)


def test_other_models_are_refused(tmp_path: Path) -> None:
    dense = tmp_path / "olmo.oam"
    oazoo.convert(source_path("olmo2"), dense)
    statistics = uneven(dense, "olmo2", tmp_path)
    with OamSource(dense) as source, pytest.raises(UsageError, match="norms before"):
        equalize(source, statistics, tmp_path / "o.oam", get_device())
    assert not (tmp_path / "o.oam").exists()
