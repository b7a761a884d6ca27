"""Device memory of training: told before it is taken, right, and what follows from there being too little."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from oazoo.cli.main import main
from oazoo.errors import DeviceError
from oazoo.formats.oam import OamSource
from oazoo.runtime import Device, OutOfDeviceMemoryError, Tensor, get_device
from oazoo.runtime.sizing import measuring
from oazoo.training.csv_log import read_log
from oazoo.training.lora import LoraSettings
from oazoo.zoo.quantize import quantize
from oazoo.zoo.train import Run, finetune, train
from oazoo.zoo.train_memory import divide
from oazoo.zoo.train_settings import TrainSettings

SETTINGS = TrainSettings(steps=1, batch_size=8, context=32)
Make = Callable[[TrainSettings], Run]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "".join(f"The {a} dog saw {b} hens and the moon.\n" for a in "abcdefgh" for b in range(99))
    )
    return path


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train("bytelm-tiny", [text], folder / "run", SETTINGS).fit()
    quantize(folder / "run" / "best.oam", folder / "q8.oam", "q8", method="absmax")
    return folder / "q8.oam"


@pytest.mark.parametrize(("checkpointing", "accumulate"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("kind", ["bytelm-tiny", "nanogpt-tiny", "lora"])
def test_a_run_takes_what_was_told(
    kind: str, checkpointing: bool, accumulate: int, text: Path, packed: Path
) -> None:
    settings = replace(SETTINGS, accumulate=accumulate, checkpointing=checkpointing)
    gc.collect()
    memory = get_device().allocator
    before = memory.used_bytes
    if kind == "lora":
        run = finetune(packed, [text], None, settings, lora=LoraSettings(rank=4))
    else:
        run = train(kind, [text], None, settings)
    planned = memory.used_bytes - before
    run.fit()
    taken = memory.used_bytes - before
    assert run.plan.memory_bytes == pytest.approx(taken, rel=0.01)
    # Planning took the weights and the optimizer's state, and nothing of the step.
    assert planned == pytest.approx(run.plan.memory.weights + run.plan.memory.optimizer, rel=0.05)
    assert run.plan.memory.step > 4 << 20


def test_checkpointing_takes_less_and_changes_nothing(text: Path, tmp_path: Path) -> None:
    results = []
    for checkpointing in (False, True):
        run = train("bytelm-tiny", [text], tmp_path / str(checkpointing),
                    replace(SETTINGS, batch_size=24, checkpointing=checkpointing))  # fmt: skip
        run.fit()
        with OamSource(tmp_path / str(checkpointing) / "best.oam") as source:
            results.append((run.plan.memory.step, {n: np.array(t.numpy()) for n, t in source.items()}))
    (all_kept, left), (little_kept, right) = results
    assert little_kept < 0.6 * all_kept
    assert all(np.array_equal(left[name], right[name]) for name in left)


def small_device(monkeypatch: pytest.MonkeyPatch, limit: int) -> Device:
    monkeypatch.setenv("OAZOO_MEMORY_LIMIT", str(limit))
    return Device.open()


def test_batches_that_fit(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step stays what was asked for; its parts are as large as the limit lets them be, and the run keeps to it."""
    asked = replace(SETTINGS, batch_size=48, context=64, auto_batch=True)
    whole = train("bytelm-tiny", [text], tmp_path / "whole", asked)
    assert (whole.plan.batch_size, whole.plan.accumulate) == (48, 1)
    whole.fit()
    device = small_device(monkeypatch, 64 << 20)
    run = train("bytelm-tiny", [text], tmp_path / "parts", asked, device=device)
    plan = run.plan
    assert plan.batch_size * plan.accumulate == 48 and plan.accumulate > 1
    assert plan.memory.fits and plan.memory.free <= 64 << 20
    run.fit()
    assert device.allocator.allocated_bytes <= 64 << 20
    larger = min(n for n in range(plan.batch_size + 1, 49) if 48 % n == 0)
    step = run.trainer.stepper
    assert (
        type(step)(step.model, step.optimizer, accumulate=48 // larger).measure(larger, 64) > plan.memory.step
    )
    one, other = (read_log(tmp_path / name / "log.csv")["loss_nats_per_token"] for name in ("whole", "parts"))
    assert np.allclose(one, other, rtol=1e-5)
    device.close()


def test_what_cannot_fit_is_refused_before_training(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = small_device(monkeypatch, 64 << 20)
    settings = replace(SETTINGS, batch_size=512, context=64)
    with pytest.raises(
        OutOfDeviceMemoryError, match=r"512 rows of 64 tokens takes [\d,]+ bytes.*--auto-batch"
    ):
        train("bytelm-tiny", [text], tmp_path / "run", settings, device=device)
    assert not (tmp_path / "run").exists()
    plan = train("bytelm-tiny", [text], None, settings, device=device).plan
    assert not plan.memory.fits and plan.memory.step > 64 << 20
    device.close()


def test_the_command_line_tells(text: Path) -> None:
    arguments = ["train", "bytelm-tiny", "--data", text, "--context", 64, "--batch-size", 24, "--dry-run"]
    done = CliRunner().invoke(
        main, [str(a) for a in [*arguments, "--auto-batch", "--checkpointing", "--json"]]
    )
    assert done.exit_code == 0, done.output
    plan: dict[str, Any] = json.loads(done.stdout)
    parts = ("weights", "optimizer", "step", "validation")
    assert plan["memory_bytes"] == sum(plan["memory"][part] for part in parts)
    assert (plan["batch_size"], plan["accumulate"]) == (24, 1)
    table = CliRunner().invoke(main, [str(a) for a in arguments])
    assert "1 of 24 rows" in table.output and "free for it" in table.output


def test_divide() -> None:
    """Against every divisor tried by hand."""
    for rows in (1, 7, 12, 64, 360):
        for free in (0, 10, 55, 130, 10_000):
            fitting = [n for n in range(1, rows + 1) if rows % n == 0 and 10 * n + 5 <= 0.9 * free]
            best = max(fitting, default=1)
            assert divide(rows, free, lambda n, _: (10 * n, 5)) == (best, rows // best)

    def measure(size: int, count: int) -> tuple[int, int]:
        if size > 16:
            raise DeviceError("more workgroups than the device's")
        return size, 0

    assert divide(1 << 20, 1 << 40, measure) == (16, 1 << 16)


def test_measuring_takes_and_does_nothing() -> None:
    device = get_device()
    tensor = Tensor.from_numpy(device, np.arange(4, dtype=np.float32))
    before = device.allocator.allocated_bytes, device.allocator.used_bytes
    with measuring(device) as arena:
        many = [Tensor.empty(device, (1 << 26,)) for _ in range(64)]
        assert arena.nbytes == 64 << 28
        tensor.inscribe(np.zeros(4, np.float32))
        del many[1:]
        again = Tensor.empty(device, (1 << 26,))  # where one of those was
        assert arena.nbytes == 64 << 28 and again.numel == many[0].numel
        with pytest.raises(OutOfDeviceMemoryError, match="larger than one buffer"):
            Tensor.empty(device, (1 << 40,))
        with pytest.raises(DeviceError, match="while a program is captured"), measuring(device):
            pass
    assert (device.allocator.allocated_bytes, device.allocator.used_bytes) == before
    assert tensor.numpy().tolist() == [0, 1, 2, 3]
