"""Random words against the published algorithm, and dropout: reproducible, fresh at replay, the same on the way back."""

from __future__ import annotations

import numpy as np
import pytest
from philox import philox

from oazoo.errors import DeviceError
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.activation import activate
from oazoo.runtime.ops.dropout import dropout, random_bits
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.linear import linear
from oazoo.runtime.random import Generator
from oazoo.runtime.tape import GradientTape, checkpoint


def test_the_reference_gives_the_published_answers() -> None:
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize(
    ("seed", "draws"), [(0, 0), (1, 5), (0xDEADBEEF_01234567, 0xFFFFFFFF), (2**64 - 1, 2**64 - 1)]
)
def test_random_bits(seed: int, draws: int) -> None:
    source = Generator(get_device())
    source.seed(seed, draws)
    words = random_bits(source, (3, 7)).numpy().reshape(-1)
    key, high = (seed & 0xFFFFFFFF, seed >> 32), (draws & 0xFFFFFFFF, draws >> 32)
    wanted = [w for i in range(6) for w in philox((i, 0, *high), key)][:21]
    assert words.tolist() == wanted
    assert source.position == (seed, (draws + 1) % 2**64)


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    source = Generator(get_device(), 3)
    x = np.full(200_001, 2.0, np.float32)
    for rate in (0.1, 0.5, 0.9):
        y = dropout(Tensor.from_numpy(get_device(), x), rate, source).numpy()
        kept = y != 0
        np.testing.assert_allclose(y[kept], 2 / (1 - rate), rtol=1e-6)
        # Five standard deviations of a binomial.
        assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / x.size)


def test_dropout_is_that_of_its_seed_and_its_gradient_that_of_its_mask() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, np.ones(999, np.float32))
    x.requires_grad = True
    dy = np.random.default_rng(0).standard_normal(999).astype(np.float32)
    first, second = Generator(device, 11), Generator(device, 11)
    with GradientTape() as tape:
        y = dropout(x, 0.3, first)
    tape.backward(y, Tensor.from_numpy(device, dy))
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.numpy(), dy * y.numpy())
    np.testing.assert_array_equal(y.numpy(), dropout(x, 0.3, second).numpy())
    assert (y.numpy() != dropout(x, 0.3, second).numpy()).any()
    words = np.array([w for i in range(250) for w in philox((i, 0, 0, 0), (11, 0))][:999])
    np.testing.assert_array_equal(y.numpy() == 0, words < round(0.3 * 2**32))


def test_a_captured_program_draws_anew_at_each_replay() -> None:
    device = get_device()
    source = Generator(device, 5)
    x = Tensor.from_numpy(device, np.ones(400, np.float32))
    x.requires_grad = True
    with device.capture() as program:
        with GradientTape() as tape:
            y = dropout(x, 0.5, source)
        tape.backward(y, x)
    assert x.grad is not None
    seen = []
    for _ in range(3):
        program.run()
        seen.append(y.numpy())
        np.testing.assert_array_equal(x.grad.numpy(), seen[-1])
    assert source.position == (5, 3)
    source.seed(5)
    for values in seen:
        np.testing.assert_array_equal(dropout(x, 0.5, source).numpy(), values)


def test_misuse_of_random_numbers() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, np.ones(4, np.float32))
    for rate in (-0.1, 1.0):
        with pytest.raises(DeviceError, match="at least 0 and less than 1"):
            dropout(x, rate)
    assert dropout(x, 0.0) is x
    with pytest.raises(DeviceError, match="out of range"):
        Generator(device, -1)


def test_a_generator_made_during_a_capture() -> None:
    device = get_device()
    with device.capture() as program:
        source = Generator(device, 9)
        words = random_bits(source, (4,))
    assert source.position == (9, 0)
    program.run()
    assert words.numpy().tolist() == list(philox((0, 0, 0, 0), (9, 0))) and source.position == (9, 1)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_a_checkpoint_changes_no_bit(rate: float) -> None:
    device, rng = get_device(), np.random.default_rng(8)
    weights = [rng.standard_normal((16, 16)).astype(np.float32) / 4 for _ in range(3)]
    dy = Tensor.from_numpy(device, rng.standard_normal((5, 16)).astype(np.float32))
    data = rng.standard_normal((5, 16)).astype(np.float32)
    results = []
    for keeping in (True, False):
        source = Generator(device, 1)
        x, *w = (Tensor.from_numpy(device, a) for a in (data, *weights))
        for tensor in (x, *w):
            tensor.requires_grad = True

        def block(x: Tensor, weight: Tensor, source: Generator = source) -> Tensor:
            return add(x, dropout(activate(linear(x, weight), "gelu_tanh"), rate, source))

        with GradientTape() as tape:
            y = x
            for weight in w:
                y = block(y, weight) if keeping else checkpoint(lambda x, w=weight: block(x, w), y)
        tape.backward(y, dy)
        results.append([y, x.grad, *(weight.grad for weight in w)])
    for kept, computed in zip(*results, strict=True):
        assert kept is not None and computed is not None
        np.testing.assert_array_equal(kept.numpy(), computed.numpy())


def test_a_checkpointed_block_that_draws_more_the_second_time() -> None:
    device = get_device()
    x = Tensor.from_numpy(device, np.ones(8, np.float32))
    x.requires_grad = True
    source, times = Generator(device, 1), [1, 2]

    def block(x: Tensor) -> Tensor:
        for _ in range(times.pop(0)):
            x = dropout(x, 0.5, source)
        return x

    with GradientTape() as tape:
        y = checkpoint(block, x)
    with pytest.raises(DeviceError, match="more often the second time"):
        tape.backward(y, x)
