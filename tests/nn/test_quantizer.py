"""Vector quantizers against OA's numbers and a float64 form; codes that follow, die, revive and are seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oa_goldens import Arrays, close, golden, on_device

from oazoo.errors import DeviceError, OazooError
from oazoo.nn import Linear, ResidualVectorQuantizer, VectorQuantizer
from oazoo.runtime import get_device
from oazoo.runtime.ops.arithmetic import scaled
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.loss import mse
from oazoo.runtime.random import Generator
from oazoo.runtime.tape import GradientTape, checkpoint
from oazoo.training import SGD, TrainingStep


@pytest.fixture(params=["device", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own kernels, and those that every device runs."""
    if request.param == "portable":
        monkeypatch.setenv("OAZOO_PORTABLE_KERNELS", "1")


def quantizer(config: dict[str, Any], codebook: np.ndarray, **options: Any) -> VectorQuantizer:
    layer = VectorQuantizer(
        config["num_codes"],
        config["code_dim"],
        beta=config["commitment_beta"],
        decay=config["ema_decay"],
        dead_threshold=config["dead_threshold"],
        normalized=config["normalize_codes"],
        eps=config["ema_epsilon"],
        **options,
    )
    layer.initialize(get_device())
    layer.codebook.assign(codebook)
    layer.sums.assign(codebook)
    return layer


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["vq", "vq_normalized"])
def test_one_level(name: str) -> None:
    arrays, config = golden(name)
    layer = quantizer(config, arrays["codebook"])
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        found = layer(x)
        loss = add(mse(found.values, on_device(arrays["target"])), found.commitment)
    tape.backward(loss)
    close(found.values, arrays["quantized"])
    assert np.array_equal(found.ids.numpy(), arrays["indices"])
    close(found.commitment, arrays["commitment_loss"])
    close(loss, arrays["loss"])
    close(x.grad, arrays["grad_input_x"])
    close(layer.lookup(on_device(arrays["indices"])), arrays["lookup"])
    check_following(layer, arrays)
    layer.seed(x)
    close(layer.codebook.tensor, arrays["codebook_seeded_from_x"])
    assert np.array_equal(layer.counts.values(), np.ones(config["num_codes"]))


def check_following(layer: VectorQuantizer, arrays: Arrays) -> None:
    """Codes after each step are OA's; those that it replaced by a row are replaced by one here, then by its own."""
    x = arrays["x"]
    layer.train()
    for step in (1, 2, 3):
        found = layer(on_device(x))
        assert np.array_equal(found.ids.numpy(), arrays[f"indices_ema{step}"])
        wanted, codes, sums = arrays[f"codebook_ema{step}"], layer.codebook.values(), layer.sums.values()
        replaced = (np.abs(wanted[:, None] - x[None]).max(2) < 1e-6).any(1)
        close(codes[~replaced], wanted[~replaced])
        for code in np.flatnonzero(replaced):
            assert (codes[code] == x).all(1).any() and layer.counts.values()[code] == 1
            codes[code] = sums[code] = wanted[code]
        layer.codebook.assign(codes)
        layer.sums.assign(sums)


@pytest.mark.usefixtures("kernels")
def test_levels() -> None:
    arrays, config = golden("rvq")
    # Looking up says codes only summed with the first of the other level; the first row's residual tells that one.
    first = arrays["x"][0] - arrays["residual_1"][0]
    assert arrays["indices_0"][0] == 0
    second = arrays["lookup_zero"][0] - first
    books = [arrays["lookup_level0"] - second, arrays["lookup_level1"] - first]
    layer = ResidualVectorQuantizer(
        2, config["num_codes"], config["code_dim"], beta=config["commitment_beta"]
    )
    layer.initialize(get_device())
    assert [name for name, _ in layer.named_buffers()][:2] == ["levels.0.codebook", "levels.0.sums"]
    for level, book in zip(layer.levels, books, strict=True):
        level.codebook.assign(book)
    x = on_device(arrays["x"], grad=True)
    with GradientTape() as tape:
        found = layer(x)
        loss = add(scaled(found.commitment, 3.0), mse(found.values, on_device(np.zeros_like(arrays["x"]))))
    close(found.values, arrays["quantized"])
    for level in (0, 1):
        assert np.array_equal(found.ids.numpy()[level], arrays[f"indices_{level}"])
    close(found.commitment, arrays["commitment_loss"])
    close(layer.lookup(found.ids), arrays["lookup"])
    # One term, on what is left over; and straight through.
    tape.backward(loss)
    left, size = arrays["x"] - arrays["quantized"], arrays["x"].size
    close(x.grad, 3 * config["commitment_beta"] * 2 * left / size + 2 * arrays["quantized"] / size)


