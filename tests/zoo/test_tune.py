"""Tuning packed models on what the original says: scales and vectors learn, codes stay, and predictions come closer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import UsageError
from oazoo.formats.oam import OamSource
from oazoo.zoo.quantize import quantize
from oazoo.zoo.tune import tune

TEXT = "She counted the boats twice, and both times one was missing that nobody had seen go out. " * 12
OTHER = "The frost had come early that year, and the last of the apples were lost to it. " * 12
Logits = npt.NDArray[np.float64]


def log_softmax(path: Path, text: str | npt.NDArray[np.int32]) -> Logits:
    """Of the logits after each token, in float64."""
    model = oazoo.load(path)
    ids = np.asarray(model.tokenizer.encode(text, allow_special=False) if isinstance(text, str) else text)[
        :30
    ]
    logits = model.logits(ids).astype(np.float64)
    top = logits.max(-1, keepdims=True)
    result: Logits = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return result


def divergence(path: Path, reference: Path, text: str | npt.NDArray[np.int32]) -> float:
    """Mean KL divergence from the reference, from whole logits in NumPy."""
    p, q = log_softmax(reference, text), log_softmax(path, text)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def planes(path: Path) -> dict[str, tuple[bytes, npt.NDArray[np.float32]]]:
    """Codes and scales of what is packed in a file."""
    found = {}
    with OamSource(path) as source:
        for name, tensor in source.items():
            if tensor.info.encoding in ("q4", "q8"):
                blocks = -(-tensor.info.numel // 32)
                raw = tensor.raw().tobytes()
                found[name] = raw[: -4 * blocks], np.frombuffer(raw[-4 * blocks :], np.float32)
    return found


@pytest.fixture(scope="module")
def packed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "packed.oam"
    quantize(dense, path, "q4", method="search", q8=["layers.0.mlp.down.weight"])
    return path


def test_scales_learn_and_codes_stay(dense: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "tuned.oam"
    report = tune(packed, dense, out, text=TEXT, passes=12, rate=0.03)
    assert report.passes == 12 and report.after < 0.8 * report.before
    # By logits of whole models, on what was learned from and on another text.
    for text, share in ((TEXT, 0.7), (OTHER, 0.95)):
        assert divergence(out, dense, text) < share * divergence(packed, dense, text)
    before, after = planes(packed), planes(out)
    assert before.keys() == after.keys() and len(after) == 9
    for name, (codes, scales) in after.items():
        assert codes == before[name][0], name
        # The one that has 8 bits stays as it is.
        assert np.array_equal(scales, before[name][1]) == (name == "layers.0.mlp.down.weight"), name
        np.testing.assert_allclose(scales, before[name][1], rtol=0, atol=0.2 * np.abs(scales).max())
    with OamSource(out) as tuned, OamSource(packed) as source:
        tuned.verify()
        assert {n: t.info.encoding for n, t in tuned.items()} == {
            n: t.info.encoding for n, t in source.items()
        }
        assert not np.array_equal(tuned["norm.weight"].numpy(), source["norm.weight"].numpy())
        note = tuned.metadata["quantization"]
        assert note["method"] == "search" and note["tuned"]["tokens"] == report.tokens
        assert note["tuned"]["before"] == report.before and note["tuned"]["after"] == report.after
        assert {n: t.raw().tobytes() for n, t in tuned.state.items()} == {
            n: t.raw().tobytes() for n, t in source.state.items()
        }


@pytest.mark.parametrize("name", ["gemma2", "qwen2", "nanogpt_script/ckpt.pt"])
def test_families(name: str, tmp_path: Path) -> None:
    """Norms stored as w - 1, biases, LayerNorm, tables of positions: what learned is read back as it was learned."""
    dense, out = tmp_path / "dense.oam", tmp_path / "tuned.oam"
    oazoo.convert(source_path(name), dense, dtype="f32")
    before = tmp_path / "packed.oam"
    quantize(dense, before, "q4", method="absmax")
    with OamSource(dense) as source:
        vocabulary = source["embed.weight"].info.shape[0]
    # The same forty tokens in all orders: something to be right about.
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.permutation(min(40, vocabulary)) for _ in range(20)]).astype(np.int32)
    report = tune(before, dense, out, ids=ids, passes=8, rate=0.03)
    assert report.passes and divergence(out, dense, ids) < 0.9 * divergence(before, dense, ids)


def test_what_makes_it_worse_is_not_kept(dense: Path, packed: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "tuned.oam", list[str]()
    report = tune(packed, dense, out, text=TEXT, passes=1, rate=30, notify=said.append)
    assert report.passes == 0 and report.after > report.before
    assert any("worse" in line for line in said)
    with OamSource(out) as tuned, OamSource(packed) as source:
        for name, tensor in source.items():
            assert tuned[name].raw().tobytes() == tensor.raw().tobytes()


def test_the_same_again_is_the_same(dense: Path, packed: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        tune(packed, dense, tmp_path / name, text=TEXT, passes=1)
    assert (
        planes(tmp_path / "a")["embed.weight"][1].tobytes()
        == planes(tmp_path / "b")["embed.weight"][1].tobytes()
    )


def test_quantize_and_tune_in_one(dense: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.oam"
    text.write_text(TEXT)
    arguments = [
        "quantize",
        str(dense),
        "--to",
        "q4",
        "--method",
        "weighted",
        "--equalize",
        "--tune",
        "--passes",
        "3",
    ]
    run = CliRunner().invoke(main, [*arguments, "--text", str(text), "-o", str(out), "--json"])
    assert run.exit_code == 0, run.output
    with OamSource(out) as source:
        note = source.metadata["quantization"]
        assert note["method"] == "weighted" and note["tuned"]["text"] == "a text of the user's"
        assert source.metadata["equalized"]["powers"] is not None
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["out.oam", "text.txt"]
    assert "tuned on" in run.output or '"tuned": {' in run.output


def test_refusals(dense: Path, packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    other, plain = tmp_path / "other.oam", tmp_path / "f16.oam"
    oazoo.convert(source_path("qwen2"), other, dtype="f32")
    quantize(packed, plain, "f16")
    eight = tmp_path / "q8.oam"
    quantize(dense, eight, "q8")
    cases = [
        (packed, other, {}, "different models"),
        (plain, dense, {}, "no scales"),
        (eight, dense, {}, "no scales"),
        (packed, dense, {"passes": 0}, "0 passes"),
        (packed, dense, {"rate": 0.0}, "rate of 0"),
        (packed, dense, {"text": "Too short."}, "at least 64"),
    ]
    for first, second, more, message in cases:
        with pytest.raises(UsageError, match=message):
            tune(first, second, out, **{"text": TEXT, **more})  # type: ignore[arg-type]
    for to, dry_run in (("f16", False), ("q8", False), ("q8", True)):
        with pytest.raises(UsageError, match="tuning is for what is packed to q4"):
            quantize(dense, out, to, tuned=True, dry_run=dry_run)
    # A text to tune on is none to pack by.
    quantize(dense, None, "q4", method="search", text=TEXT, tuned=True, dry_run=True)
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        tune(packed, dense, out, text=TEXT)
    assert out.read_bytes() == b"mine" and not list(tmp_path.glob(".*"))
    run = CliRunner().invoke(
        main, ["quantize", str(dense), "--to", "q4", "--passes", "2", "-o", str(tmp_path / "x")]
    )
    assert run.exit_code == 2 and "--passes is of --tune" in run.output
