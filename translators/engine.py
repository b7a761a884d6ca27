"""The engine: checks a translation whole before a byte moves, then streams one tensor after another.

:func:`check` compares the rules with the checkpoint and with the parameters of the typed config: every
parameter is produced exactly once with the right shape, every source tensor is used or is ignored for a
declared reason. :func:`stream` yields the bytes of one target tensor. Whole rows are moved in their stored
encoding, so that a quantised tensor is permuted undecoded; memory is one tensor's stored bytes at most,
plus a constant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from oazoo.errors import FormatError, TranslationError, UsageError
from oazoo.formats import encodings, quant
from oazoo.formats.source import SourceTensor, WeightSource
from oazoo.translators.rules import Concat, Identity, Offset, Rule, Slice
from oazoo.translators.stack import Stack, Unstack, entry_values, slice_bytes, slice_values
from oazoo.translators.translator import Checkpoint, Translation

DTYPES = ("keep", "f32", "f16", "bf16")
#: Values handled at a time while streaming.
CHUNK = 1 << 20

_FLOATS = ("f64", "f32", "f16", "bf16")
#: 8-bit floats whose every finite value is a float16.
_SMALL_FLOATS = ("f8_e4m3", "f8_e5m2", "f8_e4m3fnuz", "f8_e5m2fnuz")
#: Casts that cannot change a value.
_EXACT = {("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), *((name, "f16") for name in _SMALL_FLOATS)}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """How one target tensor comes about.

    ``action``: ``copy`` (bytes as they are, rows possibly moved), ``repack`` (Q8_0 and Q4_0 to Q8 and Q4,
    every value kept), ``convert`` (decoded and cast; rounding is measured) or ``store`` (bytes as they are,
    whatever they mean).
    """

    rule: Rule
    shape: tuple[int, ...]
    encoding: str
    nbytes: int
    source_encodings: tuple[str, ...]
    action: str

    @property
    def target(self) -> str:
        """Name of the tensor in the ``.oam``."""
        return self.rule.target

    @property
    def may_round(self) -> bool:
        """Whether values can change."""
        return self.action == "convert" and (
            not self.rule.transform.keeps_values
            or any((source, self.encoding) not in _EXACT for source in self.source_encodings)
        )

    def to_json(self) -> dict[str, Any]:
        """The plan of this tensor as JSON values."""
        return {
            "target": self.target,
            "shape": list(self.shape),
            "encoding": self.encoding,
            "bytes": self.nbytes,
            "sources": list(self.rule.sources),
            "source_encodings": list(self.source_encodings),
            "transform": self.rule.transform.name,
            "action": self.action,
        }

    def working_bytes(self, source: WeightSource) -> int:
        """Memory that streaming this tensor takes, in bytes (an upper estimate)."""
        held = sum(source[name].info.nbytes for name in self.rule.sources)
        count = encodings.numel(self.shape)
        transform = self.rule.transform
        if not transform.on_rows and any(encodings.get(e).quantized for e in self.source_encodings):
            held = 4 * count
        streamed = isinstance(transform, (Identity, Unstack, Offset)) or _rows(self, source) is not None
        if isinstance(transform, Stack):
            streamed = self.action != "repack"
        # What is not streamed is read whole, and moved into its order beside that.
        return (0 if streamed else 2 * held) + 24 * min(count, CHUNK)


@dataclass(slots=True)
class Measured:
    """What streaming a tensor found: how far values moved, and how many were NaN or infinite."""

    max_error: float = 0.0
    rounded: bool = False
    nan: int = 0
    infinite: int = 0


@dataclass(frozen=True)
class Checked:
    """A translation that fits its checkpoint."""

    tensors: tuple[TensorPlan, ...]
    #: Source tensors left out: (name, reason).
    ignored: tuple[tuple[str, str], ...] = field(default=())


def check(checkpoint: Checkpoint, translation: Translation, dtype: str = "keep") -> Checked:
    """Check a translation against the checkpoint and its typed config.

    Raises:
        UsageError: an unknown ``dtype``.
        TranslationError: missing, unexpected or repeated tensors, wrong shapes, or encodings that cannot be
            used; the message names them.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype[:32]!r}; known: {', '.join(DTYPES)}")
    source, expected = checkpoint.source, translation.config.parameters()
    _check_targets(translation.rules, expected)
    missing = [
        f"{name} (for {rule.target})"
        for rule in translation.rules
        for name in rule.sources
        if name not in source
    ]
    if missing:
        raise TranslationError(f"{source.path}: the checkpoint lacks {_listed(missing, 'tensor')}")
    ignored = _unused(source, translation)
    faults, plans = [], []
    for rule in translation.rules:
        infos = [source[name].info for name in rule.sources]
        try:
            shape = rule.transform.shape([info.shape for info in infos])
        except TranslationError as error:
            faults.append(f"{', '.join(rule.sources)}: {error}")
            continue
        if shape != expected[rule.target]:
            shapes = ", ".join(f"{info.name} {list(info.shape)}" for info in infos)
            faults.append(
                f"{shapes}: for {rule.target} the config asks for {list(expected[rule.target])}, not {list(shape)}"
            )
            continue
        plans.append(_plan_tensor(source, rule, shape, dtype, translation.any_type))
    if faults:
        raise TranslationError(
            f"{source.path}: the tensors do not fit {checkpoint.where}: {_listed(faults, 'shape')}"
        )
    return Checked(tuple(plans), tuple(ignored))


