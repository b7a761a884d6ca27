"""The report of a quantisation: its numbers against NumPy, a page that hostile names cannot break, and all or nothing."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from model_goldens import source_path

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, OutputError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.zoo import tensor_errors as module
from oazoo.zoo.calibrate import own_text
from oazoo.zoo.report import write_report
from oazoo.zoo.tensor_errors import SCALE_BINS_PER_OCTAVE, SCALE_LOW, TensorError, tensor_errors

EVIL = "<script>alert(1)</script>\"'&$\\frac$\u202e"


def write(path: Path, tensors: dict[str, npt.NDArray[Any]], payload: bytes = b'{"oazoo":1}') -> Path:
    entries = [OamEntry(name, array.shape, "f32") for name, array in tensors.items()]
    with OamWriter(path, config=OamConfig("test", payload=payload), entries=entries) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    return path


def errors_of(tmp_path: Path, tensors: dict[str, npt.NDArray[Any]], to: str) -> dict[str, TensorError]:
    source = write(tmp_path / "in.oam", tensors)
    oazoo.quantize(source, tmp_path / "out.oam", to, method="absmax")
    with OamSource(source) as before, OamSource(tmp_path / "out.oam") as after:
        return {error.name: error for error in tensor_errors(before, after)}


@pytest.mark.parametrize(("to", "top", "lowest"), [("q8", 127, -128), ("q4", 7, -7)])
def test_numbers(tmp_path: Path, to: str, top: int, lowest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 64)  # several pieces, the last one short
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 33)).astype(np.float32)
    x[3, 5] = 60  # an outlier: element 104, in block 3
    found = errors_of(
        tmp_path, {"w": x, "v": np.ones(5, np.float32), "zeros": np.zeros((2, 40), np.float32)}, to
    )
    assert set(found) == {"w", "zeros"}
    blocks = np.zeros((8, 32), np.float32)
    blocks.reshape(-1)[: x.size] = x.reshape(-1)
    scale = np.abs(blocks).max(1) / np.float32(top)
    code = np.rint(blocks / scale[:, None]).astype(int)
    y = (code.astype(np.float32) * scale[:, None]).reshape(-1)[: x.size].astype(np.float64)
    a = x.reshape(-1).astype(np.float64)
    error = a - y
    w = found["w"]
    assert w.mse == pytest.approx((error**2).mean(), rel=1e-12)
    assert w.max_abs == pytest.approx(np.abs(error).max(), rel=1e-12)
    assert w.relative == pytest.approx(np.sqrt((error**2).sum() / (a**2).sum()), rel=1e-12)
    assert w.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / (error**2).sum()), rel=1e-12)
    assert w.cosine == pytest.approx(a @ y / np.sqrt((a @ a) * (y @ y)), rel=1e-12)
    assert (w.bytes_before, w.bytes_after) == (7 * 33 * 4, 8 * (36 if to == "q8" else 20))
    counts = np.bincount(code.reshape(-1)[: x.size] - lowest, minlength=256 if to == "q8" else 16)
    assert w.codes == tuple(counts) and sum(w.codes) == x.size  # padding is not counted
    places = np.floor((np.log2(scale.astype(np.float64)) - SCALE_LOW) * SCALE_BINS_PER_OCTAVE).astype(int)
    assert w.scales == tuple(np.bincount(places, minlength=len(w.scales))) and w.negative_scales == 0
    worst = w.outliers[0]
    assert worst.block == 3 and worst.position == (2, 30) and worst.largest == 60
    e3 = error[96:128]
    assert worst.error_rms == pytest.approx(np.sqrt((e3**2).mean()), rel=1e-12)
    assert worst.ratio == pytest.approx(worst.error_rms / np.sqrt(w.mse), rel=1e-12)
    assert [b.error_rms for b in w.outliers] == sorted((b.error_rms for b in w.outliers), reverse=True)
    zeros = found["zeros"]
    assert (zeros.mse, zeros.relative, zeros.sqnr_db, zeros.cosine, zeros.outliers) == (0, 0, None, None, ())


def test_scales_and_codes_that_our_encoder_does_not_write(tmp_path: Path) -> None:
    """Any scale and any code is legal: negative scales, zero, infinity, the sixteenth code, -128."""
    raw = np.full(4 * 16, 0xFF, np.uint8)
    scales = np.array([-0.5, 0.0, np.inf, 1e-30], np.float32)
    path = tmp_path / "w.oam"
    entries = [OamEntry("w", (4, 32), "q4"), OamEntry("e", (1, 32), "q8")]
    with OamWriter(path, config=OamConfig("t"), entries=entries) as writer:
        writer.write("w", [raw, scales])
        writer.write("e", [np.full(32, 0x80, np.uint8), np.ones(1, np.float32)])
    with OamSource(path) as source:
        codes, bins, negative = module._histograms(source["w"])
        assert codes[15] == 128 and sum(codes) == 128 and negative == 1 and sum(bins) == 3
        assert bins[(-1 - SCALE_LOW) * SCALE_BINS_PER_OCTAVE] == 1 and bins[0] == 2
        codes, _, _ = module._histograms(source["e"])
        assert codes[0] == 32 and sum(codes) == 32


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_png(address: str) -> None:
    """A picture that is there and is no blank."""
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"), validate=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 300 and height > 100
    at, packed = 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    assert len(set(zlib.decompress(packed))) > 20


def test_a_page_on_a_model(tmp_path: Path) -> None:
    dense, packed, page = tmp_path / "dense.oam", tmp_path / "q4.oam", tmp_path / "page.html"
    oazoo.convert(source_path("F32"), dense)
    done = CliRunner().invoke(
        main,
        [
            "quantize",
            str(dense),
            "-o",
            str(packed),
            "--to",
            "q4",
            "--method",
            "absmax",
            "--report",
            str(page),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)["report"]
    content = page.read_text("utf-8")
    seen = Page(content)
    assert seen.open == []
    pictures = [attrs["src"] for tag, attrs in seen.tags if tag == "img"]
    groups = {re.sub(r"\d+", "*", e["name"]) for e in told["tensor_errors"]}
    assert len(pictures) == 1 + len(groups)
    for picture in pictures:
        assert picture is not None
        check_png(picture)
    # Nothing is fetched and nothing runs.
    allowed = "html head meta title style body h1 h2 h3 p table tr th td code img"
    assert {tag for tag, _ in seen.tags} <= set(allowed.split())
    assert not re.search(r"(https?:|//[a-z]|url\()", re.sub(r"data:image/png;base64,[^']*", "", content))
    with OamSource(dense) as before, OamSource(packed) as after:
        wanted = list(tensor_errors(before, after))
    assert [e["name"] for e in told["tensor_errors"]] == [e.name for e in wanted]
    for error in wanted:
        assert error.name in seen.text and f"{error.mse:.3g}" in seen.text
    # What both models say, against the logits themselves.
    a, b = oazoo.load(dense), oazoo.load(packed)
    ids = a.tokenizer.encode(own_text()[:4000], allow_special=False)[:64]
    x, y = (np.array(m.logits(ids), np.float64) for m in (a, b))
    last = told["predictions"][-1]
    at = len(ids) - 2
    p, q = (np.exp(v[at] - v[at].max()) / np.exp(v[at] - v[at].max()).sum() for v in (x, y))
    assert last["kl"] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-6)
    assert last["before"][0][1] == pytest.approx(p.max(), rel=1e-9)
    best = int(q.argmax())
    assert last["after"][0] == [a.tokenizer.decode([best]), pytest.approx(q.max(), rel=1e-9), y[at][best]]
    assert f"({x[at].max():.2f})" in seen.text and f"({y[at].max():.2f})" in seen.text
    assert "The file has no quality receipt" in seen.text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {EVIL: rng.normal(size=(4, 40)).astype(np.float32), "b": np.ones((2, 32), np.float32)}
    source = write(tmp_path / "<b>in&.oam", tensors, json.dumps({"oazoo": EVIL}).encode())
    packed = tmp_path / "out'><script>.oam"
    oazoo.quantize(source, packed, "q8", method="absmax")
    page = tmp_path / "page.html"
    report = write_report(source, packed, page)
    content = page.read_text("utf-8")
    seen = Page(content)
    assert "script" not in {tag for tag, _ in seen.tags} and "b" not in {tag for tag, _ in seen.tags}
    assert "\u202e" not in content and "<script>alert(1)</script>" in seen.text
    assert seen.open == [] and not report.predictions
    assert (
        "no model here can run" in report.why_not and report.why_not.split(":")[0].split("/")[-1] in seen.text
    )


def test_with_a_receipt(tmp_path: Path) -> None:
    dense, packed, page = tmp_path / "dense.oam", tmp_path / "q8.oam", tmp_path / "page.html"
    oazoo.convert(source_path("F32"), dense)
    text = tmp_path / "text.txt"
    text.write_text("A ferry came in at noon, and the men who mended nets looked up from their work. " * 4)
    base = [
        "quantize",
        str(dense),
        "-o",
        str(packed),
        "--to",
        "q8",
        "--method",
        "absmax",
        "--report",
        str(page),
    ]
    done = CliRunner().invoke(main, [*base, "--receipt", "--eval-text", str(text), "--eval-context", "32"])
    assert done.exit_code == 0, done.output
    seen = Page(page.read_text("utf-8"))
    assert "belongs to these weightsyes" in seen.text and "perplexity ratio" in seen.text


def test_refusals_come_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in.oam", {"w": np.ones((2, 32), np.float32)})
    out, page = tmp_path / "out.oam", tmp_path / "page.html"
    base = ["quantize", str(source), "-o", str(out), "--to", "q8", "--method", "absmax", "--report"]
    page.write_text("mine")
    for report, message in (
        (page, "exists already"),
        (tmp_path / "none" / "page.html", "no such folder"),
        (source, "is the source itself"),
    ):
        done = CliRunner().invoke(main, [*base, str(report)])
        assert done.exit_code in (1, 2) and message in done.stderr and not out.exists()
    assert page.read_text() == "mine"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        done = CliRunner().invoke(main, [*base, str(tmp_path / "new.html")])
        assert done.exit_code == 2 and "pip install 'oazoo[report]'" in done.stderr and not out.exists()
    oazoo.quantize(source, out, "q8", method="absmax")
    with pytest.raises(UsageError, match="exists already"):
        write_report(source, out, page)
    with pytest.raises(OutputError, match="no such folder"):
        write_report(source, out, tmp_path / "none" / "page.html")
    write_report(source, out, page, overwrite=True)
    assert page.read_text("utf-8").startswith("<!doctype html>")
    other = write(tmp_path / "other.oam", {"w": np.ones((3, 32), np.float32)})
    with pytest.raises(FormatError, match="w is not a tensor of that shape"):
        write_report(other, out, tmp_path / "new.html")
    assert not (tmp_path / "new.html").exists()
