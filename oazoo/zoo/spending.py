"""Spending a budget: what tensors cost at 4 bits is measured or looked up, and the room goes where it saves most."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oazoo.errors import OazooError, UsageError
from oazoo.formats import encodings
from oazoo.formats.oam import OamSource
from oazoo.formats.staging import staging
from oazoo.zoo.files import open_file
from oazoo.zoo.quantize_plan import TensorQuantization
from oazoo.zoo.recipes import Q8_SHARE, Budget, Option, choose, short_names

if TYPE_CHECKING:
    from oazoo.runtime import Device
    from oazoo.zoo.progress import Progress
    from oazoo.zoo.statistics import Sensitivity, Statistics

#: What a file's alignment and its note of what was done may add, in bytes: a tensor, and in all.
_SLACK_TENSOR, _SLACK = 64, 16384

Notify = Callable[[str], None] | None


def runs_on_text(source: OamSource) -> bool:
    """Whether a file holds a model that can run here, with a tokenizer."""
    from oazoo.text.vocabulary import TOKENIZER_ASSETS
    from oazoo.zoo.load import model_config

    try:
        model_config(source)
    except OazooError:
        return False
    return any(f"asset/{name}" in source.state for name in TOKENIZER_ASSETS)


class Spending:
    """The spending of one budget.

    Args:
        source: the model.
        steps: what becomes of its tensors without a budget; those that are packed to q4 are what it is spent on.
        budget: how much there is.
        method: by which tensors are packed.
        statistics: what is known of the model, or the file that has it; None if nothing.
    """

    def __init__(
        self,
        source: OamSource,
        steps: Sequence[TensorQuantization],
        budget: Budget,
        method: str,
        statistics: Statistics | str | Path | None,
    ) -> None:
        self._source, self._steps, self._budget, self._method = source, steps, budget, method
        self._statistics = statistics
        self._open = [step for step in steps if not step.reason and step.target == "q4"]
        self._limit()  # a budget that is too small is told before anything runs

    def sensitivity(
        self,
        stack: ExitStack,
        output: str | Path | None,
        pack_all: Callable[[Path], None],
        text: str | None,
        device: Device | None,
        progress: Progress | None,
        notify: Notify,
    ) -> tuple[Sensitivity, OamSource | None]:
        """What each tensor costs: as the statistics have it, measured now, or guessed for models that cannot run.

        For measuring, everything is packed once; that file is also given, and lives as long as ``stack`` is open.
        """
        from oazoo.zoo.sensitivity import measure, usual
        from oazoo.zoo.statistics import load_statistics

        say = notify or (lambda line: None)
        known = self._statistics
        if isinstance(known, (str, Path)):
            known = load_statistics(known)
        before = None if known is None else known.sensitivities.get(self._method)
        # Other patterns than last time may leave tensors whose costs are not known yet.
        if before is not None and all(step.name in before.losses for step in self._open):
            return before, None
        if not runs_on_text(self._source):
            say(
                "this model cannot run on a text, so the budget is spent as usually serves best, by names and sizes"
            )
            return usual(self._source, [step.name for step in self._open]), None
        if output is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oazoo-")))
        else:
            folder = stack.enter_context(staging(output, Path(output).parent))
        path = folder / "all.oam"
        pack_all(path)
        found = measure(self._source.path, path, text, device=device, progress=progress)
        packed = stack.enter_context(open_file(path))
        assert isinstance(packed, OamSource)
        return found, packed

    def choose(self, sensitivity: Sensitivity) -> dict[str, str]:
        """By name, ``q4``, ``q8`` or ``dense``.

        Raises:
            UsageError: everything at 4 bits is larger than the budget.
        """
        options: dict[str, list[Option]] = {}
        for step in self._open:
            # A tensor that has no cost is not in the model's path: it stays small.
            loss = sensitivity.losses.get(step.name, 0.0)
            options[step.name] = [
                Option("q4", step.bytes_after, loss),
                Option("q8", encodings.get("q8").bytes_for(step.shape), loss * Q8_SHARE),
            ]
            if step.source not in ("q4", "q8"):
                options[step.name].append(Option("dense", step.bytes_before, 0.0))
        return choose(options, self._limit())

    def _limit(self) -> int:
        """Bytes that the open tensors may take together.

        Raises:
            UsageError: they cannot.
        """
        settled = sum(step.bytes_after for step in self._steps) - sum(step.bytes_after for step in self._open)
        if self._budget.file_bytes is not None:
            state = sum(tensor.info.nbytes for tensor in self._source.state.values())
            overhead = state + _SLACK + _SLACK_TENSOR * (len(self._steps) + len(self._source.state))
            overhead += 2 * len(self._source.config.payload)
            limit = self._budget.file_bytes - overhead - settled
        else:
            values = sum(tensor.info.numel for tensor in self._source.values())
            assert self._budget.bits_per_weight is not None
            limit = int(self._budget.bits_per_weight * values / 8) - settled
        least = sum(step.bytes_after for step in self._open)
        if limit < least:
            values = sum(tensor.info.numel for tensor in self._source.values())
            raise UsageError(
                f"the budget of {self._budget.text} is too small for {self._source.path}: with every weight at q4 its "
                f"tensors take {8 * (least + settled) / values:.2f} bits a weight, {least + settled:,} bytes"
            )
        return limit


def chosen_names(steps: Sequence[TensorQuantization]) -> dict[str, list[str]]:
    """What a budget was spent on, for the file's note: names of what became Q8 and of what stayed dense."""
    rows: Mapping[str, list[str]] = {
        "q8": [step.name for step in steps if step.target == "q8" and not step.reason],
        "dense": [step.name for step in steps if step.reason == "the budget has room"],
    }
    return {kind: short_names(names) for kind, names in rows.items() if names}


def remember(path: str | Path, method: str, found: Sensitivity, notify: Notify) -> None:
    """Add what was measured to the file of statistics, so that the next budget costs nothing; if it can be written."""
    from oazoo.zoo.statistics import load_statistics, save_statistics

    known = load_statistics(path)
    before = known.sensitivities.get(method)
    if not found.tokens or (before is not None and before.losses.keys() >= found.losses.keys()):
        return
    try:
        save_statistics(
            replace(known, sensitivities={**known.sensitivities, method: found}), path, overwrite=True
        )
    except OazooError:
        return
    if notify is not None:
        notify(f"{path}: what each tensor costs by {method} was added to it")
