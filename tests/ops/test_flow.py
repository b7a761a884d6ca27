"""Ops of flow matching against float64 forms, and what their random numbers are like."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from gradient_checks import F64, check, normal
from oa_goldens import golden, on_device

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops import flow as ops
from oazoo.runtime.random import Generator
from oazoo.runtime.tape import GradientTape

SEQUENCES, TOKENS, WIDTH = 3, 4, 5


def rows(m: F64, chunk: int) -> F64:
    """A chunk of each sequence's vector, once for each of its rows."""
    return np.repeat(m[:, chunk * WIDTH : (chunk + 1) * WIDTH], TOKENS, 0)


MODULATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., F64]]] = {
    "shifted": (
        lambda x, m: ops.modulate(x, m, scale=1, shift=0),
        lambda x, m: x * (1 + rows(m, 1)) + rows(m, 0),
    ),
    "gate": (lambda x, m: ops.modulate(x, m, scale=2), lambda x, m: x * rows(m, 2)),
    "gate and residual": (
        lambda x, m, r: ops.modulate(x, m, scale=2, residual=r),
        lambda x, m, r: r + x * rows(m, 2),
    ),
}


@pytest.mark.parametrize("name", MODULATIONS)
def test_modulation(name: str) -> None:
    forms = MODULATIONS[name]
    arrays = [normal(SEQUENCES * TOKENS, WIDTH), normal(SEQUENCES, 3 * WIDTH)]
    arrays += [normal(SEQUENCES * TOKENS, WIDTH)] if "residual" in name else []
    check(*forms, arrays)


def test_repeated_sum() -> None:
    arrays = [normal(SEQUENCES * TOKENS, WIDTH), normal(TOKENS, WIDTH)]
    check(ops.add_repeated, lambda x, p: x + np.tile(p, (SEQUENCES, 1)), arrays)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4), (3, 4, 1), (3,)])
def test_masked_error(shape: tuple[int, ...]) -> None:
    target, mask = normal(3, 4, 5), np.abs(normal(*shape))
    mask.reshape(-1)[::2] = 0
    target.reshape(-1)[:5] = [np.inf, np.nan, 1, 2, 3]  # behind a mask of 0 anything may be
    if mask.ndim == 3 and mask.shape[2] == 5:
        mask[0, 0] = 0

    def wanted(x: F64) -> F64:
        wide = mask.reshape(*shape, *[1] * (3 - len(shape))) * np.ones_like(x)
        d = np.where(wide != 0, x - np.nan_to_num(target.astype(np.float64)), 0)
        return np.array([(wide * d * d).sum() / wide.sum()])

    check(
        lambda x: ops.masked_mse(x, on_device(target), on_device(mask.astype(np.float32))),
        wanted,
        [normal(3, 4, 5)],
    )


def test_masked_error_is_that_of_oa() -> None:
    arrays, config = golden("flow_ops")
    for name in ("same", "bcast", "frac"):
        x = on_device(arrays["clean"], grad=True)
        with GradientTape() as tape:
            loss = ops.masked_mse(x, on_device(arrays["noise"]), on_device(arrays[f"mask_{name}"]))
        np.testing.assert_allclose(loss.numpy()[0], arrays[f"masked_mse_{name}"], rtol=1e-5)
        tape.backward(loss)
        assert x.grad is not None
        if f"masked_mse_grad_{name}" in arrays:
            np.testing.assert_allclose(
                x.grad.numpy(), arrays[f"masked_mse_grad_{name}"], rtol=1e-4, atol=1e-7
            )
    zero = ops.masked_mse(
        on_device(arrays["clean"]), on_device(arrays["noise"]), on_device(np.zeros((3, 1), np.float32))
    )
    assert zero.numpy()[0] == arrays["masked_mse_allzero"] == 0
    clock = on_device(np.array([9.0, config["delta_time"]], np.float32))
    moved = ops.advance(on_device(arrays["clean"]), on_device(arrays["noise"]), clock, 1)
    np.testing.assert_allclose(moved.numpy(), arrays["euler"], rtol=1e-6)