def _listed(items: Sequence[str], what: str) -> str:
    shown = "; ".join(items[:8])
    more = f"; and {len(items) - 8} more" if len(items) > 8 else ""
    return f"{len(items)} {what}{'s' if len(items) != 1 else ''}: {shown}{more}"


def _check_targets(rules: Sequence[Rule], expected: dict[str, tuple[int, ...]]) -> None:
    produced: set[str] = set()
    for rule in rules:
        if rule.target in produced:
            raise TranslationError(f"two rules produce {rule.target}")
        if rule.target not in expected:
            raise TranslationError(f"{rule}: the model has no such parameter")
        produced.add(rule.target)
    absent = [name for name in expected if name not in produced]
    if absent:
        raise TranslationError(f"no rule produces {_listed(absent, 'parameter')}")


def _unused(source: WeightSource, translation: Translation) -> list[tuple[str, str]]:
    """Sources that no rule reads, each with the reason to leave it out; an error for those without one."""
    used = {name for rule in translation.rules for name in rule.sources}
    patterns = [(re.compile(entry.pattern), entry.reason) for entry in translation.ignored]
    ignored, unknown = [], []
    for name in source:
        if name in used:
            continue
        reason = next((reason for pattern, reason in patterns if pattern.fullmatch(name)), None)
        if reason is None:
            unknown.append(repr(name[:128]))
        else:
            ignored.append((name, reason))
    if unknown:
        raise TranslationError(
            f"{source.path}: the architecture has no use for {_listed(unknown, 'tensor')}. "
            "Nothing is dropped silently: is the architecture right?"
        )
    return ignored


def _plan_tensor(
    source: WeightSource, rule: Rule, shape: tuple[int, ...], dtype: str, any_type: bool
) -> TensorPlan:
    kinds = tuple(source[name].info.encoding for name in rule.sources)
    if any_type and _stays(kinds[0], dtype):
        return TensorPlan(rule, shape, kinds[0], source[rule.sources[0]].info.nbytes, kinds, "store")
    for name, kind in zip(rule.sources, kinds, strict=True):
        _check_usable(source, name, kind)
    encoding, action = _choose(kinds, rule, len(shape), dtype)
    if action == "repack" and not encodings.numel(shape):
        encoding, action = "f16", "convert"  # blocks cannot hold nothing
    return TensorPlan(rule, shape, encoding, encodings.get(encoding).bytes_for(shape), kinds, action)


