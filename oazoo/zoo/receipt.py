"""Quality receipts: what quantising cost, measured, and kept in the file that it is about.

A receipt is the object ``receipt`` in the config of an `.oam` file. It is bound to the weights by the checksum that the
file's header has for them: a receipt that was moved to other weights does not match. It is information and no proof; nothing
is signed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oazoo import __version__
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_rewrite import write_with_payload
from oazoo.formats.staging import staging
from oazoo.zoo.files import open_file

if TYPE_CHECKING:
    from oazoo.zoo.evaluate import Evaluation
    from oazoo.zoo.progress import Progress
    from oazoo.zoo.quantize_run import QuantizeReport

KEY = "receipt"
#: What of ``quantization`` (how the file was made) a receipt repeats; ``statistics`` has the hash of the calibration text.
_METHOD_KEYS = (
    "to",
    "recipe",
    "budget",
    "method",
    "keep",
    "q8",
    "statistics",
    "sensitivity",
    "requantized_from",
    "tool",
)


class QualityError(OazooError):
    """A quantised model is further from its original than was allowed."""


@dataclass(frozen=True)
class Limits:
    """What a quantised model may cost: mean KL divergence (nats a token) and ratio of perplexities; None is no limit.

    Raises:
        UsageError: a limit that is negative or not a number.
    """

    max_kl: float | None = None
    max_ppl_ratio: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--max-kl", self.max_kl), ("--max-ppl-ratio", self.max_ppl_ratio)):
            if value is not None and not value >= 0:
                raise UsageError(f"{name} {value}: a limit is a number from 0 on")

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return self.max_kl is not None or self.max_ppl_ratio is not None

    def check(self, evaluation: Evaluation) -> None:
        """Raise a QualityError for an evaluation that exceeds a limit. A figure that is no number exceeds all."""
        found = evaluation.comparison
        if found is None or not self.given:
            return
        over = []
        if self.max_kl is not None and not found.kl_mean <= self.max_kl:
            over.append(
                f"mean KL divergence {found.kl_mean:.4g} nats a token, {self.max_kl:g} allowed (--max-kl)"
            )
        if self.max_ppl_ratio is not None and not found.perplexity_ratio <= self.max_ppl_ratio:
            over.append(
                f"perplexity ratio {found.perplexity_ratio:.5g}, {self.max_ppl_ratio:g} allowed (--max-ppl-ratio)"
            )
        if over:
            raise QualityError(
                f"{evaluation.model} is too far from {found.against}: {'; '.join(over)}. Use more bits, or keep sensitive "
                "tensors dense"
            )


def make_receipt(packed: OamSource, original: OamSource, evaluation: Evaluation) -> dict[str, Any]:
    """The receipt of ``packed``, measured against ``original``.

    Raises:
        UsageError: the evaluation compared nothing.
    """
    measured = evaluation.to_json()
    comparison = measured["comparison"]
    if comparison is None:
        raise UsageError("a receipt needs a comparison: evaluate against the original")
    made = packed.metadata.get("quantization")
    made = made if isinstance(made, Mapping) else {}
    return {
        "weights": packed.weights_checksum,
        "made": {key: made[key] for key in _METHOD_KEYS if key in made},
        "source": {
            "name": comparison["against"],
            "weights": original.weights_checksum,
            "sha256": _sha256(original.path),
        },
        "tokenizer_sha256": _tokenizer_hash(packed),
        **{key: measured[key] for key in ("text_sha256", "context", "windows", "tokens", "perplexity")},
        "source_perplexity": comparison["perplexity"],
        **{
            key: comparison[key]
            for key in ("perplexity_ratio", "kl_mean", "kl_mean_error", "kl_999", "same_top")
        },
        "device": evaluation.device,
        "tool": f"oazoo {__version__}",
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tokenizer_hash(source: OamSource) -> str | None:
    from oazoo.text.vocabulary import TOKENIZER_ASSETS

    found = (source.asset(f"asset/{name}") for name in TOKENIZER_ASSETS)
    return next((hashlib.sha256(data).hexdigest() for data in found if data is not None), None)


def read_receipt(source: OamSource) -> dict[str, Any] | None:
    """The receipt in a file, with ``matches`` added: whether it is about the weights that the file has. None if absent.

    Whatever else is in it is what somebody wrote there.
    """
    found = source.metadata.get(KEY)
    if not isinstance(found, Mapping):
        return None
    return {
        **found,
        "matches": bool(source.weights_checksum) and found.get("weights") == source.weights_checksum,
    }


def check_receipt_target(path: Path | str) -> None:
    """Check before work that a receipt can be put into this file.

    Raises:
        UsageError: it is no file, or its config is not ours to change.
        FormatError: it is not an `.oam`, or damaged.
        OutputError: it cannot be written.
    """
    with open_file(path) as source:
        _our_config(source)
    check_output(path, overwrite=True)


def _our_config(source: Any) -> OamSource:
    if not isinstance(source, OamSource):
        raise FormatError(f"{source.path} is a {source.format} file; receipts are kept in .oam files")
    if not source.metadata:
        raise UsageError(f"{source.path}: its config is not oazoo's, so no receipt can be put into it")
    return source


def add_receipt(
    packed: Path | str,
    original: Path | str,
    evaluation: Evaluation,
    *,
    output: Path | str | None = None,
    overwrite: bool = True,
) -> dict[str, Any]:
    """Put a receipt into ``packed``, in place or under another name; the file is replaced whole or left as it was."""
    with open_file(packed) as source, open_file(original) as before:
        source = _our_config(source)
        if not isinstance(before, OamSource):
            raise FormatError(f"{before.path} is a {before.format} file; receipts are about .oam files")
        receipt = make_receipt(source, before, evaluation)
        content = {**source.metadata, KEY: receipt}
        payload = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        write_with_payload(source, output or packed, payload, overwrite=overwrite)
    return receipt


def quantize_measured(
    source: Path | str,
    output: Path | str,
    run: Callable[[Path], QuantizeReport],
    text: str,
    *,
    limits: Limits | None = None,
    context: int = 512,
    windows: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> tuple[QuantizeReport, Evaluation]:
    """Quantise, measure against the source, and let the file appear, with its receipt, only if it is good enough.

    Args:
        source: the model that is quantised, an `.oam` that can run.
        output: where the result goes.
        run: quantises ``source`` into the file that it is given (:func:`oazoo.quantize` with everything else bound).
        text: to measure on; see :func:`oazoo.zoo.evaluate.evaluate` for it, ``context`` and ``windows``.
        limits: what it may cost.
        overwrite: replace an existing output.
        progress: called with how far each step has come.

    Raises:
        QualityError: a limit is exceeded. Nothing is left behind, and an existing output stays.
        OazooError: what quantising and evaluating raise.
    """
    from oazoo.zoo.evaluate import check_request, evaluate
    from oazoo.zoo.load import model_config

    check_request(text, context, windows)
    check_output(output, overwrite=overwrite)
    check_not_input(output, [Path(source)])
    with open_file(source) as opened:
        if isinstance(opened, OamSource):
            model_config(opened)  # what cannot run cannot be measured
    target = Path(output)
    with staging(target, target.parent) as folder:
        packed = folder / target.name
        report = run(packed)
        evaluation = evaluate(
            packed, text, against=source, context=context, windows=windows, progress=progress
        )
        (limits or Limits()).check(evaluation)
        add_receipt(packed, source, evaluation, output=target, overwrite=overwrite)
    return replace(report, output=str(output), output_bytes=target.stat().st_size), evaluation


def summary(receipt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A receipt as lines for people. Values of other types than ours are shown as they are."""

    def number(key: str, form: str) -> str:
        value = receipt.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return format(value, form)
        return str(value)

    source = receipt.get("source")
    source = source if isinstance(source, Mapping) else {}
    return [
        (
            "belongs to these weights",
            "yes" if receipt.get("matches") else "NO: it was made for other weights, so it says nothing here",
        ),
        ("measured against", f"{source.get('name')} ({source.get('weights')})"),
        ("perplexity ratio", f"{number('perplexity_ratio', '.5f')} ({number('source_perplexity', '.4f')} before, "
                             f"{number('perplexity', '.4f')} after)"),
        ("mean KL", f"{number('kl_mean', '.4g')} nats a token; 99.9 % below {number('kl_999', '.4g')}"),
        ("same most probable token", number("same_top", ".2%")),
        ("text", f"sha256 {receipt.get('text_sha256')}, {number('tokens', ',')} tokens, context {number('context', ',')}"),
        ("made by", json.dumps(receipt.get("made"), ensure_ascii=False)),
    ]  # fmt: skip
