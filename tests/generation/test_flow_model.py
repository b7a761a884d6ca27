"""Samples of flow models: integrators against their definitions in float64, seeds, guidance, and what is refused."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flow_models import IMAGES, SEQUENCES, flow_model

from oazoo.errors import UsageError
from oazoo.generation.flow_model import FlowModel
from oazoo.generation.flow_steps import SAMPLERS, noise_levels
from oazoo.generation.pictures import grid, png
from oazoo.models.flow_tokens import from_tokens, to_tokens, wave_positions
from oazoo.runtime import Tensor, get_device
from oazoo.runtime.ops.flow import random_normal
from oazoo.runtime.random import Generator

F64 = npt.NDArray[np.float64]
Velocity = Callable[[F64, float], F64]


def integrate(sampler: str, velocity: Velocity, x: F64, levels: list[float]) -> F64:
    """The samplers by the book."""
    for t, end in pairwise(levels):
        h = end - t
        k1 = velocity(x, t)
        if sampler == "euler":
            x = x + h * k1
        elif sampler == "midpoint":
            x = x + h * velocity(x + h / 2 * k1, t + h / 2)
        elif sampler == "heun":
            x = x + h / 2 * (k1 + velocity(x + h * k1, end))
        else:
            k2 = velocity(x + h / 2 * k1, t + h / 2)
            k3 = velocity(x + h / 2 * k2, t + h / 2)
            k4 = velocity(x + h * k3, end)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


def velocity_of(model: FlowModel, classes: npt.NDArray[Any], guidance: float) -> Velocity:
    """The model's own velocity, guided on the host."""

    def ask(x: F64, t: float, told: npt.NDArray[Any]) -> F64:
        arrays = x.astype(np.float32), np.full(len(x), t, np.float32), told.astype(np.int32)
        tensors = [Tensor.from_numpy(get_device(), a) for a in arrays]
        return model.model.velocity(*tensors).numpy().astype(np.float64)

    def guided(x: F64, t: float) -> F64:
        none = ask(x, t, np.full_like(classes, model.config.num_classes))
        return none + guidance * (ask(x, t, classes) - none)

    return guided


def noise_of(model: FlowModel, seed: int, count: int) -> F64:
    source, shape = Generator(get_device(), seed), (1, model.config.tokens, model.config.token_size)
    return np.concatenate([random_normal(source, shape).numpy() for _ in range(count)]).astype(np.float64)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("guidance", "schedule"), [(1.0, "cosine"), (2.5, "shifted")])
