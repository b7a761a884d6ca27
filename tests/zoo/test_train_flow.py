"""Runs of flow models: data and what is refused of it, a run from beginning to end, resumption, the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from flow_models import IMAGES, flow_model

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, OazooError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.runtime import get_device
from oazoo.runtime.random import Generator
from oazoo.training import AdamW
from oazoo.training.flow import FlowStepper, HeldOutFlowLoss, flow_loss
from oazoo.training.flow_data import FlowBatches, FlowItems, digits, load_flow_data, one_flow_pass
from oazoo.zoo.train_flow import train_flow
from oazoo.zoo.train_settings import TrainSettings

RNG = np.random.default_rng(2)


def bars(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Images of 4 × 4 pixels: rows (0) or columns (1)."""
    labels = np.arange(count) % 2
    images = np.zeros((count, 4, 4), np.uint8)
    for image, label in zip(images, labels):
        at = RNG.integers(4)
        if label:
            image[:, at] = 255
        else:
            image[at] = 255
    return images, labels


@pytest.fixture
def data(tmp_path: Path) -> Path:
    images, labels = bars()
    path = tmp_path / "bars.npz"
    np.savez(path, images=images, labels=labels)
    return path


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings(**{"steps": 6, "batch_size": 8, "lr": 3e-3, "validation": 0.25, **changes})


def test_a_run_and_what_comes_of_it(tmp_path: Path, data: Path) -> None:
    run = train_flow("flow-tiny", [data], tmp_path / "run", settings(validate_every=3, checkpoint_every=2))
    assert (run.plan.rows, run.plan.context, run.plan.steps) == (30, 4, 6)
    summary = run.fit()
    assert summary.steps == 6 and summary.best_loss is not None
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"best.oam", "log.csv", "checkpoint-00000006.oam", "samples-00000003.png"} <= names
    packed = tmp_path / "q8.oam"
    oazoo.quantize(tmp_path / "run" / "best.oam", packed, "q8")
    dense, small = (
        oazoo.load_flow(p).sample(count=4, steps=3).values for p in (tmp_path / "run" / "best.oam", packed)
    )
    assert (
        dense.shape == (4, 4, 4, 1)
        and 0 < np.abs(dense - small).max() < 40
        and np.abs(dense - small).mean() < 5
    )
    with pytest.raises(UsageError, match="oazoo sample"):
        oazoo.load(packed)
    # Resumed after four steps, the rest is the same, bit for bit.
    part = train_flow("flow-tiny", [data], tmp_path / "part", settings(validate_every=3, checkpoint_every=2))
    part.trainer.callbacks.append(_StopAfter(4))
    part.fit()
    again = train_flow("flow-tiny", [data], tmp_path / "part", settings(validate_every=3), resume=True)
    again.fit()
    last = "checkpoint-00000006.oam"
    with OamSource(tmp_path / "run" / last) as one, OamSource(tmp_path / "part" / last) as other:
        for name in one:
            np.testing.assert_array_equal(one[name].numpy(), other[name].numpy())
    with pytest.raises(UsageError, match="condition_dropout"):
        train_flow("flow-tiny", [data], tmp_path / "part", settings(), resume=True, condition_dropout=0.5)


