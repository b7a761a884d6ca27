"""Checkpoints that OA wrote run and train on here; what cannot is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

import oazoo
from oazoo.cli.main import main
from oazoo.errors import FormatError, UsageError
from oazoo.formats.oam import OamSource
from oazoo.formats.oam_layout import OamConfig, OamOptimizer
from oazoo.formats.oam_writer import OamEntry, OamWriter
from oazoo.models import CausalModel
from oazoo.training import AdamW, Muon, TrainingStep
from oazoo.training.checkpoints import checkpoints
from oazoo.training.language import summed_loss
from oazoo.training.section import from_section, to_section
from oazoo.zoo.oa_checkpoint import import_oa, transformer_config
from oazoo.zoo.train import finetune
from oazoo.zoo.train_settings import TrainSettings

DATA = Path(__file__).parents[1] / "data" / "oa"
Arrays = dict[str, npt.NDArray[Any]]


def golden(name: str) -> tuple[Arrays, dict[str, Any]]:
    with np.load(DATA / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}, json.loads(str(data["config"]))


def write_as_oa(path: Path, arrays: Arrays, optimizer: OamOptimizer, suffix: str = "") -> Path:
    """The parameters of a golden file as OA itself stores them."""
    count = sum(key.startswith("param_") and key.removeprefix("param_").isdecimal() for key in arrays)
    values = [arrays[f"param_{i}{suffix}"] for i in range(count)]
    entries = [OamEntry(f"p{i}", value.shape, "f32") for i, value in enumerate(values)]
    with OamWriter(path, config=OamConfig("RustModule"), entries=entries, optimizer=optimizer) as writer:
        for entry, value in zip(entries, values, strict=True):
            writer.write(entry.name, value)
    return path


def before(config: dict[str, Any], size: int) -> OamOptimizer:
    """The state before the first step."""
    hyper, zeros = config["optimizer"], np.zeros(size, np.float32)
    first, second = hyper.get("beta1", hyper.get("beta")), hyper.get("beta2", 0.0)
    moments = (zeros, zeros if hyper["type"] == "AdamW" else None)
    return OamOptimizer(
        hyper["type"], hyper["lr"], first, second, hyper["eps"], hyper["weight_decay"], 0, *moments
    )


def test_what_oa_wrote_runs(tmp_path: Path) -> None:
    arrays, config = golden("oam_transformer_muon")
    out = tmp_path / "out.oam"
    import_oa(DATA / "oam_transformer_muon.oam", out, heads=config["heads"])
    model = oazoo.load(out)
    for row in range(3):
        got = model.logits(arrays["tokens"][row].tolist())
        np.testing.assert_allclose(got, arrays["logits"].reshape(3, 6, 13)[row], rtol=1e-4, atol=1e-5)
    with OamSource(out) as ours, OamSource(DATA / "oam_transformer_muon.oam") as theirs:
        assert ours.optimizer is not None and theirs.optimizer is not None
        assert ours.optimizer.pack_header() == theirs.optimizer.pack_header()
        assert np.array_equal(ours.optimizer.first, theirs.optimizer.first)
        assert ours.progress == theirs.progress


@pytest.mark.parametrize(("name", "kind"), [("transformer", Muon), ("bytemamba3", AdamW)])
def test_it_trains_on_as_oa_did(name: str, kind: type[Muon | AdamW], tmp_path: Path) -> None:
    """OA's recorded parameters after one and three steps; the last two from the file that the first left."""
    arrays, config = golden(name)
    size = sum(a.size for key, a in arrays.items() if key.removeprefix("param_").isdecimal())
    path = write_as_oa(tmp_path / "oa.oam", arrays, before(config, size))
    tokens = arrays["tokens"].astype(np.int32)
    targets = arrays["targets"].astype(np.int32).reshape(tokens.shape)
    weights = np.full(targets.shape, np.float32(1 / targets.size))
    done = 0
    for steps in (1, 2):
        ours = tmp_path / f"{done}.oam"
        import_oa(path, ours, heads=config.get("heads"))
        model = oazoo.load(ours).model
        assert isinstance(model, CausalModel)
        model.to_f32().requires_grad_()
        named = dict(model.named_parameters())
        with OamSource(ours) as source:
            assert source.optimizer is not None
            optimizer = kind([(key, named[key].tensor) for key in source], compat="oa")
            from_section(optimizer, source.optimizer)
        step = TrainingStep(lambda *inputs, m=model: summed_loss(m, *inputs), optimizer)  # type: ignore[misc]
        for _ in range(steps):
            step(tokens, targets, weights)
        np.testing.assert_allclose(step.losses(), arrays["losses"][done : done + steps], rtol=1e-5)
        done += steps
        after = {f"param_{i}": p.values() for i, (_, p) in enumerate(model.named_parameters())}
        for i in range(len(after)):
            np.testing.assert_allclose(
                after[f"param_{i}"], arrays[f"param_{i}_after{done}"], rtol=2e-5, atol=2e-5, err_msg=str(i)
            )
        path = write_as_oa(tmp_path / f"after{done}.oam", after, to_section(optimizer))


