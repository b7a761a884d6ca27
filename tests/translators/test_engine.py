"""The engine's checks and arithmetic, on sources made in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from oazoo.configs import NanoGPTConfig
from oazoo.errors import TranslationError, UsageError
from oazoo.formats import encodings
from oazoo.formats.source import SourceTensor, TensorInfo, WeightSource
from oazoo.translators import engine
from oazoo.translators.engine import Measured, check, same_bytes, stream
from oazoo.translators.rules import Concat, Ignored, RopePermute, Rule, Slice, Transform, Transpose2D
from oazoo.translators.translator import Checkpoint, Translation

Array = npt.NDArray[Any]


class MemoryTensor(SourceTensor):
    """A tensor held in memory."""

    def __init__(self, name: str, array: Array, encoding: str | None = None) -> None:
        self.array = np.ascontiguousarray(array)
        kind = encoding or encodings.for_dtype(array.dtype)
        self.info = TensorInfo(name, array.shape, kind, self.array.nbytes)

    def raw(self) -> npt.NDArray[np.uint8]:
        return self.array.reshape(-1).view(np.uint8)

    def numpy(self) -> Array:
        return self.array

    def chunks(self, elements: int) -> Iterator[Array]:
        flat = self.array.reshape(-1)
        for start in range(0, flat.size, elements):
            yield flat[start : start + elements]


class MemorySource(WeightSource):
    """A source held in memory."""

    format = "memory"

    def __init__(self, tensors: dict[str, Array]) -> None:
        self.path, self.files, self.metadata = Path("memory"), (), {}
        self.tensors = {name: MemoryTensor(name, array) for name, array in tensors.items()}

    def __getitem__(self, name: str) -> MemoryTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def close(self) -> None:
        pass


CONFIG = NanoGPTConfig(
    vocab_size=6,
    hidden_size=4,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    norm_eps=1e-5,
    max_positions=5,
    tied_embeddings=True,
    bias=False,
)


def identity(dtype: Any = np.float32) -> tuple[dict[str, Array], list[Rule]]:
    """Sources named ``s.TARGET`` of the right shape, and one rule each."""
    random = np.random.default_rng(0)
    tensors = {f"s.{n}": random.normal(size=shape).astype(dtype) for n, shape in CONFIG.parameters().items()}
    return tensors, [Rule(name, (f"s.{name}",)) for name in CONFIG.parameters()]


def checked(
    tensors: dict[str, Array], rules: Sequence[Rule], dtype: str = "keep", ignored: Sequence[Ignored] = ()
) -> tuple[MemorySource, engine.Checked]:
    source = MemorySource(tensors)
    checkpoint = Checkpoint(source, "gguf", {}, None, ("x",))
    return source, check(checkpoint, Translation(CONFIG, rules, ignored), dtype)


def produced(source: MemorySource, plan: engine.TensorPlan) -> tuple[Array, Measured]:
    measured = Measured()
    data = b"".join(piece.tobytes() for piece in stream(plan, source, measured))
    assert len(data) == plan.nbytes
    return np.frombuffer(data, encodings.get(plan.encoding).dtype).reshape(plan.shape), measured


def test_everything_fits() -> None:
    tensors, rules = identity()
    source, result = checked(tensors, rules)
    assert len(result.tensors) == len(rules) and not result.ignored
    for plan in result.tensors:
        assert plan.action == "copy"
        found, measured = produced(source, plan)
        assert np.array_equal(found, tensors[f"s.{plan.target}"]) and measured == Measured()


def test_identity_copies_are_views_of_the_source() -> None:
    tensors, rules = identity()
    source, result = checked(tensors, rules)
    (piece,) = stream(result.tensors[0], source, Measured())
    assert np.shares_memory(piece, source[result.tensors[0].rule.sources[0]].array)


def test_missing_tensors_are_named() -> None:
    tensors, rules = identity()
    del tensors["s.embed.weight"], tensors["s.norm.weight"]
    with pytest.raises(TranslationError, match=r"2 tensors: s\.embed\.weight .*s\.norm\.weight"):
        checked(tensors, rules)


def test_tensors_without_use_are_named() -> None:
    tensors, rules = identity()
    tensors["s.surprise"] = np.zeros(3, np.float32)
    with pytest.raises(TranslationError, match=r"s\.surprise"):
        checked(tensors, rules)
    # A pattern must fit the whole name.
    with pytest.raises(TranslationError, match=r"s\.surprise"):
        checked(tensors, rules, ignored=[Ignored("s", "no")])
    _, result = checked(tensors, rules, ignored=[Ignored(r"s\.sur.*", "a reason")])
    assert result.ignored == (("s.surprise", "a reason"),)


def test_a_target_produced_twice_is_refused() -> None:
    tensors, rules = identity()
    tensors["again"] = tensors["s.norm.weight"]
    with pytest.raises(TranslationError, match=r"two rules produce norm\.weight"):
        checked(tensors, [*rules, Rule("norm.weight", ("again",))])


def test_a_target_that_the_model_lacks_is_refused() -> None:
    tensors, rules = identity()
    with pytest.raises(TranslationError, match="no such parameter"):
        checked(tensors, [*rules, Rule("extra.weight", ("s.norm.weight",))])


def test_a_target_that_nothing_produces_is_refused() -> None:
    tensors, rules = identity()
    with pytest.raises(TranslationError, match=r"no rule produces 1 parameter: norm\.weight"):
        checked(tensors, [rule for rule in rules if rule.target != "norm.weight"])


def test_wrong_shapes_are_named_with_both_numbers() -> None:
    tensors, rules = identity()
    tensors["s.norm.weight"] = np.zeros(5, np.float32)
    tensors["s.embed.weight"] = np.zeros((4, 6), np.float32)
    with pytest.raises(TranslationError, match=r"2 shapes: .*\[4, 6\].*\[6, 4\].*\[5\].*\[4\]"):
        checked(tensors, rules)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.complex64, ml_dtypes.float8_e8m0fnu])
def test_only_floats_are_weights(dtype: Any) -> None:
    tensors, rules = identity()
    tensors["s.norm.weight"] = np.ones(4).astype(dtype)
    with pytest.raises(TranslationError, match=r"s\.norm\.weight"):
        checked(tensors, rules)


def test_unknown_dtype() -> None:
    tensors, rules = identity()
    with pytest.raises(UsageError, match="int8"):
        checked(tensors, rules, "int8")


def test_all_transforms_stream_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of a few elements, so that every bound falls inside tensors."""
    monkeypatch.setattr(engine, "CHUNK", 3)
    for dtype in ("keep", "f32", "f16", "bf16"):
        tensors, rules = identity()
        changes: dict[str, tuple[Transform, dict[str, Array]]] = {
            "layers.0.attn.qkv.weight": (
                Concat(0, (4, 8)),
                {"a": np.arange(16, dtype=np.float32).reshape(4, 4), "b": -np.ones((8, 4), np.float32)},
            ),
            "layers.0.attn.o.weight": (RopePermute(2), {"c": np.arange(16, dtype=np.float32).reshape(4, 4)}),
            "layers.0.mlp.up.weight": (Transpose2D(), {"d": np.arange(32, dtype=np.float32).reshape(4, 8)}),
            "layers.0.mlp.down.weight": (
                Slice(1, 1, 9, 10),
                {"e": np.arange(40, dtype=np.float32).reshape(4, 10)},
            ),
            "embed.weight": (Slice(0, 2, 8, 9), {"f": np.arange(36, dtype=np.float32).reshape(9, 4)}),
        }
        rules = [rule for rule in rules if rule.target not in changes]
        for target, (transform, sources) in changes.items():
            del tensors[f"s.{target}"]
            tensors |= sources
            rules.append(Rule(target, tuple(sources), transform))
        source, result = checked(tensors, rules, dtype)
        for plan in result.tensors:
            found, _ = produced(source, plan)
            expected = plan.rule.transform.apply([tensors[name] for name in plan.rule.sources])
            assert np.array_equal(found, expected.astype(found.dtype)), plan.rule


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_keep_keeps(dtype: Any) -> None:
    tensors, rules = identity(dtype)
    _, result = checked(tensors, rules)
    assert {plan.encoding for plan in result.tensors} == {encodings.for_dtype(dtype)}
    assert not any(plan.may_round for plan in result.tensors)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz])
