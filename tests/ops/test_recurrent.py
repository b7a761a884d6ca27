"""Recurrent layers, every variant, against float64 NumPy forms: states, and gradients by central differences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from gradient_checks import F64, check, normal

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.common import eight_lanes
from oazoo.runtime.ops.elementwise import dequantize
from oazoo.runtime.ops.linear import observing
from oazoo.runtime.ops.pack import pack
from oazoo.runtime.ops.recurrent import Cell, last_state, recurrence
from oazoo.runtime.tape import GradientTape

GATES: dict[Cell, int] = {"rnn": 1, "gru": 3}
FAST = eight_lanes(get_device())
VARIANTS = [*(["lanes"] if FAST else []), "group", "steps"]


def sigma(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def reference(cell: Cell, inputs: F64, weight: F64, bias: F64 | None, state: F64 | None, batch: int) -> F64:
    hidden = weight.shape[1]
    i = inputs.reshape(batch, -1, GATES[cell], hidden)
    h = np.zeros((batch, hidden)) if state is None else state
    found = []
    for t in range(i.shape[1]):
        s = h @ weight.T + (0 if bias is None else bias)
        s = s.reshape(batch, GATES[cell], hidden)
        if cell == "rnn":
            h = np.tanh(i[:, t, 0] + s[:, 0])
        else:
            r, z = sigma(i[:, t, 0] + s[:, 0]), sigma(i[:, t, 1] + s[:, 1])
            h = (1 - z) * np.tanh(i[:, t, 2] + r * s[:, 2]) + z * h
        found.append(h)
    return np.stack(found, 1).reshape(-1, hidden)


def arrays(cell: Cell, batch: int, tokens: int, hidden: int) -> list[npt.NDArray[np.float32]]:
    wide = GATES[cell] * hidden
    weight = normal(wide, hidden) * np.float32(hidden**-0.5)
    return [normal(batch * tokens, wide), weight, normal(wide) * np.float32(0.3), normal(batch, hidden)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell", GATES)
def test_gradients(cell: Cell, variant: str) -> None:
    """Of inputs, weight, bias and first state, through every state and through the last one alone."""
    batch, tokens, hidden = 2, 3, 8
    given = arrays(cell, batch, tokens, hidden)
    check(
        lambda i, w, b, h: recurrence(cell, i, w, b, h, batch=batch, variant=variant),
        lambda i, w, b, h: reference(cell, i, w, b, h, batch),
        given,
    )
    check(
        lambda i, w: last_state(recurrence(cell, i, w, batch=batch, variant=variant), batch),
        lambda i, w: reference(cell, i, w, None, None, batch).reshape(batch, tokens, hidden)[:, -1],
        given[:2],
    )


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (3, 1, 5), (1, 7, 64), (9, 5, 40), (5, 3, 17), (17, 2, 8), (2, 2, 250)]
)
@pytest.mark.parametrize("cell", GATES)
def test_shapes(cell: Cell, shape: tuple[int, int, int]) -> None:
    """Values, and gradients that agree between the variants, for odd numbers of sequences, tokens and units."""
    batch, _, hidden = shape
    given = arrays(cell, *shape)
    wanted = reference(cell, *(a.astype(np.float64) for a in given), batch)  # type: ignore[arg-type]
    grads = []
    for variant in [None, "group", "steps", *(["lanes"] if FAST and hidden % 8 == 0 else [])]:
        tensors = [Tensor.from_numpy(get_device(), a) for a in given]
        found = recurrence(cell, *tensors[:2], *tensors[2:], batch=batch, variant=variant).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        for tensor in tensors:
            tensor.requires_grad = True
        with GradientTape() as tape:
            y = recurrence(cell, *tensors[:2], *tensors[2:], batch=batch, variant=variant)
        np.testing.assert_array_equal(y.numpy(), found)
        tape.backward(
            y, Tensor.from_numpy(get_device(), np.cos(np.arange(y.numel, dtype=np.float32)).reshape(y.shape))
        )
        grads.append([t.grad.numpy() for t in tensors if t.grad is not None])
        assert len(grads[-1]) == 4
    for other in grads[1:]:
        for one, two in zip(grads[0], other, strict=True):
            np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4 * float(np.abs(one).max()))


@pytest.mark.parametrize("cell", GATES)
def test_wide_layers_and_sequences_in_pieces(cell: Cell) -> None:
    """Wider than any loop in a kernel takes; and two halves, the second from the first's last state, are the whole."""
    batch, tokens, hidden = 2, 4, 264
    given = arrays(cell, batch, tokens, hidden)
    wanted = reference(cell, *(a.astype(np.float64) for a in given), batch)  # type: ignore[arg-type]
    i, w, b, h = (Tensor.from_numpy(get_device(), a) for a in given)
    whole = recurrence(cell, i, w, b, h, batch=batch).numpy()
    np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-5)
    halves = given[0].reshape(batch, 2, 2, -1)
    for half in range(2):
        part = Tensor.from_numpy(get_device(), np.ascontiguousarray(halves[:, half]).reshape(batch * 2, -1))
        y = recurrence(cell, part, w, b, h, batch=batch)
        last_state(y, batch, into=h)  # in place, as a session does it
        np.testing.assert_allclose(
            y.numpy().reshape(batch, 2, hidden), wanted.reshape(batch, 4, hidden)[:, 2 * half : 2 * half + 2],
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("cell", GATES)
def test_extreme_values_stay_finite(cell: Cell) -> None:
    given = [a * np.float32(1e4) for a in arrays(cell, 2, 3, 8)]
    tensors = [Tensor.from_numpy(get_device(), a) for a in given]
    for tensor in tensors:
        tensor.requires_grad = True
    with GradientTape() as tape:
        y = recurrence(cell, *tensors[:2], *tensors[2:], batch=2)
    tape.backward(y, Tensor.from_numpy(get_device(), np.ones(y.shape, np.float32)))
    assert np.isfinite(y.numpy()).all()
    assert all(t.grad is not None and np.isfinite(t.grad.numpy()).all() for t in tensors)


@pytest.mark.parametrize("encoding", ["q8", "q4"])
def test_coded_weights(encoding: str) -> None:
    i, w, b, h = (Tensor.from_numpy(get_device(), a) for a in arrays("gru", 3, 5, 32))
    coded = pack(w, encoding)
    wanted = recurrence("gru", i, dequantize(coded), b, h, batch=3).numpy()
    for variant in (None, "steps"):
        found = recurrence("gru", i, coded, b, h, batch=3, variant=variant)
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-5)
    i.requires_grad = True
    with GradientTape(), pytest.raises(DeviceError, match="no gradient with weights in"):
        recurrence("gru", i, coded, b, h, batch=3)


