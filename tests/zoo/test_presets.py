"""Every one of OA's models, over every kind of vocabulary, learns a short text, and is the same again from its file.

A new architecture joins by its line in :mod:`oazoo.zoo.presets`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import oazoo
from oazoo.errors import TokenizerError
from oazoo.runtime import get_device
from oazoo.training import Muon, TrainingStep
from oazoo.training.checkpoints import checkpoints
from oazoo.training.csv_log import read_log
from oazoo.training.language import summed_loss
from oazoo.zoo.presets import PRESETS
from oazoo.zoo.train import train
from oazoo.zoo.train_settings import TrainSettings
from oazoo.zoo.train_subject import new_model

#: 576 bytes in which the tokens before mostly settle what follows.
TEXT = (
    "The keeper of the lamp has a clock for the ships. The clock for the ships is never late.\n"
    "The keeper of the lamp has a clock for the hens. The clock for the hens is often late.\n"
    "The keeper of the lamp has a stove for the café. The stove for the café is never cold.\n"
    "The keeper of the lamp has a bench for the cats. The bench for the cats is often cold.\n"
    "The keeper of the lamp has a book for the winds. The book for the winds is never full.\n"
    "The keeper of the lamp has a basket for the eggs. The basket for the eggs is often full.\n"
    "The keeper of the lamp has a lamp. It is aglow.\n"
)
OA = sorted(name for name in PRESETS if name.startswith("oa-"))
ROWS, TOKENS, STEPS, GOAL = 64, 16, 300, 0.35


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("presets") / "text.txt"
    path.write_text(TEXT, "utf-8")
    assert path.stat().st_size == 576
    return path


@pytest.mark.parametrize("name", OA)
def test_it_learns_a_short_text(name: str, text: Path) -> None:
    """Steps over 64 rows of 16 tokens: the loss falls below 0.35 within 300 (OA's own end at 0.18 to 0.22)."""
    subject = new_model(name, TrainSettings(seed=1), [text], get_device())
    model, ids = subject.model, np.array(subject.tokenizer.encode(TEXT), np.int32)
    model.requires_grad_()
    step = TrainingStep(partial(summed_loss, model), Muon(subject.learning(), 0.05, weight_decay=0.0))
    rng = np.random.default_rng(0)
    weights = np.full((ROWS, TOKENS), 1 / (ROWS * TOKENS), np.float32)
    steps, loss = 0, 9.0
    while loss >= GOAL and steps < STEPS:
        for _ in range(10):
            places = rng.integers(0, len(ids) - TOKENS, ROWS)[:, None] + np.arange(TOKENS)
            step(ids[places], ids[places + 1], weights)
        found = step.losses()
        steps, loss = steps + len(found), float(found.mean())
    assert loss < GOAL, f"{loss:.3f} after {steps} steps"


@pytest.mark.parametrize("name", [name for name in OA if name.startswith(("oa-byte", "oa-chart", "oa-bpet"))])
def test_it_is_the_same_from_its_file(name: str, text: Path, tmp_path: Path) -> None:
    """Logits of the loaded file, its text back, and a run that goes on from a checkpoint as if it had not ended."""
    settings = TrainSettings(steps=4, batch_size=4, context=TOKENS, checkpoint_every=2, validation=0.0)
    run = train(name, [text], tmp_path / "whole", settings)
    run.fit()
    loaded = oazoo.load(checkpoints(tmp_path / "whole")[-1])
    ids = loaded.tokenizer.encode(TEXT[:TOKENS])
    assert (
        ids == run.subject.tokenizer.encode(TEXT[:TOKENS]) and loaded.tokenizer.decode(ids) == TEXT[:TOKENS]
    )
    model = run.subject.model
    model.eval()
    np.testing.assert_array_equal(loaded.logits(ids), model.logits(np.array(ids)))
    assert loaded.generate("The ", max_tokens=3, temperature=0).token_ids
    parted = train(name, [text], tmp_path / "parted", settings)
    parted.trainer.steps = 2  # ends early, as if stopped
    parted.fit()
    again = train(name, [text], tmp_path / "parted", settings, resume=True)
    again.fit()
    logs = [
        read_log(tmp_path / folder / "log.csv")["loss_nats_per_token"].tolist()
        for folder in ("whole", "parted")
    ]
    assert logs[0] == logs[1] and len(logs[0]) == 4
    ours, theirs = again.subject.weights(), run.subject.weights()
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


def test_a_character_that_training_never_saw_is_refused(text: Path, tmp_path: Path) -> None:
    settings = TrainSettings(steps=1, batch_size=2, context=8, validation=0.0)
    other = tmp_path / "other.txt"
    other.write_text("The hens\nsaw a Qat.\n")
    with pytest.raises(TokenizerError, match=r"other.txt.*'Q' \(U\+0051\).*line 2"):
        train("oa-chartransformer", [text], None, settings, validation_data=[other])
    train("oa-chartransformer", [text], tmp_path / "run", settings).fit()
    with pytest.raises(TokenizerError, match=r"'Z'.*none of the 27 characters"):
        oazoo.load(tmp_path / "run" / "best.oam").generate("Zebra")
