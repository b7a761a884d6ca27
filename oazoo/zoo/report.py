"""A report on one quantisation as a single page: what it cost in each tensor, and in what the model says.

The page holds its pictures and needs nothing from elsewhere; its policy forbids scripts and requests. Names and texts come
from files and are hostile: all of them are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from oazoo import __version__
from oazoo.errors import FormatError, OazooError
from oazoo.formats.atomic import check_not_input, check_output, write_atomically
from oazoo.formats.oam import OamSource
from oazoo.optional import require_matplotlib
from oazoo.translators.plan import any_layer
from oazoo.zoo.files import open_file
from oazoo.zoo.progress import Progress
from oazoo.zoo.receipt import read_receipt, summary
from oazoo.zoo.report_pictures import codes_and_scales, noise_of_tensors
from oazoo.zoo.tensor_errors import OutlierBlock, TensorError, tensor_errors

if TYPE_CHECKING:
    from oazoo.generation.text_model import TextModel

#: Characters of a text that are read, tokens of them that are compared, and positions and candidates that are shown.
_CHARACTERS, _TOKENS, _SHOWN, _CANDIDATES = 4000, 64, 12, 3
#: Outlier blocks in the page.
_OUTLIERS = 25

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1em 0;font-size:13px}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;"
    "text-align:left;overflow-wrap:anywhere}td.n,th.n{text-align:right;white-space:nowrap}img{max-width:100%}"
    "code{white-space:pre-wrap}h2{margin-top:2em}"
)


@dataclass(frozen=True)
class Prediction:
    """What two models expect after one token of a text.

    ``before`` and ``after`` are the most probable tokens with their probabilities and logits; ``kl`` is the
    divergence in nats.
    """

    token: str
    following: str
    before: tuple[tuple[str, float, float], ...]
    after: tuple[tuple[str, float, float], ...]
    kl: float


@dataclass(frozen=True)
class Report:
    """What :func:`write_report` found; ``why_not`` says why there are no predictions, if there are none."""

    errors: tuple[TensorError, ...]
    predictions: tuple[Prediction, ...]
    why_not: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        predictions = [
            {**p.__dict__, "before": [list(x) for x in p.before], "after": [list(x) for x in p.after]}
            for p in self.predictions
        ]
        return {
            "tensor_errors": [error.to_json() for error in self.errors],
            "predictions": predictions,
            "why_no_predictions": self.why_not,
        }


def check_report(path: Path | str, inputs: Iterable[Path], *, overwrite: bool = False) -> None:
    """Check before work that a report can be written: its name, its folder, matplotlib.

    Raises:
        UsageError: matplotlib is missing, the file exists and ``overwrite`` is not set, or it is an input.
        OutputError: see :func:`oazoo.formats.atomic.check_output`.
    """
    require_matplotlib("a report needs matplotlib for its pictures")
    check_not_input(path, inputs)
    check_output(path, overwrite=overwrite)


def write_report(
    source: Path | str,
    packed: Path | str,
    path: Path | str,
    *,
    text: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare a quantised `.oam` with the one it was made from, and write the page.

    Args:
        source: the original.
        packed: what quantising made of it.
        path: the HTML file, written whole or not at all.
        text: its first tokens are read by both models; the text that models are calibrated on if None.
        overwrite: replace an existing page.
        progress: called with how far each step has come.

    Raises:
        UsageError, OutputError: see :func:`check_report`.
        FormatError: the files are no `.oam`, damaged, or not of one model.
    """
    check_report(path, [Path(source), Path(packed)], overwrite=overwrite)
    with open_file(source) as before, open_file(packed) as after:
        for opened in (before, after):
            if not isinstance(opened, OamSource):
                raise FormatError(f"{opened.path} is a {opened.format} file; a report compares .oam files")
        assert isinstance(before, OamSource) and isinstance(after, OamSource)
        errors = tuple(tensor_errors(before, after, progress))
        predictions, why_not = _predictions(before, after, text, progress)
        report = Report(errors, predictions, why_not)
        write_atomically(path, _page(report, before, after).encode(errors="replace"), overwrite=overwrite)
    return report


def _predictions(
    before: OamSource, after: OamSource, text: str | None, progress: Progress | None
) -> tuple[tuple[Prediction, ...], str]:
    from oazoo.zoo.calibrate import own_text
    from oazoo.zoo.load import load, model_config

    try:
        for source in (before, after):
            model_config(source)
    except OazooError as error:
        return (), str(error)
    models = [load(source.path, progress=progress) for source in (before, after)]
    try:
        if not all(model.has_tokenizer for model in models):
            return (), "the model has no tokenizer"
        ids = models[0].tokenizer.encode_prompt((text or own_text())[:_CHARACTERS], allow_special=False)[
            :_TOKENS
        ]
        ids = ids[: models[0].model.max_positions]
        if len(ids) < 2:
            return (), "the text is shorter than two tokens"
        logits = [model.logits(ids).astype(np.float64) for model in models]
    finally:
        for model in models:
            model.model.close()  # type: ignore[attr-defined]
    a, b = (_log_softmax(values) for values in logits)
    kl = (np.exp(a) * (a - b)).sum(1)
    return tuple(
        Prediction(
            _token(models[0], ids[at]),
            _token(models[0], ids[at + 1]),
            _best(models[0], a[at], logits[0][at]),
            _best(models[0], b[at], logits[1][at]),
            max(0.0, float(kl[at])),
        )
        for at in range(max(0, len(ids) - 1 - _SHOWN), len(ids) - 1)
    ), ""


