"""The captured step: the same as eager, as OA's recorded steps, and as one large batch; its memory and its losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from op_transformer import Sizes, Transformer

from oazoo.errors import UsageError
from oazoo.formats.oam import OamSource
from oazoo.runtime import Device, Tensor, get_device
from oazoo.runtime.ops.arithmetic import mean, scaled
from oazoo.runtime.ops.elementwise import add
from oazoo.runtime.ops.linear import linear
from oazoo.training import SGD, AdamW, Muon, TrainingStep
from oazoo.training.section import from_section, to_section

DATA = Path(__file__).parent.parent / "data" / "oa"
SIZES = Sizes(vocabulary=13, context=6, width=8, hidden=12, layers=2, heads=2)
Ints = npt.NDArray[np.int32]


def batches(count: int, sizes: Sizes, batch: int, seed: int = 1) -> list[tuple[Ints, Ints]]:
    rng = np.random.default_rng(seed)
    shape = (count, 2, batch * sizes.context)
    drawn = rng.integers(0, sizes.vocabulary, shape).astype(np.int32)
    return [(pair[0], pair[1]) for pair in drawn]


def test_the_steps_that_oa_recorded_also_when_stopped_between() -> None:
    with np.load(DATA / "transformer.npz") as data:
        config = json.loads(str(data["config"]))
        arrays = [data[f"param_{i}"] for i in range(len(config["params"]))]
        tokens, targets = data["tokens"].reshape(-1).astype(np.int32), data["targets"].astype(np.int32)
        told = config["optimizer"]
        options: dict[str, Any] = {"lr": told["lr"], "weight_decay": told["weight_decay"], "compat": "oa"}

        def build(values: list[npt.NDArray[np.float32]]) -> tuple[Transformer, Muon, TrainingStep]:
            model = Transformer(SIZES, 2, values)
            optimizer = Muon(model.tensors, momentum=told["beta"], eps=told["eps"], **options)
            return model, optimizer, TrainingStep(model.loss, optimizer)

        model, optimizer, step = build(arrays)
        logits = model.logits(Tensor.from_numpy(get_device(), tokens))
        np.testing.assert_allclose(logits.numpy(), data["logits"], rtol=1e-4, atol=1e-5)
        losses = []
        for count in range(1, len(data["losses"]) + 1):
            assert step(tokens, targets)
            losses += step.losses().tolist()
            for i, tensor in enumerate(model.tensors):
                name = f"param_{i}_after{count}"
                if name in data:
                    np.testing.assert_allclose(tensor.numpy(), data[name], rtol=2e-5, atol=2e-5, err_msg=name)
            # The next step is taken by another optimizer, from what a file would hold.
            section = to_section(optimizer)
            model, optimizer, step = build([t.numpy() for t in model.tensors])
            from_section(optimizer, section)
        np.testing.assert_allclose(losses, data["losses"], rtol=1e-5)


def test_the_checkpoint_that_oa_wrote_trains_on() -> None:
    source = OamSource(DATA / "oam_transformer_muon.oam")
    assert source.optimizer is not None
    with np.load(DATA / "oam_transformer_muon.npz") as data:
        tokens, targets = data["tokens"].reshape(-1).astype(np.int32), data["targets"].astype(np.int32)
        before, wanted = data["losses"], data["logits"]
    model = Transformer(SIZES, 3, [source[f"p{i}"].numpy() for i in range(len(source))])
    logits = model.logits(Tensor.from_numpy(get_device(), tokens))
    np.testing.assert_allclose(logits.numpy(), wanted, rtol=1e-4, atol=1e-5)
    optimizer = Muon(model.tensors, compat="oa")
    from_section(optimizer, source.optimizer)
    step = TrainingStep(model.loss, optimizer)
    for _ in range(20):
        step(tokens, targets)
    losses = step.losses()
    assert losses[0] < before[-1] and losses[-1] < losses[0] - 0.3
    assert optimizer.steps_taken == 22


@pytest.mark.parametrize("accumulation", [1, 2])
def test_captured_and_eager_give_the_same_bits(accumulation: int) -> None:
    results = []
    for captured in (True, False):
        model = Transformer.random(SIZES, 4)
        optimizer = AdamW(model.tensors, 0.01)
        step = TrainingStep(model.loss, optimizer, clip=0.5, accumulation=accumulation, captured=captured)
        for count, pair in enumerate(batches(6, SIZES, 4)):
            optimizer.set_lr(0.01 / (1 + count))
            step(*pair)
        results.append([step.losses(), *(tensor.numpy() for tensor in model.tensors)])
        assert step.nbytes > 0 if captured else step.nbytes == 0
    assert len(results[0][0]) == 6 // accumulation and np.isfinite(results[0][0]).all()
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts_of_a_batch_are_that_batch_also_in_the_last_window() -> None:
    # A window of four parts, then one of two: as a batch of four times, and of twice the size. SGD, because Adam would make
    # rounding large where a gradient is zero.
    parts = batches(6, SIZES, 2)
    split = Transformer.random(SIZES, 2)
    step = TrainingStep(split.loss, SGD(split.tensors, 0.5, momentum=0.9), clip=0.3, accumulation=4)
    taken = [step(*pair) for pair in parts]
    assert taken == [False, False, False, True, False, False] and step.pending == 2
    assert step.finish() and not step.finish()
    losses = step.losses()

    arrays = [tensor.numpy() for tensor in Transformer.random(SIZES, 2).tensors]
    whole = Transformer(SIZES, 8, arrays)
    optimizer = SGD(whole.tensors, 0.5, momentum=0.9)
    wanted = []
    for window, batch in ((parts[:4], 8), (parts[4:], 4)):
        model = Transformer(SIZES, batch, [np.zeros(s, np.float32) for s in SIZES.shapes])
        model.tensors = whole.tensors
        one = TrainingStep(model.loss, optimizer, clip=0.3)
        one(np.concatenate([t for t, _ in window]), np.concatenate([t for _, t in window]))
        wanted += one.losses().tolist()
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    for a, b in zip(split.tensors, whole.tensors, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


def test_parts_count_by_their_weights() -> None:
    w = Tensor.from_numpy(get_device(), np.zeros((1, 1), np.float32))
    unused = Tensor.from_numpy(get_device(), np.ones(3, np.float32))
    w.requires_grad = unused.requires_grad = True
    # The loss is linear in w, so its gradient is the mean of x: 1, 1, 1 and 5 make 2.
    step = TrainingStep(
        lambda x: add(mean(linear(x, w)), scaled(mean(x), 1.0)),
        SGD([w, unused], 1.0, weight_decay=0.5),
        accumulation=2,
    )
    step(np.array([[1.0]], np.float32), weight=3)
    step(np.array([[5.0]], np.float32), weight=1)
    assert w.numpy()[0, 0] == -2.0
    assert step.losses().tolist() == [2.0]
    assert unused.numpy().tolist() == [1.0] * 3  # what the loss does not depend on does not decay either


def test_memory_of_intermediates_is_used_again() -> None:
    sizes = Sizes(vocabulary=64, context=32, width=64, hidden=256, layers=4, heads=4)
    model = Transformer.random(sizes, 32)
    step = TrainingStep(model.loss, AdamW(model.tensors))
    made = 0
    allocate = Device.allocate

    def counting(self: Device, nbytes: int) -> Any:
        nonlocal made
        made += nbytes if self.capturing else 0
        return allocate(self, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "allocate", counting)
        step(*batches(1, sizes, 32)[0])
    # What the way back needs of each block: 12 times the width a token (norms, q, k, v, mixed, sums) and twice the hidden.
    kept = 4 * 32 * 32 * (sizes.layers * (12 * sizes.width + 2 * sizes.hidden) + 2 * sizes.vocabulary)
    assert step.nbytes < 1.5 * kept + (8 << 20) and step.nbytes < 0.6 * made
    assert np.isfinite(step.losses()).all()


@pytest.mark.parametrize("staged", [False, True])
def test_losses_are_read_later_and_none_is_lost(staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OAZOO_STAGING", "1" if staged else "0")
    device = Device.open("cpu") if staged else get_device()
    w = Tensor.from_numpy(device, np.zeros((1, 1), np.float32))
    w.requires_grad = True
    step = TrainingStep(lambda x: mean(linear(x, w)), SGD([w], 0.5), kept=4)
    found: list[float] = []
    for count in range(11):
        step(np.ones((1, 1), np.float32))
        if count in (2, 3):
            found += step.losses(wait=False).tolist()
    found += step.losses().tolist()
    assert found == [-0.5 * k for k in range(11)]
    assert step.losses().size == 0
    if staged:
        del step, w
        device.close()


def test_misuse_is_told() -> None:
    w = Tensor.from_numpy(get_device(), np.zeros((1, 2), np.float32))
    w.requires_grad = True
    step = TrainingStep(lambda x: mean(linear(x, w)), SGD([w]))
    step(np.ones((3, 2), np.float32))
    with pytest.raises(UsageError, match="captured for inputs"):
        step(np.ones((2, 2), np.float32))
    with pytest.raises(UsageError, match="weight of a batch"):
        step(np.ones((3, 2), np.float32), weight=0)
    for bad in ({"clip": 0.0}, {"accumulation": 0}, {"kept": 1}):
        with pytest.raises(UsageError):
            TrainingStep(lambda x: x, SGD([w]), **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.5, None])
def test_norms_of_gradients_are_kept_beside_the_losses(accumulation: int, clip: float | None) -> None:
    # The loss is w·mean(x), so its gradient is mean(x), whatever w has become.
    w = Tensor.from_numpy(get_device(), np.zeros((1, 2), np.float32))
    w.requires_grad = True
    step = TrainingStep(
        lambda x: mean(linear(x, w)), SGD([w], 0.5), clip=clip, accumulation=accumulation, norms=True
    )
    for count in range(4):
        step(np.array([[3.0, 4.0]], np.float32) * (1 + count))
    found = step.figures()
    each = [5.0, 10.0, 15.0, 20.0] if accumulation == 1 else [7.5, 17.5]
    np.testing.assert_allclose(found[:, 1], each, rtol=1e-6)
    assert step.figures().shape == (0, 2)


def test_norms_that_nobody_asked_for_are_not_measured() -> None:
    w = Tensor.from_numpy(get_device(), np.zeros((1, 1), np.float32))
    w.requires_grad = True
    step = TrainingStep(lambda x: mean(linear(x, w)), SGD([w], 0.5))
    step(np.ones((1, 1), np.float32))
    assert np.isnan(step.figures()[0, 1])
