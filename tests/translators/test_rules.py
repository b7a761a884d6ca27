"""Transforms: shapes, values against the written rule, and inversion."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from oazoo.errors import TranslationError
from oazoo.translators.rules import (
    Chain,
    Concat,
    Identity,
    Interleave,
    Interleaved,
    Offset,
    Reshape,
    RopePermute,
    Rule,
    Slice,
    Transform,
    Transpose2D,
    invert,
    run,
)


def llama_cpp_permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows, written as the row each output row comes from."""
    dim = len(weights) // heads
    out = np.empty_like(weights)
    for head in range(heads):
        for pair in range(dim // 2):
            for side in range(2):
                out[head * dim + 2 * pair + side] = weights[head * dim + side * (dim // 2) + pair]
    return out


@pytest.mark.parametrize(("heads", "dim", "columns"), [(4, 8, 5), (2, 8, 5), (1, 2, 1), (3, 64, 32)])
def test_rope_permute_undoes_the_converter(heads: int, dim: int, columns: int) -> None:
    rows = np.repeat(np.arange(heads * dim)[:, None], columns, axis=1)
    stored = llama_cpp_permute(rows, heads)
    assert np.array_equal(RopePermute(heads).apply([stored]), rows)
    assert np.array_equal(RopePermute(heads, to_half=False).apply([rows]), stored)


def test_rope_permute_of_a_bias() -> None:
    bias = np.arange(16)
    assert np.array_equal(RopePermute(2).apply([llama_cpp_permute(bias, 2)]), bias)


def test_rope_permute_with_the_wrong_head_count_differs() -> None:
    rows = np.arange(32)
    assert not np.array_equal(RopePermute(4).apply([llama_cpp_permute(rows, 2)]), rows)


@pytest.mark.parametrize(
    ("transform", "shapes", "result"),
    [
        (Identity(), [(3, 4)], (3, 4)),
        (Identity(), [()], ()),
        (Transpose2D(), [(3, 4)], (4, 3)),
        (RopePermute(2), [(8, 5)], (8, 5)),
        (Concat(0, (2, 3)), [(2, 4), (3, 4)], (5, 4)),
        (Concat(1, (2, 3)), [(4, 2), (4, 3)], (4, 5)),
        (Slice(0, 1, 3, 4), [(4, 7)], (2, 7)),
        (Slice(1, 0, 3, 4), [(7, 4)], (7, 3)),
        (Offset(1.0), [(3, 4)], (3, 4)),
        (Interleaved(2, 3, 1), [(24, 5)], (8, 5)),
        (Interleaved(2, 3, 2), [(24,)], (8,)),
        (Interleave(2, 3), [(8, 5)] * 3, (24, 5)),
    ],
)
def test_shape_is_that_of_the_values(
    transform: Transform, shapes: list[tuple[int, ...]], result: tuple[int, ...]
) -> None:
    assert transform.shape(shapes) == result
    assert transform.apply([np.zeros(shape) for shape in shapes]).shape == result


@pytest.mark.parametrize(
    ("transform", "shapes"),
    [
        (Identity(), [(1,), (1,)]),
        (Transpose2D(), [(3,)]),
        (Transpose2D(), [(3, 4, 5)]),
        (RopePermute(3), [(8, 5)]),
        (RopePermute(8), [(8, 5)]),
        (RopePermute(1), [()]),
        (Concat(0, (2, 3)), [(2, 4)]),
        (Concat(0, (2, 3)), [(2, 4), (2, 4)]),
        (Concat(0, (2, 3)), [(2, 4), (3, 5)]),
        (Concat(2, (2, 3)), [(2, 4), (3, 4)]),
        (Concat(0, ()), []),
        (Slice(0, 1, 3, 4), [(5, 7)]),
        (Slice(0, 3, 3, 4), [(4, 7)]),
        (Slice(0, 2, 5, 4), [(4, 7)]),
        (Slice(2, 0, 1, 4), [(4, 7)]),
        (Offset(1.0), [(3,), (3,)]),
        (Interleaved(2, 3, 1), [(20, 5)]),
        (Interleaved(2, 3, 3), [(24, 5)]),
        (Interleaved(2, 3, 0), [()]),
        (Interleave(2, 3), [(8, 5)] * 2),
        (Interleave(2, 3), [(8, 5), (8, 5), (8, 4)]),
        (Interleave(3, 3), [(8, 5)] * 3),
        (Interleave(2, 0), []),
    ],
)
def test_misfits_are_refused(transform: Transform, shapes: list[tuple[int, ...]]) -> None:
    with pytest.raises(TranslationError):
        transform.shape(shapes)


def test_rules_run_backwards() -> None:
    random = np.random.default_rng(0)
    sources = {
        "same": random.normal(size=(3, 2)),
        "turned": random.normal(size=(3, 5)),
        "rows": random.normal(size=(16, 3)),
        "a": random.normal(size=(2, 3)),
        "b": random.normal(size=(4, 3)),
        "fused": random.normal(size=(9, 2)),
        "wide": random.normal(size=(2, 9)),
        "heads": random.normal(size=(24, 2)),
        "norm": random.integers(-64, 64, 5).astype(np.float32) / 64,
    }
    rules = [
        Rule("t.same", ("same",)),
        Rule("t.turned", ("turned",), Transpose2D()),
        Rule("t.rows", ("rows",), RopePermute(2)),
        Rule("t.ab", ("a", "b"), Concat(0, (2, 4))),
        Rule("t.v", ("fused",), Slice(0, 6, 9, 9)),
        Rule("t.q", ("fused",), Slice(0, 0, 4, 9)),
        Rule("t.k", ("fused",), Slice(0, 4, 6, 9)),
        Rule("t.left", ("wide",), Slice(1, 0, 5, 9)),
        Rule("t.right", ("wide",), Slice(1, 5, 9, 9)),
        *(Rule(f"t.part{n}", ("heads",), Interleaved(4, 3, n)) for n in (2, 0, 1)),
        Rule("t.norm", ("norm",), Offset(1.0)),
    ]
    targets = run(rules, sources)
    back = invert(rules)
    assert {rule.target for rule in back} == set(sources)
    for name, value in run(back, targets).items():
        assert np.array_equal(value, sources[name]), name
    # And once more: the inverse of the inverse gives the targets again.
    for name, value in run(invert(back), sources).items():
        assert np.array_equal(value, targets[name]), name


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("q", ("x",), Slice(0, 0, 4, 9))],
        [Rule("q", ("x",), Slice(0, 1, 9, 9))],
        [Rule("q", ("x",), Slice(0, 0, 4, 9)), Rule("k", ("x",), Slice(0, 5, 9, 9))],
        [Rule("q", ("x",), Slice(0, 0, 5, 9)), Rule("k", ("x",), Slice(0, 4, 9, 9))],
        [Rule("a", ("x",)), Rule("b", ("x",))],
        [Rule("q", ("x",), Interleaved(2, 2, 0))],
        [Rule("q", ("x",), Interleaved(2, 2, 0)), Rule("k", ("x",), Interleaved(2, 2, 0))],
        [Rule("q", ("x",), Interleaved(2, 2, 0)), Rule("k", ("x",), Interleaved(4, 2, 1))],
    ],
)
def test_what_the_targets_do_not_determine_is_refused(rules: list[Rule]) -> None:
    with pytest.raises(TranslationError):
        invert(rules)


