"""Flow matching: conditioning by a vector a sequence, time embeddings, paths, and the arithmetic of samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oazoo.runtime.ops.common import MAX_ELEMENTS, MAX_GROUPS, class_numbers, grid, require, require_dense
from oazoo.runtime.ops.norm import column_sums
from oazoo.runtime.random import Generator, generator
from oazoo.runtime.tape import no_gradient, taped
from oazoo.runtime.tensor import Tensor

#: Elements that a workgroup of the masked loss sums.
_SUMMED = 1024


def modulate(
    x: Tensor, m: Tensor, *, scale: int, shift: int | None = None, residual: Tensor | None = None
) -> Tensor:
    """Rows of each sequence scaled, and shifted, by parts of its own vector (adaptive layer norm, arXiv:2212.09748).

    With ``shift`` that is ``x (1 + scale) + shift``, without it ``x · scale``, a gate.

    Args:
        x: f32 [sequences · tokens, width].
        m: f32 [sequences, chunks · width].
        scale: which chunk of m scales.
        shift: which is added, or None.
        residual: f32 like x, added to the result; or None.

    Returns:
        f32 like x.
    """
    op = "modulate"
    require_dense(x, op, "x", "f32", -1, -1)
    require_dense(m, op, "m", "f32", -1, -1)
    (rows, width), (sequences, wide) = x.shape, m.shape
    require(width > 0 and wide % width == 0, op, f"m of width {wide} is no multiple of the width {width}")
    require(sequences > 0 and rows % sequences == 0, op, f"{rows} rows are not {sequences} equal sequences")
    require(
        sequences <= MAX_GROUPS, op, f"{sequences:,} sequences are more than the {MAX_GROUPS:,} of one run"
    )
    chunks, tokens = wide // width, rows // sequences
    for chunk in (scale, 0 if shift is None else shift):
        require(0 <= chunk < chunks, op, f"there is no chunk {chunk} of {chunks}")
    require(scale != shift, op, "scale and shift are one chunk")
    if residual is not None:
        require_dense(residual, op, "residual", "f32", rows, width)
    one = 0.0 if shift is None else 1.0
    add = chunks if shift is None else shift
    y, groups = Tensor.empty(x.device, x.shape), grid(-(-x.numel // 256))
    if x.numel:
        x.device.kernel("modulate").dispatch(
            groups,
            {"x": x, "m": m, "residual": residual},
            {"y": y},
            count=x.numel,
            columns=groups[0],
            tokens=tokens,
            width=width,
            chunks=chunks,
            scale=scale,
            shift=add,
            added=int(residual is not None),
            one=one,
        )

    def back(dy: Tensor, want: object) -> tuple[Tensor, Tensor, Tensor | None]:
        dx, dm = Tensor.empty(x.device, x.shape), Tensor.empty(x.device, m.shape)
        x.device.kernel("modulate_back").dispatch(
            (-(-width // 64), sequences, 1),
            {"x": x, "m": m, "dy": dy},
            {"dx": dx, "dm": dm},
            tokens=tokens,
            width=width,
            chunks=chunks,
            scale=scale,
            shift=add,
            one=one,
        )
        return dx, dm, None if residual is None else dy

    return taped(y, (x, m, residual), back)


def add_repeated(x: Tensor, p: Tensor) -> Tensor:
    """``x + p`` for each stretch of x as large as p: positions of every sequence of a batch.

    Args:
        x: f32 [sequences · tokens, width].
        p: f32 [tokens, width].

    Returns:
        f32 like x.
    """
    op = "add_repeated"
    require_dense(p, op, "p", "f32", -1, -1)
    require_dense(x, op, "x", "f32", -1, p.shape[1])
    require(p.numel > 0 and x.numel % p.numel == 0, op, f"{list(x.shape)} is not made of {list(p.shape)}")
    y, groups = Tensor.empty(x.device, x.shape), grid(-(-x.numel // 256))
    if x.numel:
        x.device.kernel("add_repeated").dispatch(
            groups, {"x": x, "p": p}, {"y": y}, count=x.numel, columns=groups[0], period=p.numel
        )

    def back(dy: Tensor, want: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
        if not want[1]:
            return dy, None
        sums, _ = column_sums(dy.view(x.numel // p.numel, p.numel))
        assert sums is not None
        return dy, sums.view(*p.shape)

    return taped(y, (x, p), back)


def time_embedding(time: Tensor, frequencies: Tensor, *, cosine_first: bool = False) -> Tensor:
    """Sines, then cosines, of ``time · frequency``.

    Args:
        time: f32 [sequences]; no gradient is taken with respect to it.
        frequencies: f32 [half].
        cosine_first: cosines, then sines.

    Returns:
        f32 [sequences, 2 · half].
    """
    op = "time_embedding"
    require_dense(time, op, "time", "f32", -1)
    require_dense(frequencies, op, "frequencies", "f32", -1)
    no_gradient(op, time, frequencies)
    half = frequencies.numel
    y, groups = Tensor.empty(time.device, (time.numel, 2 * half)), grid(-(-time.numel * half // 64))
    if y.numel:
        time.device.kernel("time_embedding").dispatch(
            groups,
            {"time": time, "frequencies": frequencies},
            {"y": y},
            count=time.numel * half,
            columns=groups[0],
            half_width=half,
            cosine_first=int(cosine_first),
        )
    return y


def linear_match(clean: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """The straight path from data to noise (arXiv:2210.02747, arXiv:2209.03003), and its constant velocity.

    Args:
        clean, noise: f32 [sequences, …], of one shape.
        time: f32 [sequences]; 0 at the data, 1 at the noise.

    Returns:
        state ``(1 - time) clean + time noise`` and velocity ``noise - clean``, f32 of the same shape.
    """
    op = "linear_match"
    require_dense(clean, op, "clean", "f32", *clean.shape)
    require_dense(noise, op, "noise", "f32", *clean.shape)
    require(len(clean.shape) > 0, op, "clean has no axis of sequences")
    require_dense(time, op, "time", "f32", clean.shape[0])
    no_gradient(op, clean, noise, time)
    state, velocity = Tensor.empty(clean.device, clean.shape), Tensor.empty(clean.device, clean.shape)
    groups = grid(-(-clean.numel // 256))
    if clean.numel:
        clean.device.kernel("linear_match").dispatch(
            groups,
            {"clean": clean, "noise": noise, "time": time},
            {"state": state, "velocity": velocity},
            count=clean.numel,
            columns=groups[0],
            width=clean.numel // clean.shape[0],
        )
    return state, velocity


def masked_mse(x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """``Σ mask (x - target)² / Σ mask``; 0 where the mask is all zero. What is masked out may hold anything.

    Args:
        x: f32 of any shape, the prediction.
        target: f32 of the same shape; no gradient is taken with respect to it.
        mask: f32 with the first axes of x: each number stands for what lies behind it. Axes of size 1 at its end do not
            matter.

    Returns:
        f32 [1].
    """
    op = "masked_mse"
    require_dense(x, op, "x", "f32", *x.shape)
    require_dense(target, op, "target", "f32", *x.shape)
    require_dense(mask, op, "mask", "f32", *mask.shape)
    leading = list(mask.shape)
    while leading and leading != list(x.shape[: len(leading)]) and leading[-1] == 1:
        leading.pop()
    fits = leading == list(x.shape[: len(leading)]) and x.numel > 0
    require(fits, op, f"a mask {list(mask.shape)} does not fit {list(x.shape)}")
    no_gradient(f"target and mask of {op}", target, mask)
    device, groups = x.device, -(-x.numel // _SUMMED)
    partial, sums, over = Tensor.empty(device, (2, groups)), Tensor.empty(device, (2,)), grid(groups)
    reads: dict[str, Tensor | None] = {"x": x, "target": target, "mask": mask}
    scalars: dict[str, Any] = {"count": x.numel, "each": x.numel // mask.numel, "groups": groups}
    device.kernel("masked_mse").dispatch(
        over, {**reads, "scale": None, "sums": None}, {"y": partial}, columns=over[0], **scalars
    )
    device.kernel("masked_mse_end").dispatch(
        (1, 1, 1),
        {**dict.fromkeys(reads), "scale": None, "y": partial},
        {"sums": sums},
        columns=1,
        **scalars,
    )

    def back(dy: Tensor, want: object) -> tuple[Tensor]:
        dx, over = Tensor.empty(device, x.shape), grid(-(-x.numel // 256))
        device.kernel("masked_mse_back").dispatch(
            over, {**reads, "scale": dy, "sums": sums}, {"y": dx}, columns=over[0], **scalars
        )
        return (dx,)

    return taped(sums.rows(0, 1), (x,), back)


def random_uniform(source: Generator, shape: Sequence[int], *, strata: bool = False) -> Tensor:
    """Numbers evenly from 0 to less than 1, f32, from one draw of a stream; with ``strata`` the i-th lies in the i-th of
    equal parts of that.
    """
    return _numbers("uniforms", source, shape, strata)


def random_normal(source: Generator, shape: Sequence[int]) -> Tensor:
    """Numbers of the standard normal distribution, f32, from one draw of a stream."""
    return _numbers("normals", source, shape, False)


def _numbers(kernel: str, source: Generator, shape: Sequence[int], strata: bool) -> Tensor:
    y = Tensor.empty(source.state.device, shape)
    require(y.numel <= MAX_ELEMENTS, kernel, f"{y.numel:,} numbers are more than one run can address")
    groups = grid(-(-y.numel // 256))
    if y.numel:
        y.device.kernel(kernel).dispatch(
            groups,
            {"draw": source.draw()},
            {"y": y},
            count=y.numel,
            columns=groups[0],
            strata=int(strata),
        )
    return y


def drop_ids(ids: Tensor, rate: float, other: int, source: Generator | None = None) -> Tensor:
    """``ids`` (i32 [rows]), each replaced by ``other`` with probability ``rate``."""
    op = "drop_ids"
    class_numbers(op, "ids", ids, -1)
    require(ids.dtype == "i32", op, f"ids must be i32, not {ids.dtype}")
    require(0 <= rate <= 1, op, f"the rate {rate} must be from 0 to 1")
    if rate == 0 or ids.numel == 0:
        return ids
    y, groups = Tensor.empty(ids.device, ids.shape, "i32"), grid(-(-ids.numel // 256))
    ids.device.kernel("drop_ids").dispatch(
        groups,
        {"draw": (source or generator(ids.device)).draw(), "ids": ids},
        {"y": y},
        count=ids.numel,
        columns=groups[0],
        below=_below(rate),
        other=other,
    )
    return y


def drop_rows(x: Tensor, rate: float, source: Generator | None = None) -> Tensor:
    """Rows of f32 [rows, width], each all zero with probability ``rate``; nothing is scaled."""
    op = "drop_rows"
    require_dense(x, op, "x", "f32", -1, -1)
    require(0 <= rate <= 1, op, f"the rate {rate} must be from 0 to 1")
    if rate == 0 or x.numel == 0:
        return x
    draw, groups = (source or generator(x.device)).draw(), grid(-(-x.numel // 64))

    def run(values: Tensor) -> Tensor:
        y = Tensor.empty(x.device, x.shape)
        x.device.kernel("drop_rows").dispatch(
            groups,
            {"draw": draw, "x": values},
            {"y": y},
            count=x.numel,
            columns=groups[0],
            width=x.shape[1],
            below=_below(rate),
        )
        return y

    return taped(run(x), (x,), lambda dy, want: (run(dy),))


def _below(rate: float) -> int:
    return min(round(rate * 2**32), 2**32 - 1)


def advance(
    x: Tensor, v: Tensor, clock: Tensor, length: int, factor: float = 1.0, *, out: Tensor | None = None
) -> Tensor:
    """``x + factor · clock[length] · v``: a step along a velocity, whose length lies in device memory.

    Args:
        x, v: f32 of one number of elements.
        clock: f32 [numbers].
        length: which of them is the step's length.
        factor: on it.
        out: where the result goes (it may be x); a new tensor like x if None.
    """
    op = "advance"
    require_dense(x, op, "x", "f32", *x.shape)
    require_dense(v, op, "v", "f32", *v.shape)
    require(x.numel == v.numel, op, f"{list(x.shape)} and {list(v.shape)} have different sizes")
    _check_clock(op, clock, length)
    no_gradient(op, x, v)
    y, groups = Tensor.empty(x.device, x.shape) if out is None else out, grid(-(-x.numel // 256))
    require_dense(y, op, "out", "f32", *x.shape)
    if x.numel:
        reads = {"v": v, "clock": clock} | ({} if y is x else {"x": x})
        writes = {"y": y} | ({"x": x} if y is x else {})
        x.device.kernel("advance_state").dispatch(
            groups, reads, writes, count=x.numel, columns=groups[0], length=length, factor=factor
        )
    return y


def guide(v: Tensor, clock: Tensor, scale: int) -> Tensor:
    """Classifier-free guidance (arXiv:2207.12598): ``u + s (c - u)``, s being ``clock[scale]``.

    Args:
        v: f32 [2 · rows, …]: velocities with the condition (c), then those without (u).
        clock: f32 [numbers].
        scale: which of them is s.

    Returns:
        f32 [rows, …].
    """
    op = "guide"
    require_dense(v, op, "v", "f32", *v.shape)
    require(len(v.shape) > 0 and v.shape[0] % 2 == 0, op, f"{list(v.shape)} does not divide into two halves")
    _check_clock(op, clock, scale)
    no_gradient(op, v)
    y = Tensor.empty(v.device, (v.shape[0] // 2, *v.shape[1:]))
    groups = grid(-(-y.numel // 256))
    if y.numel:
        v.device.kernel("guide").dispatch(
            groups, {"v": v, "clock": clock}, {"y": y}, count=y.numel, columns=groups[0], scale=scale
        )
    return y


def read_clock(clock: Tensor, which: int, count: int) -> Tensor:
    """f32 [count], each the number ``which`` of ``clock`` (f32 [numbers])."""
    _check_clock("read_clock", clock, which)
    y, groups = Tensor.empty(clock.device, (count,)), grid(-(-count // 256))
    if count:
        clock.device.kernel("read_clock").dispatch(
            groups, {"clock": clock}, {"y": y}, count=count, columns=groups[0], which=which
        )
    return y


def _check_clock(op: str, clock: Tensor, which: int) -> None:
    require_dense(clock, op, "clock", "f32", -1)
    require(0 <= which < clock.numel, op, f"there is no number {which} of {clock.numel}")