def _stays(kind: str, dtype: str) -> bool:
    """Whether a tensor is stored as it is: integers always, 8-bit floats unless they are to become wider."""
    if kind in _SMALL_FLOATS:
        return dtype == "keep"
    return kind not in _FLOATS and encodings.get(kind).kind in ("dense", "packed")


def _check_usable(source: WeightSource, name: str, kind: str) -> None:
    encoding = encodings.get(kind)
    if kind in _FLOATS or kind in _SMALL_FLOATS or (encoding.kind == "gguf" and encoding.decodable):
        return
    at = f"{source.path}: tensor {name[:128]!r}"
    if encoding.kind in ("gguf", "unknown"):
        raise TranslationError(f"{at}: {encodings.undecodable(kind)}")
    known = ", ".join((*_FLOATS, *_SMALL_FLOATS))
    raise TranslationError(
        f"{at} is stored as {kind}, which is not a weight by itself. Supported: {known}, and the block types of GGUF"
    )


def _choose(kinds: tuple[str, ...], rule: Rule, rank: int, dtype: str) -> tuple[str, str]:
    """Encoding of the target, and how it is made."""
    movable = rule.transform.on_rows and (rank > 1 or rule.transform.name == "Identity")
    same = len(set(kinds)) == 1
    if dtype == "keep":
        if same and movable and kinds[0] in quant.LOSSLESS_TARGETS:
            return quant.LOSSLESS_TARGETS[kinds[0]], "repack"
        dense = {kind if kind in _FLOATS else "f16" for kind in kinds}
        wanted = dense.pop() if len(dense) == 1 else "f32"
    else:
        wanted = dtype
    return wanted, how_made(kinds, wanted, rule)


def how_made(kinds: tuple[str, ...], wanted: str, rule: Rule) -> str:
    """The action that makes dense values of ``wanted`` from sources of ``kinds``."""
    return "copy" if set(kinds) == {wanted} and rule.transform.keeps_values else "convert"


def stream(plan: TensorPlan, source: WeightSource, measured: Measured) -> Iterator[npt.NDArray[Any]]:
    """The stored bytes of a target tensor, in order, as contiguous arrays.

    Fills ``measured``.

    Raises:
        TranslationError: a finite value does not fit the target's range.
    """
    tensors = [source[name] for name in plan.rule.sources]
    if not encodings.numel(plan.shape):
        return
    if isinstance(plan.rule.transform, Stack) and plan.action != "repack":
        for part in _entries(plan):
            yield from stream(part, source, measured)
        return
    if isinstance(plan.rule.transform, Offset):
        for values in tensors[0].chunks(CHUNK):
            yield _shifted(values, plan.rule.transform, plan, measured)
        return
    if plan.action == "store":
        yield from tensors[0].pieces(4 * CHUNK)
        return
    if plan.action == "repack":
        scales = Measured()
        rows = _rows(plan, source)
        raw = partial(_row_pieces, rows) if rows is not None else _moved_bytes(plan, tensors)
        for piece in quant.reencode_stream(raw, plan.source_encodings[0]):
            if piece.dtype.kind == "f":
                _count_nonfinite(piece, scales)
            yield piece
        if scales.nan or scales.infinite:  # rare: then the values themselves are counted
            for tensor in tensors:
                for values in tensor.chunks(CHUNK):
                    _count_nonfinite(values, measured)
        return
    for values in _values(plan, source):
        if plan.action == "copy":
            _count_nonfinite(values, measured)
            yield values
        else:
            yield _cast(values, plan, measured)


#: Stores the bytes of a tensor from a position on into all of a u8 array.
Fill = Callable[[int, npt.NDArray[np.uint8]], None]


def is_copy(plan: TensorPlan) -> bool:
    """Whether a target tensor is one source tensor, dense, byte for byte."""
    identity = isinstance(plan.rule.transform, Identity)
    return identity and plan.action == "copy" and encodings.get(plan.encoding).kind == "dense"


