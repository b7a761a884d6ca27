"""Fine-tuning on conversations through the command line: only the answers are learned, and what is learned is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import oazoo
from oazoo.cli.main import main
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.training.csv_log import read_log
from oazoo.zoo.train import train
from oazoo.zoo.train_settings import TrainSettings

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TALKS = [
    [("user", "What is the colour of the sea?"), ("assistant", "Blue.")],
    [("user", "And of grass?"), ("assistant", "Green, mostly."), ("user", "Always?"), ("assistant", "No.")],
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte model with a chat template, hardly trained."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("The old dog saw the sun and the moon over the sea.\n" * 20)
    train("bytelm-tiny", [folder / "text.txt"], folder / "run", TrainSettings(steps=2, batch_size=2)).fit()
    out = folder / "chat.oam"
    with OamSource(folder / "run" / "best.oam") as source:
        tokenizer = source.state["asset/tokenizer.json"].raw().tobytes()
        config: OamConfig = source.config
        entries = [OamEntry(name, tensor.info.shape, "f32") for name, tensor in source.items()]
        assets = {"tokenizer.json": tokenizer, "chat_template.jinja": TEMPLATE.encode()}
        with OamWriter(out, config=config, entries=entries, assets=assets) as writer:
            for name, tensor in source.items():
                writer.write(name, tensor.numpy())
    return out


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_only_answers_count(base: Path, tmp_path: Path) -> None:
    """The first loss against one from the model's logits in NumPy, with the answers found in the text by hand."""
    data = tmp_path / "talks.jsonl"
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) for talk in TALKS]
    data.write_text("\n".join(lines) + "\n")
    done = command("finetune", base, "--full", "--data", data, "-o", tmp_path / "run", "--steps", 30, "--batch-size", 2,
                   "--context", 100, "--validation", 0, "--lr", 1e-2, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    model = oazoo.load(base)
    total, count = 0.0, 0
    for talk in TALKS:
        text, answers = "", []
        for role, content in talk:
            text += f"<{role}>"
            if role == "assistant":
                answers.append((len(text), len(text) + len(content)))
            text += f"{content}\n"
        ids = list(text.encode())
        logits = model.logits(ids).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(axis=1))[:-1] - shifted[np.arange(len(ids) - 1), ids[1:]]
        # The line end closes the answer, and is learned with it.
        wanted = np.concatenate([np.arange(start - 1, stop) for start, stop in answers])
        total, count = total + float(losses[wanted].sum()), count + len(wanted)
    log = read_log(tmp_path / "run" / "log.csv")
    assert log["tokens_targets"][0] == count
    assert log["loss_nats_per_token"][0] == pytest.approx(total / count, rel=1e-5)
    assert log["loss_nats_per_token"][-1] < 0.2
    trained = oazoo.load(tmp_path / "run" / "best.oam")
    assert trained.chat_template is not None
    prompt = "<user>What is the colour of the sea?\n<assistant>"
    assert trained.generate(prompt, max_tokens=5, temperature=0, raw=True).text == "Blue."
