"""Runs of training on the device: the same however they are cut, resumed or killed, and what they leave behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats.lora import read_adapter
from oazoo.formats.oam import OamSource
from oazoo.training.callbacks import Callback
from oazoo.training.checkpoints import checkpoints
from oazoo.training.csv_log import VALIDATION_COLUMNS, read_log
from oazoo.training.lora import LoraSettings
from oazoo.zoo.quantize import quantize
from oazoo.zoo.train import Run, finetune, train
from oazoo.zoo.train_settings import TrainSettings

LINES = [f"The {a} {b} {c} the {d}.\n" for a in ("old", "red", "wet") for b in ("dog", "cat", "hen")
         for c in ("saw", "met") for d in ("sun", "sea", "hill", "moon")]  # fmt: skip
SMALL = TrainSettings(steps=6, batch_size=4, context=16, validate_every=3, checkpoint_every=2)
Weights = dict[str, npt.NDArray[Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = LINES.copy()
    random.Random(3).shuffle(lines)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A byte model that has learned a little, as an `.oam` file."""
    out = tmp_path_factory.mktemp("base") / "run"
    train("bytelm-tiny", [text], out, TrainSettings(steps=4, batch_size=4, context=16)).fit()
    return out / "best.oam"


def weights(path: Path) -> Weights:
    with OamSource(path) as source:
        source.verify()
        return {name: np.array(tensor.numpy()) for name, tensor in source.items()}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def losses(folder: Path) -> list[float]:
    return read_log(folder / "log.csv")["loss_nats_per_token"].tolist()


def test_a_run_leaves_a_model_that_answers(base: Path, oamref: Any) -> None:
    oamref.load(base)
    answer = oazoo.load(base).generate("The old", max_tokens=8, temperature=0, raw=True)
    assert len(answer.token_ids) == 8


def test_the_loss_falls(text: Path, tmp_path: Path) -> None:
    settings = TrainSettings(steps=60, batch_size=8, context=32, lr=1e-2)
    summary = train("bytelm-tiny", [text], tmp_path / "run", settings).fit()
    assert summary.loss_first is not None and summary.loss_last is not None
    # 256 bytes, none likelier than another, are 5.55 nats; the text's letters alone 2.9.
    assert 5.0 < summary.loss_first < 6.5 and summary.loss_last < 2.5
    assert summary.best_loss is not None and summary.best_loss < 2.5
    assert losses(tmp_path / "run")[0] == summary.loss_first
    assert summary.step_p50 is not None
    if summary.device_p50 is not None and summary.device_p95 is not None:  # the device has a clock
        assert 0 < summary.device_p50 <= summary.device_p95 < 4 * summary.seconds
        # Nothing but the device takes long in a step.
        assert 0.2 * summary.step_p50 < summary.device_p50


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "f32"), (2, "bf16")])
def test_a_resumed_run_is_the_same_run(text: Path, tmp_path: Path, accumulate: int, dtype: str) -> None:
    """FT-04, on the device: weights, moments, schedule, order of the data and dropout's numbers."""
    settings = replace(SMALL, accumulate=accumulate, dropout=0.1, dtype=dtype)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train("oa-bytetransformer", [text], whole, settings).fit()
    first = train("oa-bytetransformer", [text], parted, settings)
    first.trainer.steps = 3  # ends early, as if stopped
    first.fit()
    second = train("oa-bytetransformer", [text], parted, settings, resume=True)
    assert second.trainer.state.step == 3
    second.fit()
    assert losses(parted) == losses(whole) and len(losses(whole)) == 6
    assert same(weights(checkpoints(parted)[-1]), weights(checkpoints(whole)[-1]))
    with OamSource(whole / "best.oam") as best, OamSource(checkpoints(whole)[-1]) as newest:
        # What is best is stored as it was used, what is gone on from in full.
        assert best["layers.0.attn.q.weight"].info.encoding == dtype
        assert {tensor.info.encoding for tensor in newest.values()} == {"f32"}
    with OamSource(checkpoints(whole)[-1]) as a, OamSource(checkpoints(parted)[-1]) as b:
        assert a.optimizer is not None and b.optimizer is not None
        assert (a.optimizer.kind, a.optimizer.step) == ("AdamW", 6) == (b.optimizer.kind, b.optimizer.step)
        assert np.array_equal(a.optimizer.first, b.optimizer.first)
        assert a.optimizer.second is not None and b.optimizer.second is not None
        assert np.array_equal(a.optimizer.second, b.optimizer.second)