def test_who_observes_products_is_told_of_the_states() -> None:
    """Statistics for quantising: the states before each token are what the weight is multiplied with."""
    given = arrays("gru", 3, 5, 16)
    i, w, b, h = (Tensor.from_numpy(get_device(), a) for a in given)
    seen = []
    with observing(lambda x, weights: seen.append((x.numpy(), weights))):
        y = recurrence("gru", i, w, b, h, batch=3).numpy().reshape(3, 5, 16)
    assert len(seen) == 5 and all(weights == [w] for _, weights in seen)
    np.testing.assert_array_equal(seen[0][0], given[3])
    np.testing.assert_array_equal(np.stack([x for x, _ in seen[1:]], 1), y[:, :-1])


def test_what_does_not_fit_is_refused() -> None:
    i, w, b, h = (Tensor.from_numpy(get_device(), a) for a in arrays("gru", 2, 3, 20))
    for message, call in (
        ("is not 1 gates", lambda: recurrence("rnn", i, w)),
        ("4 equal sequences", lambda: recurrence("gru", i, w, b, batch=4)),
        ("state must be f32.2, 20.", lambda: recurrence("gru", i, w, b, b, batch=2)),
        ("bias must be", lambda: recurrence("gru", i, w, h, batch=2)),
        ("lanes variant suits neither", lambda: recurrence("gru", i, w, batch=2, variant="lanes")),
        ("no variant 'loop'", lambda: recurrence("gru", i, w, batch=2, variant="loop")),
        ("4 equal sequences", lambda: last_state(i, 4)),
    ):
        with pytest.raises(DeviceError, match=message):
            call()