@pytest.mark.usefixtures("kernels")
def test_against_float64() -> None:
    """Nearest codes, two steps of following without replacement, on sizes that are no multiples of anything."""
    rng = np.random.default_rng(5)
    codes, x = rng.standard_normal((37, 5)), rng.standard_normal((2, 101, 5))
    layer = VectorQuantizer(37, 5, decay=0.8, dead_threshold=0.0).initialize(get_device()).train()
    layer.codebook.assign(codes)
    layer.sums.assign(codes)
    codes = codes.astype(np.float32).astype(np.float64)
    sums, counts = codes.copy(), np.ones(37)
    for _ in range(2):
        found = layer(on_device(x.astype(np.float32)))
        rows = x.astype(np.float32).astype(np.float64).reshape(-1, 5)
        ids = ((rows[:, None] - codes[None]) ** 2).sum(2).argmin(1)
        assert found.values.shape == (2, 101, 5)
        assert np.array_equal(found.ids.numpy(), ids)
        close(found.values, codes[ids])
        close(found.commitment, 0.25 * np.mean((rows - codes[ids]) ** 2))
        counts = 0.8 * counts + 0.2 * np.bincount(ids, minlength=37)
        sums *= 0.8
        np.add.at(sums, ids, 0.2 * rows)
        codes = sums / counts[:, None]
        close(layer.codebook.tensor, codes)
        close(layer.counts.tensor, counts)


@pytest.mark.usefixtures("kernels")
def test_dead_codes_become_rows_of_their_own() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    books = []
    for seed in (1, 1, 2):
        layer = VectorQuantizer(40, 3, source=Generator(get_device(), seed)).initialize(get_device()).train()
        far = np.full((40, 3), 50, np.float32)
        far[0] = 0
        layer.codebook.assign(far)
        layer(on_device(x))
        book = layer.codebook.values()
        rows = [np.flatnonzero((row == x).all(1)) for row in book[1:]]
        assert all(len(found) == 1 for found in rows)
        assert len({int(found[0]) for found in rows}) == 39  # no row twice
        assert np.array_equal(layer.sums.values()[1:], book[1:])
        books.append(book)
    assert np.array_equal(books[0], books[1])  # one seed, one codebook
    assert not np.array_equal(books[0], books[2])


def test_a_captured_step_trains_the_encoder_and_the_codes() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((32, 4)).astype(np.float32)
    results = []
    for captured in (True, False):
        encoder = Linear(4, 3).initialize(get_device(), 1)
        layer = ResidualVectorQuantizer(2, 8, 3, decay=0.5, source=Generator(get_device(), 3))
        layer.initialize(get_device(), 2).train()

        def loss(
            x: Any, target: Any, encoder: Linear = encoder, layer: ResidualVectorQuantizer = layer
        ) -> Any:
            found = layer(encoder(x))
            return add(mse(found.values, target), found.commitment)

        step = TrainingStep(loss, SGD(encoder.named_parameters(), 0.05), captured=captured)
        for _ in range(24):
            step(x, x[:, :3])
        results.append([step.losses(), *layer.state_dict().values(), *encoder.state_dict().values()])
    assert (
        results[0][0][-1] < 0.5 * results[0][0][1]
    )  # the codes are those of the first batch from the second step on
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


def test_seeding_with_fewer_rows_and_by_level() -> None:
    layer = VectorQuantizer(3, 2).initialize(get_device())
    before = layer.codebook.values()
    layer.seed(on_device(np.array([[1, 0], [0, 5]], np.float32)))
    assert np.array_equal(layer.codebook.values(), [[0, 5], [1, 0], before[2]])
    levels = ResidualVectorQuantizer(2, 2, 2).initialize(get_device())
    levels.seed(on_device(np.array([[4, 0], [3, 0], [0, 1]], np.float32)))
    first, second = (level.codebook.values() for level in levels.levels)
    assert np.array_equal(first, [[4, 0], [3, 0]])
    # (0, 1) is nearest to (3, 0) and leaves (-3, 1).
    assert np.array_equal(second[0], [-3, 1]) and not second[1].any()


def test_what_does_not_fit_is_refused() -> None:
    layer = VectorQuantizer(3, 2).initialize(get_device())
    x = on_device(np.ones((4, 2), np.float32))
    for wrong in (lambda: VectorQuantizer(0, 2), lambda: VectorQuantizer(2, 2, decay=1.5)):
        with pytest.raises(OazooError, match="are no quantizer"):
            wrong()
    with pytest.raises(OazooError, match="at least one level"):
        ResidualVectorQuantizer(0, 2, 2)
    with pytest.raises(OazooError, match=r"x must be \[..., 2\]"):
        layer(on_device(np.ones((4, 3), np.float32)))
    with pytest.raises(OazooError, match="not finite"):
        layer.seed(on_device(np.array([[np.nan, 0]], np.float32)))
    assert np.isnan(layer.lookup(on_device(np.array([7, -1], np.int32))).numpy()).all()
    nan = layer(on_device(np.array([[np.nan, 0], [0, 0]], np.float32)))
    assert np.isnan(nan.values.numpy()[0]).all() and np.isfinite(nan.values.numpy()[1]).all()
    layer.train()
    with GradientTape(), pytest.raises(DeviceError, match="outside of checkpointed blocks"):
        checkpoint(lambda x: layer(x).values, x)
