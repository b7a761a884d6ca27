"""Statistics of what weights are multiplied with, against the float64 reference models, and quantising with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import reference_models
from click.testing import CliRunner, Result

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats import quant
from oazoo.formats.oam import OamSource
from oazoo.formats.safetensors_writer import write_safetensors
from oazoo.zoo.calibrate import calibrate, cut, own_text
from oazoo.zoo.quantize import quantize
from oazoo.zoo.statistics import Statistics, load_statistics, save_statistics

TEXT = "A ferry came in at noon, and the men who mended nets looked up from their work for a while. " * 4


@pytest.fixture(scope="module")
def found(dense: Path) -> Statistics:
    return calibrate(dense, TEXT, covariance=True)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_moments_are_those_of_the_reference(
    dense: Path, found: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product of the float64 reference model is watched, and its inputs squared, on the same sequences."""
    weights, config = reference_models.load_oam(dense)
    model = oazoo.load(dense)
    ids = np.asarray(model.tokenizer.encode(TEXT, allow_special=False))
    inputs: dict[str, list[npt.NDArray[np.float64]]] = {}
    original = reference_models.linear

    def watched(p: dict[str, npt.NDArray[np.float64]], name: str, x: npt.NDArray[np.float64]) -> object:
        inputs.setdefault(f"{name}.weight", []).append(x.reshape(-1, x.shape[-1]))
        return original(p, name, x)

    monkeypatch.setattr(reference_models, "linear", watched)
    sequences = cut(ids.astype(np.int32), min(512, config.max_positions))
    for sequence in sequences:
        reference_models.logits(weights, config, sequence)
    assert found.tokens == sum(s.size for s in sequences)
    # The head goes through `linear` only where it is not tied; everything else does.
    assert {name for name in inputs if ".attn." in name or ".mlp." in name} == {
        name for name in found.shares if name.startswith("layers.")
    }
    for name, parts in inputs.items():
        if not name.startswith("layers."):
            continue
        x = np.concatenate(parts)
        wanted = x.T @ x / len(x)
        covariance = found.covariance(name, x.shape[1])
        moments = found.moment(name, x.shape[1])
        assert covariance is not None and moments is not None
        scale = np.sqrt(np.outer(wanted.diagonal(), wanted.diagonal())) + 1e-30
        assert np.abs((covariance - wanted) / scale).max() < 2e-5, name
        np.testing.assert_allclose(moments, wanted.diagonal(), rtol=2e-5, err_msg=name)
    assert found.shares["layers.0.attn.k.weight"] == "layers.0.attn.q.weight"
    assert "embed.weight" in found.shares or "head.weight" in found.shares