def filling(plan: TensorPlan, source: WeightSource, measured: Measured) -> Fill | None:
    """What puts the stored bytes of a target tensor in place, in order; None where they must be made (:func:`stream`).

    Fills ``measured``.
    """
    if not is_copy(plan):
        return None
    tensor, dtype = source[plan.rule.sources[0]], encodings.get(plan.encoding).dtype

    def fill(start: int, out: npt.NDArray[np.uint8]) -> None:
        tensor.bytes_into(start, out)
        _count_nonfinite(out.view(dtype), measured)

    return fill


def _entries(plan: TensorPlan) -> Iterator[TensorPlan]:
    """The sources of a stack, each as a tensor of its own: one after another they are the stack."""
    for name, kind in zip(plan.rule.sources, plan.source_encodings, strict=True):
        action = "copy" if kind == plan.encoding else "convert"
        size = plan.nbytes // plan.shape[0]
        yield TensorPlan(Rule(plan.target, (name,)), plan.shape[1:], plan.encoding, size, (kind,), action)


def _values(plan: TensorPlan, source: WeightSource) -> Iterator[npt.NDArray[Any]]:
    """The target's values, flattened, in pieces, in the source's own type."""
    if isinstance(plan.rule.transform, Unstack):
        yield from entry_values(source[plan.rule.sources[0]], plan.rule.transform, CHUNK)
        return
    tensors = [source[name] for name in plan.rule.sources]
    rows = _rows(plan, source)
    if rows is not None:
        for tensor, start, stop in rows:
            yield from slice_values(tensor, start, stop, CHUNK)
        return
    same = len(set(plan.source_encodings)) == 1
    kinds = [encodings.get(kind) for kind in plan.source_encodings]
    # Blocks of .oam run over the flattened tensor, with the scales behind all codes: no row is a range of bytes.
    movable = len(plan.shape) > 1 and not any(kind.kind == "oam" for kind in kinds)
    if same and plan.rule.transform.on_rows and (movable or not kinds[0].quantized):
        raw = _moved_bytes(plan, tensors)
        encoding = encodings.get(plan.source_encodings[0])
        yield from encoding.chunks(raw, encodings.numel(plan.shape), CHUNK)
        return
    arrays = [tensor.numpy() for tensor in tensors]
    if not same:
        arrays = [array.astype(np.float32) for array in arrays]
    whole = plan.rule.transform.apply(arrays)
    step = max(1, CHUNK * plan.shape[0] // max(1, encodings.numel(plan.shape)))
    for start in range(0, plan.shape[0], step):
        yield np.ascontiguousarray(whole[start : start + step]).reshape(-1)


def _rows(plan: TensorPlan, source: WeightSource) -> list[tuple[SourceTensor, int, int]] | None:
    """The ranges of elements that one after another are the target, where its rows stay in order; None if they do not.

    Blocks of .oam run over the flattened tensor: no row of such a one is a range of blocks.
    """
    tensors = [source[name] for name in plan.rule.sources]
    kinds = {encodings.get(tensor.info.encoding) for tensor in tensors}
    if len(kinds) != 1:
        return None
    kind = kinds.pop()
    match plan.rule.transform:
        case Identity():
            return [(tensors[0], 0, tensors[0].info.numel)]
        case Slice(0, first, last, _) if kind.kind != "oam" and (len(plan.shape) > 1 or not kind.quantized):
            row = encodings.numel(tensors[0].info.shape[1:])
            return [(tensors[0], first * row, last * row)]
        case Concat(0, _) if kind.kind != "oam":
            return [(tensor, 0, tensor.info.numel) for tensor in tensors]
    return None


def _row_pieces(rows: Sequence[tuple[SourceTensor, int, int]], size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """The stored bytes of ranges of elements, in pieces of about ``size`` bytes."""
    for tensor, start, stop in rows:
        kind = encodings.get(tensor.info.encoding)
        yield from slice_bytes(tensor, start, stop, max(1, size // kind.block_bytes) * kind.block)


def _moved_bytes(plan: TensorPlan, tensors: Sequence[SourceTensor]) -> npt.NDArray[np.uint8]:
    """Stored bytes of the target in the source's encoding: the transform applied to rows of bytes."""
    rows = [t.raw().reshape(t.info.shape[0] if t.info.shape else 1, -1) for t in tensors]
    moved = plan.rule.transform.apply(rows)
    return np.ascontiguousarray(moved).reshape(-1)


def _cast(values: npt.NDArray[Any], plan: TensorPlan, measured: Measured) -> npt.NDArray[Any]:
    target = encodings.get(plan.encoding).dtype
    with np.errstate(all="ignore"):
        result = values.astype(target)
        if not plan.may_round:
            _count_nonfinite(values, measured)
            return result
        # Differences of a float and its rounded neighbour are exact in the wider type.
        wide = np.float64 if values.dtype == np.float64 else np.float32
        _measure(values.astype(wide, copy=False), result.astype(wide), plan, measured)
    return result


def _shifted(
    values: npt.NDArray[Any], offset: Offset, plan: TensorPlan, measured: Measured
) -> npt.NDArray[Any]:
    """Sums, measured by how far taking the offset off again leads from where they began."""
    with np.errstate(all="ignore"):
        result: npt.NDArray[Any] = offset.apply([values]).astype(encodings.get(plan.encoding).dtype)
        _measure(values.astype(np.float64), result.astype(np.float64) - offset.amount, plan, measured)
    return result


def _measure(exact: npt.NDArray[Any], found: npt.NDArray[Any], plan: TensorPlan, measured: Measured) -> None:
    """Note how far ``found`` is from ``exact``; a finite value that became infinite is an error."""
    error = np.abs(exact - found)
    largest = float(error.max(initial=0.0))
    if not np.isfinite(largest):
        finite = np.isfinite(exact)
        lost = finite & ~np.isfinite(found)
        if lost.any():
            value = float(exact[lost][0])
            raise TranslationError(
                f"{', '.join(plan.rule.sources)}: the value {value:.6g} does not fit {plan.encoding}; "
                "convert with a dtype of wider range, such as --dtype f32 or bf16"
            )
        _count_nonfinite(exact, measured)
        largest = float(error[finite].max(initial=0.0))
    measured.max_error = max(measured.max_error, largest)
    measured.rounded = measured.rounded or largest > 0


#: Bits of infinity in the 2-byte floats; any larger magnitude is NaN. Integers compare several times faster.
_INFINITY_BITS = {"f16": 0x7C00, "bf16": 0x7F80}


def _count_nonfinite(values: npt.NDArray[Any], measured: Measured) -> None:
    infinity = _INFINITY_BITS.get(encodings.for_dtype(values.dtype))
    if infinity is not None:
        magnitude = values.view(np.uint16) & np.uint16(0x7FFF)
        if int(magnitude.max(initial=0)) < infinity:
            return
    # One pass, without a mask: NaN and infinity do not vanish in a sum. A sum may also overflow; then the mask decides.
    with np.errstate(all="ignore"):
        if values.dtype.kind == "f" and np.isfinite(np.add.reduce(values)):
            return
    finite = np.isfinite(values)
    if finite.all():
        return
    nan = int(np.isnan(values).sum())
    measured.nan += nan
    measured.infinite += int(finite.size - finite.sum()) - nan


def same_bytes(source: WeightSource, first: str, second: str) -> bool:
    """Whether two source tensors are equal in shape, encoding and every byte."""
    a, b = source[first], source[second]
    if (a.info.shape, a.info.encoding) != (b.info.shape, b.info.encoding):
        return False
    if a.info.nbytes != b.info.nbytes:
        raise FormatError(f"{source.path}: {first} and {second} differ in size")
    return all(map(np.array_equal, a.pieces(4 * CHUNK), b.pieces(4 * CHUNK)))