def test_a_bytemamba3_that_oa_wrote(tmp_path: Path) -> None:
    """Its logits, and the state of Adam after one step, to go on from."""
    arrays, _ = golden("oam_bytemamba3_adam")
    out, text = tmp_path / "out.oam", tmp_path / "text.txt"
    done = command("convert", DATA / "oam_bytemamba3_adam.oam", "-o", out)
    assert done.exit_code == 0 and "OA's empyrealm" in done.output
    model = oazoo.load(out)
    for row in range(2):
        got = model.logits(arrays["tokens"][row].tolist())
        np.testing.assert_allclose(got, arrays["logits"].reshape(2, 16, 256)[row], rtol=1e-4, atol=1e-5)
    text.write_text("The old dog saw the sun. " * 40)
    run = finetune(out, [text], tmp_path / "run", TrainSettings(steps=1, batch_size=2, context=16, optimizer="adam",
                   compat="oa", weight_decay=0.0, schedule="constant", clip=0))  # fmt: skip
    run.fit()
    with (
        OamSource(checkpoints(tmp_path / "run")[-1]) as source,
        OamSource(DATA / "oam_bytemamba3_adam.oam") as theirs,
    ):
        ours, before = source.optimizer, theirs.optimizer
        assert ours is not None and before is not None
        assert (ours.kind, ours.step, ours.lr) == ("Adam", 2, before.lr)
        assert len(ours.first) == len(before.first) == 25_800


@pytest.fixture(params=["bytetransformer", "bytemoetransformer"])
def byte_name(request: pytest.FixtureRequest) -> str:
    """OA's Transformers over bytes, without experts and with."""
    return str(request.param)


@pytest.fixture
def byte_model(byte_name: str, tmp_path: Path) -> Path:
    """Such a model as OA writes it, with the state of AdamW after seven steps."""
    arrays, _ = golden(byte_name)
    size = sum(a.size for key, a in arrays.items() if key.removeprefix("param_").isdecimal())
    first = np.linspace(-1e-3, 1e-3, size, dtype=np.float32)
    state = OamOptimizer("AdamW", 2e-3, 0.9, 0.999, 1e-8, 0.01, 7, first, first * first)
    return write_as_oa(tmp_path / "byte.oam", arrays, state)


