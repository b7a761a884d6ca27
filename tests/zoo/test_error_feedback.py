"""Packing a whole model with error feedback, against the float64 reference models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import reference_models
from click.testing import CliRunner

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.zoo import error_feedback
from oazoo.zoo.calibrate import calibrate, cut
from oazoo.zoo.quantize import quantize
from oazoo.zoo.statistics import Statistics, save_statistics

TEXT = "She counted the boats twice, and both times one was missing that nobody had seen go out. " * 5
Doubles = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def statistics(dense: Path) -> Statistics:
    return calibrate(dense, TEXT, covariance=True)


def values(path: Path, name: str) -> Doubles:
    with OamSource(path) as source:
        tensor = source[name]
        info = tensor.info
        if info.encoding == "q4":
            return quant.decode(tensor.raw(), "q4", info.numel).reshape(info.shape).astype(np.float64)
        return np.asarray(tensor.numpy(), np.float64)


def loss(error: Doubles, c: npt.NDArray[np.float32]) -> float:
    return float(((error @ c.astype(np.float64)) * error).sum())


def test_it_is_best_at_what_it_minimises(dense: Path, statistics: Statistics, tmp_path: Path) -> None:
    """With the dense model's covariances, each weight's outputs are nearer than by weighted search; the file is ordinary."""
    paths = {method: tmp_path / f"{method}.oam" for method in ("weighted", "gptq")}
    for method, path in paths.items():
        quantize(dense, path, "q4", method=method, statistics=statistics)
    names = [name for name in statistics.shares if name != "embed.weight"]
    assert len(names) == 8
    for name in names:
        original = values(dense, name)
        c = statistics.covariance(name, original.shape[1])
        assert c is not None
        assert loss(original - values(paths["gptq"], name), c) < 0.9 * loss(
            original - values(paths["weighted"], name), c
        ), name
    with OamSource(paths["gptq"]) as source:
        source.verify()
        note = source.metadata["quantization"]
        assert note["method"] == "gptq" and note["statistics"]["text_sha256"] == statistics.text_sha256
        with OamSource(dense) as before:
            assert list(source) == list(before)
    assert np.isfinite(oazoo.load(paths["gptq"]).logits([1, 2, 3])).all()


def test_layers_are_fed_what_those_before_became(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The covariances of the layer are those of the float64 model with the embedding as in the result, and the head's those
    of the one whose layer is as in the result too, without each sequence's first token."""
    seen: dict[str, npt.NDArray[np.float32]] = {}
    feedback = error_feedback.ErrorFeedback._feedback

    def watched(self: Any, name: str, inputs: int) -> Any:
        result = feedback(self, name, inputs)
        if self._layers._covariances:
            seen[name] = self._layers._covariances[self._layers._shares[name]]
        return result

    monkeypatch.setattr(error_feedback.ErrorFeedback, "_feedback", watched)
    out = tmp_path / "gptq.oam"
    quantize(dense, out, "q4", method="gptq", text=TEXT)

    weights, config = reference_models.load_oam(dense)
    assert {"layers.0.attn.q.weight", "layers.0.mlp.down.weight", "head.weight"} <= {*seen}
    inputs: dict[str, list[Doubles]] = {}
    original = reference_models.linear

    def linear(p: dict[str, Doubles], name: str, x: Doubles) -> object:
        inputs.setdefault(f"{name}.weight", []).append(x.reshape(-1, x.shape[-1])[1:])
        return original(p, name, x)

    monkeypatch.setattr(reference_models, "linear", linear)
    ids = np.asarray(oazoo.load(dense).tokenizer.encode(TEXT, allow_special=False))
    layer = [name for name in seen if name.startswith("layers.")]
    for before, names in ((["embed.weight"], layer), (layer, ["head.weight"])):
        inputs.clear()
        for name in before:
            weights[name] = values(out, name)
        for sequence in cut(ids.astype(np.int32), min(512, config.max_positions)):
            logits = reference_models.logits(weights, config, sequence)
            # More outputs than inputs: they say what the head was fed.
            fed = np.linalg.lstsq(weights["head.weight"], logits.T, rcond=None)[0].T
            inputs.setdefault("head.weight", []).append(fed[1:])
        for name in names:
            x = np.concatenate(inputs[name])
            wanted, got = x.T @ x, seen[name].astype(np.float64)
            got *= wanted.trace() / got.trace()  # what they are means of makes no difference
            scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal())) + 1e-30
            assert np.abs((got - wanted) / scale).max() < 1e-4, name