def test_eight_bit_floats_become_f16_without_loss(dtype: Any) -> None:
    tensors, rules = identity()
    tensors["s.embed.weight"] = np.arange(256, dtype=np.uint8)[: 6 * 4].reshape(6, 4).view(dtype)
    source, result = checked(tensors, rules)
    plan = next(p for p in result.tensors if p.target == "embed.weight")
    found, measured = produced(source, plan)
    assert plan.encoding == "f16" and not measured.rounded
    assert np.array_equal(
        found.astype(np.float64), tensors["s.embed.weight"].astype(np.float64), equal_nan=True
    )


def test_mixed_sources_of_one_target_become_f32() -> None:
    tensors, rules = identity()
    del tensors["s.layers.0.attn.qkv.weight"]
    tensors["a"], tensors["b"] = np.ones((4, 4), np.float16), np.full((8, 4), 1 / 3, np.float32)
    rules = [rule for rule in rules if "qkv" not in rule.target]
    rules.append(Rule("layers.0.attn.qkv.weight", ("a", "b"), Concat(0, (4, 8))))
    source, result = checked(tensors, rules)
    plan = next(p for p in result.tensors if "qkv" in p.target)
    found, measured = produced(source, plan)
    assert plan.encoding == "f32" and not measured.rounded
    assert np.array_equal(found, np.concatenate([tensors["a"].astype(np.float32), tensors["b"]]))