def command(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_through_the_command_line(byte_name: str, byte_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The old dog saw the sun. " * 40)
    ours, run = tmp_path / "ours.oam", tmp_path / "run"
    refused = command("generate", byte_model, "-p", "x")
    assert refused.exit_code == 1 and "oazoo convert byte.oam -o OUT.oam" in refused.output
    assert command("convert", byte_model, "-o", ours).exit_code == 0
    arrays, _ = golden(byte_name)
    got = oazoo.load(ours).logits(arrays["tokens"][0].tolist())
    np.testing.assert_allclose(got, arrays["logits"].reshape(2, 16, 256)[0], rtol=1e-4, atol=1e-5)
    done = command("finetune", ours, "--full", "--compat", "oa", "--data", text, "-o", run, "--steps", 3, "--batch-size", 2,
                   "--schedule", "constant", "--clip", 0)  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "the state of AdamW after 7 steps" in done.output
    with OamSource(checkpoints(run)[-1]) as source:
        assert source.optimizer is not None
        found = source.optimizer
    assert (found.step, found.lr, found.beta2) == (10, np.float32(2e-3), np.float32(0.999))
    # Without --compat oa a run begins anew.
    plain = finetune(ours, [text], None, TrainSettings(steps=3, batch_size=2, context=16))
    assert plain.trainer.stepper.optimizer.steps_taken == 0 and plain.plan.lr != np.float32(2e-3)


@pytest.mark.parametrize(
    ("name", "heads", "error", "message"),
    [
        ("oam_transformer_muon", None, UsageError, "2 layers of width 8; how many heads .* --heads N"),
        ("oam_transformer_muon", 3, UsageError, "must be a multiple of num_heads = 3"),
        (
            "oam_bytemamba3_adam",
            4,
            UsageError,
            "it is ByteMamba3: it has neither heads nor experts; leave --heads",
        ),
        ("oam_conv2d_sgd", 1, FormatError, "2 tensors are not those of a Transformer"),
    ],
)
def test_what_cannot_run(
    name: str, heads: int | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        import_oa(DATA / f"{name}.oam", tmp_path / "out.oam", heads=heads)
    assert list(tmp_path.iterdir()) == []
    done = command("generate", DATA / f"{name}.oam", "-p", "x")
    assert done.exit_code in (1, 2) and "OA wrote it, without its configuration" in done.output


def test_shapes_that_disagree() -> None:
    shapes = {f"p{i}": (4,) for i in range(22)} | {"p0": (8, 4), "p1": (6, 4), "p14": (12, 4)}
    with pytest.raises(FormatError, match=r"what would be layers\.0\.attn\.q\.weight has shape \[4\]"):
        transformer_config(shapes, 1, "x.oam")


def test_what_a_mixture_of_experts_leaves_open(tmp_path: Path) -> None:
    """To how many experts a token goes is told, as the heads are; then the model is OA's."""
    arrays, config = golden("transformer_moe")
    size = sum(a.size for key, a in arrays.items() if key.removeprefix("param_").isdecimal())
    state = OamOptimizer("SGD", 1e-3, 0.0, 0.0, 0.0, 0.0, 0, np.zeros(0, np.float32), None)
    path = write_as_oa(tmp_path / "moe.oam", arrays, state)
    out = tmp_path / "out.oam"
    for options in ([], ["--heads", 2]):
        refused = command("convert", path, *options, "-o", out)
        assert refused.exit_code == 2 and "--heads N --experts-per-token K" in refused.output
    refused = command("convert", path, "--heads", 2, "--experts-per-token", 5, "-o", out)
    assert refused.exit_code == 2 and "experts_per_token = 5 is out of range (1 to 4)" in refused.output
    assert command("convert", path, "--heads", 2, "--experts-per-token", 2, "-o", out).exit_code == 0
    for row in range(2):
        got = oazoo.load(out).logits(arrays["tokens"][row].tolist())
        np.testing.assert_allclose(got, arrays["logits"].reshape(2, 6, 13)[row], rtol=1e-4, atol=1e-5)
    assert config["experts_per_token"] == 2 and size
    dense = DATA / "oam_transformer_muon.oam"
    refused = command("convert", dense, "--heads", 2, "--experts-per-token", 2, "-o", tmp_path / "x.oam")
    assert refused.exit_code == 2 and "It has no experts" in refused.output
