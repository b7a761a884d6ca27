"""What `oazoo quantize` can do beside packing: measure what it cost, stop at a limit, and write a report."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from oazoo.cli._text import read_text
from oazoo.cli.common import ProgressCallback, say
from oazoo.errors import UsageError
from oazoo.zoo.quantize_run import QuantizeReport

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--report",
        type=click.Path(path_type=Path),
        metavar="PAGE.html",
        help="Write a page on what each tensor lost (needs oazoo[report]).",
    ),
    click.option(
        "--receipt", is_flag=True, help="Measure OUT.oam against IN.oam and store the figures in it."
    ),
    click.option("--max-kl", type=float, metavar="X", help="Write nothing above this mean KL divergence."),
    click.option(
        "--max-ppl-ratio", type=float, metavar="Y", help="Write nothing above this ratio of perplexities."
    ),
    click.option(
        "--eval-text",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="UTF-8 text that the last three measure on, and the report shows; '-' is standard input.",
    ),
    click.option(
        "--eval-context",
        type=int,
        default=512,
        show_default=True,
        metavar="N",
        help="Tokens of a window of it.",
    ),
    click.option(
        "--eval-windows", type=int, metavar="N", help="Measure on the first N windows only.  [default: all]"
    ),
)


@dataclass(frozen=True)
class Quality:
    """The options of :func:`quality_options`."""

    report: Path | None
    receipt: bool
    max_kl: float | None
    max_ppl_ratio: float | None
    eval_text: Path | None
    eval_context: int
    eval_windows: int | None

    def run(
        self,
        source: Path,
        output: Path,
        quantize: Callable[[Path], QuantizeReport],
        *,
        calibration: str | None = None,
        overwrite: bool,
        progress: ProgressCallback,
    ) -> tuple[QuantizeReport, dict[str, Any]]:
        """Quantise with ``quantize(path)``, and do what the options ask for; also gives what to add to the JSON.

        ``calibration`` is what the report shows the models on where there is no text to measure on.
        """
        from oazoo.zoo.receipt import Limits, quantize_measured

        limits = Limits(self.max_kl, self.max_ppl_ratio)
        measured = self.receipt or limits.given
        if measured and self.eval_text is None:
            raise UsageError("measuring needs a text to measure on: --eval-text FILE")
        text = None if self.eval_text is None else read_text(self.eval_text, "the text to measure on")
        if self.report is not None:
            from oazoo.zoo.report import check_report

            check_report(self.report, [source, output], overwrite=overwrite)
        more: dict[str, Any] = {}
        if measured:
            assert text is not None
            done, evaluation = quantize_measured(
                source,
                output,
                quantize,
                text,
                limits=limits,
                context=self.eval_context,
                windows=self.eval_windows,
                overwrite=overwrite,
                progress=progress,
            )
            more["evaluation"] = evaluation.to_json()
            cost = evaluation.comparison
            assert cost is not None
            say(
                f"perplexity {cost.perplexity:.3f} → {evaluation.perplexity:.3f} (× {cost.perplexity_ratio:.4f}), mean KL "
                f"{cost.kl_mean:.3g} nats a token, same most probable token {cost.same_top:.1%}"
            )
        else:
            done = quantize(output)
        if self.report is not None:
            from oazoo.zoo.report import write_report

            page = write_report(
                source, output, self.report, text=text or calibration, overwrite=overwrite, progress=progress
            )
            more["report"] = {"path": str(self.report), **page.to_json()}
            say(f"{self.report}: what each tensor lost")
        return done, more


def quality_options(command: _Command) -> _Command:
    """Adds the options; they arrive as one argument ``quality``, a :class:`Quality`."""

    @functools.wraps(command)
    def gather(**arguments: Any) -> Any:
        quality = Quality(**{name: arguments.pop(name) for name in Quality.__dataclass_fields__})
        return command(**arguments, quality=quality)

    made: Any = gather
    for option in reversed(_OPTIONS):
        made = option(made)
    return made  # type: ignore[no-any-return]