def test_parts_of_every_head() -> None:
    """GPT-NeoX's weight, row by row: of head h first its queries, then its keys, then its values."""
    heads, dim = 3, 4
    stored = np.array([(h, part, row) for h in range(heads) for part in range(3) for row in range(dim)])
    for part in range(3):
        wanted = np.array([(h, part, row) for h in range(heads) for row in range(dim)])
        assert np.array_equal(Interleaved(heads, 3, part).apply([stored]), wanted)
    assert not np.array_equal(Interleaved(1, 3, 0).apply([stored]), Interleaved(heads, 3, 0).apply([stored]))


def test_an_offset_is_added_in_float32() -> None:
    small = np.array([1.0, -0.0078125], dtype=ml_dtypes.bfloat16)
    assert Offset(1.0).apply([small]).tolist() == [2.0, 0.9921875]
    assert Offset(1.0).apply([np.array([1e-20], np.float32)]).dtype == np.float32
    assert not Offset(1.0).keeps_values and not Offset(1.0).on_rows
    assert Offset(1.0).name == "Offset(+1)" and Offset(-1.0).name == "Offset(-1)"


def test_a_rule_reads_as_a_sentence() -> None:
    assert str(Rule("t", ("s",), Transpose2D())) == "t ← Transpose2D(s)"
    assert "2 heads" in str(Rule("t", ("s",), RopePermute(2)))


def test_chains_and_reshapes() -> None:
    a, b = np.arange(6).reshape(3, 2), np.arange(9).reshape(3, 3)
    chain = Chain((Concat(1, (2, 3)), Transpose2D()))
    assert chain.shape([(3, 2), (3, 3)]) == (5, 3) and not chain.on_rows
    assert np.array_equal(chain.apply([a, b]), np.concatenate([a, b], axis=1).T)
    assert chain.name == "Concat(axis 1: 2 + 3), Transpose2D"
    reshape = Reshape((1, 3, 2), (3, 2))
    assert reshape.shape([(1, 3, 2)]) == (3, 2) and np.array_equal(reshape.apply([a[None]]), a)
    assert run(invert([Rule("t", ("s",), reshape)]), {"t": a})["s"].shape == (1, 3, 2)
    for transform, shapes in (
        (reshape, [(3, 2)]),
        (Reshape((3, 2), (4, 2)), [(3, 2)]),
        (chain, [(3, 2), (2, 3)]),
    ):
        with pytest.raises(TranslationError):
            transform.shape(shapes)
    with pytest.raises(TranslationError, match="backwards"):
        invert([Rule("t", ("a", "b"), chain)])