def test_samplers(sampler: str, guidance: float, schedule: str) -> None:
    model, classes = flow_model(IMAGES, clip=False), np.array([2, 0])
    options: dict[str, Any] = {
        "steps": 3,
        "sampler": sampler,
        "schedule": schedule,
        "guidance": guidance,
        "seed": 6,
    }
    found = model.sample(classes.tolist(), **options)
    end = integrate(
        sampler, velocity_of(model, classes, guidance), noise_of(model, 6, 2), noise_levels(3, schedule)
    )
    wanted = from_tokens(model.config, end.astype(np.float32))
    np.testing.assert_allclose(found.values, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert found.classes is not None and found.classes.tolist() == [2, 0]
    eager = model.sample(classes.tolist(), captured=False, **options)
    np.testing.assert_array_equal(found.values, eager.values)
    np.testing.assert_array_equal(found.values, model.sample(classes.tolist(), **options).values)


def test_a_picture_depends_on_its_seed_and_place_alone() -> None:
    model = flow_model(IMAGES)
    ten = model.sample(1, 10, steps=2, seed=3).values
    np.testing.assert_array_equal(model.sample(1, 10, steps=2, seed=3).values, ten)
    np.testing.assert_allclose(model.sample(1, 4, steps=2, seed=3).values, ten[:4], atol=1e-3)
    assert np.abs(model.sample(1, 10, steps=2, seed=4).values - ten).max() > 1
    assert np.abs(ten[0] - ten[1]).max() > 1
    assert ten.min() >= 50 and ten.max() <= 150  # kept within the range of the data
    many = model.sample(count=67, steps=1, seed=3)  # two batches, of which the last is not full
    assert many.classes is not None and many.classes[:5].tolist() == [0, 1, 2, 0, 1]
    np.testing.assert_allclose(many.values[64:], model.sample(count=67, steps=1, seed=3).values[64:])


def test_sequences_with_conditions_and_a_mask() -> None:
    model = flow_model(SEQUENCES)
    told = np.array([[0.5, -1.0], [2.0, 0.3]], np.float32)
    found = model.sample(conditions=told, steps=2, seed=1).values
    assert found.shape == (2, 5, 3)
    alone = model.sample(conditions=told[0], count=2, steps=2, seed=1).values
    np.testing.assert_allclose(alone[0], found[0], atol=1e-5)
    assert np.abs(alone[1] - found[1]).max() > 1e-3
    mask = [1, 1, 0, 1, 0]
    hidden = model.sample(conditions=told, steps=2, seed=1, mask=mask, guidance=2.0).values
    assert (hidden[:, [2, 4]] == 0).all() and (hidden[:, [0, 1, 3]] != 0).all()


def test_schedules() -> None:
    for schedule in ("uniform", "cosine", "shifted"):
        levels = noise_levels(4, schedule, 2.0)
        assert levels[0] == 1 and levels[-1] == 0 and sorted(levels, reverse=True) == levels
    assert noise_levels(4) == [1, 0.75, 0.5, 0.25, 0]
    np.testing.assert_allclose(noise_levels(2, "shifted", 3.0), [1, 0.75, 0])
    np.testing.assert_allclose(noise_levels(3, "cosine"), [1, 0.75, 0.25, 0], atol=1e-15)


def test_tokens_and_back() -> None:
    images = np.random.default_rng(0).uniform(50, 150, (2, 4, 4, 3)).astype(np.float32)
    tokens = to_tokens(IMAGES, images)
    assert tokens.shape == (2, 4, 12) and np.abs(tokens).max() <= 1
    # The second patch is the upper right one; its values go channel by channel, row by row.
    patch = (images[1, :2, 2:] - 100) / 50
    np.testing.assert_allclose(tokens[1, 1], patch.transpose(2, 0, 1).reshape(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(from_tokens(IMAGES, tokens), images, rtol=1e-5)


def test_positions_that_are_not_learned() -> None:
    found = wave_positions(IMAGES)
    for token, (row, column) in enumerate(np.ndindex(2, 2)):
        for first, place in ((0, column), (8, row)):
            angles = place / 10_000 ** (np.arange(4) / 4)
            wanted = np.concatenate([np.sin(angles), np.cos(angles)])
            np.testing.assert_allclose(found[token, first : first + 8], wanted, atol=1e-6)


def test_a_picture_file() -> None:
    images = np.linspace(0, 8, 2 * 3 * 2 * 3).astype(np.float32).reshape(2, 3, 2, 3)
    sheet = grid(images, 0, 8, columns=2, enlarge=2)
    assert sheet.shape == (1 + 6 + 1, 1 + 4 + 1 + 4 + 1, 3)
    assert sheet[1, 1].tolist() == [0, 7, 15] and (sheet[6, 9] == sheet[5, 8]).all() and sheet[6, 9, 2] == 255
    data = png(sheet)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body, crc = data[at + 8 : at + 8 + size], struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        assert zlib.crc32(name + body) == crc
        chunks[name], at = body, at + 12 + size
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (11, 8, 8, 2, 0, 0, 0)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(8, 1 + 33)
    assert (rows[:, 0] == 0).all()
    np.testing.assert_array_equal(rows[:, 1:].reshape(sheet.shape), sheet)
    with pytest.raises(UsageError, match="no picture"):
        grid(images[..., :2], 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 4}, "classes 0 to 2"),
        ({"classes": -1}, "not -1"),
        ({"classes": [0, 9]}, "not 9"),
        ({"count": 0}, "0 samples"),
        ({"count": 1 << 40}, "samples"),
        ({"steps": 0}, "0 steps"),
        ({"steps": 10**9}, "steps"),
        ({"sampler": "ddim"}, "no sampler 'ddim'"),
        ({"schedule": "linear"}, "no schedule"),
        ({"schedule": "shifted", "shift": 0.0}, "shift"),
        ({"guidance": float("nan")}, "guidance"),
        ({"seed": -1}, "seed"),
        ({"conditions": [[1.0]]}, "takes no conditions"),
        ({"mask": [1, 0]}, "mask"),
    ],
)
def test_what_cannot_be_sampled(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        flow_model(IMAGES).sample(**options)


def test_conditions_that_cannot_be() -> None:
    model = flow_model(SEQUENCES)
    for wrong in (None, [[1.0, 2.0, 3.0]], [[np.nan, 0.0]], np.zeros((3, 2))):
        with pytest.raises(UsageError, match="conditions"):
            model.sample(conditions=wrong, count=2)
    with pytest.raises(UsageError, match="knows no classes"):
        model.sample(1, conditions=[[0.0, 1.0]])
    plain = flow_model(SEQUENCES, condition_features=0)
    assert plain.sample(count=2, steps=1).classes is None
    with pytest.raises(UsageError, match="nothing to guide by"):
        plain.sample(guidance=2.0)
