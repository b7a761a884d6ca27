"""What goes before packing, or after it, with another file in between: equalizing, and tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oazoo.errors import FormatError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.zoo.files import open_file
from oazoo.zoo.progress import Progress
from oazoo.zoo.quantize import MEASURED, quantize, read_statistics, statistics_of
from oazoo.zoo.quantize_run import QuantizeReport
from oazoo.zoo.recipes import resolve

if TYPE_CHECKING:
    from oazoo.runtime import Device
    from oazoo.zoo.statistics import Statistics


@dataclass(frozen=True)
class Options:
    """Arguments of :func:`oazoo.zoo.quantize.quantize` that are handed on as they are."""

    to: str | None
    recipe: str | None
    budget: str | None
    keep: Sequence[str]
    q8: Sequence[str]
    method: str | None
    allow_requantize: bool
    allow_nonfinite: bool
    progress: Progress | None
    notify: Callable[[str], None] | None
    planned: Callable[[QuantizeReport], None] | None
    device: Device | None

    def __call__(self, source: str | Path, output: str | Path, **more: Any) -> QuantizeReport:
        """Pack ``source`` with them."""
        return quantize(source, output, **{**self.__dict__, **more})


def equalized_first(
    source: str | Path,
    output: str | Path | None,
    options: Options,
    statistics: Statistics | str | Path | None,
    text: str | None,
    overwrite: bool,
) -> QuantizeReport:
    """Quantise an equalized copy of the model."""
    from oazoo.runtime import get_device
    from oazoo.zoo.equalize import equalize

    given = read_statistics(statistics)
    method = options.method or ("gptq" if given is not None and given.covariances else "weighted")
    if method not in MEASURED:
        raise UsageError(f"equalizing goes by what columns are multiplied with, which {method} does not mind")
    device = options.device or get_device()
    with _between(source, output, "equalized", overwrite) as (path, even):
        with open_file(source) as opened:
            if not isinstance(opened, OamSource):
                raise FormatError(f"{source} is a {opened.format} file; quantize packs .oam files")
            known = statistics_of(opened, given, text, device, options.progress)
            scaled: Statistics | None = equalize(opened, known, even, device, options.progress)
            size = opened.path.stat().st_size
        # Error feedback without statistics runs the model along, and then reads the text itself.
        along = method == "gptq" and given is None
        more = {"method": method, "text": text if along else None, "overwrite": overwrite, "device": device}
        report = options(even, path, statistics=None if along else scaled, **more)
    return replace(report, source=str(source), source_bytes=size)


def tuned_after(
    source: str | Path,
    output: str | Path | None,
    options: Options,
    statistics: Statistics | str | Path | None,
    text: str | None,
    equalized: bool,
    passes: int | None,
    overwrite: bool,
) -> QuantizeReport:
    """Quantise, then tune what came of it."""
    from oazoo.zoo.tune import PASSES, check_passes, tune

    passes = PASSES if passes is None else passes
    check_passes(passes)
    inner = packing_text(options.to, options.recipe, options.budget, options.method, statistics, text)
    with _between(source, output, "packed", overwrite) as (path, packed):
        report = options(source, packed, statistics=statistics, text=inner, equalized=equalized)
        found = tune(
            packed,
            source,
            path,
            text=text,
            passes=passes,
            overwrite=overwrite,
            device=options.device,
            progress=options.progress,
            notify=options.notify,
        )
        size = path.stat().st_size
    seconds = report.seconds + found.seconds
    return replace(report, output=str(output), output_bytes=size, tuned=found, seconds=seconds)


def packing_text(
    to: str | None,
    recipe: str | None,
    budget: str | None,
    method: str | None,
    statistics: object,
    text: str | None,
) -> str | None:
    """The text that packing reads, of one that tuning reads: none with statistics, or a method that reads nothing.

    Raises:
        UsageError: nothing is packed to Q4, so nothing is tuned.
    """
    target, limit = resolve(to, recipe, budget)
    if target != "q4":
        raise UsageError(f"tuning is for what is packed to q4; {target} has no scales that it would move")
    reads = limit is not None or method is None or method in MEASURED
    return text if statistics is None and reads else None


@contextmanager
def _between(
    source: str | Path, output: str | Path | None, what: str, overwrite: bool
) -> Iterator[tuple[Path, Path]]:
    """The output, and a file beside it that is gone at the end. Its name is the source's: messages name it."""
    if output is None:
        raise UsageError("say where to write: only a dry run needs no output")
    path = Path(output)
    check_not_input(path, [Path(source)])
    check_output(path, overwrite=overwrite)
    with TemporaryDirectory(prefix=f".{what}-", dir=path.parent) as folder:
        yield path, Path(folder) / Path(source).name
