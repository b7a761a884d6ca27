"""Recipes: which tensors get how many bits. A recipe is a size, and what is lost decides how it is spent.

Q4 takes 5 bits a weight and Q8 takes 9, so between them lies a choice: which tensors are worth four more. Each tensor has a
sensitivity, what packing it costs (:mod:`oazoo.zoo.sensitivity`); the choice is the one of least total cost that fits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from oazoo.errors import UsageError
from oazoo.zoo.quantize_plan import TARGETS

#: What Q8 costs a tensor, compared to Q4: the squares of their steps, (7.5 / 127.5)² with room for what search gains.
Q8_SHARE = 1 / 200
_BUDGET = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(bpw|kB|MB|GB|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
#: Sizes that the search for the best choice tells apart.
_STEPS = 1 << 14


@dataclass(frozen=True)
class Budget:
    """How large a result may be: bits a weight, over all values that the file stores, or bytes of the file.

    Exactly one is given. ``text`` is how it was written.
    """

    text: str
    bits_per_weight: float | None = None
    file_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """From ``5.5bpw`` or a size such as ``92MB`` (or kB, GB, KiB, MiB, GiB).

        Raises:
            UsageError: anything else.
        """
        found = _BUDGET.fullmatch(text.strip())
        if found is None or not float(found[1]) > 0:
            raise UsageError(
                f"--budget {text!r}: write bits a weight (5.5bpw) or the file's size (92MB, 88MiB)"
            )
        number, unit = float(found[1]), found[2].lower()
        if unit == "bpw":
            return cls(text, bits_per_weight=number)
        return cls(text, file_bytes=int(number * _UNITS[unit]))


@dataclass(frozen=True)
class Recipe:
    """A way of quantising with a name: what tensors become, and the size that sensitive ones may fill with more bits."""

    name: str
    target: str
    about: str
    budget: Budget | None = None


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("q4", "q4", "every weight 4 bits: 5.0 bits a weight"),
        Recipe("q8", "q8", "every weight 8 bits: 9.0 bits a weight"),
        Recipe(
            "q4-mixed", "q4", "the most sensitive weights 8 bits: 5.35 bits a weight", Budget.parse("5.35bpw")
        ),
        Recipe("q4-high", "q4", "more of them: 6.17 bits a weight", Budget.parse("6.17bpw")),
    )
}


def resolve(to: str | None, recipe: str | None, budget: str | None) -> tuple[str, Budget | None]:
    """What tensors become, and how large the result may be.

    Raises:
        UsageError: an unknown recipe or a budget that is none; several that say the same; none of them.
    """
    if recipe is not None:
        if recipe not in RECIPES:
            raise UsageError(f"unknown recipe {recipe!r}; there are {', '.join(RECIPES)}")
        if to is not None or budget is not None:
            raise UsageError(
                "a recipe says what tensors become and how large the result is: leave --to and --budget out"
            )
        return RECIPES[recipe].target, RECIPES[recipe].budget
    limit = None if budget is None else Budget.parse(budget)
    if to is None and limit is None:
        raise UsageError(f"say what weights become: --to {', '.join(TARGETS)}, a recipe, or a budget")
    if limit is not None and to not in (None, "q4"):
        raise UsageError(f"a budget is spent on more bits than q4 has; it does not go with --to {to}")
    return to or "q4", limit


@dataclass(frozen=True)
class Option:
    """One thing that could become of a tensor: its encoding (``q4``, ``q8`` or ``dense``), bytes, and what it costs."""

    encoding: str
    nbytes: int
    loss: float


def choose(options: Mapping[str, Sequence[Option]], limit: int) -> dict[str, str]:
    """For every tensor one of its options, so that all together take at most ``limit`` bytes and cost the least.

    A multiple-choice knapsack, solved by dynamic programming over sizes; sizes are rounded up to a 16,384th of what there
    is to spend, and what rounding left is spent on what gains most for its bytes.

    Raises:
        UsageError: the smallest options take more.
    """
    smallest = {name: min(some, key=lambda o: o.nbytes) for name, some in options.items()}
    least = sum(option.nbytes for option in smallest.values())
    if least > limit:
        raise UsageError(
            f"the smallest choice takes {least:,} bytes of weights, and the budget leaves {limit:,}"
        )
    most = sum(max(o.nbytes for o in some) for some in options.values())
    spare = min(limit, most) - least
    unit = max(1, ceil(spare / _STEPS))
    room = spare // unit
    best = np.zeros(room + 1)
    picks: list[npt.NDArray[np.int8]] = []
    for name, some in options.items():
        costs = [ceil((o.nbytes - smallest[name].nbytes) / unit) for o in some]
        table = np.full((len(some), room + 1), np.inf)
        for row, option, cost in zip(table, some, costs, strict=True):
            if cost <= room:
                row[cost:] = best[: room + 1 - cost] + option.loss
        pick = table.argmin(axis=0)
        picks.append(pick.astype(np.int8))
        best = table[pick, np.arange(room + 1)]
    result: dict[str, Option] = {}
    at = room
    for (name, some), pick in zip(reversed(list(options.items())), reversed(picks), strict=True):
        option = some[int(pick[at])]
        result[name] = option
        at -= ceil((option.nbytes - smallest[name].nbytes) / unit)
    _spend(options, result, limit - sum(o.nbytes for o in result.values()))
    return {name: result[name].encoding for name in options}


def _spend(options: Mapping[str, Sequence[Option]], result: dict[str, Option], left: int) -> None:
    """Use what is left, best gain a byte first."""
    while True:
        better = [
            ((result[name].loss - option.loss) / (option.nbytes - result[name].nbytes), name, option)
            for name, some in options.items()
            for option in some
            if option.loss < result[name].loss and 0 < option.nbytes - result[name].nbytes <= left
        ]
        if not better:
            return
        _, name, option = max(better, key=lambda entry: entry[0])
        left -= option.nbytes - result[name].nbytes
        result[name] = option


def short_names(names: Sequence[str]) -> list[str]:
    """Names with numbers of layers drawn together: ``layers.{0-3,29}.mlp.down.weight``."""
    groups: dict[tuple[str, str], list[int]] = {}
    alone: list[str] = []
    for name in names:
        found = re.fullmatch(r"(.*?\.)([0-9]+)(\..*)", name)
        if found is None:
            alone.append(name)
        else:
            groups.setdefault((found[1], found[3]), []).append(int(found[2]))
    return alone + [f"{a}{_ranges(sorted(numbers))}{b}" for (a, b), numbers in groups.items()]


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return "{" + ",".join(parts) + "}"