def test_checkpoints_pass_the_strict_reader(text: Path, tmp_path: Path, oamref: Any) -> None:
    train("bytelm-tiny", [text], tmp_path / "run", SMALL).fit()
    for path in [*checkpoints(tmp_path / "run"), tmp_path / "run" / "best.oam"]:
        oamref.load(path)


def test_a_run_killed_at_any_moment_goes_on(text: Path, tmp_path: Path) -> None:
    """No file is ever damaged, and the resumed run's losses and weights are those of a run nobody killed."""
    options = [
        "--data",
        text,
        "--steps",
        12,
        "--batch-size",
        4,
        "--context",
        16,
        "--checkpoint-every",
        1,
        "-q",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = command("train", "bytelm-tiny", "-o", whole, *options)
    assert done.exit_code == 0, done.output
    draw = random.Random(11)
    kills = 0
    for _ in range(40):
        more = ["--resume"] if checkpoints(killed) else []
        arguments = [str(a) for a in ("train", "bytelm-tiny", "-o", killed, *options, *more)]
        for torn in killed.glob("log*.csv") if not more else ():
            torn.unlink()  # killed before its first checkpoint: that run begins anew
        process = subprocess.Popen([sys.executable, "-m", "oazoo", *arguments], stderr=subprocess.PIPE)
        # Wait until it has saved something, then a moment of any length.
        before = {p.name for p in checkpoints(killed)}
        while process.poll() is None and {p.name for p in checkpoints(killed)} == before:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        if process.poll() is None and kills < 4:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        assert process.communicate()[1] == b"" or kills
        for path in checkpoints(killed):
            weights(path)  # whole, by its checksums
        if process.returncode == 0:
            break
    assert process.returncode == 0 and kills >= 1
    assert losses(killed) == losses(whole)
    assert same(weights(checkpoints(killed)[-1]), weights(checkpoints(whole)[-1]))


def test_other_data_is_refused(text: Path, tmp_path: Path) -> None:
    train("bytelm-tiny", [text], tmp_path / "run", SMALL).fit()
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "more")
    with pytest.raises(UsageError, match="another run: data was"):
        train("bytelm-tiny", [other], tmp_path / "run", SMALL, resume=True)
    with pytest.raises(UsageError, match="holds a run already"):
        train("bytelm-tiny", [text], tmp_path / "run", SMALL)


LORA = TrainSettings(steps=8, batch_size=4, context=16, lr=2e-2, validate_every=8)


