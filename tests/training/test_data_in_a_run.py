"""Data and log in real runs of the loop: a bigram model in NumPy, stopped at any step, goes on as if it had not been."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from oazoo.text import ByteTokenizer
from oazoo.training.batches import Batch, Batches, one_pass
from oazoo.training.csv_log import VALIDATION_COLUMNS, CsvLog, read_log, validation_path
from oazoo.training.data import load_data, split
from oazoo.training.loop import Trainer
from oazoo.training.rows import make_rows

TEXT = b"the cat sat on the mat, the rat sat on the cat, and that was that. " * 12


class Bigrams:
    """Logits [256] for each previous byte, learned by gradient descent in float64."""

    capacity = 4

    def __init__(self) -> None:
        self.weights = np.zeros((256, 256))
        self.lr = 0.0
        self._losses: list[tuple[float, float | None]] = []

    def loss(self, batch: Batch) -> tuple[float, npt.NDArray[np.float64]]:
        """Summed loss of a batch and its gradient."""
        x, y, mask = (array.reshape(-1) for array in (batch.inputs, batch.targets, batch.mask))
        logits = self.weights[x]
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        slope = np.exp(logs)
        slope[np.arange(len(y)), y] -= 1
        gradient = np.zeros_like(self.weights)
        np.add.at(gradient, x, slope * mask[:, None])
        return float(-(logs[np.arange(len(y)), y] * mask).sum()), gradient

    def run(self, batches: Sequence[Batch]) -> None:
        parts = [self.loss(batch) for batch in batches]
        tokens = sum(batch.tokens for batch in batches)
        gradient = np.sum([part for _, part in parts], axis=0) / tokens
        self._losses.append((sum(loss for loss, _ in parts) / tokens, float(np.linalg.norm(gradient))))
        self.weights = self.weights - self.lr * gradient

    def drain(self) -> list[tuple[float, float | None]]:
        found, self._losses = self._losses, []
        return found

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def set_weight_decay(self, value: float) -> None:
        raise AssertionError(value)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weights = np.array(state["weights"])


def trainer(folder: Path, steps: int, **log: Any) -> tuple[Trainer, Bigrams]:
    path = folder / "text.txt"
    path.write_bytes(TEXT)
    documents = load_data([path], ByteTokenizer())
    train, held = split(documents, 0.2)
    batches = Batches(make_rows(train, 16, shift=True, seed=3), documents, 5, accumulate=2, seed=3)
    model = Bigrams()
    held_out = list(one_pass(make_rows(held, 16), 5))
    tokens = sum(batch.tokens for batch in held_out)

    def validate() -> tuple[float, int]:
        return sum(model.loss(batch)[0] for batch in held_out) / tokens, tokens

    run = Trainer(
        model,
        batches,
        steps=steps,
        schedule=20.0,
        validate=validate,
        validate_every=4,
        callbacks=[CsvLog(folder / "log.csv", **log)],
    )
    return run, model


def columns(path: Path, *but: str, **more: Any) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in read_log(path, **more).items() if name not in but}


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_a_run_that_was_stopped_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    run, model = trainer(tmp_path / "whole", 12)
    summary = run.fit()
    assert summary.loss_first == pytest.approx(np.log(256)) and summary.loss_last is not None
    assert summary.loss_last < 2.5 and summary.best_loss is not None and summary.best_loss < 2.5

    first, _ = trainer(tmp_path / "parts", stop)
    first.fit()
    snapshot = json.loads(json.dumps(first.snapshot()))
    with (tmp_path / "parts" / "log.csv").open(
        "a"
    ) as file:  # a step beyond the checkpoint, and half of another
        file.write(f"{stop + 1},0,9,1,1,1,1,1\n{stop + 2},0,")
    second, model_after = trainer(tmp_path / "parts", 12, resumed=True)
    second.restore(snapshot)
    second.fit()
    assert (model_after.weights == model.weights).all()
    whole, parts = (columns(tmp_path / name / "log.csv", "wall_seconds") for name in ("whole", "parts"))
    assert whole == parts and whole["step"] == list(range(1, 13))
    held = columns(validation_path(tmp_path / "whole" / "log.csv"), columns=VALIDATION_COLUMNS)
    assert held["step"] == [4, 8, 12] and held["loss_nats_per_token"][-1] == summary.best_loss
