"""Translation rules: a target tensor is a transform of source tensors.

A transform is frozen data with three meanings: the shape it yields, the values it yields, and its inverse.
Because each can be inverted, a list of rules read backwards (:func:`invert`) is the export.

``on_rows`` transforms move whole rows (slices along the first axis) and never look inside one. They apply
just as well to the stored bytes of a tensor viewed as [rows, bytes per row], whatever its encoding, which
is how quantised tensors are permuted without being decoded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import TranslationError

Shape = tuple[int, ...]
Array = npt.NDArray[Any]


class Transform(ABC):
    """What happens to the source tensors of a rule on their way to the target."""

    #: Whether only whole rows (first axis) move, so that stored bytes can be moved undecoded.
    on_rows: bool = True
    #: Whether every value of the target is one of the sources'; if not, values are computed, and may be rounded.
    keeps_values: bool = True

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return type(self).__name__

    @abstractmethod
    def shape(self, sources: Sequence[Shape]) -> Shape:
        """Shape of the target; a :class:`TranslationError` if the sources do not fit the transform."""

    @abstractmethod
    def apply(self, sources: Sequence[Array]) -> Array:
        """Values of the target, from arrays of the source shapes."""

    def inverse(self, rule: Rule) -> list[Rule]:
        """Rules that rebuild the sources of ``rule``, whose transform this is; a TranslationError if there are none."""
        raise TranslationError(f"{rule} cannot be run backwards")


def _single(sources: Sequence[Any], transform: Transform) -> Any:
    if len(sources) != 1:
        raise TranslationError(f"{transform.name} takes one source, got {len(sources)}")
    return sources[0]


@dataclass(frozen=True, slots=True)
class Identity(Transform):
    """The source as it is."""

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[...] → [...]."""
        shape: Shape = _single(sources, self)
        return shape

    def apply(self, sources: Sequence[Array]) -> Array:
        """The source itself, not a copy."""
        array: Array = _single(sources, self)
        return array


