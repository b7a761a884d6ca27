"""Packing a model's weights to Q4 or Q8 on the device, file to file, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oazoo import __version__
from oazoo.errors import FormatError, UsageError
from oazoo.formats.atomic import check_not_input, check_output
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import CARRIED_ASSET
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.zoo.files import open_file
from oazoo.zoo.progress import Progress
from oazoo.zoo.quantize_plan import BLOCKS, DENSE, Request, TensorQuantization, plan
from oazoo.zoo.quantize_run import QuantizeReport, run
from oazoo.zoo.recipes import resolve
from oazoo.zoo.spending import Spending, chosen_names, remember, runs_on_text

if TYPE_CHECKING:
    from oazoo.runtime import Device
    from oazoo.zoo.error_feedback import ErrorFeedback
    from oazoo.zoo.statistics import Sensitivity, Statistics

#: How scales and codes are chosen: by the largest magnitude of a block, or for the least squared error of a block, plain,
#: or weighted by the mean squares of what each column is multiplied with.
#: gptq: with error feedback, see :mod:`oazoo.zoo.error_feedback`.
METHODS = ("absmax", "search", "weighted", "gptq")
#: Methods that run the model over a text.
MEASURED = ("weighted", "gptq")
#: The key under which a file's config keeps its receipt (:mod:`oazoo.zoo.receipt`).
RECEIPT = "receipt"


def quantize(
    source: str | Path,
    output: str | Path | None,
    to: str | None = None,
    *,
    recipe: str | None = None,
    budget: str | None = None,
    keep: Sequence[str] = (),
    q8: Sequence[str] = (),
    method: str | None = None,
    statistics: Statistics | str | Path | None = None,
    text: str | None = None,
    equalized: bool = False,
    tuned: bool = False,
    passes: int | None = None,
    allow_requantize: bool = False,
    allow_nonfinite: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
    planned: Callable[[QuantizeReport], None] | None = None,
    device: Device | None = None,
) -> QuantizeReport:
    """Pack the weights of an `.oam` file to Q4 or Q8 with the device's packing kernels, or unpack them.

    Tensors stream through the device in chunks, so device memory and host memory stay bounded whatever the model's size;
    the output appears under its name only when it is complete.

    Args:
        source: an `.oam` file.
        output: the file to write; may be None for a dry run.
        to: ``q4`` (5 bits a weight with its scale), ``q8`` (9 bits), or, to unpack what is quantised, ``f16``, ``bf16`` or
            ``f32``. None: what the recipe says, or q4 with a budget.
        recipe: a name of :data:`oazoo.zoo.recipes.RECIPES`, in place of ``to`` and ``budget``.
        budget: how large the result may be, as ``5.5bpw`` or ``92MB``: the tensors whose packing costs most get 8 bits, or
            stay as they are. For this the model is run (:mod:`oazoo.zoo.sensitivity`), unless the statistics know the costs.
        keep: shell-style patterns of tensor names to leave as they are.
        q8: shell-style patterns of tensor names to pack to Q8 where the others become Q4.
        method: ``absmax``, the format's own rule; ``search``, the scale and codes of least squared error of each block;
            ``weighted``, the same with every column's errors weighted by the mean square of what it is multiplied with;
            ``gptq``, for q4: columns in turn, each making up for the errors of those before.
            None: for q8 ``search``; for q4 ``gptq`` if the statistics have covariances, else ``weighted`` if the model can
            run, else ``absmax``.
        statistics: for ``gptq``: with covariances; if None, the model is run along, a layer at a time, as it is packed. For
            ``weighted``: those mean squares, or the file that has them (:mod:`oazoo.zoo.statistics`); if
            None, the model is run to measure them. What a budget measures is added to the file.
        text: without statistics, what to run the model on; the general text of this package if None.
        equalized: for ``weighted`` and ``gptq``: scale columns that count more up first, and what feeds them down by as much
            (:mod:`oazoo.zoo.equalize`); the model's function stays. A dense copy lies beside the output meanwhile.
        tuned: let scales and vectors learn from the original's predictions when everything is packed
            (:mod:`oazoo.zoo.tune`); ``text`` is then what it reads, also with statistics.
        passes: over the text, if tuned; :data:`oazoo.zoo.tune.PASSES` if None.
        allow_requantize: pack to Q4 what is Q8 already.
        allow_nonfinite: pack NaN and infinities as 0 instead of refusing them.
        overwrite: replace an existing output.
        dry_run: plan and check only; nothing is written, and no device is needed but for a budget.
        progress: called with how far packing has come.
        notify: called with a line for each thing worth knowing.
        planned: called with the plan before it is carried out.
        device: where to pack; the default device if None.

    Raises:
        UsageError: see :func:`oazoo.zoo.quantize_plan.plan`; or the output exists, or the budget is too small.
        FormatError: the source is damaged, not an `.oam`, or holds non-finite values.
        DeviceError: no usable device, or out of its memory.
    """
    if (equalized or tuned) and not dry_run:
        from oazoo.zoo.quantize_more import Options, equalized_first, tuned_after

        options = Options(
            to,
            recipe,
            budget,
            keep,
            q8,
            method,
            allow_requantize,
            allow_nonfinite,
            progress,
            notify,
            planned,
            device,
        )
        if tuned:
            return tuned_after(source, output, options, statistics, text, equalized, passes, overwrite)
        return equalized_first(source, output, options, statistics, text, overwrite)
    if tuned:
        from oazoo.zoo.quantize_more import packing_text

        text = packing_text(to, recipe, budget, method, statistics, text)
    target, limit = resolve(to, recipe, budget)
    keep, q8 = ([p] if isinstance(p, str) else p for p in (keep, q8))
    request = Request(target, keep, q8, allow_requantize)
    if device is None and not dry_run and target not in DENSE:
        from oazoo.runtime import open_ahead

        open_ahead()
    with open_file(source) as opened, ExitStack() as stack:
        if not isinstance(opened, OamSource):
            raise FormatError(
                f"{source} is a {opened.format} file; quantize packs .oam files: oazoo convert {source} -o MODEL.oam"
            )
        steps = plan(opened, request)
        if output is not None:
            check_not_input(output, [opened.path])
            check_output(output, overwrite=overwrite)
        elif not dry_run:
            raise UsageError("say where to write: only a dry run needs no output")
        if target in DENSE or method is not None:
            check_method(target, method or "", statistics, text, bool(limit))
        given = read_statistics(statistics)
        how = method or default_method(opened, target, given)
        check_method(target, how, given, text, bool(limit))
        if method is None and how == "weighted" and statistics is None and notify is not None and not dry_run:
            notify(
                "method weighted: the model is run over a text first, to learn what its weights are multiplied with; oazoo "
                "calibrate does that once and for all (--stats), and --method search or absmax goes without"
            )
        known: Statistics | None = None
        if how == "weighted" and (limit or not dry_run):
            known = statistics_of(opened, given, text, device, progress)
        feedback: ErrorFeedback | None = None
        # Without covariances to go by, what a tensor becomes depends on what those before it became.
        along = how == "gptq" and given is None
        if how == "gptq" and given is not None:
            known = statistics_of(opened, given, None, device, progress)
            if not known.covariances:
                raise UsageError(
                    "gptq needs covariances, and these statistics have none: oazoo calibrate --covariance, or leave them out"
                )
        packed: OamSource | None = None
        found: Sensitivity | None = None
        if limit is not None:

            def pack_all(path: Path) -> None:
                quantize(
                    opened.path,
                    path,
                    target,
                    keep=keep,
                    q8=q8,
                    method=how,
                    statistics=None if along else known,
                    text=text if along else None,
                    allow_requantize=allow_requantize,
                    allow_nonfinite=allow_nonfinite,
                    progress=progress,
                    device=device,
                )

            spending = Spending(opened, steps, limit, how, known if given is None else given)
            found, packed = spending.sensitivity(stack, output, pack_all, text, device, progress, notify)
            if isinstance(statistics, (str, Path)):
                remember(statistics, how, found, notify)
            packed = None if along else packed
            request = replace(request, chosen=spending.choose(found))
            steps = plan(opened, request)
        if how == "gptq" and not dry_run:
            feedback = _error_feedback(opened, known, text, device, progress)
            stack.callback(feedback.close)
            known = feedback.statistics
        entries = [OamEntry(s.name, s.shape, s.target) for s in steps]
        entries += [
            OamEntry(name, t.info.shape, t.info.encoding, "state")
            for name, t in opened.state.items()
            if name != CARRIED_ASSET
        ]
        note = _note(opened, request, how, known, steps)
        if limit is not None and found is not None:
            note |= {"recipe": recipe} if recipe else {}
            note |= {"budget": limit.text, "sensitivity": found.note(), "chosen": chosen_names(steps)}
        writer = OamWriter(
            output or "plan.oam",
            config=replace(opened.config, payload=_payload(opened, note)),
            entries=entries,
            progress=opened.progress,
            overwrite=overwrite,
        )
        dropped = ["the optimizer's state"] if opened.optimizer_kind is not None else []
        dropped += ["the quality receipt, which is about other weights"] if RECEIPT in opened.metadata else []
        report = QuantizeReport(
            source=str(source),
            output="" if output is None else str(output),
            target=target,
            tensors=tuple(steps),
            source_bytes=opened.path.stat().st_size,
            output_bytes=writer.size,
            dropped=tuple(dropped),
            method=how,
            recipe=recipe or "",
            budget="" if limit is None else limit.text,
        )
        if dry_run:
            return report
        if planned is not None:
            planned(report)
        return run(report, opened, writer, allow_nonfinite, progress, device, known, packed, feedback)


def read_statistics(statistics: Statistics | str | Path | None) -> Statistics | None:
    """Statistics that were given, or are in the file that was."""
    if isinstance(statistics, (str, Path)):
        from oazoo.zoo.statistics import load_statistics

        return load_statistics(statistics)
    return statistics


def default_method(source: OamSource, target: str, statistics: Statistics | None = None) -> str:
    """``gptq`` for statistics with covariances, else ``weighted`` for a model that can run on a text, else ``absmax``; for
    q8 ``search``; none where nothing is packed.

    What 8 bits lose is little, and the few columns that weights favour would take it from all others.
    """
    if target in DENSE:
        return ""
    if target == "q8":
        return "search"
    if statistics is not None and statistics.covariances:
        return "gptq"
    return "weighted" if runs_on_text(source) else "absmax"


def check_method(
    to: str,
    method: str,
    statistics: Statistics | str | Path | None,
    text: str | None,
    measuring: bool = False,
) -> None:
    """Refuse combinations that mean nothing. ``measuring``: statistics and text also serve to spend a budget.

    Raises:
        UsageError: an unknown method or target, or statistics or a text for a method without any.
    """
    if to in DENSE:
        if method or statistics is not None or text is not None:
            raise UsageError(f"unpacking to {to} has no method, and needs neither statistics nor a text")
        return
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
    if method == "gptq" and to != "q4":
        raise UsageError(f"gptq packs to q4; for {to} there are absmax, search and weighted")
    if method not in MEASURED and not measuring and (statistics is not None or text is not None):
        raise UsageError(
            f"statistics and a text to gather them on are for the methods weighted and gptq, not {method}"
        )
    if statistics is not None and text is not None:
        raise UsageError("give either statistics or a text to gather them on")


def statistics_of(
    source: OamSource,
    given: Statistics | None,
    text: str | None,
    device: Device | None,
    progress: Progress | None,
) -> Statistics:
    """What was given, or what running the model now gathers."""
    found = given
    if found is None:
        from oazoo.zoo.calibrate import calibrate

        found = calibrate(source.path, text, device=device, progress=progress)
    if not any(name in source for name in found.shares):
        raise UsageError(
            f"the statistics are of {found.model}, which shares no weight's name with {source.path}: gather them with the "
            "model that is quantised (oazoo calibrate)"
        )
    return found


def _error_feedback(
    source: OamSource,
    known: Statistics | None,
    text: str | None,
    device: Device | None,
    progress: Progress | None,
) -> ErrorFeedback:
    """From covariances that were given, or with the model run along."""
    from oazoo.runtime import get_device
    from oazoo.zoo.error_feedback import ErrorFeedback, dense_statistics
    from oazoo.zoo.load import load

    device = device or get_device()
    if known is not None:
        return ErrorFeedback(device, known)
    model = load(source.path, device=device, progress=progress)
    return ErrorFeedback(device, dense_statistics(model, text, progress), model, text, progress)


def _note(
    source: OamSource,
    request: Request,
    method: str,
    statistics: Statistics | None,
    steps: Sequence[TensorQuantization],
) -> dict[str, Any]:
    """What was done, for the file."""
    note: dict[str, Any] = {"to": request.target}
    if method:
        note |= {"method": method, "keep": list(request.keep), "q8": list(request.q8)}
    elif request.keep:
        note["keep"] = list(request.keep)
    note |= {"tool": f"oazoo {__version__}", "source_weights": source.weights_checksum}
    if statistics is not None:
        note["statistics"] = statistics.note()
    again = [step for step in steps if not step.reason and step.source in BLOCKS]
    if again:
        note["unpacked_from" if request.target in DENSE else "requantized_from"] = {
            encoding: sum(step.source == encoding for step in again)
            for encoding in sorted({s.source for s in again})
        }
    before = source.metadata.get("quantization")
    if isinstance(before, Mapping):
        note["before"] = {key: value for key, value in before.items() if key != "before"}
    return note


def _payload(source: OamSource, note: dict[str, Any]) -> bytes:
    """The architecture config with a note of what was done; somebody else's config is left alone."""
    if not source.metadata:
        return source.config.payload
    content = {**{k: v for k, v in source.metadata.items() if k != RECEIPT}, "quantization": note}
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