def test_time_embedding_of_large_and_small_times() -> None:
    """Angles up to some thousands, of which a GPU's own sine would make little."""
    times = np.concatenate([np.linspace(-3, 3, 41), np.linspace(0, 4000, 67)]).astype(np.float32)
    frequencies = np.array([1.0, 0.37, 1e-3], np.float32)
    found = ops.time_embedding(on_device(times), on_device(frequencies), cosine_first=True).numpy()
    angles = (times[:, None] * frequencies[None]).astype(np.float64)  # the device multiplies in float32, too
    wanted = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    np.testing.assert_allclose(found, wanted, atol=3e-7)


def test_random_numbers() -> None:
    device = get_device()
    found = ops.random_normal(Generator(device, 4), (20_001,)).numpy().astype(np.float64)
    assert abs(found.mean()) < 0.03 and abs(found.std() - 1) < 0.02
    assert abs((found**3).mean()) < 0.1 and abs((found**4).mean() - 3) < 0.25
    assert 3.3 < np.abs(found).max() < 6
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03
    again = Generator(device, 4)
    np.testing.assert_array_equal(ops.random_normal(again, (20_001,)).numpy(), found.astype(np.float32))
    assert again.position == (4, 1)
    assert (ops.random_normal(again, (20_001,)).numpy() != found).mean() > 0.99
    even = ops.random_uniform(Generator(device, 2), (4000,)).numpy()
    assert even.min() >= 0 and even.max() < 1 and abs(even.mean() - 0.5) < 0.02
    parts = ops.random_uniform(Generator(device, 2), (50,), strata=True).numpy()
    np.testing.assert_array_equal(np.floor(parts * 50), np.arange(50))


def test_dropped_conditions() -> None:
    device = get_device()
    ids = np.arange(4001, dtype=np.int32) % 7
    found = ops.drop_ids(on_device(ids), 0.25, 99, Generator(device, 1)).numpy()
    assert abs((found == 99).mean() - 0.25) < 0.03
    np.testing.assert_array_equal(found[found != 99], ids[found != 99])
    assert (ops.drop_ids(on_device(ids), 1.0, 99, Generator(device, 1)).numpy() == 99).all()
    x = on_device(normal(801, 3), grad=True)
    with GradientTape() as tape:
        y = ops.drop_rows(x, 0.5, Generator(device, 1))
    tape.backward(y, on_device(np.ones((801, 3), np.float32)))
    kept = (y.numpy() != 0).all(1)
    assert abs(kept.mean() - 0.5) < 0.06
    np.testing.assert_array_equal(y.numpy()[kept], x.numpy()[kept])
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), np.repeat(kept[:, None], 3, 1).astype(np.float32))


def test_wrong_arguments_are_refused() -> None:
    x, m = on_device(normal(6, 4)), on_device(normal(3, 8))
    for wrong, message in (
        (lambda: ops.modulate(x, on_device(normal(4, 8)), scale=0), "6 rows are not 4"),
        (lambda: ops.modulate(x, on_device(normal(3, 7)), scale=0), "no multiple"),
        (lambda: ops.modulate(x, m, scale=2), "no chunk 2 of 2"),
        (lambda: ops.modulate(x, m, scale=1, shift=1), "one chunk"),
        (lambda: ops.add_repeated(x, on_device(normal(4, 4))), "not made of"),
        (lambda: ops.masked_mse(x, x, m), "does not fit"),
        (lambda: ops.guide(on_device(normal(3, 2)), m.view(24), 0), "two halves"),
        (lambda: ops.read_clock(m.view(24), 24, 2), "no number 24"),
        (lambda: ops.drop_rows(x, 1.5), "rate 1.5"),
    ):
        with pytest.raises(DeviceError, match=message):
            wrong()