@pytest.fixture(scope="module")
def run(base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Corrections trained beside Q8 weights."""
    folder = tmp_path_factory.mktemp("lora")
    packed = folder / "q8.oam"
    quantize(base, packed, "q8", method="absmax")
    run = finetune(packed, [text], folder / "run", LORA, lora=LoraSettings(rank=4))
    run.fit()
    return run


class TestLora:
    def test_only_corrections_learn(self, run: Run) -> None:
        assert run.output is not None
        found = weights(checkpoints(run.output)[-1])
        # q, k, v, o, gate, up, down of 3 layers, A and B of each.
        assert len(found) == 42 and all(name.endswith(("lora_a", "lora_b")) for name in found)
        assert all(np.abs(values).max() > 0 for values in found.values())
        assert losses(run.output)[-1] < losses(run.output)[0]

    def test_generated_with_it_beside_as_merged(self, run: Run, tmp_path: Path) -> None:
        """The adapter beside Q8 weights, read from its files, gives what the merged f32 weights give in float64."""
        assert run.output is not None
        packed = run.output.parent / "q8.oam"
        beside = oazoo.load(packed, adapter=run.output / "adapter")
        merged = tmp_path / "merged.oam"
        done = command("merge", packed, run.output / "adapter", "-o", merged, "--dtype", "f32")
        assert done.exit_code == 0, done.output
        ids = list(b"The old dog")
        got, wanted, plain = (
            beside.logits(ids),
            oazoo.load(merged).logits(ids),
            oazoo.load(packed).logits(ids),
        )
        assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
        assert np.abs(got - plain).max() > 100 * np.abs(got - wanted).max()

    def test_the_adapter_is_pefts(self, run: Run) -> None:
        assert run.output is not None
        adapter = read_adapter(run.output / "adapter")
        assert len(adapter.pairs) == 21 and "model.layers.0.self_attn.q_proj" in adapter.pairs
        assert adapter.base["encoding"] == "q8"
        config = json.loads((run.output / "adapter" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16)

    def test_generate_takes_it(self, run: Run) -> None:
        assert run.output is not None
        arguments = ["generate", run.output.parent / "q8.oam", "-p", "The", "--raw", "--temperature", 0,
                     "--max-tokens", 4, "--json"]  # fmt: skip
        done = command(*arguments, "--adapter", run.output / "adapter")
        assert done.exit_code == 0, done.output

    def test_an_adapter_for_another_model(self, run: Run, text: Path, tmp_path: Path) -> None:
        assert run.output is not None
        train("bytelm-small", [text], tmp_path / "run", TrainSettings(steps=1, batch_size=2, context=8)).fit()
        done = command(
            "generate", tmp_path / "run" / "best.oam", "-p", "x", "--adapter", run.output / "adapter"
        )
        assert done.exit_code == 1 and "q_proj" in done.output

    def test_targets(self, base: Path, text: Path) -> None:
        run = finetune(base, [text], None, LORA, lora=LoraSettings(rank=2), targets=["q_proj", "attn.v"])
        assert len(run.subject.learning()) == 2 * 2 * 3
        with pytest.raises(UsageError, match=r"no linear layer .* is called 'in_proj'; there are attn\.q"):
            finetune(base, [text], None, LORA, lora=LoraSettings(rank=2), targets=["in_proj"])
        with pytest.raises(UsageError, match="a rank of 65"):
            finetune(base, [text], None, LORA, lora=LoraSettings(rank=65))


def test_all_weights(base: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finetune(base, [text], out, TrainSettings(steps=3, batch_size=4, context=16, lr=1e-3)).fit()
    before, after = weights(base), weights(out / "best.oam")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)
    with OamSource(out / "best.oam") as source:
        assert source.asset("asset/tokenizer.json") is not None and source.metadata["family"] == "decoder"


def test_quantised_weights_do_not_learn(base: Path, text: Path, tmp_path: Path) -> None:
    """FT-10: the error has both ways out."""
    quantize(base, tmp_path / "q4.oam", "q4", method="absmax")
    done = command("finetune", tmp_path / "q4.oam", "--full", "--data", text, "-o", tmp_path / "run")
    assert done.exit_code == 2
    assert "--lora 8" in done.output and "oazoo quantize q4.oam --to f32" in done.output
    assert not (tmp_path / "run").exists()


def test_a_bpe_preset(text: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text(text.read_text() * 3)
    out = tmp_path / "run"
    train("nanogpt-tiny", [long], out, TrainSettings(steps=2, batch_size=2, context=16)).fit()
    model = oazoo.load(out / "best.oam")
    assert model.tokenizer.decode(model.tokenizer.encode("The old dog")) == "The old dog"
    assert model.eos_ids == {0}


def test_a_dry_run(text: Path, tmp_path: Path) -> None:
    done = command(
        "train", "bytelm-tiny", "--data", text, "--steps", 5, "--context", 16, "--dry-run", "--json"
    )
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert plan["steps"] == 5 and plan["context"] == 16 and plan["parameters"] == plan["trained"] > 100_000
    assert plan["memory_bytes"] > 16 * plan["parameters"]
    assert list(tmp_path.iterdir()) == []


def test_validation_on_other_files(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The young owl heard the wind.\n" * 3)
    plans = [
        train("bytelm-tiny", [text], None, SMALL, **options).plan
        for options in ({}, {"validation_data": [other]})
    ]
    assert plans[1].tokens_per_epoch == text.stat().st_size - 1 > plans[0].tokens_per_epoch
    assert plans[1].validation_tokens == other.stat().st_size - 1


def test_names_of_control_tokens_are_what_one_says(tmp_path: Path) -> None:
    data = tmp_path / "marked.txt"
    data.write_text("One text.<|endoftext|>Another text of words.<|endoftext|>" * 30)
    given = ("train", "nanogpt-tiny", "--data", data, "--context", 16, "--dry-run", "--json")
    refused = command(*given)
    assert (
        refused.exit_code == 2
        and "marked.txt:1: has the name of the control token <|endoftext|>" in refused.output
    )
    learned = [
        json.loads(command(*given, "--special", way).stdout)["tokens_per_epoch"]
        for way in ("tokens", "plain")
    ]
    assert 0 < learned[0] < learned[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train", "bytelm-huge"], "no preset 'bytelm-huge'"),
        (["train", "bytelm-tiny", "--batch-size", 0], "batch_size must be 1 or more"),
        (["train", "bytelm-tiny", "--accumulate", 10**9], "cannot be meant"),
        (["train", "bytelm-tiny", "--lr", "nan"], "learning rate of nan"),
        (["train", "bytelm-tiny", "--context", 400000], "longer than the"),
        (["train", "bytelm-tiny", "--validation", 0, "--patience", 1], "need validation data"),
        (["train", "bytelm-tiny", "--dropout", 1], "dropout must be from 0"),
        (["finetune", "MODEL"], "say what learns"),
        (["finetune", "MODEL", "--full", "--target", "q"], "belong to --lora"),
        (["finetune", "MODEL", "--lora", 4, "--dtype", "bf16"], "leave --dtype out"),
        (["finetune", "MODEL", "--full", "--minutes", 0], "cannot take 0.0 minutes"),
        (["finetune", "MODEL", "--full", "--context", 200], "longer than the 16 positions"),
    ],
)
def test_misuse(options: list[Any], message: str, base: Path, text: Path, tmp_path: Path) -> None:
    given = [base if option == "MODEL" else option for option in options]
    done = command(*given, "--data", text, "-o", tmp_path / "run")
    assert done.exit_code == 2 and message in done.output, done.output
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_folder(text: Path, tmp_path: Path) -> None:
    """The second is told, whether the first is at work or has been there since."""
    first = train("bytelm-tiny", [text], tmp_path / "run", SMALL)
    second = train("bytelm-tiny", [text], tmp_path / "run", SMALL)

    class Meddler(Callback):
        said = ""

        def on_validation(self, trainer: object, record: object) -> None:
            with pytest.raises(UsageError) as caught:
                second.fit()
            self.said = str(caught.value)

    meddler = Meddler()
    first.trainer.callbacks.append(meddler)
    first.fit()
    assert "another run is at work in it" in meddler.said
    with pytest.raises(UsageError, match="another run has been here meanwhile"):
        second.fit()
    assert len(losses(tmp_path / "run")) == 6


def test_a_run_that_saved_nothing_is_begun_again(text: Path, tmp_path: Path) -> None:
    """A log without a checkpoint is not in the way, something else of that name is; nor is a model overwritten."""

    class Unplugged(Callback):
        def on_steps(self, trainer: object, records: object) -> None:
            raise KeyboardInterrupt

    run = train("bytelm-tiny", [text], tmp_path / "run", replace(SMALL, checkpoint_every=6, validate_every=6))
    run.trainer.callbacks.append(Unplugged())
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert losses(tmp_path / "run") and not checkpoints(tmp_path / "run")
    with pytest.raises(UsageError, match="no checkpoint to go on from; to begin there, leave --resume out"):
        train("bytelm-tiny", [text], tmp_path / "run", SMALL, resume=True)
    train("bytelm-tiny", [text], tmp_path / "run", SMALL).fit()
    assert len(losses(tmp_path / "run")) == 6

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "log.csv").write_text("my,own\n1,2\n")
    with pytest.raises(FormatError, match=r"log\.csv"):
        train("bytelm-tiny", [text], tmp_path / "mine", SMALL).fit()
    assert (tmp_path / "mine" / "log.csv").read_text() == "my,own\n1,2\n"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "best.oam").write_bytes(b"mine")
    with pytest.raises(UsageError, match="holds a run already"):
        train("bytelm-tiny", [text], tmp_path / "model", SMALL)
    with pytest.raises(UsageError, match="no such folder to go on in"):
        train("bytelm-tiny", [text], tmp_path / "none", SMALL, resume=True)


def test_a_step_may_be_divided_otherwise_when_it_goes_on(text: Path, tmp_path: Path) -> None:
    """On a device with less memory: the same rows make the steps, in other batches."""
    whole = train("bytelm-tiny", [text], tmp_path / "whole", SMALL).fit()
    run = train("bytelm-tiny", [text], tmp_path / "run", SMALL)
    run.trainer.steps = 3
    run.fit()
    halves = replace(SMALL, batch_size=2, accumulate=2, checkpointing=True, auto_batch=True)
    second = train("bytelm-tiny", [text], tmp_path / "run", halves, resume=True)
    second.fit()
    assert np.allclose(losses(tmp_path / "run"), losses(tmp_path / "whole"), rtol=1e-5)
    assert whole.steps == 6 and second.trainer.state.step == 6
    with pytest.raises(UsageError, match=r"another run: settings\.rows_of_a_step was 4, now it is 8"):
        train("bytelm-tiny", [text], tmp_path / "run", replace(SMALL, batch_size=8), resume=True)


def test_lora_goes_on_exactly_after_a_kill(base: Path, text: Path, tmp_path: Path) -> None:
    """Its dropout's numbers, too: losses and corrections are those of a run that nobody killed, bit for bit."""
    settings = replace(LORA, steps=6, checkpoint_every=2, validate_every=3)
    lora = LoraSettings(rank=4, dropout=0.1)
    finetune(base, [text], tmp_path / "whole", settings, lora=lora).fit()
    options = ["--lora", 4, "--alpha", 16, "--lora-dropout", 0.1, "--data", text, "--steps", 6,
               "--batch-size", 4, "--context", 16, "--lr", 0.02, "--checkpoint-every", 2,
               "--validate-every", 3, "-q"]  # fmt: skip
    arguments = [sys.executable, "-m", "oazoo", "finetune", base, "-o", tmp_path / "killed", *options]
    process = subprocess.Popen([str(a) for a in arguments], stderr=subprocess.DEVNULL)
    while process.poll() is None and not checkpoints(tmp_path / "killed"):
        time.sleep(0.002)
    process.kill()
    process.wait()
    done = command("finetune", base, "-o", tmp_path / "killed", *options, "--resume")
    assert done.exit_code == 0, done.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert same(weights(checkpoints(tmp_path / "killed")[-1]), weights(checkpoints(tmp_path / "whole")[-1]))
    one, other = (read_adapter(tmp_path / name / "adapter").pairs for name in ("killed", "whole"))
    assert all(np.array_equal(one[n].a, other[n].a) and np.array_equal(one[n].b, other[n].b) for n in other)


def test_a_merged_adapter_leaves(run: Run, tmp_path: Path) -> None:
    """Merged, exported to Hugging Face's layout and converted back: the same model."""
    assert run.output is not None
    packed, merged = run.output.parent / "q8.oam", tmp_path / "merged.oam"
    steps = [
        ("merge", packed, run.output / "adapter", "-o", merged, "--dtype", "f32"),
        ("export", merged, "-o", tmp_path / "hf"),
        # The embedding, Q8 in the one, is f16 in the other.
        ("diff", merged, tmp_path / "hf", "--tol", 1e-3),
    ]
    for arguments in steps:
        done = command(*arguments)
        assert done.exit_code == 0, done.output
    assert command("diff", packed, merged).exit_code == 1


def test_early_stopping_and_the_plateau(text: Path, tmp_path: Path) -> None:
    """Through the command line: a rate that is too high for any progress is halved, and the run ends early."""
    done = command("train", "bytelm-tiny", "--data", text, "-o", tmp_path / "run", "--steps", 40, "--batch-size", 2,
                   "--context", 16, "--validate-every", 1, "--patience", 3, "--schedule", "plateau",
                   "--optimizer", "sgd", "--lr", 20, "--clip", 1, "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)["summary"]
    assert summary["ended"] == "early stop" and summary["steps"] < 40
    checks = read_log(tmp_path / "run" / "log.validation.csv", VALIDATION_COLUMNS)["loss_nats_per_token"]
    best = int(np.argmin(checks))
    assert len(checks) == summary["steps"] == best + 1 + 4  # three are borne, the fourth ends it
    rates = read_log(tmp_path / "run" / "log.csv")["learning_rate"]
    assert rates[0] == 20 and rates[-1] == 10


def test_a_rate_that_is_too_high_ends_the_run(text: Path, tmp_path: Path) -> None:
    """The command fails and says where; no weight that is not finite is ever saved, though the loss before it was fine."""
    done = command("train", "bytelm-tiny", "--data", text, "-o", tmp_path / "run", "--steps", 40, "--batch-size", 2,
                   "--context", 16, "--checkpoint-every", 1, "--optimizer", "sgd", "--lr", 900, "--clip", 0,
                   "--schedule", "constant", "--weight-decay", 0)  # fmt: skip
    assert done.exit_code == 1, done.output
    faults = r"not finite|the loss is nan|the gradient's norm is (nan|inf)"
    assert re.search(rf"(after )?step \d+: .*({faults})", done.output), done.output
    for path in [*checkpoints(tmp_path / "run"), *(tmp_path / "run").glob("best.oam")]:
        assert all(np.isfinite(values).all() for values in weights(path).values())
    assert len(losses(tmp_path / "run")) < 40