def test_a_file_of_them_gives_them_back(found: Statistics, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_statistics(found, path)
    back = load_statistics(path)
    assert (back.model, back.weights, back.tokens, back.text_sha256) == (
        found.model,
        found.weights,
        found.tokens,
        hashlib.sha256(TEXT.encode()).hexdigest(),
    )
    assert dict(back.shares) == dict(found.shares)
    for table, other in ((back.moments, found.moments), (back.covariances, found.covariances)):
        assert table.keys() == other.keys()
        assert all(np.array_equal(table[name], other[name]) for name in table)


def test_damaged_files_are_refused(found: Statistics, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(FormatError, match="holds no statistics"):
        write_safetensors(path, {"x": np.ones(3, np.float32)})
        load_statistics(path)

    def write(tensors: dict[str, npt.NDArray[np.float32]], facts: object, version: str = "1") -> None:
        metadata = {"format": "oazoo.statistics", "version": version, "statistics": json.dumps(facts)}
        write_safetensors(path, tensors, metadata=metadata, overwrite=True)

    good = {"model": "m", "weights": "", "text": "t", "text_sha256": "", "tokens": 3, "shares": {"a": "a"}}
    ones = {"moments.a": np.ones(4, np.float32)}
    write(ones, good)
    assert load_statistics(path).moment("a", 4) is not None
    with pytest.raises(UsageError, match="has 4 inputs; this one has 5"):
        load_statistics(path).moment("a", 5)
    for tensors, facts, why in (
        ({"moments.a": np.array([1, -1], np.float32)}, good, "no mean of squares"),
        ({"moments.a": np.array([1, np.nan], np.float32)}, good, "no mean of squares"),
        ({"moments.a": np.ones((2, 2, 2), np.float32)}, good, "no part of statistics"),
        ({**ones, "covariance.a": np.ones((2, 3), np.float32)}, good, "no part of statistics"),
        ({**ones, "other": np.ones(2, np.float32)}, good, "no part of statistics"),
        (ones, {**good, "shares": {"a": "b"}}, "of b are missing"),
        (ones, {**good, "shares": {"a": 1}}, "must name tensors"),
        (ones, {**good, "tokens": "3"}, "metadata lack"),
        (ones, [], "metadata lack"),
    ):
        write(tensors, facts)
        with pytest.raises(FormatError, match=why):
            load_statistics(path)
    write(ones, good, "2")
    with pytest.raises(FormatError, match="version '2'"):
        load_statistics(path)


def weighted_error(
    path: Path, dense: Path, name: str, weights: npt.NDArray[np.float64], encoding: str
) -> float:
    with OamSource(path) as source, OamSource(dense) as original:
        shape = source[name].info.shape
        back = quant.decode(source[name].raw(), encoding, source[name].info.numel).reshape(shape)
        return float((((original[name].numpy() - back).astype(np.float64)) ** 2 * weights).sum())


@pytest.mark.parametrize("to", ["q4", "q8"])
def test_each_method_is_best_at_what_it_minimises(
    dense: Path, found: Statistics, tmp_path: Path, to: str
) -> None:
    """By plain squared error search wins, by weighted error weighted does; the file says how it was made."""
    paths = {method: tmp_path / f"{method}.oam" for method in ("absmax", "search", "weighted")}
    for method, path in paths.items():
        statistics = found if method == "weighted" else None
        quantize(dense, path, to, method=method, statistics=statistics)
    for name in ("layers.0.attn.q.weight", "layers.0.mlp.down.weight"):
        with OamSource(dense) as original:
            inputs = original[name].info.shape[1]
        moment = found.moment(name, inputs)
        assert moment is not None
        plain = {m: weighted_error(p, dense, name, np.ones(inputs), to) for m, p in paths.items()}
        heavy = {m: weighted_error(p, dense, name, moment.astype(np.float64), to) for m, p in paths.items()}
        assert plain["search"] < plain["absmax"] and plain["search"] <= plain["weighted"]
        assert heavy["weighted"] < heavy["search"] and heavy["weighted"] < heavy["absmax"]
    with OamSource(paths["weighted"]) as source:
        source.verify()
        note = source.metadata["quantization"]
        assert note["method"] == "weighted"
        assert note["statistics"]["text_sha256"] == found.text_sha256
        assert note["statistics"]["tokens"] == found.tokens
    assert np.isfinite(oazoo.load(paths["weighted"]).logits([1, 2, 3])).all()


def test_commands(dense: Path, tmp_path: Path) -> None:
    text, stats, out = tmp_path / "t.txt", tmp_path / "s.safetensors", tmp_path / "o.oam"
    text.write_text(TEXT)
    done = run("calibrate", dense, "--text", text, "-o", stats, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["text"] == "t.txt"
    assert run("calibrate", dense, "--text", text, "-o", stats).exit_code != 0  # exists already
    done = run("quantize", dense, "-o", out, "--to", "q4", "--method", "weighted", "--stats", stats)
    assert done.exit_code == 0, done.output
    first = out.read_bytes()
    # Gathering on the way gives the same file but for what the text is called.
    done = run("quantize", dense, "-o", out, "--to", "q4", "--method", "weighted", "--text", text, "--force")
    assert done.exit_code == 0, done.output
    with OamSource(out) as source:
        checksum = source.weights_checksum
    out.write_bytes(first)
    with OamSource(out) as source:
        assert source.weights_checksum == checksum


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"  \n ", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff", "not UTF-8"),
        (b"abc\0def", "NUL"),
        (b"hi", "at least 16"),
    ],
)
def test_texts_that_are_none(dense: Path, tmp_path: Path, content: bytes, why: str) -> None:
    text = tmp_path / "t.txt"
    text.write_bytes(content)
    done = run("calibrate", dense, "--text", text, "-o", tmp_path / "s.safetensors")
    assert done.exit_code == 2 and why in done.output, done.output
    assert not (tmp_path / "s.safetensors").exists()


def test_misuse(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.oam"
    with pytest.raises(UsageError, match="unknown method"):
        quantize(dense, out, "q4", method="best")
    with pytest.raises(UsageError, match="for the methods weighted"):
        quantize(dense, out, "q4", method="search", text=TEXT)
    with pytest.raises(UsageError, match="either"):
        quantize(dense, out, "q4", method="weighted", text=TEXT, statistics="x")
    other = Statistics("other", "", "t", "", 16, {"x": "x"}, {"x": np.ones(4, np.float32)})
    with pytest.raises(UsageError, match="shares no weight's name"):
        quantize(dense, out, "q4", method="weighted", statistics=other)
    assert not out.exists()


def test_the_text_that_ships_is_broad() -> None:
    text = own_text()
    assert 60_000 < len(text) < 90_000 and text.isprintable() is False and "\0" not in text
    for sign in ("def ", "#include", "SELECT", "<!DOCTYPE", "Assistant:", "Lemma", "NO WARRANTY"):
        assert sign in text