def one(value: Any, dtype: str, source_dtype: Any = np.float32) -> tuple[Array, Measured]:
    """Cast a tensor that is zero but for one value."""
    tensors, rules = identity(source_dtype)
    tensors["s.norm.weight"] = np.array([0, value, 0, 0], source_dtype)
    source, result = checked(tensors, rules, dtype)
    return produced(source, next(p for p in result.tensors if p.target == "norm.weight"))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(65520.0, "f16"), (-1e30, "f16"), (3.4028234e38, "bf16"), (3.4028234e38, "f16")],
)
def test_overflow_is_refused_never_infinity(value: float, dtype: str) -> None:
    with pytest.raises(TranslationError, match=r"s\.norm\.weight.*does not fit"):
        one(value, dtype)


def test_overflow_of_doubles() -> None:
    with pytest.raises(TranslationError, match="does not fit f32"):
        one(1e300, "f32", np.float64)


def test_the_largest_value_that_fits() -> None:
    # 65519.996 rounds down to 65504, the largest float16.
    found, measured = one(65519.0, "f16")
    assert found[1] == 65504 and measured.max_error == 15.0 and measured.rounded


def test_rounding_is_measured_exactly() -> None:
    value = 1.0 + 2.0**-11 + 2.0**-20
    found, measured = one(value, "f16")
    assert found[1] == np.float16(1.0 + 2.0**-10)
    assert measured.max_error == float(np.float32(1.0 + 2.0**-10) - np.float32(value))
    _, exact = one(0.5, "f16")
    assert not exact.rounded and exact.max_error == 0


def test_underflow_counts_as_rounding() -> None:
    found, measured = one(1e-9, "f16")
    assert found[1] == 0 and measured.rounded and measured.max_error == pytest.approx(1e-9)


@pytest.mark.parametrize("dtype", ["keep", "f32", "f16", "bf16"])
@pytest.mark.parametrize("source_dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_and_infinity_pass_and_are_counted(dtype: str, source_dtype: Any) -> None:
    tensors, rules = identity(source_dtype)
    tensors["s.norm.weight"] = np.array([np.nan, np.inf, -np.inf, 1], source_dtype)
    source, result = checked(tensors, rules, dtype)
    found, measured = produced(source, next(p for p in result.tensors if p.target == "norm.weight"))
    assert (measured.nan, measured.infinite, measured.max_error) == (1, 2, 0.0)
    assert np.isnan(found[0]) and np.isposinf(found[1]) and np.isneginf(found[2]) and found[3] == 1


def test_same_bytes() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    b = a.copy()
    b[2, 3] = -0.0
    source = MemorySource({"a": a, "b": b, "c": a.copy(), "d": a.reshape(4, 3), "e": a.astype(np.float64)})
    assert same_bytes(source, "a", "c")
    assert not any(same_bytes(source, "a", other) for other in "bde")