class _StopAfter:
    """Ends a run after a step, as a person would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __getattr__(self, event: str) -> Any:
        return lambda *what: None

    def state(self) -> dict[str, Any]:
        return {}

    def on_checkpoint(self, trainer: Any, path: str) -> None:
        if trainer.state.step == self.step:
            trainer.end("stopped")


def test_a_step_is_the_same_captured_or_not_and_learns() -> None:
    losses = []
    for captured in (True, False):
        model = flow_model(IMAGES).model
        model.condition_dropout = 0.5
        optimizer = AdamW([(n, p.tensor) for n, p in model.named_parameters()], 3e-3)
        stepper = FlowStepper(model, optimizer, clip=1.0, captured=captured, seed=4)
        images = np.full((16, 4, 4, 3), 150, np.float32)
        items = _items(images, np.arange(16) % 3)
        batches = FlowBatches(items, 16)
        for _ in range(40 if captured else 3):
            stepper.run(batches.next())
        losses.append([loss for loss, _ in stepper.drain()])
    assert losses[0][:3] == losses[1]
    assert np.mean(losses[0][-8:]) < 0.7 * np.mean(losses[0][:4])


def _items(images: np.ndarray, labels: np.ndarray) -> FlowItems:
    from oazoo.models.flow_tokens import to_tokens
    from oazoo.training.flow_data import FlowData

    data = FlowData(images.astype(np.float32), labels.astype(np.int32), low=50, high=150, where="test")
    return FlowItems(data, to_tokens(IMAGES, data.values))


def test_held_out_loss_is_always_of_the_same_noise() -> None:
    model = flow_model(IMAGES).model
    items = _items(RNG.uniform(50, 150, (10, 4, 4, 3)), np.arange(10) % 3)
    held = HeldOutFlowLoss(model, list(one_flow_pass(items, 4, 9)), rounds=2)
    loss, tokens = held()
    assert held() == (loss, tokens) and tokens == 2 * 2 * 4 * 4
    # The same by hand, from the stream that it begins anew.
    from oazoo.runtime import Tensor

    source, found = Generator(get_device(), 0), []
    for _ in range(2):
        for batch in one_flow_pass(items, 4, 9):
            tensors = [Tensor.from_numpy(get_device(), a) for a in batch.arrays]
            found.append(float(flow_loss(model, source, *tensors, drop=False).numpy()[0]))
    assert loss == pytest.approx(np.mean(found), rel=1e-6)


def test_batches_go_on_where_they_were() -> None:
    items = _items(RNG.uniform(50, 150, (7, 4, 4, 3)), np.arange(7) % 3)
    batches, seen = FlowBatches(items, 3, accumulate=2, seed=5), []
    for _ in range(2):
        seen += [batch.arrays[0] for batch in batches.next()]
    state = batches.state()
    after = [batch.arrays[0] for batch in batches.next()]
    other = FlowBatches(items, 3, accumulate=2, seed=5)
    other.restore(state)
    np.testing.assert_array_equal(np.concatenate([b.arrays[0] for b in other.next()]), np.concatenate(after))
    first = {row.tobytes() for row in np.concatenate(seen)[:7]}
    assert len(first) == 7  # a pass has every item once
    for wrong in ({**state, "index": 7}, {**state, "epoch": -1}, {**state, "index": "1"}):
        with pytest.raises(FormatError, match="damaged"):
            other.restore(wrong)
    with pytest.raises(UsageError, match="other data"):
        other.restore({**state, "data": "0"})


def test_sequences_with_a_mask_are_learned(tmp_path: Path) -> None:
    values = RNG.standard_normal((12, 5, 3)) * [1, 10, 0.1] + [0, 50, 0]
    mask = np.ones((12, 5))
    mask[::2, 3:] = 0
    values[::2, 3:] = 1e6  # nobody looks at these
    path = tmp_path / "walk.npz"
    np.savez(path, sequences=values, mask=mask, conditions=RNG.standard_normal((12, 2)))
    run = train_flow("flow-tiny", [path], None, settings(steps=2, batch_size=6, validation=0.0))
    config = run.subject.config
    assert config.condition_features == 2 and 40 < config.data_offset[1] < 60 and config.data_scale[1] < 20
    summary = run.fit()
    assert summary.loss_last is not None and summary.loss_last < 20


def test_the_digits() -> None:
    found = digits()
    assert found.values.shape == (1797, 8, 8, 1) and (found.low, found.high) == (0, 16)
    assert found.labels is not None
    few = found.of_classes([3, 5])
    assert few.labels is not None and set(few.labels.tolist()) == {3, 5}
    part, held = found.split(0.1, 1)
    assert held is not None and (part.count, held.count) == (1617, 180)
    with pytest.raises(UsageError, match="nothing of class 12"):
        found.of_classes([12])


def arrays(**found: Any) -> dict[str, Any]:
    return found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (arrays(images=np.zeros((4, 4))), "shape"),
        (arrays(images=np.zeros((4, 4, 4))), "all pixels are 0"),
        (arrays(images=np.full((4, 4, 4), np.nan)), "not finite, the first at"),
        (arrays(images=np.zeros((0, 4, 4))), "and some"),
        (arrays(images=np.zeros((2, 4, 4), complex)), "must be numbers"),
        (arrays(images=bars(4)[0], labels=np.zeros(3, int)), "labels must be 4 whole numbers"),
        (arrays(images=bars(4)[0], labels=np.array([0, 1, -1, 0])), "labels must be"),
        (arrays(images=bars(4)[0], labels=np.array([0.5, 1, 1, 0])), "labels must be"),
        (arrays(images=bars(4)[0], more=np.zeros(3)), "holds 'more'"),
        (arrays(images=bars(4)[0], x=np.zeros(3)), "one array"),
        (arrays(labels=np.zeros(3)), "one array"),
        (arrays(images=bars(4)[0], mask=np.ones((4, 4))), "mask is for sequences"),
        (arrays(sequences=np.zeros((4, 3, 2)), mask=np.zeros((4, 3))), "with a token in each"),
        (arrays(sequences=np.zeros((4, 3, 2)), conditions=np.zeros(4)), "conditions"),
        (arrays(images=np.array([{"a": 1}], object)), "no file of NumPy"),
    ],
)
def test_data_that_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, **content)
    with pytest.raises(OazooError, match=message):
        load_flow_data([path])


def test_files_that_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("a.npz", b"no zip", "no file of NumPy"),
        (
            "b.npy",
            b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 4, 4), }",
            "NumPy",
        ),
        ("c.txt", b"", "are read from .npy and .npz"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(OazooError, match=message):
            load_flow_data([path])
    with pytest.raises(UsageError, match="no such file"):
        load_flow_data([tmp_path / "missing.npz"])


def test_commands(tmp_path: Path, data: Path) -> None:
    def oazoo_(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, [*arguments, "-q"], standalone_mode=True)
        assert result.exit_code == code, result.output
        return result.output

    run, more, out = str(tmp_path / "run"), str(tmp_path / "more"), tmp_path / "out"
    oazoo_("train", "flow-tiny", "--data", str(data), "-o", run, "--steps", "2", "--batch-size", "4")
    best = f"{run}/best.oam"
    told = oazoo_("sample", best, "--class", "1", "-n", "3", "--steps", "2", "-o", f"{out}.npz", "--json")
    assert json.loads(told)["shape"] == [3, 4, 4, 1]
    with np.load(f"{out}.npz") as found:
        assert found["labels"].tolist() == [1, 1, 1]
        images = found["images"]
    oazoo_("sample", best, "--class", "1", "-n", "3", "--steps", "2", "-o", f"{out}.npy")
    np.testing.assert_array_equal(np.load(f"{out}.npy"), images)
    oazoo_("sample", best, "-o", f"{out}.png")
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    assert "exists already" in oazoo_("sample", best, "-o", f"{out}.png", code=2)
    assert "not 7" in oazoo_("sample", best, "--class", "7", "-o", f"{out}2.png", code=2)
    assert ".png, .npy, .npz" in oazoo_("sample", best, "-o", f"{out}.jpg", code=2)
    oazoo_("finetune", best, "--full", "--data", str(data), "--classes", "1", "-o", more, "--steps", "1")
    assert "--full" in oazoo_("finetune", best, "--lora", "4", "--data", str(data), "-o", f"{more}2", code=2)
    assert "flow models" in oazoo_("train", "bytelm-tiny", "--classes", "1", "-o", f"{more}2", code=2)
    assert "--data" in oazoo_("train", "flow-tiny", "-o", f"{more}2", code=2)


def test_no_option_of_a_run_is_passed_over(tmp_path: Path, data: Path) -> None:
    with pytest.raises(UsageError, match="learn as f32; leave --dtype out"):
        train_flow("flow-tiny", [data], tmp_path / "run", settings(dtype="bf16"))
    run = train_flow("flow-tiny", [data], tmp_path / "run", settings(steps=100_000, minutes=1e-4))
    assert 0 < run.fit().steps < 100_000