def _log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x - x.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(1, keepdims=True))
    return result


def _token(model: TextModel, token_id: int) -> str:
    return model.tokenizer.decode([token_id], skip_special=False, after=[token_id]) or f"token {token_id}"


def _best(
    model: TextModel, row: npt.NDArray[np.float64], logits: npt.NDArray[np.float64]
) -> tuple[tuple[str, float, float], ...]:
    order = np.argsort(-row, kind="stable")[:_CANDIDATES]
    return tuple((_token(model, int(i)), float(np.exp(row[i])), float(logits[i])) for i in order)


# ------------------------------------------------------------------------------------------------------- the page


def _page(report: Report, before: OamSource, after: OamSource) -> str:
    sizes = before.path.stat().st_size, after.path.stat().st_size
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>Quantisation of {_text(before.path.name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Quantisation of {_text(before.path.name)}</h1>",
        _facts(
            [
                ("result", f"{after.path.name}, {sizes[1]:,} bytes of {sizes[0]:,} ({sizes[1] / sizes[0]:.1%})"),
                ("how", json.dumps(after.metadata.get("quantization", "not recorded"), ensure_ascii=False)),
                ("weights", after.weights_checksum),
                ("reported by", f"oazoo {__version__}"),
            ]
        ),
        "<h2>Measured quality</h2>",
        _quality(read_receipt(after)),
        "<h2>Tensors</h2>",
    ]  # fmt: skip
    if report.errors:
        parts.append(f"<img alt='signal to noise of each tensor' src='{noise_of_tensors(report.errors)}'>")
    parts.append(_tensors(report.errors))
    parts.append("<h2>Codes and scales</h2>")
    groups: dict[tuple[str, str], list[TensorError]] = {}
    for error in report.errors:
        groups.setdefault((any_layer(error.name), error.target), []).append(error)
    for (name, target), some in groups.items():
        negative = sum(error.negative_scales for error in some)
        parts.append(
            f"<h3>{_text(name)}</h3><p>{len(some)} tensor{'s' if len(some) > 1 else ''} in {_text(target)}"
            f"{f', {negative:,} negative scales' if negative else ''}</p>"
            f"<img alt='histograms of codes and scales' src='{codes_and_scales(some)}'>"
        )
    parts += [
        "<h2>Blocks that stand out</h2>",
        "<p>The blocks of 32 values whose error is largest beside that of their tensor.</p>",
        _outliers(report.errors),
        "<h2>What the model says, before and after</h2>",
        _said(report),
        "</body></html>",
    ]
    return "\n".join(parts)


def _text(value: object) -> str:
    """Any text as HTML that shows it: markup escaped, control and direction-changing characters made visible."""
    shown = "".join(
        c if c.isprintable() or c == " " else c.encode("unicode_escape", "replace").decode()
        for c in str(value)
    )
    return escape(shown, quote=True)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _quality(receipt: Mapping[str, Any] | None) -> str:
    if receipt is None:
        return "<p>The file has no quality receipt: perplexity and divergence were not measured.</p>"
    return _facts(summary(receipt))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    """A table of ready HTML cells; columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{' class=n' if i in right else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    return f"<table>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>"


def _tensors(errors: Sequence[TensorError]) -> str:
    head = [
        "",
        "tensor",
        "shape",
        "from",
        "to",
        "bytes",
        "MSE",
        "largest error",
        "relative",
        "SQNR, dB",
        "cosine",
    ]
    rows = [
        [
            str(index), _text(e.name), "×".join(map(str, e.shape)), _text(e.source), _text(e.target),
            f"{e.bytes_before:,} → {e.bytes_after:,}", f"{e.mse:.3g}", f"{e.max_abs:.3g}", f"{e.relative:.3%}",
            "–" if e.sqnr_db is None else f"{e.sqnr_db:.2f}", "–" if e.cosine is None else f"{e.cosine:.6f}",
        ]
        for index, e in enumerate(errors)
    ]  # fmt: skip
    return _table(head, rows, [0, 5, 6, 7, 8, 9, 10])


def _outliers(errors: Sequence[TensorError]) -> str:
    every: list[tuple[str, OutlierBlock]] = [(e.name, block) for e in errors for block in e.outliers]
    every.sort(key=lambda item: -item[1].ratio)
    head = ["tensor", "block", "from", "largest value", "rms", "error rms", "beside the tensor's"]
    rows = [
        [
            _text(name), f"{b.block:,}", _text(list(b.position)), f"{b.largest:.4g}", f"{b.rms:.4g}",
            f"{b.error_rms:.4g}", f"{b.ratio:.1f}×",
        ]
        for name, b in every[:_OUTLIERS]
    ]  # fmt: skip
    return _table(head, rows, [1, 3, 4, 5, 6])


def _said(report: Report) -> str:
    if not report.predictions:
        return f"<p>Not shown: {_text(report.why_not)}</p>"

    def candidates(best: tuple[tuple[str, float, float], ...]) -> str:
        return " · ".join(
            f"<code>{_text(repr(token))}</code> {p:.1%} ({logit:.2f})" for token, p, logit in best
        )

    rows = [
        [
            f"<code>{_text(repr(p.token))}</code>", f"<code>{_text(repr(p.following))}</code>",
            candidates(p.before), candidates(p.after), f"{p.kl:.2g}",
        ]
        for p in report.predictions
    ]  # fmt: skip
    legend = "<p>The most probable tokens with their probabilities and, in brackets, logits.</p>"
    return legend + _table(["after", "comes", "expected before", "expected now", "KL, nats"], rows, [4])