@dataclass(frozen=True, slots=True)
class Transpose2D(Transform):
    """[a, b] → [b, a]: weights stored as [in, out], such as GPT-2's."""

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """A transpose cuts through rows."""
        return False

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[a, b] → [b, a]."""
        shape: Shape = _single(sources, self)
        if len(shape) != 2:
            raise TranslationError(f"only a matrix can be transposed, the source has shape {list(shape)}")
        return shape[::-1]

    def apply(self, sources: Sequence[Array]) -> Array:
        """The transposed view."""
        array: Array = _single(sources, self)
        return array.T


@dataclass(frozen=True, slots=True)
class Reshape(Transform):
    """``source`` → ``target``, two shapes of the same elements in the same order."""

    source: Shape
    target: Shape

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """Rows of the two shapes differ."""
        return False

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Reshape({list(self.source)} to {list(self.target)})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """``source`` → ``target``."""
        shape: Shape = _single(sources, self)
        if shape != self.source or math.prod(self.source) != math.prod(self.target):
            raise TranslationError(f"{self.name}: the source has shape {list(shape)}")
        return self.target

    def apply(self, sources: Sequence[Array]) -> Array:
        """A view of the other shape."""
        array: Array = _single(sources, self)
        return array.reshape(self.target)


@dataclass(frozen=True, slots=True)
class Chain(Transform):
    """Transforms one after another: the first takes the sources, each other one the result before it."""

    steps: tuple[Transform, ...]

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """Rows stay whole when every step keeps them so."""
        return all(step.on_rows for step in self.steps)

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return ", ".join(step.name for step in self.steps)

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """The shape after the last step."""
        for step in self.steps:
            sources = [step.shape(sources)]
        shape: Shape = _single(sources, self)
        return shape

    def apply(self, sources: Sequence[Array]) -> Array:
        """The values after the last step."""
        for step in self.steps:
            sources = [step.apply(sources)]
        array: Array = _single(sources, self)
        return array


@dataclass(frozen=True, slots=True)
class RopePermute(Transform):
    """Reorder the q or k rows of each head between the two conventions of rotary embedding.

    Within a head of d rows, the interleaved order (GGUF's Llama) rotates rows 2j and 2j+1 together, the
    half-split order (Hugging Face, and ours) rows j and j + d/2. ``to_half`` says which way this rule goes.
    ``heads`` is the number of heads in *this* tensor: of queries for q, of keys for k.
    """

    heads: int
    to_half: bool = True

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"RopePermute({self.heads} heads, to {'half-split' if self.to_half else 'interleaved'})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[heads * d, ...] → the same."""
        shape: Shape = _single(sources, self)
        if not shape or shape[0] % (2 * self.heads):
            raise TranslationError(
                f"shape {list(shape)} has no even number of rows for each of {self.heads} heads"
            )
        return shape

    def apply(self, sources: Sequence[Array]) -> Array:
        """A copy with its rows in the other order."""
        array: Array = _single(sources, self)
        half = array.shape[0] // (2 * self.heads)
        inner = (half, 2) if self.to_half else (2, half)
        split = array.reshape(self.heads, *inner, *array.shape[1:])
        return split.swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class Offset(Transform):
    """A number added to every element, in float32: norm weights that mean 1 + w where a container holds w, or the sum.

    The sum is rounded to float32, as those who compute with it round it.
    """

    amount: float

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """Values change, so stored bytes cannot be moved undecoded."""
        return False

    @property
    def keeps_values(self) -> bool:  # type: ignore[override]
        """Every value is a sum."""
        return False

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Offset({self.amount:+g})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[...] → [...]."""
        shape: Shape = _single(sources, self)
        return shape

    def apply(self, sources: Sequence[Array]) -> Array:
        """A float32 copy with the amount added."""
        array: Array = _single(sources, self)
        return np.asarray(array, np.float32) + np.float32(self.amount)


@dataclass(frozen=True, slots=True)
class Interleaved(Transform):
    """Part ``index`` of ``parts`` that lie interleaved by head: rows are [heads, parts, head rows] (GPT-NeoX's qkv).

    Rows of the parts, in order, make the source again.
    """

    heads: int
    parts: int
    index: int

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Interleaved(part {self.index} of {self.parts}, {self.heads} heads)"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[heads · parts · d, ...] → [heads · d, ...]."""
        shape: Shape = _single(sources, self)
        if not shape or shape[0] % (self.heads * self.parts) or not 0 <= self.index < self.parts:
            raise TranslationError(
                f"{self.name}: shape {list(shape)} does not hold {self.parts} parts for each head"
            )
        return (shape[0] // self.parts, *shape[1:])

    def apply(self, sources: Sequence[Array]) -> Array:
        """A copy of the part's rows."""
        array: Array = _single(sources, self)
        split = array.reshape(self.heads, self.parts, -1, *array.shape[1:])
        return split[:, self.index].reshape(-1, *array.shape[1:])


@dataclass(frozen=True, slots=True)
class Interleave(Transform):
    """The inverse of :class:`Interleaved`: sources of equal shape, [heads · d, ...] each, interleaved by head."""

    heads: int
    parts: int

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Interleave({self.parts} parts, {self.heads} heads)"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """Sources [heads · d, ...] → [heads · parts · d, ...]."""
        first = sources[0] if sources else ()
        if len(sources) != self.parts or not first or first[0] % self.heads or set(sources) != {first}:
            raise TranslationError(f"{self.name}: the sources have shapes {[list(s) for s in sources]}")
        return (first[0] * self.parts, *first[1:])

    def apply(self, sources: Sequence[Array]) -> Array:
        """A new array holding all sources."""
        rest = sources[0].shape[1:]
        split = [array.reshape(self.heads, 1, -1, *rest) for array in sources]
        return np.concatenate(split, axis=1).reshape(-1, *rest)

    def inverse(self, rule: Rule) -> list[Rule]:
        """Each source is its part."""
        return [
            Rule(source, (rule.target,), Interleaved(self.heads, self.parts, index))
            for index, source in enumerate(rule.sources)
        ]


@dataclass(frozen=True, slots=True)
class Concat(Transform):
    """Sources of the given ``sizes`` along ``axis``, one after another."""

    axis: int
    sizes: tuple[int, ...]

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """Rows stay whole when the first axis is joined."""
        return self.axis == 0

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Concat(axis {self.axis}: {' + '.join(map(str, self.sizes))})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """Sources [.., size_i, ..] → [.., sum of sizes, ..]."""
        if len(sources) != len(self.sizes) or not sources:
            raise TranslationError(f"{self.name} takes {len(self.sizes)} sources, got {len(sources)}")
        first = sources[0]
        for shape, size in zip(sources, self.sizes, strict=True):
            expected = _with_size(first, self.axis, size)
            if shape != expected:
                raise TranslationError(f"{self.name}: a source has shape {list(shape)}, not {list(expected)}")
        return _with_size(first, self.axis, sum(self.sizes))

    def apply(self, sources: Sequence[Array]) -> Array:
        """A new array holding all sources."""
        return np.concatenate(sources, axis=self.axis)


@dataclass(frozen=True, slots=True)
class Slice(Transform):
    """Entries ``start`` to ``stop`` along ``axis`` of a source of ``size`` there."""

    axis: int
    start: int
    stop: int
    size: int

    @property
    def on_rows(self) -> bool:  # type: ignore[override]
        """Rows stay whole when the first axis is cut."""
        return self.axis == 0

    @property
    def name(self) -> str:
        """The transform as the plan shows it."""
        return f"Slice(axis {self.axis}: {self.start} to {self.stop} of {self.size})"

    def shape(self, sources: Sequence[Shape]) -> Shape:
        """[.., size, ..] → [.., stop − start, ..]."""
        shape: Shape = _single(sources, self)
        if not 0 <= self.start < self.stop <= self.size:
            raise TranslationError(f"{self.name} is not a range of its source")
        if shape != _with_size(shape, self.axis, self.size):
            raise TranslationError(f"{self.name}: the source has shape {list(shape)}")
        return _with_size(shape, self.axis, self.stop - self.start)

    def apply(self, sources: Sequence[Array]) -> Array:
        """A view of the range."""
        array: Array = _single(sources, self)
        index = (slice(None),) * self.axis + (slice(self.start, self.stop),)
        return array[index]


def _with_size(shape: Shape, axis: int, size: int) -> Shape:
    if not 0 <= axis < len(shape):
        raise TranslationError(f"shape {list(shape)} has no axis {axis}")
    return (*shape[:axis], size, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Rule:
    """``target ← transform(sources)``."""

    target: str
    sources: tuple[str, ...]
    transform: Transform = Identity()

    def __str__(self) -> str:
        return f"{self.target} ← {self.transform.name}({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Source tensors that carry no weight of the model: a regular expression for whole names, and why."""

    pattern: str
    reason: str


def invert(rules: Sequence[Rule]) -> list[Rule]:
    """The rules that rebuild every source from the targets.

    A Concat turns into Slices of its target; Slices of one source turn into a Concat, provided that they
    cover it.

    Raises:
        TranslationError: a source that the targets do not determine.
    """
    inverse: list[Rule] = []
    slices: dict[str, list[tuple[Slice, str]]] = defaultdict(list)
    interleaved: dict[str, list[tuple[Interleaved, str]]] = defaultdict(list)
    for rule in rules:
        match rule.transform:
            case Identity() | Transpose2D():
                inverse.append(Rule(rule.sources[0], (rule.target,), rule.transform))
            case Reshape(before, after):
                inverse.append(Rule(rule.sources[0], (rule.target,), Reshape(after, before)))
            case RopePermute(heads, to_half):
                inverse.append(Rule(rule.sources[0], (rule.target,), RopePermute(heads, not to_half)))
            case Concat(axis, sizes):
                start = 0
                for source, size in zip(rule.sources, sizes, strict=True):
                    inverse.append(Rule(source, (rule.target,), Slice(axis, start, start + size, sum(sizes))))
                    start += size
            case Offset(amount):
                inverse.append(Rule(rule.sources[0], (rule.target,), Offset(-amount)))
            case Interleaved():
                interleaved[rule.sources[0]].append((rule.transform, rule.target))
            case Slice():
                slices[rule.sources[0]].append((rule.transform, rule.target))
            case _:
                inverse += rule.transform.inverse(rule)
    for source, parts in slices.items():
        inverse.append(_join(source, sorted(parts, key=lambda part: part[0].start)))
    for source, pieces in interleaved.items():
        pieces.sort(key=lambda piece: piece[0].index)
        first = pieces[0][0]
        whole = [Interleaved(first.heads, first.parts, index) for index in range(first.parts)]
        if [piece for piece, _ in pieces] != whole:
            raise TranslationError(f"{source} cannot be rebuilt: not every one of its parts is there once")
        names = tuple(name for _, name in pieces)
        inverse.append(Rule(source, names, Interleave(first.heads, first.parts)))
    _refuse_repeats([rule.target for rule in inverse], "run backwards, the rules produce")
    return inverse


def _join(source: str, parts: list[tuple[Slice, str]]) -> Rule:
    axis, size, position = parts[0][0].axis, parts[0][0].size, 0
    for cut, _ in parts:
        if (cut.axis, cut.size, cut.start) != (axis, size, position):
            raise TranslationError(
                f"{source} cannot be rebuilt: its parts leave a hole or overlap at {position}"
            )
        position = cut.stop
    if position != size:
        raise TranslationError(f"{source} cannot be rebuilt: its parts end at {position} of {size}")
    return Rule(
        source, tuple(name for _, name in parts), Concat(axis, tuple(c.stop - c.start for c, _ in parts))
    )


def _refuse_repeats(names: Sequence[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise TranslationError(f"{what} {name!r} more than once")
        seen.add(name)


def run(rules: Sequence[Rule], tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Apply rules to arrays in memory (small models, tests, export of one tensor at a time)."""
    return {rule.target: rule.transform.apply([tensors[name] for name in rule.sources]) for rule in rules}