def test_patterns_and_odd_widths(dense: Path, statistics: Statistics, tmp_path: Path) -> None:
    """What is kept, or becomes Q8, is as by the other methods, and what follows still is packed."""
    out = tmp_path / "o.oam"
    report = quantize(
        dense, out, "q4", method="gptq", text=TEXT, keep=["layers.0.attn.o.*"], q8=["layers.0.mlp.down.*"]
    )
    kinds = {t.name: t.target for t in report.tensors}
    assert kinds["layers.0.attn.o.weight"] == "f32" and kinds["layers.0.mlp.down.weight"] == "q8"
    np.testing.assert_array_equal(
        values(out, "layers.0.attn.o.weight"), values(dense, "layers.0.attn.o.weight")
    )
    with OamSource(out) as source:
        source.verify()
        info = source["layers.0.mlp.down.weight"].info
        back = quant.decode(source["layers.0.mlp.down.weight"].raw(), "q8", info.numel).reshape(info.shape)
    original = values(dense, "layers.0.mlp.down.weight")
    assert np.abs(back - original).max() < np.abs(original).max() / 100


def test_misuse(dense: Path, statistics: Statistics, tmp_path: Path) -> None:
    out = tmp_path / "o.oam"
    with pytest.raises(UsageError, match="gptq packs to q4"):
        quantize(dense, out, "q8", method="gptq")
    plain = Statistics(**{**statistics.__dict__, "covariances": {}})
    with pytest.raises(UsageError, match="needs covariances"):
        quantize(dense, out, "q4", method="gptq", statistics=plain)
    name = "layers.0.attn.v.weight"
    bad = tmp_path / "bad.oam"
    raw = bytearray(dense.read_bytes())
    with OamSource(dense) as source:
        first = np.ascontiguousarray(source[name].numpy()).tobytes()[:64]
    at = raw.index(first)
    raw[at : at + 4] = np.float32(np.nan).tobytes()
    bad.write_bytes(raw)
    with pytest.raises(FormatError, match="not finite"):
        quantize(bad, out, "q4", method="gptq", statistics=statistics)
    assert not out.exists()


def test_command(dense: Path, statistics: Statistics, tmp_path: Path) -> None:
    stats, out = tmp_path / "s.safetensors", tmp_path / "o.oam"
    save_statistics(statistics, stats)
    arguments = ["quantize", dense, "-o", out, "--to", "q4", "--method", "gptq", "--stats", stats, "--json"]
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    assert '"method": "gptq"' in done.stdout


def test_what_is_chance_is_left_out() -> None:
    """Inputs that vary alone lose what a short text shows of them together; those that vary together keep theirs, and more
    of it the longer the text."""
    rng = np.random.default_rng(1)
    alone = rng.normal(size=(300, 64)) * rng.gamma(1.0, size=64)
    together = rng.normal(size=(300, 4)) @ rng.normal(size=(4, 64))
    for x, tokens, low, high in (
        (alone, 300, 0.0, 0.05),
        (together, 300, 0.75, 0.9),
        (together, 10**6, 0.89, 0.9),
    ):
        c = (x.T @ x / len(x)).astype(np.float32)
        got = error_feedback.drawn(c, tokens)
        np.testing.assert_array_equal(got.diagonal(), c.diagonal())
        off = ~np.eye(64, dtype=bool)
        kept = got[off] / c[off]
        assert np.ptp(kept) < 1e-4 and low <= kept[0] <= high + 1e-6, (tokens, kept[0])
    silent = np.zeros((32, 32), np.float32)
    silent[0, 0] = 2
    np.testing.assert_array_equal(error_feedback.drawn(silent, 100), silent)
