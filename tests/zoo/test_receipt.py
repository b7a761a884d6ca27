"""Quality receipts: what was measured stays with the weights it is about, and limits are gates."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_rewrite import write_with_payload
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.zoo.evaluate import evaluate
from oazoo.zoo.inspect import inspect
from oazoo.zoo.receipt import QualityError, add_receipt, quantize_measured, read_receipt

TEXT = "A ferry came in at noon, and the men who mended nets looked up from their work for a while. " * 4


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    path = tmp_path / "dense.oam"
    oazoo.convert(source_path("F32"), path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def pack(source: Path, to: str = "q4") -> Callable[[Path], Any]:
    return lambda path: oazoo.quantize(source, path, to, method="absmax")


def test_a_receipt_made_with_the_file(dense: Path, text: Path, tmp_path: Path, oamref: Any) -> None:
    out = tmp_path / "q4.oam"
    done = run("quantize", dense, "-o", out, "--to", "q4", "--method", "absmax", "--receipt", "--eval-text", text,
               "--eval-context", 32, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["output"] == str(out) and told["output_bytes"] == out.stat().st_size
    found = evaluate(out, TEXT, against=dense, context=32)
    other = found.comparison
    assert other is not None
    with OamSource(out) as source, OamSource(dense) as original:
        source.verify()
        receipt = read_receipt(source)
        assert receipt is not None and receipt["matches"] is True
        assert receipt["weights"] == source.weights_checksum
        assert receipt["source"]["weights"] == original.weights_checksum
        tokenizer = source.asset("asset/tokenizer.json")
        assert tokenizer is not None
        assert receipt["tokenizer_sha256"] == hashlib.sha256(tokenizer).hexdigest()
    assert receipt["source"]["name"] == "dense"
    assert receipt["source"]["sha256"] == hashlib.sha256(dense.read_bytes()).hexdigest()
    assert receipt["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert (receipt["context"], receipt["tokens"]) == (32, found.tokens)
    assert receipt["kl_mean"] == other.kl_mean and receipt["kl_999"] == other.kl_999
    assert receipt["perplexity_ratio"] == other.perplexity_ratio and receipt["same_top"] == other.same_top
    assert receipt["made"]["to"] == "q4" and receipt["made"]["method"] == "absmax"
    plain = tmp_path / "plain.oam"
    oazoo.quantize(dense, plain, "q4", method="absmax")
    assert oamref.load(out)["weights"] == oamref.load(plain)["weights"]
    shown = run("inspect", out).stdout
    assert "belongs to these weights: yes" in shown and f"{other.perplexity_ratio:.5f}" in shown
    assert inspect(out)["receipt"]["kl_mean"] == other.kl_mean


def test_a_receipt_added_later_and_again(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "q8.oam"
    oazoo.quantize(dense, out, "q8", method="absmax")
    assert "quality receipt: none" in run("inspect", out).stdout and inspect(out)["receipt"] is None
    with OamSource(out) as source:
        weights = source.weights_checksum
    for context in (16, 32):
        done = run("eval", out, "--against", dense, "--text", text, "--context", context, "--receipt")
        assert done.exit_code == 0, done.output
        receipt = inspect(out)["receipt"]
        assert receipt["context"] == context and receipt["matches"] is True
        with OamSource(out) as source:
            source.verify()
            assert source.weights_checksum == weights and source.metadata["quantization"]["to"] == "q8"
    assert oazoo.load(out).generate("A ferry", max_tokens=2, raw=True).token_ids  # the file still runs
    assert "receipt" not in inspect(dense)


def test_a_receipt_of_other_weights_is_told(dense: Path, tmp_path: Path) -> None:
    q4, q8 = tmp_path / "q4.oam", tmp_path / "q8.oam"
    quantize_measured(dense, q4, pack(dense), TEXT, context=32)
    oazoo.quantize(dense, q8, "q8", method="absmax")
    with OamSource(q4) as measured, OamSource(q8) as source:
        forged = json.dumps({**source.metadata, "receipt": measured.metadata["receipt"]}).encode()
        write_with_payload(source, q8, forged, overwrite=True)
    shown = run("inspect", q8)
    assert "belongs to these weights: NO" in shown.stdout and inspect(q8)["receipt"]["matches"] is False
    # Weights changed under the receipt: one byte of a code.
    data = bytearray(q4.read_bytes())
    with OamSource(q4) as source:
        raw = source["embed.weight"].raw()[:64].tobytes()
    data[data.find(raw)] ^= 1
    q4.write_bytes(data)
    assert run("verify", q4).exit_code == 1


@pytest.mark.parametrize(
    "receipt",
    ["text", [1, 2], {"source": 7, "kl_mean": "\x1b[31m", "perplexity_ratio": True}, {"weights": None}],
)
def test_what_somebody_else_calls_a_receipt_is_shown_and_never_believed(
    dense: Path, tmp_path: Path, receipt: Any
) -> None:
    path = tmp_path / "odd.oam"
    with OamSource(dense) as source:
        write_with_payload(source, path, json.dumps({**source.metadata, "receipt": receipt}).encode())
    shown = run("inspect", path)
    assert shown.exit_code == 0 and "\x1b" not in shown.output
    expected = "none" if not isinstance(receipt, dict) else "NO: it was made for other weights"
    assert expected in shown.stdout
    assert run("inspect", path, "--json").exit_code == 0


def test_gates(dense: Path, text: Path, tmp_path: Path) -> None:
    """QZ-04: a limit that is exceeded is exit status 1, nothing is written, and what was there stays."""
    out = tmp_path / "q4.oam"
    base = [
        "quantize",
        dense,
        "-o",
        out,
        "--to",
        "q4",
        "--method",
        "absmax",
        "--eval-text",
        text,
        "--eval-context",
        32,
    ]
    before = sorted(tmp_path.iterdir())
    done = run(*base, "--max-kl", "1e-12")
    assert done.exit_code == 1 and "allowed (--max-kl)" in done.stderr
    assert sorted(tmp_path.iterdir()) == before
    out.write_bytes(b"precious")
    assert run(*base, "--max-kl", "9").exit_code == 2  # exists
    done = run(*base, "--max-ppl-ratio", "0.5", "--force")
    assert done.exit_code == 1 and "allowed (--max-ppl-ratio)" in done.stderr
    assert out.read_bytes() == b"precious" and sorted(tmp_path.iterdir()) == sorted([*before, out])
    assert run(*base, "--max-kl", "9", "--max-ppl-ratio", "9", "--force").exit_code == 0
    assert inspect(out)["receipt"]["matches"] is True
    assert sorted(tmp_path.iterdir()) == sorted([*before, out])


def outlier_model(dense: Path, path: Path) -> None:
    """The model with one channel of a layer forty times larger, and one value in it once more twenty-five times."""
    with OamSource(dense) as source:
        entries = [OamEntry(n, t.info.shape, t.info.encoding) for n, t in source.items()]
        assets = {n.removeprefix("asset/"): t.raw().tobytes() for n, t in source.state.items()}
        with OamWriter(path, config=source.config, entries=entries, assets=assets) as writer:
            for name, tensor in source.items():
                values: npt.NDArray[Any] = np.array(tensor.numpy())
                if name == "layers.0.mlp.up.weight":
                    values[5] *= 40
                    values[5, 3] *= 25
                writer.write(name, values)


def test_an_outlier_channel_fails_q4_and_passes_q8(dense: Path, tmp_path: Path) -> None:
    """QZ-04: with outliers in a layer 4 bits are flagged, 8 bits are not."""
    hurt = tmp_path / "hurt.oam"
    outlier_model(dense, hurt)
    costs = {}
    for to in ("q8", "q4"):
        out = tmp_path / f"{to}.oam"
        _, found = quantize_measured(hurt, out, pack(hurt, to), TEXT, context=32)
        assert found.comparison is not None
        costs[to] = found.comparison.kl_mean
    assert costs["q4"] > 20 * costs["q8"] > 0
    limit = (costs["q4"] * costs["q8"]) ** 0.5
    from oazoo.zoo.receipt import Limits

    quantize_measured(hurt, tmp_path / "ok.oam", pack(hurt, "q8"), TEXT, limits=Limits(limit), context=32)
    with pytest.raises(QualityError, match="mean KL divergence"):
        quantize_measured(hurt, tmp_path / "no.oam", pack(hurt, "q4"), TEXT, limits=Limits(limit), context=32)
    assert not (tmp_path / "no.oam").exists()


def test_misuse(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.oam"
    base = ["quantize", dense, "-o", out, "--to", "q4", "--method", "absmax"]
    for arguments, message in (
        ([*base, "--receipt"], "--eval-text FILE"),
        ([*base, "--max-kl", "0.1"], "--eval-text FILE"),
        ([*base, "--max-kl", "-1", "--eval-text", text], "from 0 on"),
        ([*base, "--receipt", "--eval-text", tmp_path / "none"], "no such file"),
        ([*base, "--receipt", "--eval-text", text], "can have at most 256"),
        (["eval", dense, "--against", dense, "--text", text, "--receipt", "--context", "999"], "at most 256"),
        (
            ["eval", source_path("F32"), "--against", dense, "--text", text, "--receipt"],
            "receipts are kept in .oam",
        ),
    ):
        done = run(*arguments)
        assert done.exit_code in (1, 2) and message in done.stderr, (arguments, done.stderr)
        assert not out.exists()
    with pytest.raises(UsageError, match="is the source itself"):
        quantize_measured(dense, dense, pack(dense), TEXT, overwrite=True)
    weights_only = tmp_path / "raw.oam"
    oazoo.convert(source_path("F32"), weights_only, arch="raw")
    with pytest.raises(FormatError, match="holds tensors without a model"):
        quantize_measured(weights_only, out, pack(weights_only), TEXT)
    with pytest.raises(UsageError, match="a receipt needs a comparison"):
        add_receipt(dense, dense, evaluate(dense, TEXT, context=32))
    foreign = tmp_path / "foreign.oam"
    shutil.copy(sorted((source_path("F32").parent.parent / "oa").glob("*.oam"))[0], foreign)
    done = run("eval", foreign, "--against", dense, "--text", text, "--receipt")
    assert done.exit_code == 2 and "its config is not oazoo's" in done.stderr
